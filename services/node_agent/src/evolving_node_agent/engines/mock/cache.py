"""The node's pool (evolving.core.pool) and, where KV is verified, the bytes of each copy.

Bytes follow what the pool says happened: a block that came into a tier has the bytes it was handed with, or those of
its copy in the other tier. Without them (`verify_kv` is off) a copy's bytes are what its name says they must be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from evolving.core.pool import NodePool
from evolving.core.pool_events import BlocksRemoved, BlocksStored, PoolEvent
from evolving.core.pool_runs import Use
from evolving_node_agent.engines.mock.config import MockConfig
from evolving_node_agent.engines.mock.model import block_kv
from evolving_node_agent.engines.port import Cleared, KvEvent, Removed, Stored, Tier


class BlockCache:
    """One node's blocks. Nothing here awaits; changes leave as events."""

    def __init__(self, config: MockConfig) -> None:
        size = config.block_tokens
        self.pool = NodePool(config.l1_tokens // size, config.l2_tokens // size, config.eviction)
        self._page_bytes = config.page_bytes
        self._bytes: dict[Tier, dict[bytes, bytes]] | None = {tier: {} for tier in Tier} if config.verify_kv else None
        self._events: list[KvEvent] = []

    def read(self, name: bytes, tier: Tier) -> bytes | None:
        """KV bytes of a block in a tier, shape (page_bytes,); None where it isn't."""
        if self._bytes is None:
            return block_kv(name, self._page_bytes) if self.pool.holds(name, tier) else None
        self._follow({})
        return self._bytes[tier].get(name)

    def commit(self, names: Sequence[bytes], first: int, last: int, use: Use, data: Sequence[bytes] = ()) -> None:
        """As `NodePool.commit`. data: KV bytes of the new blocks where they are verified; none: L2 has them."""
        self._follow({})
        self.pool.commit(names, first, last, use)
        self._follow(dict(zip(names[first:last], data, strict=False)))

    def store_fetched(self, names: Sequence[bytes], first: int, last: int, data: Sequence[bytes] = ()) -> int:
        """Put blocks [first, last), read from a peer, into L2, behind those that are here. data: as in `commit`.

        Returns how many leading blocks L2 has then.
        """
        self._follow({})
        reached = self.pool.store(names, first, last)
        self._follow(dict(zip(names[first:last], data, strict=False)))
        return reached

    def snapshot(self) -> list[KvEvent]:
        """All that is held, as events from nothing, parents before children."""
        return [_event(each) for each in self.pool.snapshot()]

    def take_events(self) -> list[KvEvent]:
        """Changes since the last call, in order."""
        self._follow({})
        events, self._events = self._events, []
        return events

    def damage(self, name: bytes, tier: Tier) -> None:
        """Flip a bit of a copy, as failing memory would."""
        data = self.read(name, tier)
        assert data is not None
        assert self._bytes is not None, "without verify_kv there is nothing to damage"
        self._bytes[tier][name] = bytes([data[0] ^ 1]) + data[1:]

    def check_invariants(self) -> None:
        """Assert all bookkeeping; O(blocks)."""
        self.pool.check_invariants()
        self._follow({})
        if self._bytes is not None:
            held: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}
            for event in self.pool.snapshot():
                if isinstance(event, BlocksStored):
                    held[event.tier].update(event.names)
            assert held == {tier: set(copies) for tier, copies in self._bytes.items()}

    def _follow(self, given: Mapping[bytes, bytes]) -> None:
        """Bring bytes and events up to what happened in the pool; `given` are bytes of blocks that came."""
        for event in self.pool.take_events():
            if self._bytes is not None:
                self._move_bytes(self._bytes, event, given)
            self._events.append(_event(event))

    def _move_bytes(
        self, copies: Mapping[Tier, dict[bytes, bytes]], event: PoolEvent, given: Mapping[bytes, bytes]
    ) -> None:
        own = copies[event.tier]
        if isinstance(event, BlocksStored):
            other = copies[Tier.L2 if event.tier is Tier.L1 else Tier.L1]
            for name in event.names:
                own[name] = given[name] if name in given else other[name]
        elif isinstance(event, BlocksRemoved):
            for name in event.names:
                del own[name]
        else:
            own.clear()


def _event(event: PoolEvent) -> KvEvent:
    if isinstance(event, BlocksStored):
        return Stored(event.tier, event.parent, tuple(event.names))
    if isinstance(event, BlocksRemoved):
        return Removed(event.tier, tuple(event.names))
    return Cleared(event.tier)
