"""Sums over iterations: kinds, cold starts, windows, and what the mix of work decides."""

from __future__ import annotations

import math
from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evolving.core.iterations import (
    COLD_ITERATIONS,
    IterationMeter,
    IterationSums,
    IterationWindow,
    Mix,
    WindowCutter,
    measure_mix,
)
from evolving.core.timemodel import PrefillSums

prefills = st.builds(
    PrefillSums,
    uncached_tokens=st.integers(1, 512),
    query_key_pairs=st.integers(1, 10**6),
    restored_tokens=st.integers(0, 100),
    cached_tokens=st.integers(100, 10**4),
)
# (prefill, reused tokens, requests, context tokens, quarters of a second)
iteration_lists = st.lists(
    st.tuples(
        st.none() | prefills, st.integers(0, 100), st.integers(0, 16), st.integers(1, 10**5), st.integers(1, 8)
    ).filter(lambda each: each[0] is not None or each[2] > 0),
    max_size=60,
)
Iterations = list[tuple[PrefillSums | None, int, int, int, int]]


def run(meter: IterationMeter, iterations: Iterations) -> None:
    for prefill, reused, requests, context, quarters in iterations:
        meter.add(quarters / 4, prefill, reused if prefill else 0, requests, context if requests else 0)


def warm_meter(experts: int = 0, experts_per_token: int = 0) -> IterationMeter:
    meter = IterationMeter(experts, experts_per_token)
    run(meter, [(PrefillSums(1), 0, 1, 1, 1)] * COLD_ITERATIONS)
    return meter


def naive(iterations: Iterations, prefill: bool, decode: bool) -> tuple[object, ...]:
    """Sums of one kind, by looking through all iterations."""
    own = [each for each in iterations if (each[0] is not None, each[2] > 0) == (prefill, decode)]
    works = [each[0] for each in own if each[0] is not None]
    return (
        len(own),
        sum(each[4] for each in own) / 4,
        tuple(sum(astuple(work)[place] for work in works) for place in range(4)),
        sum(each[2] for each in own),
        sum(each[3] for each in own if each[2]),
    )


def flat(sums: IterationSums) -> tuple[object, ...]:
    return (sums.iterations, sums.busy_s, astuple(sums.prefill), sums.requests, sums.context_tokens)


@given(iteration_lists)
def test_every_iteration_is_in_the_sums_of_its_kind(iterations: Iterations) -> None:
    meter = warm_meter()
    run(meter, iterations)
    totals = meter.totals()
    assert flat(totals.prefill) == naive(iterations, prefill=True, decode=False)
    assert flat(totals.decode) == naive(iterations, prefill=False, decode=True)
    assert flat(totals.mixed) == naive(iterations, prefill=True, decode=True)
    assert totals.reused_tokens == sum(each[1] for each in iterations if each[0])
    assert totals.cold_iterations == COLD_ITERATIONS


@given(iteration_lists)
def test_the_first_iterations_of_either_phase_are_cold(iterations: Iterations) -> None:
    meter = IterationMeter()
    run(meter, iterations)
    warm, prefills_seen, decodes_seen = [], 0, 0
    for each in iterations:
        prefills_seen += each[0] is not None
        decodes_seen += each[2] > 0
        cold = (each[0] is not None and prefills_seen <= COLD_ITERATIONS) or (
            each[2] > 0 and decodes_seen <= COLD_ITERATIONS
        )
        warm += [] if cold else [each]
    totals = meter.totals()
    assert totals.cold_iterations == len(iterations) - len(warm)
    assert flat(totals.prefill) == naive(warm, prefill=True, decode=False)
    assert flat(totals.decode) == naive(warm, prefill=False, decode=True)


def test_the_expert_share_is_summed_per_iteration_equation_2() -> None:
    meter = warm_meter(experts=8, experts_per_token=2)
    for requests in (1, 3):
        meter.add(0.01, requests=requests, context_tokens=10)
    expected = (1 - (6 / 8) ** 1) + (1 - (6 / 8) ** 3)
    assert math.isclose(meter.totals().decode.expert_share, expected)


@given(iteration_lists, st.lists(st.integers(0, 60), max_size=5))
def test_windows_add_up_to_the_totals(iterations: Iterations, cuts: list[int]) -> None:
    meter, cutter, windows = warm_meter(), WindowCutter(1.0), list[IterationWindow]()
    start = meter.totals()
    assert cutter.add(0.0, "life", start) is None
    places = sorted({min(cut, len(iterations)) for cut in cuts} | {len(iterations)})
    for now_s, (begin, end) in enumerate(zip([0, *places], places, strict=False), start=1):
        run(meter, iterations[begin:end])
        window = cutter.add(float(now_s), "life", meter.totals())
        assert window is not None
        windows.append(window)
    whole = meter.totals().since(start)
    for kind in ("prefill", "decode", "mixed"):
        parts = [getattr(window, kind) for window in windows]
        total = getattr(whole, kind)
        assert sum(part.busy_s for part in parts) == total.busy_s, "quarters of seconds are exact"
        assert sum(part.prefill.query_key_pairs for part in parts) == total.prefill.query_key_pairs
        assert sum(part.context_tokens for part in parts) == total.context_tokens


def test_a_window_lasts_as_long_as_was_asked_for_and_ends_with_the_engine() -> None:
    meter, cutter = warm_meter(), WindowCutter(2.0)
    cutter.add(10.0, "one", meter.totals())
    meter.add(0.5, requests=1, context_tokens=7)
    assert cutter.add(11.9, "one", meter.totals()) is None
    meter.add(0.5, requests=2, context_tokens=9)
    window = cutter.add(12.5, "one", meter.totals())
    assert window is not None
    assert (window.decode.requests, window.decode.context_tokens) == (3, 16)
    assert cutter.add(20.0, "two", warm_meter().totals()) is None, "another life counts from 0"
    empty = cutter.add(22.0, "two", warm_meter().totals())
    assert empty == IterationWindow()
    with pytest.raises(ValueError, match="positive"):
        WindowCutter(0.0)


def test_new_tokens_and_the_restored_share_are_ratios_of_sums() -> None:
    meter = warm_meter()
    start = meter.totals()
    meter.add(0.1, PrefillSums(100, 1.0, 30, 50), reused_tokens=50)
    meter.add(0.1, PrefillSums(100, 1.0, 0, 150))  # a later chunk reads more, and reuses nothing
    meter.add(0.1, PrefillSums(10, 1.0, 0, 10), reused_tokens=10, requests=2, context_tokens=5)
    assert measure_mix([meter.totals().since(start)]) == Mix(210 / 3, 30 / 60)
    assert measure_mix([]) == Mix(None, None)
