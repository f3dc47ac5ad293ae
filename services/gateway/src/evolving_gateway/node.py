"""One node as this gateway sees it: by its registration, by what it says itself, and by what was sent there since."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

import grpc.aio

from evolving.core.errors import InvalidArgument
from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients
from evolving.core.work import PrefillWork
from evolving.internal.v1 import node_agent_pb2, node_agent_pb2_grpc
from evolving.runtime.keys import NodeRegistration
from evolving.runtime.log import get_logger
from evolving.wire.timemodel import decode_from_proto, prefill_from_proto

_log = get_logger(__name__)


@dataclass(slots=True)
class Arriving:
    """A prefill leg on its way into a node's status."""

    work: PrefillWork
    fetched_tokens: int  # of its cached ones, those to come from peers
    acknowledged: bool = False  # W_n covers it


@dataclass(slots=True)
class DecodeArriving:
    """A decode leg on its way into a node's status."""

    context_tokens: int
    stored_tokens: int  # of them, what the node's host memory lacks
    reserved: bool = False  # it has a slot
    has_slot: bool = False  # and the node's status counts it
    started: bool = False  # its KV is there


@dataclass(eq=False)
class Node:
    """One life of one node: replaced when its engine or its agent comes back under another incarnation or address."""

    registration: NodeRegistration
    channel: grpc.aio.Channel
    stub: node_agent_pb2_grpc.NodeAgentServiceAsyncStub
    registered: bool = True  # its lease lives
    watching: bool = False  # its status stream is up
    status: node_agent_pb2.WatchStatusResponse = field(default_factory=node_agent_pb2.WatchStatusResponse)
    wait_s: float = 0.0  # W_n as it last said
    arriving: dict[str, Arriving] = field(default_factory=dict)  # prefill legs its status does not cover
    decode_arriving: dict[str, DecodeArriving] = field(default_factory=dict)  # decode legs it does not cover in full
    legs: int = 0  # legs of this gateway running there
    task: asyncio.Task[None] | None = None
    prefill_coefficients: PrefillCoefficients = field(init=False)  # equation 1 on this node
    decode_coefficients: DecodeCoefficients = field(init=False)  # equation 2

    def __post_init__(self) -> None:
        self._take_model(self.status)

    @property
    def node_id(self) -> str:
        """Its id."""
        return self.registration.node_id

    @property
    def ready(self) -> bool:
        """New work may go there, as far as its life is concerned."""
        same = self.status.incarnation == self.registration.incarnation
        return self.registered and self.watching and self.status.ready and same

    @property
    def new_tokens_per_iteration(self) -> float:
        """ū: observed, else the chunk size."""
        return self.status.new_tokens_per_iteration or float(self.registration.chunk_tokens)

    @property
    def slots_free(self) -> int:
        """Decode slots left, legs on their way there taken off."""
        return max(0, self.status.decode_slots_free - len(self._without_slot))

    @property
    def decoding(self) -> int:
        """B, legs that will be in the batch in a moment included."""
        return self.status.decoding + self.status.reserved + len(self._without_slot)

    @property
    def decode_context_tokens(self) -> int:
        """Summed over these B."""
        return self.status.decode_context_tokens + sum(leg.context_tokens for leg in self._without_slot)

    @property
    def decode_memory_tokens(self) -> int:
        """Device memory that decodes leave to another one, prefill's not counted; below 0 where some wait for it."""
        facts = self.registration
        return facts.l1_tokens - facts.reserve_tokens - self.decode_context_tokens

    @property
    def full(self) -> bool:
        """Another leg would have to wait for a slot or for memory before it decodes."""
        return self.status.decode_slots_free == 0 or self.decode_memory_tokens < 0

    def has_room(self, context_tokens: int) -> bool:
        """A decode leg of so many tokens would get a slot and memory at once."""
        return self.slots_free > 0 and (self.decode_memory_tokens >= context_tokens or not self.decoding)

    @property
    def unacknowledged(self) -> tuple[PrefillWork, ...]:
        """Prefill legs that W_n does not cover."""
        return tuple(leg.work for leg in self.arriving.values() if not leg.acknowledged)

    @property
    def fetch_backlog_tokens(self) -> int:
        """Tokens that legs there, or on their way, still have to get from peers."""
        return self.status.fetch_backlog_tokens + sum(leg.fetched_tokens for leg in self.arriving.values())

    @property
    def room_tokens(self) -> float:
        """Host memory that is free or held for no branch, less what legs queued or on their way there will store;
        infinite without any."""
        status = self.status
        if not status.l2_total_tokens:
            return math.inf
        arriving = sum(leg.work.uncached_tokens + leg.fetched_tokens for leg in self.arriving.values())
        decode_arriving = sum(leg.stored_tokens for leg in self.decode_arriving.values())
        free = status.l2_total_tokens - status.l2_used_tokens + status.l2_zero_tokens
        return max(0, free - status.queued_tokens - arriving - decode_arriving)

    @property
    def _without_slot(self) -> list[DecodeArriving]:
        return [leg for leg in self.decode_arriving.values() if not leg.has_slot]

    def take_status(self, status: node_agent_pb2.WatchStatusResponse) -> None:
        """A new status: it covers the legs acknowledged, the slots reserved and the decodes started before it."""
        before, self.status = self.status, status
        if _model_of(before) != _model_of(status):
            self._take_model(status)
        self.wait_s = status.wait_s
        self.arriving = {name: leg for name, leg in self.arriving.items() if not leg.acknowledged}
        self.decode_arriving = {name: leg for name, leg in self.decode_arriving.items() if not leg.started}
        for leg in self.decode_arriving.values():
            leg.has_slot = leg.reserved

    def acknowledge(self, leg_id: str, wait_s: float) -> None:
        """The node has the leg in its queue; `wait_s` says so."""
        if (leg := self.arriving.get(leg_id)) is not None:
            leg.acknowledged = True
        self.wait_s = wait_s

    def _take_model(self, status: node_agent_pb2.WatchStatusResponse) -> None:
        """What the node says was fitted; as registered where it says nothing, or what can't be."""
        facts = self.registration
        experts = (min(facts.experts_per_token, facts.experts), facts.experts)
        self.prefill_coefficients = PrefillCoefficients(*facts.prefill_coefficients)
        self.decode_coefficients = DecodeCoefficients(*facts.decode_coefficients, *experts)
        try:
            if status.prefill_coefficients_s:
                self.prefill_coefficients = prefill_from_proto(status.prefill_coefficients_s)
            if status.decode_coefficients_s:
                self.decode_coefficients = decode_from_proto(status.decode_coefficients_s, *experts)
        except InvalidArgument as error:
            _log.warning("time_model_ignored", node_id=facts.node_id, error=str(error))


def _model_of(status: node_agent_pb2.WatchStatusResponse) -> tuple[list[float], list[float]]:
    return list(status.prefill_coefficients_s), list(status.decode_coefficients_s)
