"""The counts of blocks on this node, by name, and what follows from them. Scheduler's thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .names import names_of


class BranchCounts:
    """What eviction goes by."""

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}
        self._in_l2: Mapping[bytes, object] = {}
        self.l2_blocks = 0  # blocks in L2 that have a count
        self.version = 0

    def watch(self, in_l2: Mapping[bytes, object]) -> None:
        """Keep `l2_blocks` for this mapping, whose owner says what comes and goes."""
        self._in_l2 = in_l2
        self.l2_blocks = sum(name in self._counts for name in in_l2)

    def on_stored(self, names: Iterable[bytes], in_l2: bool) -> None:
        """These blocks came to a tier."""
        counted = sum(name in self._counts for name in names)
        if counted:
            self.version += 1  # what was remembered of the nodes above is no longer true
            self.l2_blocks += counted if in_l2 else 0

    def on_removed(self, names: Iterable[bytes]) -> None:
        """These blocks left L2."""
        self.l2_blocks -= sum(name in self._counts for name in names)

    def update(self, counts: Mapping[bytes, int]) -> None:
        """Replace the counts of the named blocks; 0 forgets one."""
        self.version += 1
        for name, count in counts.items():
            if name in self._in_l2:
                self.l2_blocks += (count > 0) - (name in self._counts)
            if count > 0:
                self._counts[name] = count
            else:
                self._counts.pop(name, None)

    def nonzero(self) -> dict[bytes, int]:
        """A copy of all counts."""
        return dict(self._counts)

    def levels(self, node: Any, below: int) -> tuple[int, tuple[int, ...]]:
        """The effective count of a tree node's first block, when that of its children is `below`; and the blocks at
        which a new effective count begins, last first."""
        if not self._counts or node.hash_value is None:
            return below, ()
        level, cuts = below, []
        names = names_of(node)
        for index in range(len(names) - 1, -1, -1):
            count = self._counts.get(names[index], 0)
            if count > level:
                if index + 1 < len(names):
                    cuts.append(index + 1)
                level = count
        return level, tuple(cuts)
