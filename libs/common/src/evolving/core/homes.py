"""Whose copy a branch counts, stretch by stretch of its context: home(β, φ) for one phase φ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar


class HomeMap:
    """A map from depth to a node's number, or to nobody, kept as stretches.

    A branch's parts land at a handful of nodes, so a list of a few stretches says it all. Adjacent stretches differ;
    the last one is somebody's.
    """

    __slots__ = ("_stretches",)

    NOBODY: ClassVar[int] = 0

    def __init__(self) -> None:
        self._stretches: list[tuple[int, int, int]] = []  # first block, end, node; gapless from 0

    def stretches(self, first: int, end: int) -> list[tuple[int, int, int]]:
        """(first, end, node) within [first, end), gapless; node is NOBODY where no copy is counted."""
        homes_end = self.end()
        if first == 0 and end >= homes_end:  # of the whole context, as most who ask want them
            found = self._stretches.copy()
        else:
            found = [
                (max(first, begin), min(end, until), node)
                for begin, until, node in self._stretches
                if begin < end and until > first
            ]
        covered = max(first, homes_end)
        if covered < end:
            found.append((covered, end, HomeMap.NOBODY))
        return found

    def assign(self, first: int, end: int, node: int) -> None:
        """Make `node` (or NOBODY) the home of blocks [first, end)."""
        if first >= end:
            return
        pieces = self.stretches(0, first) if first else []
        pieces.append((first, end, node))
        if end < self.end():
            pieces += self.stretches(end, self.end())
        merged: list[tuple[int, int, int]] = []
        for begin, until, home in pieces:
            if merged and merged[-1][2] == home:
                merged[-1] = (merged[-1][0], until, home)
            else:
                merged.append((begin, until, home))
        if merged[-1][2] == HomeMap.NOBODY:
            merged.pop()
        self._stretches = merged

    def end(self) -> int:
        """Depth where the last home ends."""
        return self._stretches[-1][1] if self._stretches else 0

    def has(self, node: int) -> bool:
        """Whether the node is home of any block."""
        return any(home == node for _, _, home in self._stretches)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """(first, end, node) of all stretches that have a home."""
        return (stretch for stretch in self._stretches if stretch[2] != HomeMap.NOBODY)

    def check_invariants(self, blocks: int) -> None:
        """Assert that the stretches are gapless, merged, within the context and end with a home."""
        at = 0
        last = -1
        for begin, until, node in self._stretches:
            assert begin == at < until, self._stretches
            assert node != last, self._stretches
            at, last = until, node
        assert at <= blocks, (self._stretches, blocks)
        assert last != HomeMap.NOBODY, self._stretches
