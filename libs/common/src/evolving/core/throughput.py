"""Requests per second that a split can serve: equations 3 to 5 of the paper (section 4.3).

`Θ = min(Σμ_P, Σμ_D)`, since every request passes through both phases. `μ_P` is one over the time a node computes the
mean prompt, `μ_D` the requests a node decodes at once over the time one of them needs there. Nodes of equal models are
counted together, and many splits are computed at a time. Everything here is pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from evolving.core.terms import Role
from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients, PrefillSums

FloatArray = npt.NDArray[np.float64]
CountArray = npt.NDArray[np.int64]

MEMORY_WITHOUT_LIMIT = 2**53
"""Tokens; a number that JSON and floats hold exactly."""

_LEVEL_STEPS = 32  # halvings of the iteration time all decode nodes share; what is left is interpolated
_INVERSE_STEPS_MAX = 64
_INVERSE_PRECISION = 1e-10
_DECAY_MAX = 50.0  # (1 − k/E)^B with k = E: e^−50 is 0 for all that matters, and finite arithmetic stays finite


@dataclass(frozen=True, slots=True)
class MeanWork:
    """w̄: what one request asks of the cluster, means over requests. Finite and not negative, else ValueError."""

    uncached_tokens: float  # t_uc
    query_key_pairs: float  # A, the mean of per-request values, never recomputed from means
    cached_tokens: float  # t_c
    restored_tokens: float  # t_rst
    decode_iterations: float  # n_it = (t_out − 1)/t_acc: prefill gives the first token
    context_tokens: float = 0.0  # context of one decoding request, mean over decode iterations

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"MeanWork.{entry.name} must be finite and >= 0, got {value}")

    @property
    def asks_both_phases(self) -> bool:
        """There is something to prefill and something to decode; without, no split is better than another."""
        return self.uncached_tokens > 0 and self.query_key_pairs > 0 and self.decode_iterations > 0


@dataclass(frozen=True, slots=True)
class NodeModel:
    """One node as the planner knows it. ValueError for sizes below 1 and for a phase that would take no time."""

    prefill: PrefillCoefficients
    decode: DecodeCoefficients
    new_tokens_per_iteration: float  # ū; the chunk size where nothing was observed
    decode_slots: int  # most requests decoded at once
    tokens_per_request: float = 1.0  # t_fwd, tokens a request feeds per decode iteration
    decode_tokens: int = MEMORY_WITHOUT_LIMIT  # KV that its device memory holds of requests that decode

    def __post_init__(self) -> None:
        if not self.decode_tokens >= 1:
            raise ValueError(f"NodeModel.decode_tokens must be at least 1, got {self.decode_tokens}")
        for name in ("new_tokens_per_iteration", "decode_slots", "tokens_per_request"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 1:
                raise ValueError(f"NodeModel.{name} must be finite and at least 1, got {value}")
        if self.prefill.prefill_iteration_s(PrefillSums(1.0, 1.0)) <= 0:
            raise ValueError("a prefill iteration would take no time")
        if self.decode.decode_iteration_s(1.0, 0.0, self.tokens_per_request) <= 0:
            raise ValueError("a decode iteration would take no time")

    def prefill_s(self, work: MeanWork) -> float:
        """T_req,P = c0·t_uc/ū + c1·t_uc + c2·A + c3·t_rst + c4·t_c, seconds (equation 3)."""
        sums = PrefillSums(work.uncached_tokens, work.query_key_pairs, work.restored_tokens, work.cached_tokens)
        iterations = work.uncached_tokens / self.new_tokens_per_iteration
        return self.prefill.c0_s * iterations + self.prefill.marginal_s(sums)


@dataclass(frozen=True, slots=True)
class Throughput:
    """What a split can serve, requests per second."""

    prefill: float  # Σμ_P
    decode: float  # Σμ_D

    @property
    def total(self) -> float:
        """Θ, the slower phase (equation 5)."""
        return min(self.prefill, self.decode)


def throughput(
    models: Mapping[str, NodeModel], roles: Mapping[str, Role], work: MeanWork, open_requests: float
) -> Throughput:
    """Θ of one split. `open_requests` is q̄: the time-mean of requests accepted and unfinished, wherever they are.

    Counted are the nodes whose role is PREFILL or DECODE; `models` must have each of them, else KeyError. A MIXED node
    counts in neither phase: what it gives to one it takes from the other, by no plan. Raises ValueError unless `work`
    asks both phases.
    """
    kinds = Kinds(models[node] for node, role in roles.items() if role in (Role.PREFILL, Role.DECODE))
    prefill = kinds.count(models[node] for node, role in roles.items() if role is Role.PREFILL)
    decode = kinds.count(models[node] for node, role in roles.items() if role is Role.DECODE)
    return Throughput(
        prefill=float(kinds.prefill_rates(prefill[np.newaxis], work)[0]),
        decode=float(kinds.decode_rates(decode[np.newaxis], work, open_requests)[0]),
    )


class Kinds:
    """The distinct models of a set of nodes. A split is a row of counts, one per kind; rows are computed together."""

    def __init__(self, models: Iterable[NodeModel]) -> None:
        self.models = tuple(dict.fromkeys(models))
        self._index = {model: kind for kind, model in enumerate(self.models)}

    def count(self, models: Iterable[NodeModel]) -> CountArray:
        """How many of `models` are of each kind. Shape: (kinds,). KeyError for a model of no kind here."""
        counts = np.zeros(len(self.models), dtype=np.int64)
        for model in models:
            counts[self._index[model]] += 1
        return counts

    def of(self, model: NodeModel) -> int:
        """The number of a model's kind. Raises KeyError."""
        return self._index[model]

    def prefill_rates(self, counts: CountArray, work: MeanWork) -> FloatArray:
        """Σμ_P of each row, requests/s. Shapes: (rows, kinds) → (rows,). ValueError unless `work` asks both phases."""
        _require_both_phases(work)
        rates = np.array([1.0 / model.prefill_s(work) for model in self.models])
        return np.asarray(counts @ rates, dtype=np.float64)

    def decode_rates(self, counts: CountArray, work: MeanWork, open_requests: float) -> FloatArray:
        """Σμ_D of each row, requests/s: μ_D = B/(n_it·T_D(B)), with T_D(1) below one request (equation 4).

        Shapes: (rows, kinds) → (rows,). Raises ValueError unless `work` asks both phases.
        """
        _require_both_phases(work)
        curve = IterationTimes(self.models, work.context_tokens)
        batches = curve.spread(counts, open_requests)
        rates = batches / curve.seconds(np.maximum(batches, 1.0))
        return np.asarray((counts * rates).sum(axis=1) / work.decode_iterations, dtype=np.float64)

    def node_decode_rates(self, work: MeanWork, open_requests: float) -> FloatArray:
        """μ_D of one node of each kind that has `open_requests` to itself. Shape: (kinds,)."""
        _require_both_phases(work)
        curve = IterationTimes(self.models, work.context_tokens)
        batches = np.minimum(open_requests, curve.slots)
        return np.asarray(batches / curve.seconds(np.maximum(batches, 1.0)) / work.decode_iterations, dtype=np.float64)


class IterationTimes:
    """T_D of each kind as a function of B (equation 2), and its inverse. Constant below B = 1."""

    def __init__(self, models: tuple[NodeModel, ...], context_tokens: float) -> None:
        decode = [model.decode for model in models]
        shares = [1.0 - d.experts_per_token / d.experts if d.experts else 1.0 for d in decode]
        self._fixed_s = np.array([d.d0_s for d in decode])
        self._experts_s = np.array([d.d1_s if d.experts else 0.0 for d in decode])
        self._request_s = np.array([d.d2_s + d.d3_s * context_tokens for d in decode])
        self._decay = np.array(
            [
                min(_DECAY_MAX, -math.log(share) * model.tokens_per_request) if share > 0 else _DECAY_MAX
                for share, model in zip(shares, models, strict=True)
            ]
        )
        self.slots = np.array([_requests_at_once(model, context_tokens) for model in models])
        self._least_s = self.seconds(np.ones(len(models)))
        self._most_s = self.seconds(self.slots)

    def seconds(self, batch: FloatArray) -> FloatArray:
        """T_D of `batch` requests, B >= 1. Shape: (..., kinds)."""
        share = -np.expm1(-self._decay * batch)
        return np.asarray(self._fixed_s + self._experts_s * share + self._request_s * batch, dtype=np.float64)

    def spread(self, counts: CountArray, open_requests: float) -> FloatArray:
        """B_n with equal T_D(B_n) and Σ B_n = min(open_requests, Σ slots), as routing to the soonest node would. Slots
        are as many as have room in device memory, on average.

        A full node stays at its slots, one slower with a single request than the others with theirs gets none.
        Shape: (rows, kinds).
        """
        slots = np.broadcast_to(self.slots, counts.shape)
        wanted = np.minimum(max(open_requests, 0.0), (counts * slots).sum(axis=1))
        if len(self.slots) == 1:  # alike nodes share alike
            nodes = np.maximum(counts[:, 0], 1)
            return np.asarray((wanted / nodes)[:, np.newaxis], dtype=np.float64)
        low_s = np.full(len(counts), self._least_s.min(initial=0.0))
        high_s = np.full(len(counts), self._most_s.max(initial=0.0))
        low, high = np.zeros(counts.shape), slots.copy()
        for _ in range(_LEVEL_STEPS):
            level_s = (low_s + high_s) / 2
            batch = self._at(level_s[:, np.newaxis], low)
            above = (counts * batch).sum(axis=1) > wanted
            high_s, low_s = np.where(above, level_s, high_s), np.where(above, low_s, level_s)
            high = np.where(above[:, np.newaxis], batch, high)
            low = np.where(above[:, np.newaxis], low, batch)
        least, most = (counts * low).sum(axis=1), (counts * high).sum(axis=1)
        # Where T_D is flat, its whole step in B lies between `low` and `high`: those nodes share what is left alike.
        with np.errstate(divide="ignore", invalid="ignore"):
            part = np.where(most > least, (wanted - least) / (most - least), 0.0)
        return np.asarray(low + (high - low) * part[:, np.newaxis], dtype=np.float64)

    def _at(self, level_s: FloatArray, start: FloatArray) -> FloatArray:
        """B at which T_D is `level_s`: 0 below T_D(1), at most the slots. `start` is a B not above it, per element.

        T_D is concave, so Newton's steps from the left never overshoot. The line T_D approaches from below is a second
        start from the left.
        """
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            asymptote = np.where(
                self._request_s > 0, (level_s - self._fixed_s - self._experts_s) / self._request_s, 1.0
            )
        batch = np.clip(np.maximum(start, asymptote), 1.0, self.slots)
        inside = (level_s > self._least_s) & (level_s < self._most_s)
        for _ in range(_INVERSE_STEPS_MAX):
            slope = self._experts_s * self._decay * np.exp(-self._decay * batch) + self._request_s
            missing_s = level_s - self.seconds(batch)
            with np.errstate(over="ignore"):
                step = np.divide(missing_s, slope, out=np.zeros_like(batch), where=inside & (slope > 0))
            batch = np.clip(batch + step, 1.0, self.slots)
            if not np.any(np.abs(step) > _INVERSE_PRECISION * batch):
                break
        within = np.where(level_s >= self._most_s, self.slots, batch)
        return np.asarray(np.where(level_s < self._least_s, 0.0, within), dtype=np.float64)


def _requests_at_once(model: NodeModel, context_tokens: float) -> float:
    """As many as it has slots and memory for, on average; one always."""
    fitting = model.decode_tokens / context_tokens if context_tokens else math.inf
    return max(1.0, min(float(model.decode_slots), fitting))


def _require_both_phases(work: MeanWork) -> None:
    if not work.asks_both_phases:
        raise ValueError(f"work must ask something of both phases: {work}")
