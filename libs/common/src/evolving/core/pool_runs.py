"""The blocks one node holds, as a tree of runs: the structure under the node's pool.

A *run* is consecutive blocks of a context, no branching inside, about which everything is equal: tiers, users, need,
last use. Names are chained, so a name says its whole prefix: finding how far a context is held is a bisection over one
dictionary, and whatever concerns a prefix costs a step a run.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from evolving.core.terms import Tier


class Use(enum.IntEnum):
    """Who keeps blocks from being evicted, always from a context's first block on."""

    PREFILL = 0  # prefill legs, in L1
    DECODE = 1  # decode legs, in L1
    QUEUED = 2  # legs not taken yet, in L2


class Leaving(enum.IntEnum):
    """What a run in use leaves once nobody uses it."""

    NOTHING = 0
    L1 = 1
    BOTH = 2


@dataclass(slots=True, eq=False)
class Run:
    """Consecutive blocks. `names` root-most first, never empty while the run lives."""

    names: list[bytes]
    start: int  # depth of names[0]
    parent: Run | None
    serial: int  # its age: makes every order of runs a whole one
    tiers: int = 0  # Tier values, or-ed
    locks: tuple[int, int, int] = (0, 0, 0)  # by Use
    need: int = 0  # of each of these blocks (`evolving.core.needs`)
    effective: int = 0  # the largest need of the run and what is below it (§4.4)
    accessed: int = 0  # the operation that used it last
    leaving: Leaving = Leaving.NOTHING
    children: dict[Run, None] = field(default_factory=dict)
    below: list[int] = field(default_factory=lambda: [0, 0, 0])  # children in a tier, by Tier

    @property
    def size(self) -> int:
        """Its blocks."""
        return len(self.names)

    @property
    def end(self) -> int:
        """Depth after its last block."""
        return self.start + len(self.names)

    @property
    def used_in_l1(self) -> bool:
        """Whether a leg keeps its L1 copy."""
        return self.locks[Use.PREFILL] > 0 or self.locks[Use.DECODE] > 0

    def evictable(self, tier: Tier) -> bool:
        """Whether its last block may leave the tier: nothing is below it there, and nobody uses it."""
        if not self.tiers & tier or self.below[tier]:
            return False
        return not (self.used_in_l1 if tier is Tier.L1 else self.locks[Use.QUEUED])

    def agrees(self, other: Run) -> bool:
        """Whether nothing but the names tells the two apart."""
        return (
            self.tiers == other.tiers
            and self.accessed == other.accessed
            and self.need == other.need
            and self.locks == other.locks
            and self.leaving == other.leaving
        )


class RunTree:
    """Runs by the names of their blocks. `on_change` hears of each run that came to end elsewhere or be a leaf."""

    def __init__(self, on_change: Callable[[Run], None]) -> None:
        self.runs: dict[Run, None] = {}
        self._where: dict[bytes, Run] = {}
        self._on_change = on_change
        self._serial = 0

    # -- finding

    def __contains__(self, name: bytes) -> bool:
        return name in self._where

    def get(self, name: bytes) -> Run | None:
        """The run of a block."""
        return self._where.get(name)

    def depth(self, names: Sequence[bytes], blocks: int, tier: Tier | None = None, known: int = 0) -> int:
        """How many of the first `blocks` blocks lie in `tier` (None: in either); the first `known` surely do."""
        low, high = known, blocks + 1  # the first low blocks lie there, the first high ones don't
        probe = blocks
        while high - low > 1:
            run = self._where.get(names[probe - 1])
            if run is not None and (tier is None or run.tiers & tier):
                low = probe
            else:
                high = probe
            probe = (low + high) // 2
        return low

    def cut(self, names: Sequence[bytes], blocks: int) -> Run | None:
        """The run that ends with the `blocks`-th block, which is held; a longer one is cut. None for 0."""
        if blocks == 0:
            return None
        run = self._where[names[blocks - 1]]
        return run if run.end == blocks else self.split(run, blocks - run.start)[0]

    def path(self, names: Sequence[bytes], first: int, last: int) -> list[Run]:
        """The runs of blocks [first, last), all held, the last one first; runs that stick out are cut."""
        if last <= first:
            return []
        self.cut(names, first)
        run = self.cut(names, last)
        runs = []
        while run is not None and run.start >= first:
            runs.append(run)
            run = run.parent
        return runs

    def parents_first(self) -> Iterator[Run]:
        """All runs; the tree may change meanwhile, by removals."""
        return iter(sorted(self.runs, key=lambda run: (run.start, run.serial)))

    # -- changing

    def add(self, parent: Run | None, names: Sequence[bytes]) -> Run:
        """New blocks below the end of `parent` (None: at the root), in no tier yet."""
        run = self._new(list(names), parent.end if parent is not None else 0, parent)
        if parent is not None:
            run.leaving = parent.leaving
            parent.children[run] = None
        return run

    def remove(self, run: Run) -> None:
        """Forget a run that has no children."""
        assert not run.children
        for name in run.names:
            del self._where[name]
        run.names = []
        del self.runs[run]
        if run.parent is not None:
            del run.parent.children[run]

    def split(self, run: Run, size: int) -> tuple[Run, Run]:
        """Cut a run after its first `size` blocks, 0 < size < run.size. The shorter part becomes a new run."""
        other = self._new(run.names[:size] if 2 * size <= run.size else run.names[size:], run.start, run.parent)
        other.tiers, other.locks, other.need = run.tiers, run.locks, run.need
        other.effective, other.accessed, other.leaving = run.effective, run.accessed, run.leaving
        if 2 * size <= run.size:
            head, tail = other, run
            del run.names[:size]
            if head.parent is not None:
                del head.parent.children[tail]
                head.parent.children[head] = None
        else:
            head, tail = run, other
            del run.names[size:]
            self._adopt(tail, head)
        tail.start = head.start + size
        tail.parent = head
        head.children = {tail: None}
        head.below = [0, tail.tiers & 1, tail.tiers >> 1]
        self._on_change(tail)
        return head, tail

    def merge_path(self, run: Run | None) -> None:
        """Join what agrees on the way from a run to the root, and with the run's only child."""
        at = self._join_child(run)
        while at is not None:
            at = self._join(at) or at.parent

    def merge_around(self, run: Run | None) -> None:
        """Join a run with its only child and its parent, where they agree."""
        at = self._join_child(run)
        if at is not None:
            self._join(at)

    def merge_near(self, run: Run | None) -> None:
        """Join a run with its only child, and with those before it as far as they agree."""
        at = self._join_child(run)
        while at is not None:
            at = self._join(at)

    def _join_child(self, run: Run | None) -> Run | None:
        if run is None or not run.names:
            return None
        if len(run.children) == 1:
            (child,) = run.children
            return self._join(child) or run
        return run

    def _join(self, run: Run) -> Run | None:
        """Join a run with its parent; the longer of them goes on, and is returned. None: they don't agree."""
        parent = run.parent
        if parent is None or len(parent.children) != 1 or not parent.agrees(run):
            return None
        if run.size <= parent.size:
            self._point(run.names, parent)
            parent.names += run.names
            self._adopt(parent, run)
            gone, stays = run, parent
        else:
            self._point(parent.names, run)
            run.names = parent.names + run.names
            run.start = parent.start
            run.parent = parent.parent
            if parent.parent is not None:
                del parent.parent.children[parent]
                parent.parent.children[run] = None
            gone, stays = parent, run
        gone.names = []
        del self.runs[gone]
        self._on_change(stays)
        return stays

    def _adopt(self, run: Run, former: Run) -> None:
        run.children, run.below = former.children, former.below
        for child in run.children:
            child.parent = run

    def _new(self, names: list[bytes], start: int, parent: Run | None) -> Run:
        self._serial += 1
        run = Run(names, start, parent, self._serial)
        self.runs[run] = None
        self._point(names, run)
        return run

    def _point(self, names: list[bytes], run: Run) -> None:
        where = self._where
        for name in names:
            where[name] = run

    # -- invariants

    def check_invariants(self) -> None:
        """Assert the structure; walks everything."""
        blocks = 0
        children: dict[Run, list[Run]] = {}
        for run in self.runs:
            assert run.names, "a dead run"
            assert run.tiers, "a run that lies nowhere"
            assert all(self._where[name] is run for name in run.names)
            blocks += run.size
            if run.parent is None:
                assert run.start == 0
                continue
            children.setdefault(run.parent, []).append(run)
            assert run.parent in self.runs
            assert run.start == run.parent.end
            assert run.tiers & ~run.parent.tiers == 0, "tiers are closed under prefixes"
            assert all(above >= own for above, own in zip(run.parent.locks, run.locks, strict=True))
            assert run.parent.accessed >= run.accessed
        assert blocks == len(self._where)
        for run in self.runs:
            own = children.get(run, [])
            assert set(own) == set(run.children)
            assert run.below == [0, *(sum(bool(child.tiers & tier) for child in own) for tier in Tier)]
            assert run.effective == max([run.need, *(child.effective for child in own)])
