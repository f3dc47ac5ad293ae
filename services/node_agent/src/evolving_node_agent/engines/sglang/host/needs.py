"""How much blocks on this node are needed, by name, and what follows from it. Scheduler's thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from evolving.core.needs import is_last

from .names import names_of


class Needs:
    """What eviction goes by."""

    def __init__(self) -> None:
        self._needs: dict[bytes, int] = {}
        self._in_l2: Mapping[bytes, object] = {}
        self.l2_blocks = 0  # blocks in L2 that some branch counts
        self.version = 0

    def watch(self, in_l2: Mapping[bytes, object]) -> None:
        """Keep `l2_blocks` for this mapping, whose owner says what comes and goes."""
        self._in_l2 = in_l2
        self.l2_blocks = sum(name in self._needs for name in in_l2)

    def on_stored(self, names: Iterable[bytes], in_l2: bool) -> None:
        """These blocks came to a tier."""
        counted = sum(name in self._needs for name in names)
        if counted:
            self.version += 1  # what was remembered of the nodes above is no longer true
            self.l2_blocks += counted if in_l2 else 0

    def on_removed(self, names: Iterable[bytes]) -> None:
        """These blocks left L2."""
        self.l2_blocks -= sum(name in self._needs for name in names)

    def update(self, needs: Mapping[bytes, int]) -> None:
        """Replace what was known of the named blocks; 0 forgets one."""
        self.version += 1
        for name, need in needs.items():
            if name in self._in_l2:
                self.l2_blocks += (need > 0) - (name in self._needs)
            if need > 0:
                self._needs[name] = need
            else:
                self._needs.pop(name, None)

    def nonzero(self) -> dict[bytes, int]:
        """A copy of all."""
        return dict(self._needs)

    def levels(self, node: Any, below: int) -> tuple[int, tuple[int, ...]]:
        """The effective need of a tree node's first block, when that of its children is `below`; and the blocks at
        which a new effective need begins, last first."""
        if not self._needs or node.hash_value is None:
            return below, ()
        level, cuts = below, []
        names = names_of(node)
        for index in range(len(names) - 1, -1, -1):
            need = self._needs.get(names[index], 0)
            if need > level:
                if index + 1 < len(names):
                    cuts.append(index + 1)
                level = need
        return level, tuple(cuts)

    def last_blocks(self, node: Any) -> tuple[int, int]:
        """Blocks of a tree node that the pool would lose with this copy, and all of them.

        Remembered on the node until needs change or a split gives it other hashes: every eviction asks for all leaves,
        back to where their contexts part.
        """
        if node.hash_value is None:
            return 0, 0
        names = names_of(node)
        version, of_names, last = getattr(node, "last_as_of", (-1, None, 0))
        if version != self.version or of_names is not names:
            last = sum(is_last(self._needs.get(name, 0)) for name in names)
            node.last_as_of = (self.version, names, last)
        return last, len(names)
