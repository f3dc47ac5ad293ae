"""Whether gains measured slice by slice are more than noise (paper, section 4.3). Everything here is pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from evolving.core.config import Gate, PlannerConfig

_ROUNDING = 1e-9  # a gain no larger than this may be one of floating point alone
_AUTOCORRELATION_MAX = 0.5
_ERRORS_LEAST = 2.0  # standard errors that a mean must exceed


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the gate says of one candidate. Gains are relative: 0.02 is 2 %."""

    mean_gain: float
    error: float  # standard error of the mean; the default gate's is widened
    passes: bool


def judge(gains: Sequence[float], config: PlannerConfig, *, earlier_count: int = 0) -> Verdict:
    """The paper's test: `mean g > 2·sd/√n`, sd with n − 1. `gains` has one gain per slice, in order, at least two.

    The default gate asks more. Slices that resemble their neighbours are fewer than they look, so the error grows by
    `√((1 + r)/(1 − r))`, r being the lag-1 autocorrelation, clipped to [0, 0.5]; and a gain must be worth a switch.

    The first `earlier_count` gains are of windows before the last one. They are looked at again with each window that
    comes, so with n of the N gains there may be (`evidence_windows`) the mean must exceed `2·√(N/n)` errors: the bound
    of O'Brien and Fleming (Biometrics 35, 1979), by which noise passes one of the looks up to N in 2.8 % of cases, a
    single look at N in 2.3 %. It bounds neither the test of each window alone, nor the looks after N, which drop the
    oldest window for each new one. Nor may the last window contradict, for work may have changed: its own mean is above
    0, and the mean of all at most two of the last window's errors above that.
    """
    if not earlier_count:
        return _judge(gains, config, _ERRORS_LEAST)
    most = config.evidence_windows * config.slices
    of_all = _judge(gains, config, _ERRORS_LEAST * math.sqrt(most / len(gains)))
    of_last = _judge(gains[earlier_count:], config, _ERRORS_LEAST)
    agrees = of_last.mean_gain > 0.0 and of_all.mean_gain <= of_last.mean_gain + _ERRORS_LEAST * of_last.error
    return replace(of_all, passes=of_all.passes and agrees)


def _judge(gains: Sequence[float], config: PlannerConfig, errors_least: float) -> Verdict:
    count = len(gains)
    mean = math.fsum(gains) / count
    deviations = [gain - mean for gain in gains]
    squares = math.fsum(deviation * deviation for deviation in deviations)
    error = math.sqrt(squares / (count - 1) / count)
    floor = _ROUNDING
    if config.gate is Gate.DEFAULT:
        error *= _widening(deviations, squares)
        floor = max(floor, config.gain_floor)
    return Verdict(mean, error, passes=mean > max(errors_least * error, floor))


def _widening(deviations: Sequence[float], squares: float) -> float:
    if squares <= 0:
        return 1.0
    neighbours = math.fsum(a * b for a, b in itertools.pairwise(deviations))
    correlation = min(max(neighbours / squares, 0.0), _AUTOCORRELATION_MAX)
    return math.sqrt((1 + correlation) / (1 - correlation))
