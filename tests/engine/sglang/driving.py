"""Driving engines: one request through its two legs, as a gateway and two agents would."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
from listening import listening

from evolving_node_agent.engines.port import (
    CachedTokens,
    DecodeJob,
    Engine,
    EngineInfo,
    Finished,
    FinishReason,
    Holder,
    KvEvent,
    Prefilled,
    PrefillJob,
    Removed,
    Reserved,
    Sampling,
    Sent,
    Started,
    Stored,
    Taken,
    Tier,
    TokenIds,
    Tokens,
)

BLOCK = 64
ROOT = bytes(range(32))
OTHER_ROOT = bytes(range(32, 64))
_numbers = count(1)


@dataclass
class Node:
    """A started engine, and what it says it holds."""

    name: str
    engine: Engine
    info: EngineInfo
    held: dict[Tier, set[bytes]] = field(default_factory=lambda: {Tier.L1: set(), Tier.L2: set()})
    parents: dict[bytes, bytes | None] = field(default_factory=dict)
    events: list[KvEvent] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def listen(self) -> None:
        """Apply the engine's events for as long as it lives."""
        async for batch in self.engine.kv_events():
            for event in batch:
                self.events.append(event)
                self._apply(event)
            self.changed.set()

    def _apply(self, event: KvEvent) -> None:
        held = self.held[event.tier]
        if isinstance(event, Stored):
            parent = event.parent
            for name in event.names:
                assert self.parents.setdefault(name, parent) == parent, "a block changed its parent"
                parent = name
            assert not held.intersection(event.names), "stored twice"
            held.update(event.names)
        elif isinstance(event, Removed):
            assert held.issuperset(event.names), "removed what was not there"
            held.difference_update(event.names)
        else:
            held.clear()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the events make `condition` true."""
        while not condition():
            self.changed.clear()
            if not condition():
                await self.changed.wait()

    async def until_holds(self, tier: Tier, names: Sequence[bytes]) -> None:
        """Wait until the engine said it holds all of `names`."""
        await self.until(lambda: self.held[tier].issuperset(names))

    async def until_decoding(self, requests: int) -> None:
        """Wait until the running batch has that many requests."""
        async for status in self.engine.status_changes():
            if status.decoding >= requests:
                return

    async def until_idle(self) -> None:
        """Wait until no leg is left in the status."""
        async for status in self.engine.status_changes():
            if not (status.queued or status.prefilling or status.holding or status.decoding or status.reserved):
                return

    async def until_only_cache(self) -> None:
        """Wait until no leg is left and the engine's memory holds what it announced, and not a token more."""
        async for status in self.engine.status_changes():
            legs = status.queued or status.prefilling or status.holding or status.decoding or status.reserved
            used = (status.l1_used_tokens, status.l2_used_tokens)
            if not legs and used == tuple(self.info.block_tokens * len(self.held[tier]) for tier in Tier):
                return

    def holder(self, first_block: int, blocks: int) -> Holder:
        """This node as a holder of a run of blocks."""
        return Holder(self.name, self.info.pool_address, self.info.incarnation, first_block, blocks)


@dataclass
class Served:
    """What one request did."""

    ids: list[int]
    cached: CachedTokens
    prefill_events: list[Any]
    decode_events: list[Any]
    token_events: list[Tokens]

    @property
    def finished(self) -> Finished:
        """How decoding ended."""
        event = self.decode_events[-1]
        assert isinstance(event, Finished)
        return event

    @property
    def started(self) -> Started:
        """When decoding began."""
        return next(event for event in self.decode_events if isinstance(event, Started))

    @property
    def sent(self) -> Sent:
        """How the prefill leg ended."""
        event = self.prefill_events[-1]
        assert isinstance(event, Sent)
        return event


def prompt(seed: int, length: int) -> list[int]:
    """Random ids of the tiny model's vocabulary, without its special tokens."""
    return [int(token) for token in np.random.default_rng(seed).integers(8, 512, length)]


def names(tokens: Sequence[int], root: bytes = ROOT) -> list[bytes]:
    """Names as the directory computes them: chained SHA-256 from the root, 16 bytes."""
    previous, out = root, []
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        block = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + BLOCK])
        previous = hashlib.sha256(previous + block).digest()
        out.append(previous[:16])
    return out


def ids(tokens: Sequence[int]) -> TokenIds:
    """Tokens as the port takes them."""
    return np.array(tokens, dtype=np.uint32)


def greedy(max_tokens: int, **fields: Any) -> Sampling:
    """Greedy sampling past the end token."""
    return Sampling(**({"max_tokens": max_tokens, "ignore_eos": True} | fields))


def jobs(
    source: Node, tokens: Sequence[int], sampling: Sampling, generated: int = 0, root: bytes = ROOT, **prefill: Any
) -> tuple[PrefillJob, DecodeJob]:
    """The two legs of one request."""
    number = next(_numbers)
    shared: dict[str, Any] = {
        "transfer_id": number,
        "tokens": ids(tokens),
        "generated": generated,
        "root": root,
        "sampling": sampling,
    }
    decode = {key: prefill.pop(key) for key in ("reserve_deadline_s",) if key in prefill}
    return (
        PrefillJob(leg_id=f"p{number}", **shared, **prefill),
        DecodeJob(
            leg_id=f"d{number}",
            source_node_id=source.name,
            source_address=source.info.transfer_address,
            **shared,
            **decode,
        ),
    )


async def serve(
    source: Node, target: Node, tokens: Sequence[int], sampling: Sampling | int, generated: int = 0, **job: Any
) -> Served:
    """Prefill on `source`, decode on `target`, chosen when the prefill leg leaves its queue."""
    wanted = greedy(sampling) if isinstance(sampling, int) else sampling
    prefill_job, decode_job = jobs(source, tokens, wanted, generated, **job)
    taken = asyncio.Event()
    prefill_events: list[Any] = []
    decode_events: list[Any] = []

    async def prefill() -> None:
        async for event in source.engine.prefill(prefill_job):
            prefill_events.append(event)
            if isinstance(event, Taken):
                taken.set()

    async def decode() -> None:
        await taken.wait()
        decode_events.extend([event async for event in target.engine.decode(decode_job)])

    async with asyncio.TaskGroup() as legs:
        legs.create_task(prefill())
        legs.create_task(decode())
    return _served(prefill_events, decode_events, generated)


async def prefill_only(source: Node, tokens: Sequence[int], **job: Any) -> Prefilled:
    """A request of one token: no decode leg."""
    prefill_job, _ = jobs(source, tokens, greedy(1), **job)
    events = [event async for event in source.engine.prefill(prefill_job)]
    assert [type(event) for event in events] == [Taken, Prefilled]
    assert isinstance(events[-1], Prefilled)
    assert events[-1].finish is FinishReason.LENGTH
    return events[-1]


def _served(prefill_events: list[Any], decode_events: list[Any], generated: int) -> Served:
    """Check the order of events and the token indices, then collect."""
    assert [type(event) for event in prefill_events] == [Taken, Prefilled, Sent]
    prefilled = prefill_events[1]
    tokens = [event for event in decode_events if isinstance(event, Tokens)]
    others = [type(event) for event in decode_events if not isinstance(event, Tokens)]
    assert others == [Reserved, Started, Finished]
    output = [prefilled.first_token]
    for event in tokens:
        assert event.index == generated + len(output), "a gap or a repeat"
        output.extend(event.ids.tolist())
    served = Served(output, prefilled.cached, prefill_events, decode_events, tokens)
    assert served.finished.iterations == len(tokens)
    return served


async def collect(events: AsyncIterator[Any]) -> list[Any]:
    """All events of a leg."""
    return [event async for event in events]


@contextlib.asynccontextmanager
async def black_holes(first_block: int, blocks: int, count: int = 30) -> AsyncIterator[tuple[Holder, ...]]:
    """Holders that take connections and say nothing. The engine gives each up after seconds: many take a minute."""

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while await reader.read(1 << 16):
                pass

    async with contextlib.AsyncExitStack() as holes:
        addresses = [await holes.enter_async_context(listening(swallow)) for _ in range(count)]
        yield tuple(
            Holder(f"hole {index}", f"{host}:{port}", f"hole {index}", first_block, blocks)
            for index, (host, port) in enumerate(addresses)
        )
