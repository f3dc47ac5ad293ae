"""A node's pool block by block: what `evolving.core.pool` must do, without a run or an index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from evolving.core.config import EvictionPolicy
from evolving.core.needs import JUST_MADE, need
from evolving.core.pool_runs import Use
from evolving.core.terms import Tier

LAST = need(1, elsewhere=False) - 1  # what a need is above of a block that the pool would lose


@dataclass(eq=False)
class Block:
    """One held block."""

    name: bytes
    parent: Block | None
    tiers: set[Tier] = field(default_factory=set)
    locks: list[int] = field(default_factory=lambda: [0, 0, 0])
    accessed: int = 0
    leaving: int = 0  # tiers it leaves once unused, from the first on

    def used_in(self, tier: Tier) -> bool:
        """Whether it must stay in the tier."""
        return any(self.locks[:2]) if tier is Tier.L1 else self.locks[2] > 0


class PoolModel:
    """The same operations, each by looking at all blocks."""

    def __init__(self, l1_blocks: int, l2_blocks: int, policy: EvictionPolicy) -> None:
        self.capacity = {Tier.L1: l1_blocks, Tier.L2: l2_blocks}
        self.policy = policy
        self.blocks: dict[bytes, Block] = {}
        self.needs: dict[bytes, int] = {}
        self.own = [0, 0]
        self.operation = 0

    def held(self, tier: Tier) -> set[bytes]:
        """Names in a tier."""
        return {block.name for block in self.blocks.values() if tier in block.tiers}

    def free(self, tier: Tier) -> int:
        """Room nothing fills."""
        return self.capacity[tier] - len(self.held(tier)) - (sum(self.own) if tier is Tier.L1 else 0)

    def room(self) -> int:
        """L1 room that could be had."""
        return self.free(Tier.L1) + sum(not self.blocks[name].used_in(Tier.L1) for name in self.held(Tier.L1))

    def depth(self, names: Sequence[bytes], tier: Tier | None = None) -> int:
        """Leading blocks held."""
        for depth, name in enumerate(names):
            if name not in self.blocks or (tier is not None and tier not in self.blocks[name].tiers):
                return depth
        return len(names)

    def touch(self, names: Sequence[bytes]) -> None:
        """Count a use."""
        self.operation += 1
        for name in names:
            self.blocks[name].accessed = self.operation

    def lock(self, names: Sequence[bytes], first: int, use: Use) -> None:
        """Keep blocks from `first` on."""
        for name in names[first:]:
            self.blocks[name].locks[use] += 1
            if first == 0:
                self.blocks[name].leaving = 0
        self.touch(names)

    def unlock(self, names: Sequence[bytes], use: Use) -> None:
        """Give blocks up."""
        for name in names:
            self.blocks[name].locks[use] -= 1
        self.touch(names)
        for name in reversed(names):
            block = self.blocks[name]
            if block.leaving == 1 and not block.used_in(Tier.L1):
                block.leaving = 0
                if block.tiers == set(Tier):
                    self._drop_leaf(block, Tier.L1)
            elif block.leaving == 2 and not any(block.locks):
                block.leaving = 0
                for tier in Tier:
                    self._drop_leaf(block, tier)

    def reserve(self, blocks: int, use: Use) -> None:
        """Take L1 room."""
        while self.free(Tier.L1) < blocks:
            assert self.evict(Tier.L1, None)
        self.own[use] += blocks

    def commit(self, names: Sequence[bytes], first: int, use: Use) -> None:
        """Own room becomes blocks."""
        self.own[use] -= len(names) - first
        for depth in range(first, len(names)):
            self._put(names, depth, Tier.L1)
        self._store(names)
        for name in names[first:]:
            self.blocks[name].locks[use] += 1
        self.touch(names)

    def store(self, names: Sequence[bytes], first: int) -> int:
        """Into L2; blocks before `first` from L1."""
        if self.depth(names[:first]) == first:
            self._store(names)
        have = self.depth(names, Tier.L2)
        self.touch(names[:have])
        return have

    def set_needs(self, needs: Mapping[bytes, int]) -> None:
        """How much blocks are needed."""
        self.needs.update(needs)

    def free_l1(self) -> int:
        """Out of L1 what L2 has."""
        for block in self.blocks.values():
            if block.tiers == set(Tier) and block.used_in(Tier.L1):
                block.leaving = max(block.leaving, 1)
        dropped = 0
        for block in self._children_first():
            if block.tiers == set(Tier) and not block.used_in(Tier.L1):
                dropped += self._drop_leaf(block, Tier.L1)
        return dropped

    def clear(self) -> int:
        """Everything out."""
        dropped = 0
        for block in self._children_first():
            if any(block.locks):
                block.leaving = 2
                continue
            dropped += 1
            for tier in Tier:
                self._drop_leaf(block, tier)
        return dropped

    def lose(self, tier: Tier) -> None:
        """A tier is gone."""
        for block in self._children_first():
            self._drop_leaf(block, tier)

    def effective(self, block: Block) -> int:
        """The largest need at or below a block."""
        below = [self.effective(each) for each in self.blocks.values() if each.parent is block]
        return max([self.needs.get(block.name, 0), *below])

    def needed(self, block: Block, tier: Tier) -> int:
        """How much a block is needed in a tier; a leg that runs stands for a branch with no other copy."""
        if self.policy is EvictionPolicy.LRU:
            return 0
        needed = self.effective(block)
        alone = self._alone(block)
        if needed > LAST and 8 * sum(self.needs.get(each.name, 0) > LAST for each in alone) <= len(alone):
            needed -= LAST
        return max(needed, JUST_MADE if tier is Tier.L2 and block.used_in(Tier.L1) else 0)

    def _alone(self, block: Block) -> list[Block]:
        """A block and those before it, back to where another context goes on."""
        alone = [block]
        while (parent := alone[-1].parent) and sum(each.parent is parent for each in self.blocks.values()) == 1:
            alone.append(parent)
        return alone

    def evict(self, tier: Tier, keep: Block | None) -> bool:
        """Drop the block that goes first."""
        leaves = [
            block
            for block in self.blocks.values()
            if block is not keep
            and tier in block.tiers
            and not block.used_in(tier)
            and not self._has_child(block, tier)
        ]
        if not leaves:
            return False
        orders = {(self.needed(block, tier), block.accessed): block for block in leaves}
        assert len(orders) == len(leaves), "the order is a whole one"
        self._drop_leaf(orders[min(orders)], tier)
        return True

    def _has_child(self, block: Block, tier: Tier) -> bool:
        return any(each.parent is block and tier in each.tiers for each in self.blocks.values())

    def _children_first(self) -> list[Block]:
        return sorted(self.blocks.values(), key=_depth, reverse=True)

    def _drop_leaf(self, block: Block, tier: Tier) -> bool:
        if tier not in block.tiers or self._has_child(block, tier):
            return False
        block.tiers.discard(tier)
        if not block.tiers:
            del self.blocks[block.name]
        return True

    def _store(self, names: Sequence[bytes]) -> None:
        have = self.depth(names, Tier.L2)
        above = self.blocks[names[have - 1]] if have else None
        while self.free(Tier.L2) < len(names) - have and self.evict(Tier.L2, above):
            pass
        for depth in range(have, min(len(names), have + self.free(Tier.L2))):
            self._put(names, depth, Tier.L2)

    def _put(self, names: Sequence[bytes], depth: int, tier: Tier) -> None:
        block = self.blocks.get(names[depth])
        if block is None:
            parent = self.blocks[names[depth - 1]] if depth else None
            block = self.blocks[names[depth]] = Block(names[depth], parent, leaving=parent.leaving if parent else 0)
        block.tiers.add(tier)


def _depth(block: Block) -> int:
    return 0 if block.parent is None else 1 + _depth(block.parent)
