"""Node agent messages ↔ the engine port, every field checked before an engine sees it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from google.protobuf.message import Message

from evolving.core.blocks import DIGEST_BYTES, TOKEN_BYTES, HashedTokens, hash_tokens, split_names
from evolving.core.contexts import Contexts
from evolving.core.terms import NAME_BYTES
from evolving.internal.v1 import node_agent_pb2
from evolving.runtime.errors import InvalidRequest
from evolving.v1 import common_pb2, gateway_pb2
from evolving_node_agent.engines.port import (
    CachedTokens,
    DecodeJob,
    EngineInfo,
    FinishReason,
    Holder,
    PrefillJob,
    Sampling,
    Tier,
    TokenIds,
)

_LONGEST_ID = 256  # characters, of ids and of addresses
_MAX_HOLDERS = 4096
_MAX_STOP_TOKENS = 64
_DEFAULT_MAX_TOKENS = 512  # as Sampling.max_tokens says
MAX_DIGESTS = 4096

FINISH_REASONS: Mapping[FinishReason, gateway_pb2.FinishReason.ValueType] = {
    FinishReason.STOP: gateway_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: gateway_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: gateway_pb2.FINISH_REASON_UNSPECIFIED,
}
"""ABORTED has no public reason: unspecified, as for an output that goes on."""


def prefill_job(
    request: node_agent_pb2.PrefillRequest, info: EngineInfo, contexts: Contexts, fetch_deadline_s: float, keep_s: float
) -> PrefillJob:
    """The job of a prefill call. Raises InvalidRequest."""
    data = request.token_ids
    tokens = _tokens(data, request.generated_tokens, info)
    _check_ids(request)
    if len(request.holders) > _MAX_HOLDERS:
        raise InvalidRequest(f"{len(request.holders)} holders; at most {_MAX_HOLDERS} are taken")
    root = _root(request.root)
    return PrefillJob(
        leg_id=request.leg_id,
        transfer_id=request.transfer_id,
        tokens=tokens,
        generated=request.generated_tokens,
        root=root,
        sampling=sampling(request.sampling, request.generated_tokens),
        priority=request.priority,
        holders=tuple(_holder(each) for each in request.holders),
        fetch_deadline_s=fetch_deadline_s,
        keep_s=keep_s,
        blocks=_blocks(request, root, data, info, contexts),
    )


def decode_job(
    request: node_agent_pb2.DecodeRequest, info: EngineInfo, contexts: Contexts, default_deadline_s: float
) -> DecodeJob:
    """The job of a decode call. Raises InvalidRequest."""
    data = request.token_ids
    tokens = _tokens(data, request.generated_tokens, info)
    _check_ids(request)
    if not request.source_address:
        raise InvalidRequest("source_address is empty")
    _check_lengths(request, "source_node_id", "source_address")
    deadline_s = request.reserve_deadline_s
    if not 0 <= deadline_s <= 24 * 3600:
        raise InvalidRequest(f"reserve_deadline_s must be between 0 and a day, got {deadline_s}")
    root = _root(request.root)
    return DecodeJob(
        leg_id=request.leg_id,
        transfer_id=request.transfer_id,
        tokens=tokens,
        generated=request.generated_tokens,
        root=root,
        sampling=sampling(request.sampling, request.generated_tokens),
        source_node_id=request.source_node_id,
        source_address=request.source_address,
        reserve_deadline_s=deadline_s or default_deadline_s,
        blocks=_blocks(request, root, data, info, contexts),
    )


def sampling(message: gateway_pb2.Sampling, generated: int) -> Sampling:
    """How to draw, with the defaults the public message names. Raises InvalidRequest."""
    max_tokens = message.max_tokens or _DEFAULT_MAX_TOKENS
    if generated >= max_tokens:
        raise InvalidRequest(f"{generated} tokens were generated already and max_tokens is {max_tokens}")
    if len(message.stop_token_ids) > _MAX_STOP_TOKENS:
        raise InvalidRequest(f"at most {_MAX_STOP_TOKENS} stop tokens are taken, got {len(message.stop_token_ids)}")
    checked = Sampling(
        max_tokens=max_tokens,
        temperature=_within("temperature", message.temperature, 0.0, 1e6),
        top_p=_within("top_p", message.top_p or 1.0, 0.0, 1.0),
        top_k=message.top_k or -1,
        min_p=_within("min_p", message.min_p, 0.0, 1.0),
        frequency_penalty=_within("frequency_penalty", message.frequency_penalty, -2.0, 2.0),
        presence_penalty=_within("presence_penalty", message.presence_penalty, -2.0, 2.0),
        repetition_penalty=_within("repetition_penalty", message.repetition_penalty or 1.0, 0.0, 2.0),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        seed=message.seed if message.HasField("seed") else None,
    )
    if checked.repetition_penalty <= 0 or checked.top_p <= 0:
        raise InvalidRequest("repetition_penalty and top_p must be above 0")
    return checked


def names_and_tier(request: node_agent_pb2.ReadDigestsRequest) -> tuple[list[bytes], Tier]:
    """What digests are asked for. Raises InvalidRequest."""
    if request.tier not in (common_pb2.TIER_L1, common_pb2.TIER_L2):
        raise InvalidRequest("tier must be L1 or L2")
    data = request.names
    if len(data) % NAME_BYTES or len(data) > MAX_DIGESTS * NAME_BYTES:
        raise InvalidRequest(f"names: {len(data)} bytes; each takes {NAME_BYTES} and at most {MAX_DIGESTS} are taken")
    return split_names(data), Tier(request.tier)


def cached_to_proto(cached: CachedTokens) -> gateway_pb2.CachedTokens:
    """Reused tokens by source."""
    return gateway_pb2.CachedTokens(own_l1=cached.l1, own_l2=cached.l2, peer_l2=cached.peer)


def _tokens(data: bytes, generated: int, info: EngineInfo) -> TokenIds:
    if len(data) % TOKEN_BYTES:
        raise InvalidRequest(f"token_ids: {len(data)} bytes; each id takes {TOKEN_BYTES}")
    tokens = np.frombuffer(data, dtype="<u4").astype(np.uint32, copy=False)
    if generated >= len(tokens):
        raise InvalidRequest(f"{len(tokens)} token ids, {generated} of them generated: the prompt is empty")
    if len(tokens) - generated > info.max_prompt_tokens:
        raise InvalidRequest(f"the prompt has {len(tokens) - generated} tokens; at most {info.max_prompt_tokens} fit")
    if len(tokens) >= info.max_context_tokens:
        raise InvalidRequest(f"{len(tokens)} tokens leave no room in a context of {info.max_context_tokens}")
    largest = int(tokens.max())
    if largest >= info.vocab_size:
        at = int(np.argmax(tokens))
        raise InvalidRequest(f"id {largest} at position {at} is outside the vocabulary of {info.vocab_size}")
    return tokens


def _blocks(
    request: node_agent_pb2.PrefillRequest | node_agent_pb2.DecodeRequest,
    root: bytes,
    data: bytes,
    info: EngineInfo,
    contexts: Contexts,
) -> HashedTokens:
    """The full blocks of the request's tokens, hashed on from what is known of its branch."""
    if not request.branch_id:
        return hash_tokens(root, data, info.block_tokens)
    blocks = hash_tokens(root, data, info.block_tokens, contexts.get(request.tenant, request.branch_id))
    contexts.keep(request.tenant, request.branch_id, blocks)
    return blocks


def _root(data: bytes) -> bytes:
    if len(data) != DIGEST_BYTES:
        raise InvalidRequest(f"root: {len(data)} bytes instead of {DIGEST_BYTES}")
    return data


def _check_ids(request: node_agent_pb2.PrefillRequest | node_agent_pb2.DecodeRequest) -> None:
    for name in ("leg_id", "request_id"):
        if not getattr(request, name):
            raise InvalidRequest(f"{name} is empty")
    _check_lengths(request, "leg_id", "tenant", "branch_id", "request_id")


def _holder(message: node_agent_pb2.Holder) -> Holder:
    _check_lengths(message, "node_id", "pool_address", "incarnation")
    if not message.pool_address or not message.blocks:
        raise InvalidRequest(f"holder {message.node_id!r} needs a pool_address and blocks")
    return Holder(message.node_id, message.pool_address, message.incarnation, message.first_block, message.blocks)


def _check_lengths(message: Message, *names: str) -> None:
    for name in names:
        if len(getattr(message, name)) > _LONGEST_ID:
            raise InvalidRequest(f"{name} is longer than {_LONGEST_ID} characters")


def _within(name: str, value: float, low: float, high: float) -> float:
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low:g} and {high:g}, got {value:g}")
    return value
