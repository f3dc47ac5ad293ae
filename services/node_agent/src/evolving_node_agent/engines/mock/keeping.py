"""What stays in L2 for legs in the queue: their own blocks and those fetched for them."""

from __future__ import annotations

import asyncio

from evolving.core.pool import NodePool
from evolving.core.pool_runs import Use
from evolving.core.terms import Tier
from evolving_node_agent.engines.mock.admission import PrefillQueue
from evolving_node_agent.engines.mock.fetching import ReadMeter
from evolving_node_agent.engines.mock.legs import PrefillLeg

_KEPT_SHARE = 0.5  # of L2 at most: what running legs write through needs room too


class Keeping:
    """Bounded, but for the leg that is next: so one always gets on. What is being read counts as kept."""

    def __init__(self, pool: NodePool, queue: PrefillQueue, reads: ReadMeter) -> None:
        self._pool = pool
        self._queue = queue
        self._reads = reads
        self._room = asyncio.Event()

    def has_room(self, leg: PrefillLeg, blocks: int) -> bool:
        """Whether the first `blocks` blocks can be kept for a leg, with all that those before it in the queue will
        reuse; what is kept for others anyway takes no room."""
        lacking = 0
        for ahead in self._queue:
            if ahead is leg:
                break
            lacking += 0 if ahead.fetch.over else self._lacking(ahead, ahead.fetch.until)
        else:
            return False  # it left the queue
        if next(iter(self._queue)) is leg:
            return True
        kept = self._pool.used_by(Use.QUEUED) + self._reads.blocks_under_way + lacking + self._lacking(leg, blocks)
        return kept <= _KEPT_SHARE * self._pool.capacity(Tier.L2)

    def _lacking(self, leg: PrefillLeg, blocks: int) -> int:
        """How many of the first `blocks` blocks of a leg nobody keeps."""
        return blocks - self._pool.kept(leg.kv.names, blocks, Use.QUEUED)

    async def until_room(self) -> None:
        """Wait for a leg to leave the queue, or a read or a fetch to end."""
        await self._room.wait()

    def keep(self, leg: PrefillLeg, blocks: int) -> None:
        """Keep the first `blocks` blocks, all in L2, for a leg."""
        if blocks > leg.fetch.kept:
            self._pool.lock(leg.kv.names, leg.fetch.kept, blocks, Use.QUEUED)
            leg.fetch.kept = blocks

    def keep_own(self, leg: PrefillLeg) -> bool:
        """Keep what L2 has of a leg that waits; False where there is no room."""
        held = self._pool.matched(leg.kv.names, leg.fetch.until, Tier.L2)
        if held > leg.fetch.kept:
            if not self.has_room(leg, held):
                return False
            self.keep(leg, held)
        return True

    def let_go(self, leg: PrefillLeg) -> None:
        """Nothing is kept for a leg that left the queue; the room goes to others in their order."""
        self._pool.unlock(leg.kv.names, leg.fetch.kept, Use.QUEUED)
        leg.fetch.kept = 0
        for waiting in self._queue:
            if not self.keep_own(waiting):
                break  # nor is there any for those behind
        self.room_came()

    def room_came(self) -> None:
        """Let those look again who wait for room."""
        self._room.set()
        self._room = asyncio.Event()
