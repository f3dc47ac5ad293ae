"""Eviction by what branches still need: (effective count, last access), smallest first.

The effective count of a block is the largest count of it and its descendants on this node, so that a parent never goes
before a counted child (paper §4.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.mem_cache.evict_policy import EvictionStrategy

from .names import name_of_hash


class BranchCounts:
    """The counts of blocks on this node, by name."""

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}
        self.version = 0

    def update(self, counts: Mapping[bytes, int]) -> None:
        """Replace the counts of the named blocks; 0 forgets one."""
        self.version += 1
        for name, count in counts.items():
            if count > 0:
                self._counts[name] = count
            else:
                self._counts.pop(name, None)

    def nonzero(self) -> dict[bytes, int]:
        """A copy of all counts."""
        return dict(self._counts)

    def of_node(self, node: Any) -> int:
        """The largest count of a tree node's own blocks."""
        if not self._counts or node.hash_value is None:
            return 0
        return max((self._counts.get(name_of_hash(page_hash), 0) for page_hash in node.hash_value), default=0)


class BranchCountStrategy(EvictionStrategy):  # type: ignore[misc]
    """SGLang's eviction order."""

    counts = BranchCounts()  # one engine a process; SGLang constructs the strategy itself

    def get_priority(self, node: Any) -> tuple[int, float]:
        """What leaves first has the smallest."""
        return (self.effective_count(node), node.last_access_time)

    def effective_count(self, node: Any) -> int:
        """The largest count of a node's blocks and of its descendants'.

        Remembered on each node with the version of the counts. A child that left since only makes its parent look
        more needed than it is until the next update, which no promise is about.
        """
        version = self.counts.version
        if getattr(node, "counted_at", None) == version:
            return int(node.counted)
        stack = [(node, False)]
        while stack:
            current, children_done = stack.pop()
            if getattr(current, "counted_at", None) == version:
                continue
            if not children_done:
                stack.append((current, True))
                stack.extend((child, False) for child in current.children.values())
                continue
            below = (child.counted for child in current.children.values())
            current.counted = max(self.counts.of_node(current), *below, 0)
            current.counted_at = version
        return int(node.counted)
