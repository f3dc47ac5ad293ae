"""Errors of time models over measured samples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls

from evolving.core.iterations import IterationSums, IterationWindow

KINDS = ("prefill_single", "prefill_batch", "decode_single", "decode_batch")
ERROR_MOST = 0.10  # mean relative error; the paper's is 0.042 for one request and 0.063 for batches
NOISE_TIMES = 1.5  # repeat noise, where that is more
TOTAL_LENGTH_TIMES = 3.0  # a model of total length errs at least so many times as much as ours


@dataclass(frozen=True, slots=True)
class Sample:
    """Iterations of one kind, measured in one run of a setting."""

    kind: str
    setting: str
    sums: IterationSums
    lengths: tuple[int, ...] = ()  # prompts' total lengths, where it is prefill

    @property
    def s(self) -> float:
        """Seconds measured."""
        return self.sums.busy_s


def mean_error(samples: Sequence[Sample], predicted_s: Sequence[float]) -> dict[str, float]:
    """Mean relative error by kind; 0 without samples."""
    errors: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for sample, value in zip(samples, predicted_s, strict=True):
        errors[sample.kind].append(abs(value / sample.s - 1))
    return {kind: statistics.fmean(each) if each else 0.0 for kind, each in errors.items()}


def repeat_noise(samples: Sequence[Sample]) -> dict[str, float]:
    """By kind: how far the time of an iteration lies from the mean of the setting's other repeats, relative to it."""
    by_setting: dict[tuple[str, str], list[float]] = {}
    for sample in samples:
        by_setting.setdefault((sample.kind, sample.setting), []).append(sample.s / sample.sums.iterations)
    noise: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for (kind, _), times in by_setting.items():
        for place, own in enumerate(times):
            others = times[:place] + times[place + 1 :]
            if others:
                noise[kind].append(abs(own / statistics.fmean(others) - 1))
    return {kind: statistics.fmean(each) if each else 0.0 for kind, each in noise.items()}


@dataclass(frozen=True, slots=True)
class TotalLength:
    """A model of prefill time by total prompt length, cached or not: t0·iterations + t1·ΣL + t2·ΣL²."""

    terms: tuple[float, float, float]

    @classmethod
    def of_windows(cls, windows: Iterable[IterationWindow]) -> TotalLength:
        """Fitted to what ours is fitted to; without the square, of which windows keep no sum."""
        used = [window.prefill for window in windows if window.prefill.iterations]
        rows = [
            (each.iterations, each.prefill.uncached_tokens + each.prefill.cached_tokens, 0.0, each.busy_s)
            for each in used
        ]
        return cls._fitted(rows)

    @classmethod
    def of_samples(cls, samples: Sequence[Sample]) -> TotalLength:
        """Fitted to the very samples it will be judged on: no model of this form errs much less on them."""
        return cls._fitted([(*_row(sample), sample.s) for sample in samples])

    @classmethod
    def _fitted(cls, rows: Sequence[tuple[float, float, float, float]]) -> TotalLength:
        table = np.array(rows)
        scale = np.array([1.0, 1e3, 1e6])
        terms, _ = nnls(table[:, :3] / scale / table[:, 3:], np.ones(len(table)))
        return cls(tuple((terms / scale).tolist()))

    def error(self, samples: Sequence[Sample]) -> float:
        """Mean relative error."""
        return statistics.fmean(abs(np.dot(self.terms, _row(sample)) / sample.s - 1) for sample in samples)


def _row(sample: Sample) -> tuple[float, float, float]:
    return sample.sums.iterations, sum(sample.lengths), sum(length**2 for length in sample.lengths)


@dataclass(frozen=True, slots=True)
class Bar:
    """One figure beside what it has to be."""

    name: str
    value: float
    most: float | None = None
    least: float | None = None

    @property
    def met(self) -> bool:
        """Whether the figure is within its bounds."""
        return (self.most is None or self.value <= self.most) and (self.least is None or self.value >= self.least)

    def __str__(self) -> str:
        bound = f"at most {self.most:.3f}" if self.most is not None else f"at least {self.least:.3f}"
        return f"{self.name} {self.value:.3f}, {bound}: {'met' if self.met else 'MISSED'}"


def bars(result: dict[str, Any]) -> list[Bar]:
    """Every bar of `result`: errors by kind, and how many times our worse prefill error total length errs at best."""
    found = [
        Bar(kind, result[kind], most=max(ERROR_MOST, NOISE_TIMES * result["repeat_noise"][kind])) for kind in KINDS
    ]
    worst = max(result["prefill_single"], result["prefill_batch"])
    total_length = min(result["prefill_total_length_model"], result["prefill_total_length_model_at_best"])
    times = total_length / worst if worst else math.inf
    return [*found, Bar("total length errs, times as much", times, least=TOTAL_LENGTH_TIMES)]
