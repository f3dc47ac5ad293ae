"""Whether gains measured slice by slice are more than noise (paper, section 4.3). Everything here is pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from evolving.core.config import Gate, PlannerConfig

_ROUNDING = 1e-9  # a gain no larger than this may be one of floating point alone
_AUTOCORRELATION_MAX = 0.5
_ERRORS = 2.0  # standard errors that a mean must exceed


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the gate says of one candidate. Gains are relative: 0.02 is 2 %."""

    mean_gain: float
    error: float  # standard error of the mean; the default gate's is widened
    passes: bool


def judge(gains: Sequence[float], config: PlannerConfig, *, earlier: int = 0) -> Verdict:
    """The paper's test: `mean g > 2·sd/√n`, sd with n − 1. `gains` has one gain per slice, in order, at least two.

    The default gate asks more. Slices that resemble their neighbours are fewer than they look, so the error grows by
    `√((1 + r)/(1 − r))`, r being the lag-1 autocorrelation, clipped to [0, 0.5]; and a gain must be worth a switch.

    The first `earlier` gains are of windows before the last one. Those are judged anew with each window that comes, and
    noise has as many chances; so the mean of n of the N gains there may be (`evidence_windows`) must exceed 2·√(N/n)
    errors, which all looks together pass hardly more often than one look at N (O'Brien and Fleming, Biometrics 35,
    1979). Nor may the last window contradict, for work may have changed: by it too there is a gain, and the mean of all
    lies no higher than its own two errors allow.
    """
    if not earlier:
        return _judge(gains, config, _ERRORS)
    most = config.evidence_windows * config.slices
    of_all = _judge(gains, config, _ERRORS * math.sqrt(max(1.0, most / len(gains))))
    of_last = _judge(gains[earlier:], config, _ERRORS)
    agrees = of_last.mean_gain > 0.0 and of_all.mean_gain <= of_last.mean_gain + _ERRORS * of_last.error
    return replace(of_all, passes=of_all.passes and agrees)


def _judge(gains: Sequence[float], config: PlannerConfig, errors: float) -> Verdict:
    count = len(gains)
    mean = math.fsum(gains) / count
    deviations = [gain - mean for gain in gains]
    squares = math.fsum(deviation * deviation for deviation in deviations)
    error = math.sqrt(squares / (count - 1) / count)
    floor = _ROUNDING
    if config.gate is Gate.DEFAULT:
        error *= _widening(deviations, squares)
        floor = max(floor, config.gain_floor)
    return Verdict(mean, error, passes=mean > errors * error and mean > floor)


def _widening(deviations: Sequence[float], squares: float) -> float:
    if squares <= 0:
        return 1.0
    neighbours = math.fsum(a * b for a, b in itertools.pairwise(deviations))
    correlation = min(max(neighbours / squares, 0.0), _AUTOCORRELATION_MAX)
    return math.sqrt((1 + correlation) / (1 - correlation))
