"""How long one iteration of a node takes: equations 1 and 2 of the paper.

Coefficients come from configuration or from a fit; this module only evaluates them. Everything here is pure.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, fields

_SLOWEST_S = 1e6  # a coefficient beyond is none of any node, and sums of such would not be finite


@dataclass(frozen=True, slots=True)
class PrefillSums:
    """What one prefill iteration, or one window of them, worked on, summed over its requests.

    Of a request computed in chunks, each iteration has the tokens and pairs of its own chunk; what the request reuses
    is in the iteration of its first chunk alone, so that sums over its iterations are the work of the request.
    """

    uncached_tokens: float = 0.0  # Σt_uc: tokens computed
    query_key_pairs: float = 0.0  # ΣA; summed per request, never recomputed from means
    restored_tokens: float = 0.0  # Σt_rst: cached tokens brought from host to device memory
    cached_tokens: float = 0.0  # Σt_c: tokens of prefix that nobody computes


@dataclass(frozen=True, slots=True)
class PrefillCoefficients:
    """Equation 1: `T_P = c0 + c1·Σt_uc + c2·ΣA + c3·Σt_rst + c4·Σt_c`. Non-negative and finite, else ValueError."""

    c0_s: float  # seconds an iteration costs whatever is in it
    c1_s: float  # seconds per uncached token
    c2_s: float  # seconds per query-key pair
    c3_s: float = 0.0  # seconds per token restored from host memory
    c4_s: float = 0.0  # seconds per cached token; 0 where the fit found it not worth having

    def __post_init__(self) -> None:
        _require_non_negative(self)

    def prefill_iteration_s(self, sums: PrefillSums) -> float:
        """Seconds of one prefill iteration over `sums` (equation 1)."""
        return self.c0_s + self.marginal_s(sums)

    def marginal_s(self, sums: PrefillSums) -> float:
        """Equation 1 without the fixed part: what `sums` add to an iteration that runs anyway."""
        return self.terms_s(sums.uncached_tokens, sums.query_key_pairs, sums.restored_tokens, sums.cached_tokens)

    def terms_s(self, uncached_tokens: float, pairs: float, restored_tokens: float, cached_tokens: float) -> float:
        """The same, of its four sums."""
        return self.c1_s * uncached_tokens + self.c2_s * pairs + self.c3_s * restored_tokens + self.c4_s * cached_tokens


@dataclass(frozen=True, slots=True)
class DecodeCoefficients:
    """Equation 2: `T_D(B) = d0 + d1·φ(B) + d2·B + d3·Σcontext`.

    Non-negative and finite, `experts_per_token` at most `experts`, else ValueError. The paper leaves out the context
    term, which models with latent or sparse attention hardly need; a full-attention model does.
    """

    d0_s: float  # seconds an iteration costs whatever is in it
    d1_s: float  # seconds to read all experts; weighted by the share φ that a batch touches
    d2_s: float  # seconds per request of the batch
    d3_s: float = 0.0  # seconds per token of context, summed over the batch
    experts_per_token: int = 0  # k
    experts: int = 0  # E; 0: a dense model, which has no φ

    def __post_init__(self) -> None:
        _require_non_negative(self)
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token {self.experts_per_token} exceeds experts {self.experts}")

    def expert_share(self, batch: float, tokens_per_request: float = 1.0) -> float:
        """φ(B) = 1 − (1 − k/E)^(t_fwd·B): share of experts that a batch of B requests reads; 0 for a dense model.

        `tokens_per_request` is t_fwd, the tokens each request feeds per iteration (above 1 with speculation).
        """
        if self.experts == 0:
            return 0.0
        return 1.0 - float((1.0 - self.experts_per_token / self.experts) ** (tokens_per_request * batch))

    def decode_iteration_s(self, batch: float, context_tokens: float = 0.0, tokens_per_request: float = 1.0) -> float:
        """Seconds of one decode iteration of B = `batch` requests whose contexts sum to `context_tokens` (equation 2).

        B may be fractional: planning spreads a mean number of requests over nodes.
        """
        return (
            self.d0_s
            + self.d1_s * self.expert_share(batch, tokens_per_request)
            + self.d2_s * batch
            + self.d3_s * context_tokens
        )


def mixed_iteration_s(
    prefill: PrefillCoefficients,
    sums: PrefillSums,
    decode: DecodeCoefficients,
    batch: float,
    context_tokens: float,
    tokens_per_request: float = 1.0,
) -> float:
    """Seconds of an iteration that does both: `T_P + T_D − d0`, since the decode part's fixed cost is paid once."""
    decode_s = decode.decode_iteration_s(batch, context_tokens, tokens_per_request)
    return prefill.prefill_iteration_s(sums) + decode_s - decode.d0_s


def prefill_takes_time(coefficients: PrefillCoefficients) -> bool:
    """Whether a prediction can use them."""
    return _bounded(coefficients) and coefficients.prefill_iteration_s(PrefillSums(1.0, 1.0)) > 0


def decode_takes_time(coefficients: DecodeCoefficients) -> bool:
    """Whether a prediction can use them."""
    return _bounded(coefficients) and coefficients.decode_iteration_s(1.0) > 0


def _bounded(coefficients: PrefillCoefficients | DecodeCoefficients) -> bool:
    return all(value <= _SLOWEST_S for value in astuple(coefficients))


def _require_non_negative(coefficients: PrefillCoefficients | DecodeCoefficients) -> None:
    for entry in fields(coefficients):
        value = getattr(coefficients, entry.name)
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{type(coefficients).__name__}.{entry.name} must be finite and >= 0, got {value}")
