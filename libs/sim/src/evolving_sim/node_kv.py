"""What KV a node holds: per branch its leading blocks, in device memory (L1) and in host memory (L2).

Simpler than the pools of the product: host memory never fills, device memory gives up whole branches, the longest
unused first. The blocks that agents of a kind have in common count once per node.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Branch:
    """A context as nodes see it: some leading blocks common to its kind, then its own."""

    branch_id: str
    common_id: str  # whose leading blocks it has in common; no branch's id
    common_blocks: int


@dataclass(frozen=True, slots=True)
class Depth:
    """Leading blocks of a prompt that a node holds."""

    l1_blocks: int  # in device memory
    any_blocks: int  # in either


@dataclass(slots=True)
class NodeKv:
    """One node's."""

    l1_blocks_max: int
    _l1: OrderedDict[str, int] = field(init=False, default_factory=OrderedDict)  # own blocks, the longest unused first
    _l2: dict[str, int] = field(init=False, default_factory=dict)
    _l1_used: int = field(init=False, default=0)

    def depth(self, branch: Branch, blocks: int) -> Depth:
        """Of the first `blocks` of a branch's context."""
        return Depth(min(blocks, _leading(self._l1, branch)), min(blocks, _leading(self._l2, branch)))

    def store(self, branch: Branch, blocks: int) -> None:
        """The first `blocks` of a context are in device memory, and written through to host memory."""
        self.fetch(branch, blocks)
        for owner, own in _owned(branch, blocks):
            before = self._l1.pop(owner, 0)
            self._l1[owner] = max(own, before)
            self._l1_used += self._l1[owner] - before
        while self._l1_used > self.l1_blocks_max and self._l1:
            self._l1_used -= self._l1.popitem(last=False)[1]

    def fetch(self, branch: Branch, blocks: int) -> None:
        """The first `blocks` of a context are in host memory."""
        for owner, own in _owned(branch, blocks):
            self._l2[owner] = max(own, self._l2.get(owner, 0))

    def rewrite(self, branch: Branch, kept_blocks: int) -> None:
        """The branch's context is another after its first `kept_blocks`."""
        own = max(0, kept_blocks - branch.common_blocks)
        if self._l2.get(branch.branch_id, 0) > own:
            self._l2[branch.branch_id] = own
        in_l1 = self._l1.get(branch.branch_id, 0)
        if in_l1 > own:
            self._l1[branch.branch_id] = own
            self._l1_used -= in_l1 - own

    def drop(self, branch: Branch) -> None:
        """The branch ended."""
        self._l2.pop(branch.branch_id, None)
        self._l1_used -= self._l1.pop(branch.branch_id, 0)

    def check_invariants(self) -> None:
        """Assert that L1 is within bounds, and that L2 has all it has."""
        assert self._l1_used == sum(self._l1.values()) <= self.l1_blocks_max
        assert all(self._l2[owner] >= own for owner, own in self._l1.items())


def _owned(branch: Branch, blocks: int) -> tuple[tuple[str, int], tuple[str, int]]:
    """Whose blocks the first `blocks` are; the common ones last: they are the last to go."""
    common = min(blocks, branch.common_blocks)
    return (branch.branch_id, blocks - common), (branch.common_id, common)


def _leading(tier: dict[str, int] | OrderedDict[str, int], branch: Branch) -> int:
    common = min(tier.get(branch.common_id, 0), branch.common_blocks)
    return common + tier.get(branch.branch_id, 0) if common == branch.common_blocks else common
