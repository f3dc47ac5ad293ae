"""Between the port's types and the channel's messages."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from evolving_node_agent.engines import port
from evolving_node_agent.engines.port import EngineError, EngineInfo, Rejected, Tier

from . import messages as m

NAME_BYTES = 16
_ERRORS: dict[str, type[EngineError]] = {
    kind.__name__: kind
    for kind in (
        port.EngineError,
        port.EngineDown,
        port.NoRoom,
        port.SourceLost,
        port.DecodeLost,
        port.Aborted,
        port.Rejected,
    )
}


def check_job(job: port.PrefillJob | port.DecodeJob, info: EngineInfo) -> None:
    """Raise Rejected for a job this engine could never do."""
    prompt = len(job.tokens) - job.generated
    if job.generated < 0 or prompt < 1:
        raise Rejected(f"{len(job.tokens)} tokens of which {job.generated} generated leave no prompt")
    if len(job.root) != 32:
        raise Rejected(f"the root has {len(job.root)} bytes, not 32")
    if len(job.tokens) > info.max_prompt_tokens:
        raise Rejected(f"{len(job.tokens)} tokens; this engine takes {info.max_prompt_tokens}")
    if len(job.tokens) + 1 >= info.max_context_tokens:
        raise Rejected(f"{len(job.tokens)} tokens leave no room in a context of {info.max_context_tokens}")
    if int(job.tokens.max()) >= info.vocab_size:
        raise Rejected(f"token {int(job.tokens.max())} is not in a vocabulary of {info.vocab_size}")
    check_sampling(job.sampling, job.generated)


def check_sampling(sampling: port.Sampling, generated: int) -> None:
    """Raise Rejected for sampling values no sampler has a meaning for."""
    if sampling.max_tokens <= generated:
        raise Rejected(f"max_tokens {sampling.max_tokens} is used up by {generated} generated tokens")
    limits = (
        ("temperature", sampling.temperature, 0.0, 100.0),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0),
        ("presence_penalty", sampling.presence_penalty, -2.0, 2.0),
        ("repetition_penalty", sampling.repetition_penalty, 1e-3, 2.0),
        ("top_p", sampling.top_p, 1e-6, 1.0),
    )
    for name, value, low, high in limits:
        if not low <= value <= high:
            raise Rejected(f"{name} must be in [{low}, {high}], got {value}")
    if sampling.top_k != -1 and sampling.top_k < 1:
        raise Rejected(f"top_k must be -1 or positive, got {sampling.top_k}")


def token_bytes(tokens: port.TokenIds) -> bytes:
    """Little-endian u32."""
    return tokens.astype("<u4", copy=False).tobytes()


def tokens_of(data: bytes) -> port.TokenIds:
    """The inverse of `token_bytes`."""
    return np.frombuffer(data, dtype="<u4").astype(np.uint32, copy=False)


def id_array(tokens: port.TokenIds) -> array[int]:
    """As SGLang keeps token ids; not by way of Python's ints, which takes 10 ms for a long prompt."""
    ids = array("q")
    ids.frombytes(tokens.astype(np.int64).tobytes())
    return ids


def prefill_command(job: port.PrefillJob) -> m.Prefill:
    """The job as a command."""
    return m.Prefill(
        leg_id=job.leg_id,
        transfer_id=job.transfer_id,
        tokens=token_bytes(job.tokens),
        generated=job.generated,
        root=job.root,
        sampling=job.sampling,
        priority=job.priority,
        holders=job.holders,
        fetch_deadline_s=job.fetch_deadline_s,
        keep_s=job.keep_s,
    )


def decode_command(job: port.DecodeJob) -> m.Decode:
    """The job as a command."""
    return m.Decode(
        leg_id=job.leg_id,
        transfer_id=job.transfer_id,
        tokens=token_bytes(job.tokens),
        generated=job.generated,
        root=job.root,
        sampling=job.sampling,
        source_node_id=job.source_node_id,
        source_address=job.source_address,
        reserve_deadline_s=job.reserve_deadline_s,
    )


def event_of(report: m.LegMessage) -> port.PrefillEvent | port.DecodeEvent:
    """The port's event in a leg's report; not for failures."""
    match report:
        case m.LegTaken(_, queue_s, fetch_s, hidden_s):
            return port.Taken(queue_s=queue_s, fetch_s=fetch_s, hidden_s=hidden_s)
        case m.LegPrefilled(_, first_token, cached, prefill_s, finish):
            return port.Prefilled(first_token=first_token, cached=cached, prefill_s=prefill_s, finish=finish)
        case m.LegSent(_, transfer_s, size):
            return port.Sent(transfer_s=transfer_s, bytes=size)
        case m.LegReserved():
            return port.Reserved()
        case m.LegStarted(_, transfer_s, cached_tokens, first_token):
            return port.Started(transfer_s=transfer_s, cached_tokens=cached_tokens, first_token=first_token)
        case m.LegTokens(_, index, ids):
            return port.Tokens(index=index, ids=tokens_of(ids))
        case m.LegFinished(_, reason, iterations):
            return port.Finished(reason=reason, iterations=iterations)
        case m.LegFailed():
            raise AssertionError("a failure is an exception, not an event")


def error_of(kind: str, message: str) -> EngineError:
    """The port's exception of this class name."""
    return _ERRORS[kind](message)


def split_names(joined: bytes) -> tuple[bytes, ...]:
    """Concatenated 16-byte names, one by one."""
    return tuple(joined[start : start + NAME_BYTES] for start in range(0, len(joined), NAME_BYTES))


def kv_events_of(changes: Iterable[m.BlocksStored | m.BlocksRemoved | m.TierCleared]) -> Sequence[port.KvEvent]:
    """The port's events of a batch."""
    return [_kv_event(change) for change in changes]


def _kv_event(change: m.BlocksStored | m.BlocksRemoved | m.TierCleared) -> port.KvEvent:
    match change:
        case m.BlocksStored(tier, parent, names):
            return port.Stored(tier=Tier(tier), parent=parent, names=split_names(names))
        case m.BlocksRemoved(tier, names):
            return port.Removed(tier=Tier(tier), names=split_names(names))
        case m.TierCleared(tier):
            return port.Cleared(tier=Tier(tier))
