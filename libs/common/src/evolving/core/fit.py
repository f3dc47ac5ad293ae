"""Fitting the time model of a node to what its iterations took (paper, section 4.2).

Each window in which iterations of a kind ran is a row. Rows are divided by the time they took, so that least squares
weighs relative errors; coefficients are not negative. Everything here is pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from evolving.core.iterations import IterationSums, IterationWindow
from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients

Coefficients = TypeVar("Coefficients", PrefillCoefficients, DecodeCoefficients)
_Matrix = npt.NDArray[np.float64]
_COLLINEAR = 1e-6  # of a column's length is all that the other columns leave of it: rounding, or next to nothing


@dataclass(frozen=True, slots=True)
class FitConfig:
    """How a fit decides. Out-of-range values raise ValueError."""

    rows_least: int = 20  # fewer rows of a kind, and it is not fitted
    folds: int = 10  # parts of the rows that are left out in turn; row i is in part i mod folds
    # An optional term stays when without it the left-out error is more than this share larger.
    term_gain_least: float = 0.05
    # A coefficient is unidentified when the standard error of its part of an iteration is a larger share than this.
    uncertainty_max: float = 0.1
    drift_rows_least: int = 20  # fewer recent rows say nothing about drift
    drift_error_max: float = 0.15  # mean relative error; the paper's is below 0.07
    drift_error_ratio: float = 2.0  # and this many times the left-out error of the fit, where that is more

    def __post_init__(self) -> None:
        if self.rows_least < 2 or self.drift_rows_least < 1 or self.folds < 2:
            raise ValueError(f"need rows_least >= 2, drift_rows_least >= 1 and folds >= 2: {self}")
        for name in ("term_gain_least", "uncertainty_max", "drift_error_max", "drift_error_ratio"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and >= 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Fitted(Generic[Coefficients]):
    """Coefficients, and how much they can be trusted. Errors are means of |predicted − measured| / measured."""

    coefficients: Coefficients
    rows: int
    error_in_sample: float  # over the rows fitted
    error_left_out: float  # over rows while they were left out of the fit
    # By name, "c0". Unidentified: never seen at work, or the data cannot tell its part from the others'.
    unidentified: tuple[str, ...]
    dropped: tuple[str, ...]  # optional terms that did not pay, and so are 0


@dataclass(frozen=True, slots=True)
class WindowError:
    """How well fixed coefficients tell the time of windows."""

    rows: int
    mean_relative: float  # of |predicted − measured| / measured; 0 without rows


def fit_prefill(
    windows: Iterable[IterationWindow], config: FitConfig | None = None
) -> Fitted[PrefillCoefficients] | None:
    """Equation 1 from the iterations that only computed prompts; c3 and c4 are optional. None: too few rows."""
    table = _table([window.prefill for window in windows], _prefill_row)
    return _fit(table, ("c0", "c1", "c2", "c3", "c4"), ("c3", "c4"), _prefill_coefficients, config or FitConfig())


def fit_decode(
    windows: Iterable[IterationWindow], experts: int = 0, experts_per_token: int = 0, config: FitConfig | None = None
) -> Fitted[DecodeCoefficients] | None:
    """Equation 2 from the iterations that only decoded; d1 and d3 are optional. None: too few rows.

    `experts` 0: a dense model, which has no d1.
    """
    table = _table([window.decode for window in windows], _decode_row)
    names: tuple[str, ...] = ("d0", "d1", "d2", "d3")
    if experts == 0:
        table, names = _Table(np.delete(table.columns, 1, axis=1), table.busy_s), ("d0", "d2", "d3")
    optional = tuple(name for name in ("d1", "d3") if name in names)

    def coefficients(values: dict[str, float]) -> DecodeCoefficients:
        d0, d1, d2, d3 = (values.get(name, 0.0) for name in ("d0", "d1", "d2", "d3"))
        return DecodeCoefficients(d0, d1, d2, d3, experts_per_token, experts)

    return _fit(table, names, optional, coefficients, config or FitConfig())


def prefill_error(coefficients: PrefillCoefficients, windows: Iterable[IterationWindow]) -> WindowError:
    """Of equation 1, over iterations that only computed prompts."""
    table = _table([window.prefill for window in windows], _prefill_row)
    terms = (coefficients.c0_s, coefficients.c1_s, coefficients.c2_s, coefficients.c3_s, coefficients.c4_s)
    return _window_error(table, terms)


def decode_error(coefficients: DecodeCoefficients, windows: Iterable[IterationWindow]) -> WindowError:
    """Of equation 2, over iterations that only decoded."""
    table = _table([window.decode for window in windows], _decode_row)
    return _window_error(table, (coefficients.d0_s, coefficients.d1_s, coefficients.d2_s, coefficients.d3_s))


def has_drifted(recent: WindowError, error_left_out: float, config: FitConfig) -> bool:
    """Whether a node fitted with `error_left_out` is to be fitted anew, for what it does now is not what it did."""
    bound = max(config.drift_error_max, config.drift_error_ratio * error_left_out)
    return recent.rows >= config.drift_rows_least and recent.mean_relative > bound


# -- rows


@dataclass(frozen=True, slots=True)
class _Table:
    """Rows of sums and what they took. Shapes: (rows, terms), (rows,)."""

    columns: _Matrix
    busy_s: _Matrix

    @property
    def relative(self) -> _Matrix:
        """Rows divided by their time: with exact coefficients each adds up to 1."""
        return self.columns / self.busy_s[:, None]


def _prefill_row(sums: IterationSums) -> tuple[float, ...]:
    work = sums.prefill
    return sums.iterations, work.uncached_tokens, work.query_key_pairs, work.restored_tokens, work.cached_tokens


def _decode_row(sums: IterationSums) -> tuple[float, ...]:
    return sums.iterations, sums.expert_share, sums.requests, sums.context_tokens


def _table(sums: Sequence[IterationSums], row: Callable[[IterationSums], tuple[float, ...]]) -> _Table:
    used = [each for each in sums if each.iterations > 0 and each.busy_s > 0]
    width = len(row(IterationSums()))
    columns = np.array([row(each) for each in used], dtype=np.float64).reshape(len(used), width)
    return _Table(columns, np.array([each.busy_s for each in used], dtype=np.float64))


def _window_error(table: _Table, coefficients: Sequence[float]) -> WindowError:
    if not len(table.busy_s):
        return WindowError(0, 0.0)
    error = table.relative @ np.array(coefficients) - 1.0
    return WindowError(len(error), float(np.abs(error).mean()))


# -- least squares


def _fit(
    table: _Table,
    names: tuple[str, ...],
    optional: tuple[str, ...],
    coefficients: Callable[[dict[str, float]], Coefficients],
    config: FitConfig,
) -> Fitted[Coefficients] | None:
    rows = table.relative
    if len(rows) < config.rows_least:
        return None
    kept = _choose_terms(rows, names, optional, config)
    places = [names.index(name) for name in kept]
    solution = _solve(rows[:, places])
    return Fitted(
        coefficients=coefficients(dict(zip(kept, solution.tolist(), strict=True))),
        rows=len(rows),
        error_in_sample=float(np.abs(rows[:, places] @ solution - 1.0).mean()),
        error_left_out=_left_out_error(rows[:, places], config.folds),
        unidentified=_unidentified(rows, names, kept, config.uncertainty_max),
        dropped=tuple(name for name in optional if name not in kept),
    )


def _prefill_coefficients(values: dict[str, float]) -> PrefillCoefficients:
    return PrefillCoefficients(*(values.get(name, 0.0) for name in ("c0", "c1", "c2", "c3", "c4")))


def _solve(rows: _Matrix) -> _Matrix:
    """Non-negative x with the least Σ(row·x − 1)². Columns are brought to one length, for their units differ widely."""
    lengths = np.linalg.norm(rows, axis=0)
    scale = np.where(lengths > 0, lengths, 1.0)
    solution, _ = nnls(rows / scale, np.ones(len(rows)))
    return np.asarray(solution / scale, dtype=np.float64)


def _left_out_error(rows: _Matrix, folds: int) -> float:
    """Mean relative error over rows that the fit did not see."""
    part = np.arange(len(rows)) % min(folds, len(rows))
    errors = [np.abs(rows[part == each] @ _solve(rows[part != each]) - 1.0) for each in range(part.max() + 1)]
    return float(np.concatenate(errors).mean())


def _choose_terms(
    rows: _Matrix, names: tuple[str, ...], optional: tuple[str, ...], config: FitConfig
) -> tuple[str, ...]:
    """The fewest terms whose left-out error is next to the best; the earlier ones where equally many do."""
    seen = [name for name in optional if rows[:, names.index(name)].any()]
    choices = [
        tuple(name for name in names if name not in optional or name in extra)
        for count in range(len(seen) + 1)
        for extra in combinations(seen, count)
    ]
    errors = [_left_out_error(rows[:, [names.index(name) for name in choice]], config.folds) for choice in choices]
    bound = min(errors) * (1 + config.term_gain_least) + 1e-9  # rounding, where rows are free of noise
    return next(choice for choice, error in zip(choices, errors, strict=True) if error <= bound)


def _unidentified(
    rows: _Matrix, names: tuple[str, ...], kept: tuple[str, ...], uncertainty_max: float
) -> tuple[str, ...]:
    """Names of the terms whose coefficient these rows do not tell.

    A term whose column the other columns make up is one; so is one whose standard error, judged beside the terms that
    were kept, is a large share of an iteration.
    """
    found = []
    for place, name in enumerate(names):
        beside = sorted({names.index(other) for other in kept} | {place})
        made_up = _unexplained_share(rows, place) <= _COLLINEAR
        if made_up or _uncertainty(rows[:, beside], beside.index(place)) > uncertainty_max:
            found.append(name)
    return tuple(found)


def _unexplained_share(rows: _Matrix, place: int) -> float:
    """Share of a column's length that no combination of the others makes up; 0 for a column of zeros."""
    column, others = rows[:, place], np.delete(rows, place, axis=1)
    length = float(np.linalg.norm(column))
    lengths = np.linalg.norm(others, axis=0)
    others = others[:, lengths > 0] / lengths[lengths > 0]
    if length == 0:
        return 0.0
    unit = column / length
    rest = unit - others @ np.linalg.lstsq(others, unit, rcond=None)[0]
    return float(np.linalg.norm(rest))


def _uncertainty(rows: _Matrix, place: int) -> float:
    """The standard error of a coefficient, as the mean share of an iteration that it stands for."""
    residual = rows @ _solve(rows) - 1.0
    freedom = max(1, len(rows) - rows.shape[1])
    deviation = math.sqrt(float(residual @ residual) / freedom)
    column = rows[:, place]
    return deviation * float(column.mean()) / (float(np.linalg.norm(column)) * _unexplained_share(rows, place))
