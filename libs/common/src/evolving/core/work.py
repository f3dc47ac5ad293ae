"""The work of requests (paper, section 4.2) and the time a node needs for it.

`S`, the service time of one request, is linear in its work, so a queue's time is a sum plus one fixed part. All
functions are pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from evolving.core.timemodel import PrefillCoefficients, PrefillSums


def query_key_pairs(uncached_tokens: int, cached_tokens: int) -> float:
    """A = t_uc·t_c + t_uc·(t_uc + 1)/2: pairs of query and key that causal attention visits for one request."""
    return uncached_tokens * cached_tokens + uncached_tokens * (uncached_tokens + 1) / 2


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """Prefill work of one request, or of what is left of it."""

    uncached_tokens: int  # t_uc
    cached_tokens: int = 0  # t_c: prefix whose KV is reused
    restored_tokens: int = 0  # t_rst: of the cached ones, those read from host memory

    def __post_init__(self) -> None:
        if min(self.uncached_tokens, self.cached_tokens, self.restored_tokens) < 0:
            raise ValueError(f"work must not be negative: {self}")

    @property
    def query_key_pairs(self) -> float:
        """A of this request."""
        return query_key_pairs(self.uncached_tokens, self.cached_tokens)


def sum_work(works: Iterable[PrefillWork]) -> PrefillSums:
    """Σt_uc, ΣA, Σt_rst and Σt_c over requests; A is summed per request."""
    uncached, pairs, restored, cached = 0, 0.0, 0, 0
    for work in works:
        uncached += work.uncached_tokens
        pairs += work.query_key_pairs
        restored += work.restored_tokens
        cached += work.cached_tokens
    return PrefillSums(uncached, pairs, restored, cached)


def service_s(work: PrefillWork, coefficients: PrefillCoefficients, new_tokens_per_iteration: float) -> float:
    """S = c0·t_uc/ū + c1·t_uc + c2·A + c3·t_rst + c4·t_c, seconds.

    `new_tokens_per_iteration` is ū, the mean of new tokens a prefill iteration of this node computes; where nothing
    was observed yet, the chunk size. Raises ValueError unless it is positive.
    """
    tokens = (work.uncached_tokens, work.cached_tokens, work.restored_tokens)
    return tokens_service_s(*tokens, coefficients, new_tokens_per_iteration)


def tokens_service_s(
    uncached_tokens: int,
    cached_tokens: int,
    restored_tokens: int,
    coefficients: PrefillCoefficients,
    new_tokens_per_iteration: float,
) -> float:
    """`service_s` of work that is not made into one object: of many that are only compared."""
    if new_tokens_per_iteration <= 0:
        raise ValueError(f"new tokens per iteration must be positive, got {new_tokens_per_iteration}")
    fixed_s = coefficients.c0_s * uncached_tokens / new_tokens_per_iteration
    pairs = query_key_pairs(uncached_tokens, cached_tokens)
    return fixed_s + coefficients.terms_s(uncached_tokens, pairs, restored_tokens, cached_tokens)


def queue_service_s(
    works: Iterable[PrefillWork], coefficients: PrefillCoefficients, new_tokens_per_iteration: float
) -> float:
    """Service of a queue, seconds: the fixed part is c0·max(1, Σt_uc/ū), since short requests share iterations.

    0 for an empty queue. Raises ValueError unless `new_tokens_per_iteration` is positive.
    """
    if new_tokens_per_iteration <= 0:
        raise ValueError(f"new tokens per iteration must be positive, got {new_tokens_per_iteration}")
    works = tuple(works)
    return _together_s(sum_work(works), coefficients, new_tokens_per_iteration) if works else 0.0


def node_wait_s(
    running: Iterable[PrefillWork],
    queued: Iterable[PrefillWork],
    coefficients: PrefillCoefficients,
    new_tokens_per_iteration: float,
    decode_iteration_s: float = 0.0,
) -> float:
    """W_n: seconds until a request queued now would be taken (the first two terms of equation 7).

    The remaining time of the running batch plus the service of the queue. `running` holds, per prefilling request,
    what is left of it: tokens still to compute, and those already computed or reused as cached, which the rest attends
    to and which cost nothing more by themselves. `decode_iteration_s`: T_D of the batch the node decodes, 0 without
    one; an iteration of it goes with each prefill iteration.
    """
    running, queued = tuple(running), tuple(queued)
    rest = sum_work(running) if running else None
    waiting = sum_work(queued) if queued else None
    return summed_wait_s(rest, waiting, coefficients, new_tokens_per_iteration, decode_iteration_s)


def summed_wait_s(
    running: PrefillSums | None,
    queued: PrefillSums | None,
    coefficients: PrefillCoefficients,
    new_tokens_per_iteration: float,
    decode_iteration_s: float = 0.0,
) -> float:
    """`node_wait_s` of work that is summed up already; None: there is none. Raises ValueError unless
    `new_tokens_per_iteration` is positive."""
    if new_tokens_per_iteration <= 0:
        raise ValueError(f"new tokens per iteration must be positive, got {new_tokens_per_iteration}")
    if running is None and queued is None:
        return 0.0
    wait_s = tokens = 0.0
    if queued is not None:
        wait_s += _together_s(queued, coefficients, new_tokens_per_iteration)
        tokens += queued.uncached_tokens
    if running is not None:
        rest = PrefillSums(running.uncached_tokens, running.query_key_pairs)
        wait_s += _together_s(rest, coefficients, new_tokens_per_iteration)
        tokens += running.uncached_tokens
    return wait_s + max(1.0, tokens / new_tokens_per_iteration) * decode_iteration_s


def _together_s(sums: PrefillSums, coefficients: PrefillCoefficients, new_tokens_per_iteration: float) -> float:
    """Seconds of requests that share iterations."""
    iterations = max(1.0, sums.uncached_tokens / new_tokens_per_iteration)
    return coefficients.c0_s * iterations + coefficients.marginal_s(sums)
