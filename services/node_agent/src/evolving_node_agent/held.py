"""What the engine holds, kept so that each change can be told with its place in a context. Pure.

The engine names blocks; the directory wants runs that begin at a depth which is a multiple of 16 (the anchored form
of KvChange). So the table knows each block's parent, and keeps blocks that left while a descendant is still held.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from evolving.core.terms import ANCHOR_BLOCKS
from evolving_node_agent.engines.port import Cleared, KvEvent, Stored, Tier

RUN_BLOCKS_MAX = 256
_depth = attrgetter("depth")


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks of one context from depth `first_block`, a multiple of 16; those after the first `skip`
    changed, the ones before say where."""

    first_block: int
    names: tuple[bytes, ...]
    skip: int


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a tier. run None: the tier was emptied."""

    tier: Tier
    stored: bool
    run: Run | None


@dataclass(slots=True, eq=False)
class _Entry:
    name: bytes
    parent: _Entry | None
    depth: int
    tiers: int = 0  # bit per Tier
    children: int = 0


class HeldTable:
    """Blocks by name. `unknown_parents` and `unknown_removals` count events that could not be placed."""

    def __init__(self) -> None:
        self._entries: dict[bytes, _Entry] = {}
        self.unknown_parents = 0
        self.unknown_removals = 0

    def __len__(self) -> int:
        return len(self._entries)

    def tiers(self, name: bytes) -> frozenset[Tier]:
        """Where a block is held."""
        entry = self._entries.get(name)
        return frozenset(tier for tier in Tier if entry is not None and entry.tiers & _bit(tier))

    def holds(self, name: bytes) -> bool:
        """Whether a block is held in any tier."""
        entry = self._entries.get(name)
        return entry is not None and entry.tiers != 0

    def apply(self, events: Iterable[KvEvent]) -> list[Change]:
        """Take the engine's changes; how to tell them."""
        changes: list[Change] = []
        for event in events:
            if isinstance(event, Stored):
                changes += self._store(event)
            elif isinstance(event, Cleared):
                changes.append(self._clear(event.tier))
            else:
                changes += self._remove(event.tier, event.names)
        return changes

    def snapshot(self) -> Iterator[Change]:
        """All that is held, parents before children; the table must not change meanwhile."""
        announced: set[bytes] = set()
        runs = [(run, tier) for tier in Tier for run in _runs(self._in_tier(tier))]
        runs.sort(key=lambda each: each[0][0].depth)
        for entries, tier in runs:
            head = entries[0]
            if head.parent is not None and head.parent.name not in announced:
                # Its ancestors are held nowhere: name them all, or the directory would not know the place.
                path = self._path(head, 0)
                announced.update(path)
            else:
                path = self._path(head, _anchor(head.depth))
            names = [entry.name for entry in entries]
            announced.update(names)
            yield Change(tier, True, Run(head.depth - len(path), (*path, *names), len(path)))

    def check_invariants(self) -> None:
        """Assert the structure; O(blocks)."""
        children: dict[bytes, int] = {}
        for entry in self._entries.values():
            if entry.parent is not None:
                assert self._entries.get(entry.parent.name) is entry.parent
                assert entry.depth == entry.parent.depth + 1
                children[entry.parent.name] = children.get(entry.parent.name, 0) + 1
            else:
                assert entry.depth == 0
        for entry in self._entries.values():
            assert entry.children == children.get(entry.name, 0)
            assert entry.tiers or entry.children, "a block held nowhere stays only for its descendants"

    def _store(self, event: Stored) -> Iterator[Change]:
        parent = self._entries.get(event.parent) if event.parent is not None else None
        if event.parent is not None and parent is None:
            self.unknown_parents += 1
            return
        entries, known, bit = [], self._entries, _bit(event.tier)
        for name in event.names:
            entry = known.get(name)
            if entry is None:
                entry = known[name] = _Entry(name, parent, parent.depth + 1 if parent is not None else 0)
                if parent is not None:
                    parent.children += 1
            entry.tiers |= bit
            entries.append(entry)
            parent = entry
        yield from (self._change(event.tier, True, run) for run in _cut(entries))

    def _remove(self, tier: Tier, names: Sequence[bytes]) -> Iterator[Change]:
        known, bit = self._entries, _bit(tier)
        gone = [entry for name in names if (entry := known.get(name)) is not None and entry.tiers & bit]
        self.unknown_removals += len(names) - len(gone)
        gone.sort(key=_depth)
        changes = [self._change(tier, False, run) for run in _runs(gone)]
        for entry in reversed(gone):
            entry.tiers &= ~bit
            if not entry.tiers:
                self._prune(entry)
        yield from changes

    def _clear(self, tier: Tier) -> Change:
        for entry in reversed(self._in_tier(tier)):  # children first, so that each goes once nothing hangs below
            entry.tiers &= ~_bit(tier)
            self._prune(entry)
        return Change(tier, False, None)

    def _prune(self, entry: _Entry) -> None:
        at: _Entry | None = entry
        while at is not None and at.tiers == 0 and at.children == 0 and at.name in self._entries:
            del self._entries[at.name]
            at = at.parent
            if at is not None:
                at.children -= 1

    def _in_tier(self, tier: Tier) -> list[_Entry]:
        """Blocks of a tier, in order of depth."""
        bit = _bit(tier)
        return sorted([entry for entry in self._entries.values() if entry.tiers & bit], key=_depth)

    def _change(self, tier: Tier, stored: bool, entries: Sequence[_Entry]) -> Change:
        head = entries[0]
        path = self._path(head, _anchor(head.depth))
        names = [entry.name for entry in entries]
        return Change(tier, stored, Run(head.depth - len(path), (*path, *names), len(path)))

    def _path(self, entry: _Entry, first_depth: int) -> list[bytes]:
        """Names of the ancestors from `first_depth` on."""
        names = []
        at = entry.parent
        while at is not None and at.depth >= first_depth:
            names.append(at.name)
            at = at.parent
        names.reverse()
        return names


def _bit(tier: Tier) -> int:
    return 1 << tier


def _anchor(depth: int) -> int:
    """The last multiple of 16 before `depth`, so that at least one block before it is named; 0 for a context's
    first."""
    return (depth - 1) // ANCHOR_BLOCKS * ANCHOR_BLOCKS if depth else 0


def _runs(entries: Sequence[_Entry]) -> list[list[_Entry]]:
    """Cut blocks, in order of depth, into runs each of which is a path; at most RUN_BLOCKS_MAX long."""
    by_tail: dict[bytes, list[_Entry]] = {}
    done: list[list[_Entry]] = []
    run: list[_Entry] = []  # the one that grew last, which nearly always grows next
    for entry in entries:
        if not run or entry.parent is not run[-1]:
            if run:
                by_tail[run[-1].name] = run
            run = by_tail.pop(entry.parent.name, []) if entry.parent is not None else []
        if len(run) >= RUN_BLOCKS_MAX:
            done.append(run)
            run = []
        run.append(entry)
    return [*done, *by_tail.values(), run] if run else []


def _cut(entries: Sequence[_Entry]) -> Iterator[Sequence[_Entry]]:
    for start in range(0, len(entries), RUN_BLOCKS_MAX):
        yield entries[start : start + RUN_BLOCKS_MAX]
