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


# -- several windows


def about(mean: float, count: int, spread: float = 0.1) -> list[float]:
    """So many gains, `spread` above and below the mean in turns: each differs from its neighbours."""
    return [mean + (spread if at % 2 else -spread) for at in range(count)]


@pytest.mark.parametrize("windows", [2, 4, 6])
def test_the_fewer_windows_count_the_surer_they_have_to_be(windows: int) -> None:
    """O'Brien and Fleming, Biometrics 35 (1979): look k of K asks for √(K/k) times as much as the last one."""
    config = PlannerConfig(slices=10, evidence_windows=6, gain_floor=0.0)
    count = 10 * windows
    error = 0.1 / math.sqrt(count - 1)
    least = 2.0 * math.sqrt(6 / windows) * error
    assert judge(about(1.01 * least, count), config, earlier_count=count - 10).passes
    assert not judge(about(0.99 * least, count), config, earlier_count=count - 10).passes


def test_the_last_window_must_not_contradict_those_before_it() -> None:
    config = PlannerConfig()
    sure = about(0.1, 50, spread=0.01)
    for last, passes in ((0.001, True), (-0.001, False)):
        assert judge([*sure, *about(last, 10, spread=0.3)], config, earlier_count=50).passes == passes
    error = 0.05 / math.sqrt(9)
    # The mean of all, with five times as many before it, is 0.1 − (0.1 − last)/6.
    highest = (0.1 * 5 / 6 - 2 * error) / (5 / 6)  # of a last mean that contradicts
    for last, passes in ((highest + 1e-6, True), (highest - 1e-6, False)):
        assert judge([*sure, *about(last, 10, spread=0.05)], config, earlier_count=50).passes == passes


def test_what_several_windows_gain_is_still_worth_a_switch_only_above_the_floor() -> None:
    config = PlannerConfig(gain_floor=0.02)
    assert judge(about(0.021, 60, spread=0.001), config, earlier_count=50).passes
    assert not judge(about(0.019, 60, spread=0.001), config, earlier_count=50).passes
