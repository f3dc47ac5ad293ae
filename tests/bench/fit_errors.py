"""Errors of time models over measured samples."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls

from evolving.core.iterations import IterationSums, IterationWindow

KINDS = ("prefill_single", "prefill_batch", "decode_single", "decode_batch")


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


def verdicts(result: dict[str, Any]) -> str:
    """Which bars are met."""
    said = []
    for kind in KINDS:
        bar = max(0.10, 1.5 * result["repeat_noise"][kind])
        said.append(f"{kind} {'met' if result[kind] <= bar else 'MISSED'} (bar {bar:.3f})")
    worst = max(result["prefill_single"], result["prefill_batch"])
    said.append(f"total length errs {result['prefill_total_length_model'] / worst:.1f} times as much")
    return ", ".join(said)
