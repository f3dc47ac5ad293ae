"""One phase of one node: the rows it reported, what was fitted to them, and when that is to be done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic

import numpy as np

from evolving.core.fit import (
    Coefficients,
    FitConfig,
    Fitted,
    WindowError,
    decode_error,
    fit_decode,
    fit_prefill,
    has_drifted,
    prefill_error,
)
from evolving.core.iterations import IterationSums, IterationWindow
from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients, decode_takes_time, prefill_takes_time
from evolving_planner.model_record import Facts, PhaseFit

Rows = Sequence[IterationWindow]


@dataclass(frozen=True, slots=True)
class Kind(Generic[Coefficients]):
    """What the two phases do differently."""

    name: str
    sums: Callable[[IterationWindow], IterationSums]
    fit: Callable[[Rows, Facts, FitConfig], Fitted[Coefficients] | None]
    error: Callable[[Coefficients, Rows], WindowError]
    takes_time: Callable[[Coefficients], bool]


PREFILL: Kind[PrefillCoefficients] = Kind(
    "prefill",
    lambda window: window.prefill,
    lambda rows, _, config: fit_prefill(rows, config),
    prefill_error,
    prefill_takes_time,
)
DECODE: Kind[DecodeCoefficients] = Kind(
    "decode",
    lambda window: window.decode,
    lambda rows, facts, config: fit_decode(rows, facts.experts, facts.experts_per_token, config),
    decode_error,
    decode_takes_time,
)


@dataclass(frozen=True, slots=True)
class Due:
    """What a fit is to be made of."""

    rows: Rows  # all that are kept
    newest: Rows = ()  # of these, the ones that an earlier fit tells badly; none: there is no earlier fit to go


@dataclass(slots=True)
class PhaseRows(Generic[Coefficients]):
    """Bounded: the newest `kept` windows in which the phase ran alone, of the node as it is now."""

    kind: Kind[Coefficients]
    kept: int
    fit: PhaseFit[Coefficients] | None = None
    _rows: deque[IterationWindow] = field(init=False)
    _taken: int = field(init=False, default=0)  # rows ever
    _fitted_at: int = field(init=False, default=0)  # of these, the ones before the fit
    _tried_at: int = field(init=False, default=0)  # and before the last try, whatever came of it

    def __post_init__(self) -> None:
        self._rows = deque(maxlen=self.kept)

    def take(self, window: IterationWindow) -> None:
        """The node reported it."""
        sums = self.kind.sums(window)
        if sums.iterations > 0 and sums.busy_s > 0:
            self._rows.append(window)
            self._taken += 1

    def newest(self, most: int) -> tuple[IterationWindow, ...]:
        """Up to `most` rows, oldest first; where the phase is fitted, those that came since."""
        count = min(most, len(self._rows), self._taken - self._fitted_at if self.fit is not None else most)
        return tuple(islice(self._rows, len(self._rows) - count, None))

    def due(self, config: FitConfig, settled: int, recent: int) -> Due | None:
        """What the phase is to be fitted to now; None: it is not to be.

        It is fitted as soon as that is possible, again each time its rows have doubled, and with `settled` rows for the
        last time: then the fit stays until the newest `recent` rows are told badly. What could not be fitted is tried
        again when as many rows came once more.
        """
        if self._taken - self._tried_at < config.rows_least:
            return None
        if self.fit is None:
            return self.anyway()
        fitted, newest = self.fit.fitted, self.newest(recent)
        if has_drifted(self.kind.error(fitted.coefficients, newest), fitted.error_left_out, config):
            return Due(tuple(self._rows), newest)
        return self.anyway() if 2 * fitted.rows <= min(len(self._rows), settled) else None

    def anyway(self) -> Due:
        """For a fit to all there is."""
        return Due(tuple(self._rows))

    def begin(self) -> int:
        """A fit to rows up to now begins. Returns what `end` wants to know."""
        self._tried_at = self._taken
        return self._taken

    def end(self, fit: PhaseFit[Coefficients], began_at: int) -> None:
        """It is in force from now on. Rows before those that it was made of are of a node that was another."""
        self.fit, self._fitted_at = fit, began_at
        while len(self._rows) > fit.fitted.rows + self._taken - began_at:
            self._rows.popleft()

    def adopt(self, fit: PhaseFit[Coefficients] | None) -> None:
        """Of an earlier leader: the rows here are none of those since."""
        self.fit, self._fitted_at = fit, self._taken


def compute(kind: Kind[Coefficients], due: Due, facts: Facts, config: FitConfig) -> Fitted[Coefficients] | None:
    """A fit that predictions can use. None: the rows are too few, or say nothing that makes sense.

    Rows that an earlier fit tells badly come of a node that is another now, or of work that earlier rows had too little
    of. One fit that tells old rows and newest alike says which: it stands where it tells the newest as well as one of
    the newest alone, for it knows more kinds of work.
    """
    of_all = _usable(kind, due.rows, facts, config)
    if not due.newest:
        return of_all
    of_newest = _usable(kind, due.newest, facts, config)
    if of_all is None or of_newest is None:
        return of_newest
    error = kind.error(of_all.coefficients, due.newest).mean_relative
    # The margin is the one by which terms are kept or dropped, and rounding.
    return of_all if error <= of_newest.error_left_out * (1 + config.term_gain_least) + 1e-9 else of_newest


def _usable(kind: Kind[Coefficients], rows: Rows, facts: Facts, config: FitConfig) -> Fitted[Coefficients] | None:
    try:
        found = kind.fit(rows, facts, config)
    except (RuntimeError, np.linalg.LinAlgError):
        return None  # scipy or numpy gave up on them
    return found if found is not None and kind.takes_time(found.coefficients) else None
