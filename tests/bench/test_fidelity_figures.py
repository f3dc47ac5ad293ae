"""Two runs of the same requests are compared as bench-fidelity says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench.fidelity_figures import BARS, PAIRS_LEAST, Row, bars, figures, pair, paired
from hypothesis import given
from hypothesis import strategies as st

ROWS = [
    Row(0, 0, 0, 0.0, 1.0, 3.0, 1000, 10, 0, 0),
    Row(0, 0, 1, 5.0, 2.0, 6.0, 2000, 10, 1200, 1280),
    Row(0, 1, 0, 6.0, 3.0, 4.0, 1000, 10, 640, 600),
]


def test_a_run_is_like_itself() -> None:
    told = figures(ROWS)
    assert all(bar.met for bar in bars(told, told, PAIRS_LEAST, 0))
    single = paired(pair(ROWS, ROWS))
    assert single["ttft_difference_mean_s"] == single["e2e_difference_p50_of_absolute_s"] == 0
    assert single["ttft_rank_correlation"] == pytest.approx(1)
    assert single["same_cached_share"] == 1


def test_shares_are_of_prompt_tokens_and_more_than_the_ideal_is_no_negative_loss() -> None:
    told = figures(ROWS)
    assert told["hit_rate"] == pytest.approx(1840 / 4000)
    assert told["lost_reuse"] == pytest.approx(80 / 4000)
    assert told["ttft_mean_s"] == pytest.approx(2)
    assert told["span_s"] == 11


def test_only_what_both_answered_is_compared_in_the_order_of_the_trace() -> None:
    pairs = pair(ROWS[::-1], [replace(row, ttft_s=row.ttft_s + 1) for row in ROWS[:2]])
    assert [one.place for one, _ in pairs] == [(0, 0, 0), (0, 0, 1)]
    assert paired(pairs)["ttft_difference_mean_s"] == pytest.approx(1)


def test_other_requests_are_no_pair() -> None:
    with pytest.raises(ValueError, match="not the same request"):
        pair(ROWS, [replace(ROWS[0], prompt_tokens=999)])


@given(st.sampled_from(sorted(BARS)), st.floats(0.5, 1.5))
def test_a_bar_is_a_share_of_the_live_figure(name: str, times: float) -> None:
    live = dict.fromkeys(BARS, 2.0)
    missed = [bar.name for bar in bars(live, live | {name: 2.0 * times}, PAIRS_LEAST, 0) if not bar.met]
    assert missed == ([name] if abs(times - 1) > BARS[name] else [])


def test_too_few_pairs_and_failures_are_missed_bars() -> None:
    told = figures(ROWS)
    assert [bar.name for bar in bars(told, told, PAIRS_LEAST - 1, 1) if not bar.met] == ["pairs", "failed requests"]
