"""Blocks that are to leave memory as soon as no leg uses them. Scheduler's thread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import DriveHostEvictionResult

from evolving_node_agent.engines.port import Tier

from .residency import Residency


class Leaving:
    """What was told to go and is still in use, by name: of L1 alone, or of both tiers."""

    def __init__(self, tree: Any, residency: Residency) -> None:
        self._tree = tree
        self._core = tree.tree_core
        self._residency = residency
        self._l1: set[bytes] = set()
        self._both: set[bytes] = set()
        residency.on_gone = self._on_gone

    def free_l1(self) -> int:
        """Drop from L1 the blocks that L2 has too, those in use when they are no longer; the blocks dropped now."""
        for node in self._nodes():
            data = node.component_data[BASE_COMPONENT_TYPE]
            if data.value is not None and data.host_value is not None:
                self._l1.update(self._residency.names(node))
        return self._drop_l1()

    def clear(self) -> int:
        """Drop all blocks from both tiers, those in use when they are no longer; the blocks dropped now."""
        for node in self._nodes():
            self._both.update(self._residency.names(node))
        return self._drop_both()

    def drop(self) -> None:
        """Drop what was told to go and nobody uses any more."""
        self._drop_l1()
        self._drop_both()

    def _on_gone(self, tier: Tier, names: list[bytes], everywhere: bool) -> None:
        """Blocks left a tier, for whatever reason."""
        if tier is Tier.L1:
            self._l1.difference_update(names)
        if everywhere:
            self._both.difference_update(names)

    def _nodes(self) -> Iterator[Any]:
        stack = list(self._core.root_node.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def _drop_l1(self) -> int:
        return self._each(self._l1, lambda: self._core.evictable_device_leaves, self._demote)

    def _drop_both(self) -> int:
        dropped = self._each(self._both, lambda: self._core.evictable_device_leaves, self._evict_device)
        return dropped + self._each(self._both, lambda: self._core.evictable_host_leaves, self._evict_host)

    def _each(self, marked: set[bytes], leaves: Callable[[], set[Any]], drop: Callable[[Any], bool]) -> int:
        """Drop marked leaves until none is left; the blocks of those that `drop` says are gone."""
        dropped, refused = 0, set[int]()
        while marked:
            victims = [node for node in leaves() if node.id not in refused and self._is_marked(node, marked)]
            if not victims:
                break
            for node in victims:
                blocks = len(self._residency.names(node))
                if drop(node):
                    dropped += blocks
                else:
                    refused.add(node.id)
        return dropped

    def _demote(self, node: Any) -> bool:
        if not node.backuped:
            return False
        self._tree._demote(node.id, defaultdict(int))
        return True

    def _evict_device(self, node: Any) -> bool:
        """Whether nothing is left of the node; else it is in L2 alone from now on."""
        backed_up = node.backuped
        self._tree._evict_device_leaf(node.id, defaultdict(int))
        return not backed_up

    def _evict_host(self, node: Any) -> bool:
        result = DriveHostEvictionResult()
        self._core._evict_host_leaf(
            node, result.tracker, result.device_frees, result.host_frees, cache_actions=result.cache_actions
        )
        self._tree._apply_eviction_result(result)
        return True

    def _is_marked(self, node: Any, marked: set[bytes]) -> bool:
        """Whether the node, or what it continues, is marked: output of a marked request leaves with its prompt."""
        while node.parent is not None:
            if self._residency.names(node)[-1] in marked:
                return True
            node = node.parent
        return False
