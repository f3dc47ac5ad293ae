"""What a generation yields: started, tokens…, finished."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from evolving.v1 import common_pb2, gateway_pb2
from evolving_client.errors import InvalidRequest, ProtocolError


class FinishReason(Enum):
    """Why the output ended."""

    STOP = "stop"
    """A stop text, a stop token or the model's end token."""
    LENGTH = "length"
    """`max_tokens` or the model's context was reached."""


class LossCause(Enum):
    """Why KV is gone that the branch counted, where it wasn't evicted."""

    SWITCH = "switch"
    """A role switch emptied the node."""
    NODE = "node"
    """The node went away."""


@dataclass(frozen=True, slots=True)
class Started:
    """The request was routed. Comes again when it is routed anew.

    prompt_tokens: of the whole prompt. predicted_cached_tokens: of these, expected to be reused.
    predicted_ttft_s: seconds. version: the branch's version this request got; 0 without a branch.
    """

    request_id: str
    prompt_tokens: int
    prefill_node_id: str
    predicted_cached_tokens: int
    predicted_ttft_s: float
    version: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """Output tokens `index`, `index` + 1, …. No index comes twice and none is left out, also after a reconnect.

    text: what these ids complete. The bytes of a character that is still incomplete come with a later event.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Cached:
    """Prompt tokens that were not computed, by where their KV was.

    own_l1: in device memory of the prefill node; own_l2: in its host memory; peer_l2: in another node's host memory.
    """

    own_l1: int
    own_l2: int
    peer_l2: int

    @property
    def total(self) -> int:
        """Tokens from all three."""
        return self.own_l1 + self.own_l2 + self.peer_l2


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens. prompt = cached + computed."""

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Reuse:
    """What could have been reused when the request was last routed; `Cached` tells what was.

    pool_tokens: leading prompt tokens whose KV some node held; the last token is always computed. planned_tokens: of
    them, those routing meant to reuse; the others were sooner computed than fetched. loss: why the pool had less than
    the branch counted, where it wasn't eviction; None: not known to have lost anything.
    """

    pool_tokens: int
    planned_tokens: int
    loss: LossCause | None


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds, of the last attempt; ttft_s from the arrival at the gateway to the first token it sent.

    fetch_s: in which KV was read from other nodes; fetch_hidden_s: of it, what passed while the request had to wait
    anyway.
    """

    queue_s: float
    fetch_s: float
    fetch_hidden_s: float
    prefill_s: float
    transfer_s: float
    ttft_s: float
    tpot_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The whole output and what it cost. Always the last event.

    output_token_ids: all output ids. Sent verbatim as the continuation of the prompt's ids, they give the next turn
    the best reuse. attempts: times the cluster moved the request to another node. reconnects: times this client had
    to send it again. reusable_blocks: whole blocks of prompt and output that the next turn can reuse.
    """

    request_id: str
    version: int
    reason: FinishReason
    output_token_ids: tuple[int, ...]
    text: str
    prefill_node_id: str
    decode_node_id: str
    cached: Cached
    reuse: Reuse
    usage: Usage
    timings: Timings
    attempts: int
    reconnects: int
    reusable_blocks: int


Event = Started | Tokens | Finished

_REASONS = {
    gateway_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    gateway_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}
_LOSSES = {
    common_pb2.LOSS_CAUSE_SWITCH: LossCause.SWITCH,
    common_pb2.LOSS_CAUSE_NODE: LossCause.NODE,
}


def encode_token_ids(token_ids: Iterable[int]) -> bytes:
    """Unsigned 32-bit little-endian integers, 4 bytes each. Raises InvalidRequest for what is none."""
    ids = tuple(token_ids)
    try:
        return struct.pack(f"<{len(ids)}I", *ids)
    except struct.error as error:
        raise InvalidRequest(f"token ids are integers from 0 to 4294967295: {error}") from error


def decode_token_ids(data: bytes) -> tuple[int, ...]:
    """The inverse. Raises ProtocolError when the bytes don't divide into ids."""
    if len(data) % 4:
        raise ProtocolError(f"the server sent {len(data)} bytes of token ids, not a multiple of 4")
    return struct.unpack(f"<{len(data) // 4}I", data)


def started_from(message: gateway_pb2.GenerateStarted) -> Started:
    """The event of a wire message."""
    return Started(
        request_id=message.request_id,
        prompt_tokens=message.prompt_tokens,
        prefill_node_id=message.prefill_node_id,
        predicted_cached_tokens=message.predicted_cached_tokens,
        predicted_ttft_s=message.predicted_ttft_s,
        version=message.version,
    )


def tokens_from(message: gateway_pb2.GenerateTokens) -> Tokens:
    """The event of a wire message."""
    return Tokens(index=message.index, token_ids=decode_token_ids(message.token_ids), text=message.text)


def finished_from(message: gateway_pb2.GenerateFinished, *, request_id: str, version: int, reconnects: int) -> Finished:
    """The event of a wire message, with what the client knows of the request."""
    reason = _REASONS.get(message.reason)
    if reason is None:
        raise ProtocolError(f"unknown finish reason {message.reason}: is the gateway newer than this client?")
    cached, reuse, usage, timings = message.cached, message.reuse, message.usage, message.timings
    return Finished(
        request_id=request_id,
        version=version,
        reason=reason,
        output_token_ids=decode_token_ids(message.output_token_ids),
        text=message.text,
        prefill_node_id=message.prefill_node_id,
        decode_node_id=message.decode_node_id,
        cached=Cached(cached.own_l1, cached.own_l2, cached.peer_l2),
        reuse=Reuse(reuse.pool_tokens, reuse.planned_tokens, _LOSSES.get(reuse.loss)),
        usage=Usage(usage.prompt_tokens, usage.cached_tokens, usage.computed_tokens, usage.output_tokens),
        timings=Timings(
            queue_s=timings.queue_s,
            fetch_s=timings.fetch_s,
            fetch_hidden_s=timings.fetch_hidden_s,
            prefill_s=timings.prefill_s,
            transfer_s=timings.transfer_s,
            ttft_s=timings.ttft_s,
            tpot_s=timings.tpot_s,
            total_s=timings.total_s,
        ),
        attempts=message.attempts,
        reconnects=reconnects,
        reusable_blocks=message.reusable_blocks,
    )
