"""A run-compressed tree of block names: the structure under the prefix index.

A *run* is a stretch of consecutive blocks of one context that share everything recorded about them: the nodes that
hold them in L1 and in L2 (bit masks) and the branches' homes. Names are chained digests, so a name determines all
names before it, and equality at one depth means equality up to it.

What holds between calls:
- The index maps the name of every run's first block, and of every block whose depth is a multiple of 16, to its run.
  Children are found through it; a run knows its parent only, so runs form no reference cycles.
- A branch's context ends at the end of a run (its *tip*). Splitting keeps the old object as the suffix, and merging
  keeps the child, so tips and parent references stay valid.
- A run with no copy, home or tip is deleted unless it has a child; with one it stays as a hole. So the tree is
  prefix-closed whatever the nodes evict.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

from evolving.core.errors import BrokenChain
from evolving.core.terms import ANCHOR_BLOCKS, NAME_BYTES

ANCHOR_BYTES = ANCHOR_BLOCKS * NAME_BYTES

SLICE_RUNS = 1_000
"""Runs looked at in one go, where all are: a few milliseconds."""


class Run:
    """Blocks [start, start + size) of a context. Mutable, compared by identity."""

    __slots__ = ("children", "homes", "l1", "l2", "names", "parent", "size", "start", "tips")

    def __init__(self, names: bytes, start: int, parent: Run | None, l1: int, l2: int) -> None:
        self.names = names  # 16 bytes a block
        self.start = start  # depth of the first block
        self.size = len(names) // NAME_BYTES  # 0: the run was merged away or deleted
        self.parent = parent  # ends where this starts; None: this starts a context
        self.children = 0
        self.tips = 0  # branches whose context ends here
        self.l1 = l1  # bit per node holding all blocks in device memory
        self.l2 = l2  # bit per node holding all blocks in host memory
        self.homes: dict[int, int] | None = None  # home key (node, phase) -> branches; None: no branch

    def is_bare_leaf(self) -> bool:
        """Whether nothing but copies is recorded here, and nothing hangs below."""
        return self.children == 0 and self.tips == 0 and self.homes is None

    def __repr__(self) -> str:
        return f"Run({self.start}+{self.size}, l1={self.l1:b}, l2={self.l2:b}, homes={self.homes}, tips={self.tips})"


class Visit:
    """All runs, part by part, while the tree changes in between: each block there at the start that is still there is
    in a run of some part, as the run is by then. A run may come more than once, and new ones may come too.

    A context manager: it is open from `RunTree.visit` on and has to be closed.
    """

    __slots__ = ("_left", "_tree", "changed", "nodes")

    def __init__(self, tree: RunTree, runs: list[Run], nodes: int) -> None:
        self._tree = tree
        self._left = runs
        self.nodes = nodes  # bits of those there at the start
        # Runs whose copies or homes changed since the visit began. They are kept: no other takes their identity.
        self.changed: set[Run] = set()

    def take(self, most: int) -> list[Run]:
        """At most `most` runs of those left."""
        part = self._left[-most:]
        del self._left[-most:]
        return [run for run in dict.fromkeys(part) if run.size]

    @property
    def over(self) -> bool:
        """Whether no run is left."""
        return not self._left

    def again(self, run: Run) -> None:
        """A run came about by a cut or a merge: what is in it may not have been visited."""
        self._left.append(run)
        self.changed.add(run)

    def close(self) -> None:
        """The rest is of no interest."""
        self._left = []
        self._tree.visits.remove(self)

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class RunTree:
    """The runs and their index, and the four moves everything else is made of: grow, split, merge, prune."""

    def __init__(self, run_blocks_max: int = 256) -> None:
        self._by_name: dict[bytes, Run] = {}
        self._run_blocks_max = run_blocks_max
        self._longest_bytes = run_blocks_max * NAME_BYTES
        self.visits: list[Visit] = []  # those open
        self.retired = 0  # bits of nodes whose copies are gone and wait to be swept from the runs
        self.block_count = 0
        self.run_count = 0

    def runs(self) -> Iterator[Run]:
        """All runs, in a fixed order. The tree must not change meanwhile."""
        for name, run in self._by_name.items():
            if run.names.startswith(name):
                yield run

    def visit(self, nodes: int = 0) -> Visit:
        """Begin to visit all runs. Takes about 10 ms at 20 million blocks: it copies the index's values."""
        visit = Visit(self, list(self._by_name.values()), nodes)
        self.visits.append(visit)
        return visit

    def mark_changed(self, run: Run) -> None:
        """Tell the visits that a run's copies or homes change."""
        for visit in self.visits:
            visit.changed.add(run)

    def indexed(self, name: bytes) -> Run | None:
        """The run of an indexed name."""
        return self._by_name.get(name)

    # ------------------------------------------------------------------------------------------------------- the moves

    def grow(self, parent: Run | None, start: int, names: bytes, l1: int = 0, l2: int = 0) -> Run:
        """Add new blocks below the end of `parent` (None: at the root); returns the run that ends them.

        A leaf with the same state, and no tip to keep in place, is extended instead of getting a child. Raises
        BrokenChain, and changes nothing, when a name to be indexed is indexed already: then they aren't new chained
        digests. Other names are taken on trust, until a split would index them.
        """
        limit = self._longest_bytes
        at = 0
        if parent is not None and parent.l1 == l1 and parent.l2 == l2 and parent.is_bare_leaf():
            at = min(limit - len(parent.names), len(names))
        self._check_new(start, names, at, limit)
        self.block_count += len(names) // NAME_BYTES
        if parent is not None:
            if at:
                self._lengthen(parent, names if at == len(names) else names[:at])
            if at < len(names):
                parent.children += 1
        last = parent
        while at < len(names):
            run = Run(names[at : at + limit], start + at // NAME_BYTES, last, l1, l2)
            self._index(run, run)
            self.run_count += 1
            at += limit
            if at < len(names):
                run.children = 1
            last = run
        assert last is not None, "grow needs blocks or a parent"
        return last

    def _check_new(self, start: int, names: bytes, at: int, limit: int) -> None:
        """Raise BrokenChain unless all names that get indexed are new: anchors, and every `limit` bytes from `at` on
        the first of a run."""
        by_name = self._by_name
        first_anchor = -start % ANCHOR_BLOCKS * NAME_BYTES
        if len(names) <= ANCHOR_BYTES and len(names) - at <= limit:  # one of each at most: a turn, or a node's batch
            anchor = names[first_anchor : first_anchor + NAME_BYTES]
            first = anchor if at == first_anchor else names[at : at + NAME_BYTES]
            known = anchor in by_name or first in by_name or (at != first_anchor and anchor == first != b"")
        else:
            places = {*range(first_anchor, len(names), ANCHOR_BYTES), *range(at, len(names), limit)}
            fresh = {names[place : place + NAME_BYTES] for place in places}
            known = len(fresh) != len(places) or not by_name.keys().isdisjoint(fresh)
        if known:
            raise BrokenChain(f"a block from depth {start} on is known under another parent")

    def extend(self, run: Run | None, depth: int, names: bytes) -> Run | None:
        """Put new blocks (perhaps none) below a position: depth `depth`, in `run` or at its end (None: the root).
        Returns the run that ends there. Raises BrokenChain; then at most a run was cut in two."""
        if run is not None and depth < run.start + run.size:
            run = self.split(run, depth - run.start)
        return self.grow(run, depth, names) if names else run

    def _lengthen(self, run: Run, names: bytes) -> None:
        """Add blocks to a run in place."""
        end = run.start + run.size
        run.names += names
        run.size += len(names) // NAME_BYTES
        for at in range(-end % ANCHOR_BLOCKS * NAME_BYTES, len(names), ANCHOR_BYTES):
            self._by_name[names[at : at + NAME_BYTES]] = run

    def split(self, run: Run, size: int) -> Run:
        """Cut a run after its first `size` blocks, 0 < size < run.size. Returns the new run before the cut; `run` is
        what follows it."""
        cut = size * NAME_BYTES
        suffix_name = run.names[cut : cut + NAME_BYTES]
        known = self._by_name.get(suffix_name)
        if known is not None and (known is not run or (run.start + size) % ANCHOR_BLOCKS):
            raise BrokenChain(f"block {run.start + size} is known under another parent")
        prefix = Run(run.names[:cut], run.start, run.parent, run.l1, run.l2)
        prefix.homes = None if run.homes is None else dict(run.homes)
        prefix.children = 1
        run.names = run.names[cut:]
        run.start += size
        run.size -= size
        run.parent = prefix
        self._index(prefix, prefix)
        self._by_name[suffix_name] = run
        self.run_count += 1
        for visit in self.visits:
            visit.changed.add(run)
            visit.again(prefix)
        return prefix

    def merge(self, run: Run) -> None:
        """Take in the ancestors that have no other child, no tip and the same state, up to the longest run allowed."""
        parent = run.parent
        while (
            parent is not None
            and parent.children == 1
            and parent.tips == 0
            and parent.l1 == run.l1
            and parent.l2 == run.l2
            and parent.homes == run.homes
            and parent.size + run.size <= self._run_blocks_max
        ):
            if run.start % ANCHOR_BLOCKS:
                del self._by_name[run.names[:NAME_BYTES]]
            run.names = parent.names + run.names
            run.start = parent.start
            run.size += parent.size
            run.parent = parent.parent
            self._index(parent, run)
            self.run_count -= 1
            parent.size = 0
            parent.parent = None
            parent = run.parent
            for visit in self.visits:
                visit.again(run)

    def merge_up(self, tip: Run | None, down_to: int = 0) -> None:
        """Merge what agrees on a path, from the run `tip` up to the run that holds depth `down_to`."""
        run = tip
        while run is not None:
            parent = run.parent
            if parent is not None and parent.l1 == run.l1 and parent.l2 == run.l2:  # most differ here, and are many
                self.merge(run)
            if run.start <= down_to:
                return
            run = run.parent

    def prune(self, run: Run | None) -> None:
        """Delete a run nothing needs, then its ancestors that nothing needs any more."""
        while (
            run is not None
            and run.children == 0
            and run.tips == 0
            and run.homes is None
            and not run.l1
            and not run.l2
            and run.size
        ):
            names = run.names
            del self._by_name[names[:NAME_BYTES]]
            first_anchor = -run.start % ANCHOR_BLOCKS * NAME_BYTES
            for at in range(first_anchor or ANCHOR_BYTES, len(names), ANCHOR_BYTES):
                del self._by_name[names[at : at + NAME_BYTES]]
            self.run_count -= 1
            self.block_count -= run.size
            parent = run.parent
            run.size = 0
            run.parent = None
            if parent is not None:
                parent.children -= 1
            run = parent

    def _index(self, stretch: Run, owner: Run) -> None:
        """Let the indexed names of `stretch` lead to `owner`."""
        names = stretch.names
        by_name = self._by_name
        by_name[names[:NAME_BYTES]] = owner
        for at in range(-stretch.start % ANCHOR_BLOCKS * NAME_BYTES, len(names), ANCHOR_BYTES):
            by_name[names[at : at + NAME_BYTES]] = owner

    # --------------------------------------------------------------------------------------------------------- finding

    def walk(self, run: Run | None, depth: int, names: bytes, at: int = 0) -> tuple[Run | None, int]:
        """Follow names[at:] down from a position: depth `depth`, in `run` or at its end (None: the root).

        Returns the deepest position reached. Takes a step a run. Raises BrokenChain.
        """
        while at < len(names):
            if run is None or depth == run.start + run.size:
                child = self._by_name.get(names[at : at + NAME_BYTES])
                if child is None:
                    break
                if child.parent is not run or child.start != depth:
                    raise BrokenChain(f"block {depth} is known under another parent")
                run = child
            same = common_blocks(run, depth, names, at)
            depth += same
            at += same * NAME_BYTES
            if depth < run.start + run.size:
                break
        return run, depth

    def deepest(self, run: Run | None, depth: int, names: bytes) -> tuple[Run | None, int]:
        """As `walk`, for long names: bisects the index instead of visiting every run on the way."""
        if len(names) <= ANCHOR_BYTES:  # a turn's: nothing to bisect
            return self.walk(run, depth, names)
        blocks = len(names) // NAME_BYTES
        first = -depth % ANCHOR_BLOCKS
        known, unknown = -1, (blocks - 1 - first) // ANCHOR_BLOCKS + 1 if blocks > first else 0
        probe = unknown - 1  # the last anchor first: appends and full hits end there
        found: Run | None = None
        while known < probe < unknown:
            at = (first + probe * ANCHOR_BLOCKS) * NAME_BYTES
            candidate = self._by_name.get(names[at : at + NAME_BYTES])
            if candidate is None:
                unknown = probe
            else:
                known, found = probe, candidate
            probe = (known + unknown) // 2
        if found is None:
            return self.walk(run, depth, names)
        block = first + known * ANCHOR_BLOCKS
        at = block * NAME_BYTES
        inside = (depth + block - found.start) * NAME_BYTES
        if inside < 0 or found.names[inside : inside + NAME_BYTES] != names[at : at + NAME_BYTES]:
            raise BrokenChain(f"block {depth + block} is known at another depth")
        return self.walk(found, depth + block, names, at)

    def on_path(self, run: Run | None, depth: int, name: bytes) -> Run | None:
        """The run with the block of this depth and name, among `run` and its ancestors."""
        while run is not None and run.start > depth:
            run = run.parent
        if run is None or depth >= run.start + run.size:
            return None
        at = (depth - run.start) * NAME_BYTES
        return run if run.names[at : at + NAME_BYTES] == name else None

    # ------------------------------------------------------------------------------------------------------ invariants

    def check_invariants(self) -> None:
        """Assert the structure's invariants. Walks everything."""
        seen = list(self.runs())
        children: dict[int, int] = {}
        indexed = 0
        for run in seen:
            assert run.size > 0, run
            assert len(run.names) == run.size * NAME_BYTES, run
            assert run.size <= self._run_blocks_max, run
            assert run.homes is None or (run.homes and all(count > 0 for count in run.homes.values())), run
            assert run.children or run.tips or run.homes or run.l1 or run.l2, f"{run} is needed by nothing"
            if run.parent is None:
                assert run.start == 0, run
            else:
                assert run.parent.start + run.parent.size == run.start, run
                children[id(run.parent)] = children.get(id(run.parent), 0) + 1
            for offset in range(run.size):
                if offset == 0 or (run.start + offset) % ANCHOR_BLOCKS == 0:
                    indexed += 1
                    name = run.names[offset * NAME_BYTES : (offset + 1) * NAME_BYTES]
                    assert self._by_name.get(name) is run, (run, offset)
        assert indexed == len(self._by_name)
        assert len(seen) == self.run_count
        assert sum(run.size for run in seen) == self.block_count
        for run in seen:
            assert run.children == children.pop(id(run), 0), run
        assert not children, "a parent is not in the index"


def common_blocks(run: Run, depth: int, names: bytes, at: int) -> int:
    """How many blocks from depth `depth` of `run` on equal names[at:]. Bisects: chained names agree on a prefix."""
    inside = (depth - run.start) * NAME_BYTES
    high = min(len(run.names) - inside, len(names) - at)
    if names.startswith(run.names[inside : inside + high], at):
        return high // NAME_BYTES
    low, high = 0, high // NAME_BYTES  # low blocks agree, high don't
    while high - low > 1:
        middle = (low + high) // 2
        end = inside + middle * NAME_BYTES
        if names.startswith(run.names[end - NAME_BYTES : end], at + (middle - 1) * NAME_BYTES):
            low = middle
        else:
            high = middle
    return low
