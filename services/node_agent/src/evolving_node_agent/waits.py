"""W_n: how long a prefill leg queued now would wait (the first terms of the paper's equation 7). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients
from evolving.core.work import PrefillWork, node_wait_s
from evolving_node_agent.engines.port import CachedTokens, EngineStatus


@dataclass(frozen=True, slots=True)
class LegSize:
    """A prefill leg by its prompt."""

    prompt_tokens: int
    expected_cached_tokens: int  # what the gateway reckoned with; the engine knows better once it looked


def new_tokens_per_iteration(status: EngineStatus) -> float:
    """ū: mean new tokens a prefill iteration computed; 0: not observed."""
    return status.prefill_tokens / status.prefill_iterations if status.prefill_iterations else 0.0


class RestoredShare:
    """ρ: share of reused prompt tokens that came from host memory, by all prefilled legs; 0 until one reused any."""

    def __init__(self) -> None:
        self._cached_tokens = 0
        self._restored_tokens = 0

    def add(self, cached: CachedTokens) -> None:
        """A leg is prefilled."""
        self._cached_tokens += cached.total
        self._restored_tokens += cached.restored

    @property
    def value(self) -> float:
        """ρ now, in [0, 1]."""
        return self._restored_tokens / self._cached_tokens if self._cached_tokens else 0.0


def wait_s(
    status: EngineStatus,
    waiting: Mapping[str, LegSize],
    running: Mapping[str, LegSize],
    prefill: PrefillCoefficients,
    decode: DecodeCoefficients,
    chunk_tokens: int,
    restored_share: float = 0.0,
) -> float:
    """Seconds until a leg queued now would be taken.

    waiting: legs not taken yet; one the engine doesn't list is on its way to it and counts with what the gateway
    expected; of one it lists, what peers are still to bring counts as reused. running: legs taken and not prefilled;
    what they reuse is restored already. restored_share: ρ, for what the waiting ones will reuse.
    """
    started = [_work(running[leg], left) for leg, left in status.prefilling.items() if leg in running]
    to_compute = _to_compute(status, waiting)
    queued = [_work(size, to_compute[leg], restored_share) for leg, size in waiting.items()]
    tokens_per_iteration = new_tokens_per_iteration(status) or float(chunk_tokens)
    beside_s = decode.decode_iteration_s(status.decoding, status.decode_context_tokens) if status.decoding else 0.0
    return node_wait_s(started, queued, prefill, tokens_per_iteration, beside_s)


def _to_compute(status: EngineStatus, waiting: Mapping[str, LegSize]) -> dict[str, int]:
    """Prompt tokens each waiting leg will compute.

    The engine counts tokens that are still to come from peers as not cached. What a leg lacks against what the gateway
    expected is taken to be such tokens, as far as the engine's backlog of fetches goes: beyond it they will not come.
    """
    expected = {leg: size.prompt_tokens - size.expected_cached_tokens for leg, size in waiting.items()}
    lacking = {leg: max(0, tokens - expected[leg]) for leg, tokens in status.queued.items() if leg in expected}
    total = sum(lacking.values())
    coming_share = min(1.0, status.fetch_backlog_tokens / total) if total else 0.0
    counted = {leg: status.queued[leg] - round(coming_share * tokens) for leg, tokens in lacking.items()}
    return expected | counted


def _work(size: LegSize, uncached_tokens: int, restored_share: float = 0.0) -> PrefillWork:
    uncached = min(max(uncached_tokens, 0), size.prompt_tokens)
    cached = size.prompt_tokens - uncached
    return PrefillWork(uncached, cached, round(restored_share * cached))
