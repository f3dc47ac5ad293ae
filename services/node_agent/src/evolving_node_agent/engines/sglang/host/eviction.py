"""Eviction by what branches still need: (effective need, last access), smallest first.

The effective need of a block (`evolving.core.needs`) is the largest of it and its descendants on this node, so that a
parent never goes before a counted child (paper §4.1). SGLang evicts tree nodes, so a node whose blocks differ in it is
split first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sglang.srt.mem_cache.evict_policy import EvictionStrategy
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE

from evolving.core.config import EvictionPolicy
from evolving.core.needs import is_last, need_at_end

from .needs import Needs


class NeedStrategy(EvictionStrategy):  # type: ignore[misc]
    """SGLang's eviction order, and who is asked for needs."""

    # One engine a process; SGLang constructs the strategy itself.
    needs = Needs()
    policy = EvictionPolicy.AGENT

    def get_priority(self, node: Any) -> tuple[int, float]:
        """What leaves first has the smallest."""
        effective = self.effective_need(node)
        return (need_at_end(effective, *self._alone(node)) if is_last(effective) else effective, node.last_access_time)

    def _alone(self, node: Any) -> tuple[int, int]:
        """Of a node and those before it back to where another context goes on: blocks with no other copy, and all."""
        last = blocks = 0
        at = node
        while at.parent is not None:
            own_last, own_blocks = self.needs.last_blocks(at)
            last, blocks = last + own_last, blocks + own_blocks
            if len(at.parent.children) > 1:
                break
            at = at.parent
        return last, blocks

    def effective_need(self, node: Any) -> int:
        """The largest need of a node's blocks and of its descendants'; 0 where needs don't matter.

        Remembered on each node with the version of the needs. A child that left since only makes its parent look
        more needed than it is until the next update, which no promise is about.
        """
        version = self.needs.version
        if self.policy is EvictionPolicy.LRU:
            return 0
        if getattr(node, "need_as_of", None) == version:
            return int(node.need)
        stack = [(node, False)]
        while stack:
            current, children_done = stack.pop()
            if getattr(current, "need_as_of", None) == version:
                continue
            if not children_done:
                stack.append((current, True))
                stack.extend((child, False) for child in current.children.values())
                continue
            below = max((child.need for child in current.children.values()), default=0)
            current.need, current.cuts = self.needs.levels(current, below)
            current.need_as_of = version
        return int(node.need)


class EvenNodes:
    """Splits nodes before SGLang looks for victims, so that all blocks of a node are needed equally."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self._core = tree.tree_core
        self._strategy: NeedStrategy = self._core.eviction_strategy
        self._split = self._core._split_node
        self._core._split_node = self._split_unnoticed
        self._before(self._core, "evict_device_start", lambda: self._even(self._core.evictable_device_leaves, True))
        self._before(self._core, "drive_host_eviction", lambda: self._even(self._core.evictable_host_leaves, False))

    @staticmethod
    def _before(target: Any, name: str, first: Callable[[], None]) -> None:
        method = getattr(target, name)

        def both(*args: Any, **kwargs: Any) -> Any:
            first()
            return method(*args, **kwargs)

        setattr(target, name, both)

    def _split_unnoticed(self, key: Any, child: Any, length: int) -> tuple[Any, Any]:
        """SGLang's split, which would make both parts look as if they had just been used."""
        accessed = child.last_access_time
        parent, action = self._split(key, child, length)
        parent.last_access_time = child.last_access_time = accessed
        return parent, action

    def _even(self, leaves: Iterable[Any], on_device: bool) -> None:
        """Split what can become a victim: leaves and, once those are gone, what they continue.

        Nodes in use are left as they are: they are no victims, and whoever uses them may count on their extent.
        """
        if self._strategy.policy is EvictionPolicy.LRU:
            return
        version = self._strategy.needs.version
        for leaf in list(leaves):
            path, node = [], leaf
            while node.parent is not None and getattr(node, "even_at", None) != version:
                if self._in_use(node) or (on_device and node.evicted) or not (on_device or node.evicted):
                    break
                path.append(node)
                node = node.parent
            reached = node.parent is None or getattr(node, "even_at", None) == version
            for each in path:
                self._cut(each)
                if reached:
                    each.even_at = version

    def _cut(self, node: Any) -> None:
        """Cut a node at the blocks where another effective need begins; it stays the last part itself."""
        self._strategy.effective_need(node)
        cuts = node.cuts
        if cuts:
            node.need_as_of = None  # what is remembered is the need of its first block, which goes to another node
        for cut in cuts:
            node, action = self._core._split_node(node.key, node, cut * self._core.page_size)
            if action is not None:
                self._tree._apply_cache_actions([action])

    @staticmethod
    def _in_use(node: Any) -> bool:
        data = node.component_data[BASE_COMPONENT_TYPE]
        return bool(data.lock_ref or data.host_lock_ref)
