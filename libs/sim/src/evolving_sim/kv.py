"""What one simulated node holds: the product's own pool of names, and the KV of the legs that run there.

A leg's KV is leading blocks shared through the pool, kept for it, then room of its own, as in an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from evolving.core.config import EvictionPolicy
from evolving.core.directory_types import Cleared, NodeEvent, Removed, RunRef, Stored
from evolving.core.pool import NodePool
from evolving.core.pool_runs import Run, Use
from evolving.core.terms import ANCHOR_BLOCKS, Tier
from evolving_sim.node_config import NodeConfig

_KEPT_SHARE = 0.5  # of L2 at most is kept for legs in the queue: what running ones write through needs room too


class PlacedChanges:
    """Changes of a pool as the directory is told of them, noted while their place in the tree of runs is known."""

    def __init__(self, on_first: Callable[[], None] = lambda: None) -> None:
        """on_first: hears that there is something to tell."""
        self._events: list[NodeEvent] = []
        self._on_first = on_first

    def stored(self, tier: Tier, run: Run) -> None:
        """A run came into a tier."""
        self._note(Stored(tier, placed(run)))

    def removed(self, tier: Tier, run: Run) -> None:
        """A run leaves a tier."""
        self._note(Removed(tier, placed(run)))

    def cleared(self, tier: Tier) -> None:
        """A tier is lost."""
        self._note(Cleared(tier))

    def take(self) -> list[NodeEvent]:
        """Those since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _note(self, event: NodeEvent) -> None:
        self._events.append(event)
        if len(self._events) == 1:
            self._on_first()


def placed(run: Run) -> RunRef:
    """A run of a pool, named so that the directory finds it."""
    start = run.start
    if start == 0:
        return RunRef(0, b"".join(run.names))
    anchor = (start - 1) // ANCHOR_BLOCKS * ANCHOR_BLOCKS
    parts = [b"".join(run.names)]
    left, above = start - anchor, run.parent
    while left > 0:
        assert above is not None
        parts.append(b"".join(above.names[-left:]))
        left -= above.size
        above = above.parent
    parts.reverse()
    return RunRef(anchor, b"".join(parts), start - anchor)


@dataclass(slots=True, eq=False)
class LegKv:
    """KV of one leg. Room is taken once and given back at the end."""

    node: NodeKv
    names: Sequence[bytes]  # of its context
    use: Use
    blocks: int = 0  # leading ones that are in device memory, kept for it
    _own: int = field(default=0)  # room that is no block yet

    def take(self, pages: int, reusable_blocks: int) -> int | None:
        """Take room for `pages`, and keep what device memory has of the leading `reusable_blocks`; how many these are.
        None, and nothing is taken, where there is no room.

        Legs of either kind leave one context's worth of device memory alone: so nodes full of prompts that wait for
        decode nodes never wait on each other for ever.
        """
        pool = self.node.pool
        in_l1 = pool.matched(self.names, reusable_blocks, Tier.L1)
        unused, unused_by_kind = pool.unused(self.names, in_l1, self.use)
        own = pages - in_l1
        if pool.room - unused < own or pool.used_by(self.use) + unused_by_kind + own > self.node.leg_blocks_max:
            return None
        pool.lock(self.names, 0, in_l1, self.use)
        pool.reserve(own, self.use)
        self.blocks, self._own = in_l1, own
        return in_l1

    def reach(self, blocks: int) -> None:
        """The first `blocks` are in device memory now: restored, computed or received. They are written through."""
        if blocks > self.blocks:
            self.node.pool.commit(self.names, self.blocks, blocks, self.use)
            self._own -= blocks - self.blocks
            self.blocks = blocks

    def release(self) -> None:
        """The leg is over."""
        self.node.pool.give_back(self._own, self.use)
        self.node.pool.unlock(self.names, self.blocks, self.use)
        self._own = self.blocks = 0


class NodeKv:
    """One node's pool for one life of its engine."""

    def __init__(
        self,
        config: NodeConfig,
        policy: EvictionPolicy = EvictionPolicy.AGENT,
        host_copies: float = 1.0,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """host_copies: how often host memory keeps the same KV. on_change: hears that there are `changes`."""
        size = config.block_tokens
        self.block_tokens = size
        self.changes = PlacedChanges(on_change)
        self.pool = NodePool(
            config.l1_tokens // size, int(config.l2_tokens / (size * host_copies)), policy, self.changes
        )
        self.leg_blocks_max = (config.l1_tokens - config.reserve_tokens) // size

    def leg(self, names: Sequence[bytes], use: Use) -> LegKv:
        """The KV of a leg that comes; it has nothing yet."""
        return LegKv(self, names, use)

    def pages(self, tokens: int) -> int:
        """Blocks that a context takes."""
        return -(-tokens // self.block_tokens)

    def free_tokens(self) -> int:
        """Host memory that is free or held for no branch."""
        return (self.pool.free(Tier.L2) + self.pool.zero_l2) * self.block_tokens

    def used_share(self, use: Use) -> float:
        """Share of device memory that legs of a kind use, their room included."""
        return self.pool.used_by(use) / self.pool.capacity(Tier.L1)

    def keep(self, names: Sequence[bytes], kept: int, blocks: int, *, first: bool) -> int:
        """Keep what host memory has of the first `blocks` for a leg in the queue for which the first `kept` are kept.

        Within bounds, but for the `first` one, so that one always gets on. Returns how many are kept then.
        """
        held = self.pool.matched(names, blocks, Tier.L2)
        if held <= kept:
            return kept
        lacking = held - self.pool.kept(names, held, Use.QUEUED)
        if not first and self.pool.used_by(Use.QUEUED) + lacking > _KEPT_SHARE * self.pool.capacity(Tier.L2):
            return kept
        self.pool.lock(names, kept, held, Use.QUEUED)
        return held

    def snapshot(self) -> list[NodeEvent]:
        """All that is held, parents before children."""
        held = PlacedChanges()
        self.pool.tell(held)
        return held.take()

    def check_invariants(self) -> None:
        """Assert all bookkeeping; walks everything."""
        self.pool.check_invariants()
