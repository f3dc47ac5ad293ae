"""The planner's test of gains (paper, section 4.3). How often noise passes it is in test_planner_properties.py."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evolving.core.config import Gate, PlannerConfig
from evolving.core.gate import judge

PAPER, DEFAULT = PlannerConfig(gate=Gate.PAPER), PlannerConfig(gate=Gate.DEFAULT)
GAINS = st.lists(st.floats(-1, 5), min_size=2, max_size=12)


def test_the_paper_s_gate_is_twice_the_standard_error() -> None:
    gains = [0.01, 0.02, 0.03, 0.04]
    error = statistics.stdev(gains) / math.sqrt(4)
    verdict = judge(gains, PAPER)
    assert verdict.mean_gain == pytest.approx(0.025)
    assert verdict.error == pytest.approx(error)
    assert verdict.passes
    lower = [gain - 0.025 + 1.99 * error for gain in gains]
    assert not judge(lower, PAPER).passes
    assert judge([gain + 0.02 * error for gain in lower], PAPER).passes


def test_the_default_gate_asks_for_one_per_cent() -> None:
    assert judge([0.0099] * 10, PAPER).passes
    assert not judge([0.0099] * 10, DEFAULT).passes
    assert judge([0.0101] * 10, DEFAULT).passes


def test_no_gain_at_all_passes_no_gate() -> None:
    for config in (PAPER, PlannerConfig(gain_floor=0.0)):
        assert not judge([0.0] * 10, config).passes
        assert not judge([2.2e-16] * 10, config).passes, "rounding is no gain"


def test_slices_that_resemble_their_neighbours_count_for_less() -> None:
    rising = [0.1, 0.2, 0.3, 0.4, 0.5]
    deviations = [-0.2, -0.1, 0, 0.1, 0.2]
    correlation = sum(a * b for a, b in itertools.pairwise(deviations)) / sum(d * d for d in deviations)
    assert correlation == pytest.approx(0.4)
    wider = math.sqrt((1 + correlation) / (1 - correlation))
    assert judge(rising, DEFAULT).error == pytest.approx(judge(rising, PAPER).error * wider)


def test_the_correlation_is_taken_for_a_half_at_most_and_never_for_less_than_none() -> None:
    long_rise = [float(i) for i in range(40)]
    assert judge(long_rise, DEFAULT).error == pytest.approx(judge(long_rise, PAPER).error * math.sqrt(3))
    turns = [0.1, 0.3] * 5
    assert judge(turns, DEFAULT).error == pytest.approx(judge(turns, PAPER).error)


@given(gains=GAINS)
def test_what_passes_the_default_gate_passes_the_paper_s(gains: list[float]) -> None:
    if judge(gains, DEFAULT).passes:
        assert judge(gains, PAPER).passes
