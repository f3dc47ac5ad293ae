"""Coefficients of equations 1 and 2 as they travel: c0..c4 and d0..d3, seconds."""

from __future__ import annotations

from collections.abc import Sequence

from evolving.core.errors import InvalidArgument
from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients, decode_takes_time, prefill_takes_time


def prefill_from_proto(values_s: Sequence[float]) -> PrefillCoefficients:
    """Equation 1. Raises InvalidArgument where no prediction can use it."""
    try:
        coefficients = PrefillCoefficients(*_counted(values_s, 5))
    except ValueError as error:
        raise InvalidArgument(f"no coefficients of prefill: {error}") from error
    if not prefill_takes_time(coefficients):
        raise InvalidArgument(f"coefficients of prefill by which work takes no time, or ages: {coefficients}")
    return coefficients


def decode_from_proto(values_s: Sequence[float], experts_per_token: int = 0, experts: int = 0) -> DecodeCoefficients:
    """Equation 2 for a node with so many experts (0: dense). Raises InvalidArgument where no prediction can use it."""
    try:
        d0_s, d1_s, d2_s, d3_s = _counted(values_s, 4)
        coefficients = DecodeCoefficients(d0_s, d1_s, d2_s, d3_s, min(experts_per_token, experts), experts)
    except ValueError as error:
        raise InvalidArgument(f"no coefficients of decode: {error}") from error
    if not decode_takes_time(coefficients):
        raise InvalidArgument(f"coefficients of decode by which work takes no time, or ages: {coefficients}")
    return coefficients


def _counted(values_s: Sequence[float], count: int) -> Sequence[float]:
    if len(values_s) != count:
        raise ValueError(f"needs {count}, got {len(values_s)}")
    return values_s
