"""The legs of requests on this node, as both threads see them."""

from __future__ import annotations

import asyncio
import enum
import itertools
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from evolving.core.fetching import Rank
from evolving_node_agent.engines.claims import Claims
from evolving_node_agent.engines.port import CachedTokens, EngineError, FinishReason, TokenIds
from evolving_node_agent.engines.sglang import messages as m
from evolving_node_agent.engines.sglang.translate import tokens_of

from .names import namespace
from .stopwatch import Stopwatch

_arrivals = itertools.count()


class Phase(enum.Enum):
    """Where a prefill leg is."""

    ARRIVED = enum.auto()
    QUEUED = enum.auto()  # in SGLang's waiting queue
    COMPUTING = enum.auto()
    HOLDING = enum.auto()  # computed; the KV waits for its decode leg
    OVER = enum.auto()


@dataclass(slots=True)
class FirstToken:
    """What a prefill leg hands to its decode leg."""

    token: int
    finish: FinishReason | None


@dataclass(eq=False, slots=True, kw_only=True)
class Leg:
    """What both kinds share. `request` and everything named so is the scheduler thread's."""

    leg_id: str
    transfer_id: int
    tokens: TokenIds
    generated: int
    root: bytes
    # SGLang finds requests by prefix of their id, so ids are of one length and random.
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    request: Any = None
    aborted: bool = False
    ended: asyncio.Future[None]  # service thread: resolved or failed when the scheduler is done with it

    @property
    def extra_key(self) -> str:
        """The tree's namespace of this leg."""
        return namespace(self.root)


@dataclass(eq=False, slots=True, kw_only=True)
class FetchState:
    """The reading of a leg's blocks from peers, beside its wait."""

    rank: Rank  # of the leg in the queue
    due: asyncio.Future[None]  # service thread: resolved when the reading is to begin
    over: bool = False  # scheduler thread: nothing more will come
    missing_tokens: int = 0  # prompt tokens that are still to come from peers
    spans: list[tuple[int, int]] = field(default_factory=list)  # scheduler thread: prompt tokens [from, to) that came
    reading: Stopwatch = field(default_factory=Stopwatch)  # the service's: blocks are being read
    held_up: Stopwatch = field(default_factory=Stopwatch)  # the scheduler's: the leg would be taken if it were over

    @property
    def hidden_s(self) -> float:
        """Seconds of reading that cost the leg nothing."""
        return max(0.0, self.reading.total_s - self.held_up.total_s)


@dataclass(eq=False, slots=True, kw_only=True)
class PrefillLeg(Leg):
    """One prefill leg."""

    command: m.Prefill
    fetch: FetchState
    phase: Phase = Phase.ARRIVED
    arrived_s: float = field(default_factory=time.monotonic)
    taken_s: float = 0.0
    known_cached_tokens: int = 0  # for the queue's truth
    held_kv: Any = None  # the request's KV record while it waits for the decode leg
    owned_tokens: int = 0  # KV this leg holds beyond what was cached when it began
    taken: asyncio.Future[None]  # service thread: resolved when the leg leaves the queue
    first: asyncio.Future[FirstToken]  # service thread
    claims: Claims = field(default_factory=Claims)  # service thread: of decode legs that have not pulled, by id
    puller: str = ""  # service thread: id of the decode leg that has room and came for the KV
    handed_over: asyncio.Future[tuple[float, int]]  # service thread: (transfer_s, bytes)
    over: asyncio.Future[None]  # service thread: resolved when the leg is forgotten

    def cached(self, device: int, host: int) -> CachedTokens:
        """SGLang's split by tier, with the peers' part taken out of the host's."""
        total = device + host
        peer = sum(max(0, min(total, end) - max(device, start)) for start, end in self.fetch.spans)
        return CachedTokens(l1=device, l2=host - peer, peer=peer)


@dataclass(eq=False, slots=True, kw_only=True)
class DecodeLeg(Leg):
    """One decode leg."""

    command: m.Decode
    local: PrefillLeg | None = None  # the prefill leg, when it is on this node
    reserved: asyncio.Future[int]  # service thread: prompt tokens already here
    holds_slot: bool = False
    running: bool = False
    sent: int = 0  # output tokens reported, counted from the request's first
    iterations: int = 0
    owned_tokens: int = 0  # KV reserved for this leg beyond what was cached
    reading: asyncio.Future[bool] | None = None  # service thread: bytes may land until it is done


def prefill_leg(command: m.Prefill) -> PrefillLeg:
    """The state of a new prefill leg; on the service's loop."""
    loop = asyncio.get_running_loop()
    return PrefillLeg(
        leg_id=command.leg_id,
        transfer_id=command.transfer_id,
        tokens=tokens_of(command.tokens),
        generated=command.generated,
        root=command.root,
        command=command,
        fetch=FetchState(rank=(-command.priority, next(_arrivals)), due=loop.create_future()),
        ended=_observed(loop.create_future()),
        taken=loop.create_future(),
        first=loop.create_future(),
        handed_over=_observed(loop.create_future()),
        over=loop.create_future(),
    )


def decode_leg(command: m.Decode) -> DecodeLeg:
    """The state of a new decode leg; on the service's loop."""
    loop = asyncio.get_running_loop()
    return DecodeLeg(
        leg_id=command.leg_id,
        transfer_id=command.transfer_id,
        tokens=tokens_of(command.tokens),
        generated=command.generated,
        root=command.root,
        command=command,
        ended=_observed(loop.create_future()),
        reserved=loop.create_future(),
        sent=command.generated + 1,
    )


def _observed(future: asyncio.Future[Any]) -> asyncio.Future[Any]:
    """Its exception counts as seen: whoever still waits for it gets it."""
    future.add_done_callback(lambda done: None if done.cancelled() else done.exception() and None)
    return future


def failure(leg: Leg, error: EngineError) -> m.LegFailed:
    """The report that ends a leg with an error."""
    return m.LegFailed(leg.leg_id, type(error).__name__, str(error))
