"""What a node evicts first: the least needed by branches, then the longest unused; never a parent before a child.

A block that a running leg uses may leave L2 while L1 keeps it. The leg's branch will need it, and its counts of new
blocks are still on their way; so in L2 such a block is needed as the last copy of one branch at least.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from evolving.core.config import EvictionPolicy
from evolving.core.needs import JUST_MADE, blocks_until_last, is_last, need_at_end
from evolving.core.pool_runs import Run
from evolving.core.terms import Tier

_Entry = tuple[int, int, int, Run]  # need, last use, serial of the run, the run


class EvictionOrder:
    """Runs whose last block may leave a tier, in order. A run is offered after each change of what orders it."""

    def __init__(self, policy: EvictionPolicy, runs: dict[Run, None]) -> None:
        self._needs_matter = policy is EvictionPolicy.AGENT
        self._runs = runs
        self._heaps: dict[Tier, list[_Entry]] = {tier: [] for tier in Tier}

    def offer(self, run: Run) -> None:
        """Note a run's present place; earlier notes are stale by what they say."""
        for tier, heap in self._heaps.items():
            if not run.below[tier] and run.evictable(tier):
                heapq.heappush(heap, self._entry(run, tier))
                if len(heap) > 4 * len(self._runs) + 64:
                    heap[:] = [self._entry(each, tier) for each in self._runs if each.evictable(tier)]
                    heapq.heapify(heap)

    def offer_all(self, runs: Iterable[Run]) -> None:
        """Offer runs, and below each those that go by what lies above them, once each."""
        offered: set[Run] = set()
        for run in runs:
            at: Run | None = run
            while at is not None and at not in offered:
                offered.add(at)
                self.offer(at)
                at = next(iter(at.children)) if len(at.children) == 1 else None

    def pop(self, tier: Tier) -> tuple[Run, int] | None:
        """The run whose last blocks go next, and how many at most before another may; it must be offered again if it
        stays. None: nothing may leave."""
        heap = self._heaps[tier]
        while heap:
            entry = heapq.heappop(heap)
            run = entry[3]
            if run.names and run.evictable(tier) and entry == self._entry(run, tier):
                return run, self._most(run)
        return None

    def _entry(self, run: Run, tier: Tier) -> _Entry:
        needed = self._need(run)
        if self._needs_matter and tier is Tier.L2 and run.used_in_l1:
            needed = max(needed, JUST_MADE)
        return (needed, run.accessed, run.serial, run)

    def _need(self, run: Run) -> int:
        if not self._needs_matter:
            return 0
        return need_at_end(run.effective, *_alone(run)) if is_last(run.effective) else run.effective

    def _most(self, run: Run) -> int:
        """Blocks that may leave as one piece, before what is left goes by a larger need."""
        lowered = self._needs_matter and self._need(run) != run.effective
        return min(run.size, blocks_until_last(*_alone(run))) if lowered and not is_last(run.need) else run.size


def _alone(run: Run) -> tuple[int, int]:
    """Of a run and those before it back to where another context goes on: blocks with no other copy, and all."""
    last = blocks = 0
    at: Run | None = run
    while at is not None:
        blocks += at.size
        last += at.size if is_last(at.need) else 0
        at = at.parent if at.parent is not None and len(at.parent.children) == 1 else None
    return last, blocks
