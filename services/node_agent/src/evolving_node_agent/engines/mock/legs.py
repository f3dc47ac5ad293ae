"""The state of one leg. The life of the engine changes it; tasks of transfers and fetches wait on its events."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from evolving_node_agent.engines.claims import Claims
from evolving_node_agent.engines.mock.context import ContextKv
from evolving_node_agent.engines.mock.fetching import LegFetch
from evolving_node_agent.engines.port import (
    CachedTokens,
    DecodeEvent,
    DecodeJob,
    EngineError,
    PrefillEvent,
    PrefillJob,
)

Event = TypeVar("Event")


class EventStream(Generic[Event]):
    """Events of a leg on their way to whoever iterates over it; the leg never waits for a slow reader."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Event | EngineError | None] = asyncio.Queue()

    def put(self, event: Event) -> None:
        """Hand over one event."""
        self._queue.put_nowait(event)

    def close(self, error: EngineError | None) -> None:
        """No more events; the reader gets `error` after those before it."""
        self._queue.put_nowait(error)

    async def __aiter__(self) -> AsyncIterator[Event]:
        while (entry := await self._queue.get()) is not None:
            if isinstance(entry, EngineError):
                raise entry
            yield entry


class PrefillStage(enum.Enum):
    """Where a prefill leg is."""

    QUEUED = enum.auto()  # its fetch from peers goes on beside
    RUNNING = enum.auto()  # has its room; chunks are computed
    HOLDING = enum.auto()  # computed; KV waits for, or goes to, a decode leg
    OVER = enum.auto()


class DecodeStage(enum.Enum):
    """Where a decode leg is."""

    RESERVING = enum.auto()
    PULLING = enum.auto()  # has its room; KV comes
    RUNNING = enum.auto()  # in the batch
    OVER = enum.auto()


@dataclass(slots=True, eq=False)
class PrefillLeg:
    """One prefill leg."""

    job: PrefillJob
    kv: ContextKv
    order: int  # arrival, for first in, first out among equal priorities
    queued_s: float  # clock when it arrived
    reusable_blocks: int  # the last token is always computed
    fetch: LegFetch
    events: EventStream[PrefillEvent] = field(default_factory=EventStream)
    stage: PrefillStage = PrefillStage.QUEUED
    fetching: asyncio.Task[None] | None = None
    taken_s: float = 0.0  # clock when it left the queue
    cached: CachedTokens = field(default_factory=CachedTokens)
    first_token: int = 0
    claims: Claims = field(default_factory=Claims)
    pulled: bool = False  # a decode leg that has its room has come for it
    partner: DecodeLeg | None = None  # the decode leg on this node that waits for it
    ready: asyncio.Event = field(default_factory=asyncio.Event)  # computed and held
    tasks: list[asyncio.Task[None]] = field(default_factory=list)  # cancelled when the leg is over

    @property
    def left(self) -> int:
        """Prompt tokens still to compute."""
        return len(self.job.tokens) - self.kv.tokens

    @property
    def rank(self) -> tuple[int, int]:
        """Order in the queue."""
        return (-self.job.priority, self.order)


@dataclass(slots=True, eq=False)
class DecodeLeg:
    """One decode leg."""

    job: DecodeJob
    kv: ContextKv
    output: list[int]  # ids drawn so far, earlier attempts included; the last one has no KV yet
    dismiss: Callable[[DecodeJob], Coroutine[None, None, None]]  # tells the source that it ended
    events: EventStream[DecodeEvent] = field(default_factory=EventStream)
    stage: DecodeStage = DecodeStage.RESERVING
    cached_blocks: int = 0
    iterations: int = 0
    partner: PrefillLeg | None = None  # the prefill leg on this node that it waits for
    reserved: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def context_tokens(self) -> int:
        """Tokens of the context, the newest included."""
        return len(self.job.tokens) - self.job.generated + len(self.output)


Leg = PrefillLeg | DecodeLeg
