"""What nodes and gateways report, from the wire. Nothing of it is trusted: a value that no honest reporter sends is
refused with its whole report, so that none is taken by half."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from evolving.core.iterations import IterationSums, IterationWindow
from evolving.core.slices import DecodeDone, PrefillDone
from evolving.core.terms import Phase
from evolving.core.timemodel import PrefillSums
from evolving.internal.v1 import planner_pb2
from evolving.runtime.errors import InvalidRequest
from evolving_planner.measures import OpenLevel, WorkSample
from evolving_planner.models import EndedWindow

_LONGEST_ID = 256  # characters
_SAMPLES_MAX, _WINDOWS_MAX, _LEVELS_MAX = 10_000, 10_000, 10_000  # in one report
_AGE_MAX_S = 1e9  # thirty years; of a greater one floats don't tell seconds apart any more
_SUM_MAX = 1e18  # of tokens, pairs, iterations: sums of such and their squares are finite
_SHORTEST_S = 1e-9  # of iterations that took any time, so that ratios are finite too
_OVERLAP_MAX_S = 1e-3  # rounding of ages
_LEVEL_DIGITS = 9  # what a clock tells of a level; of less than that, ratios of splits are not finite


def work_samples(samples: Sequence[planner_pb2.WorkSample], now_s: float) -> list[WorkSample]:
    """Of a report that came at `now_s`, by the planner's monotonic clock. Raises InvalidRequest."""
    if len(samples) > _SAMPLES_MAX:
        raise InvalidRequest(f"more than {_SAMPLES_MAX} samples in one report")
    return [_work_sample(sample, now_s) for sample in samples]


def iteration_windows(windows: Sequence[planner_pb2.IterationWindow], now_s: float) -> list[EndedWindow]:
    """Of a report that came at `now_s`, by the planner's monotonic clock. Raises InvalidRequest."""
    if len(windows) > _WINDOWS_MAX:
        raise InvalidRequest(f"more than {_WINDOWS_MAX} windows in one report")
    return [EndedWindow(now_s - window.age_s, _iteration_window(window)) for window in windows]


def open_levels(levels: Sequence[planner_pb2.OpenLevel], now_s: float) -> list[OpenLevel]:
    """Of a report that came at `now_s`, by the planner's monotonic clock. Raises InvalidRequest."""
    if len(levels) > _LEVELS_MAX:
        raise InvalidRequest(f"more than {_LEVELS_MAX} levels in one report")
    for level in levels:
        _require_within("from_age_s", level.from_age_s, _AGE_MAX_S)
        _require_within("to_age_s", level.to_age_s, level.from_age_s)
        _require_within("requests", level.requests, _SUM_MAX)
    if any(later.from_age_s > earlier.to_age_s + _OVERLAP_MAX_S for earlier, later in itertools.pairwise(levels)):
        raise InvalidRequest("levels overlap, or are not the oldest first")
    return [
        OpenLevel(now_s - level.from_age_s, now_s - level.to_age_s, round(level.requests, _LEVEL_DIGITS))
        for level in levels
    ]


def require_id(name: str, value: str) -> None:
    """Raises InvalidRequest for an id that is none."""
    if not 0 < len(value) <= _LONGEST_ID:
        raise InvalidRequest(f"{name} must have 1 to {_LONGEST_ID} characters")


def _work_sample(sample: planner_pb2.WorkSample, now_s: float) -> WorkSample:
    require_id("request_id", sample.request_id)
    if len(sample.tenant) > _LONGEST_ID:
        raise InvalidRequest(f"tenant has more than {_LONGEST_ID} characters")
    request_id = f"{sample.tenant}\n{sample.request_id}"  # no two tenants know of each other's ids
    _require_within("query_key_pairs", sample.query_key_pairs, _SUM_MAX)
    _require_within("context_tokens", sample.context_tokens, _SUM_MAX)
    _require_within("age_s", sample.age_s, _AGE_MAX_S)
    if int(sample.phase) not in set(Phase):
        raise InvalidRequest(f"a work sample has no phase (number {sample.phase})")
    done: PrefillDone | DecodeDone
    if Phase(sample.phase) is Phase.PREFILL:
        if sample.query_key_pairs < sample.uncached_tokens:
            raise InvalidRequest("a token computed attends to itself at least: query_key_pairs < uncached_tokens")
        tokens = (sample.restored_tokens, sample.cached_tokens)
        done = PrefillDone(request_id, PrefillSums(sample.uncached_tokens, sample.query_key_pairs, *tokens))
    else:
        done = DecodeDone(request_id, sample.iterations, sample.context_tokens)
    return WorkSample(now_s - sample.age_s, done)


def _iteration_window(window: planner_pb2.IterationWindow) -> IterationWindow:
    _require_within("age_s", window.age_s, _AGE_MAX_S)
    _require_within("cold_iterations", window.cold_iterations, _SUM_MAX)
    return IterationWindow(
        prefill=_iteration_sums(window.prefill),
        decode=_iteration_sums(window.decode),
        mixed=_iteration_sums(window.mixed),
        cold_iterations=window.cold_iterations,
    )


def _iteration_sums(sums: planner_pb2.IterationSums) -> IterationSums:
    for name in ("iterations", "uncached_tokens", "query_key_pairs", "restored_tokens", "cached_tokens"):
        _require_within(name, getattr(sums, name), _SUM_MAX)
    for name in ("requests", "expert_share", "context_tokens"):
        _require_within(name, getattr(sums, name), _SUM_MAX)
    _require_within("busy_s", sums.busy_s, _AGE_MAX_S)
    if 0 < sums.busy_s < _SHORTEST_S:
        raise InvalidRequest(f"busy_s is {sums.busy_s}: no iteration is that short")
    return IterationSums(
        iterations=sums.iterations,
        busy_s=sums.busy_s,
        prefill=PrefillSums(sums.uncached_tokens, sums.query_key_pairs, sums.restored_tokens, sums.cached_tokens),
        requests=sums.requests,
        expert_share=sums.expert_share,
        context_tokens=sums.context_tokens,
    )


def _require_within(name: str, value: float, most: float) -> None:
    if not (math.isfinite(value) and 0 <= value <= most):
        raise InvalidRequest(f"{name} must be from 0 to {most:g}, got {value}")
