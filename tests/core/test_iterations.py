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
# (prefill, requests, context tokens, quarters of a second)
iteration_lists = st.lists(
    st.tuples(st.none() | prefills, st.integers(0, 16), st.integers(1, 10**5), st.integers(1, 8)).filter(
        lambda each: each[0] is not None or each[1] > 0
    ),
    max_size=60,
)
Iterations = list[tuple[PrefillSums | None, int, int, int]]


def run(meter: IterationMeter, iterations: Iterations) -> None:
    for prefill, requests, context, quarters in iterations:
        meter.add(quarters / 4, prefill, requests, context if requests else 0)


def warm_meter(experts: int = 0, experts_per_token: int = 0) -> IterationMeter:
    meter = IterationMeter(experts, experts_per_token)
    run(meter, [(PrefillSums(1), 1, 1, 1)] * COLD_ITERATIONS)
    return meter


def naive(iterations: Iterations, prefill: bool, decode: bool) -> tuple[float, ...]:
    """Sums of one kind, by looking through all iterations."""
    own = [each for each in iterations if (each[0] is not None, each[1] > 0) == (prefill, decode)]
    works = [each[0] for each in own if each[0] is not None]
    return (
        len(own),
        sum(each[3] for each in own) / 4,
        *(sum(astuple(work)[place] for work in works) for place in range(4)),
        sum(each[1] for each in own),
        sum(each[2] for each in own if each[1]),
    )


def flat(sums: IterationSums) -> tuple[float, ...]:
    return (sums.iterations, sums.busy_s, *astuple(sums.prefill), sums.requests, sums.context_tokens)


@given(iteration_lists)
def test_every_iteration_is_in_the_sums_of_its_kind(iterations: Iterations) -> None:
    meter = warm_meter()
    run(meter, iterations)
    totals = meter.totals()
    assert flat(totals.prefill) == naive(iterations, prefill=True, decode=False)
    assert flat(totals.decode) == naive(iterations, prefill=False, decode=True)
    assert flat(totals.mixed) == naive(iterations, prefill=True, decode=True)
    assert totals.cold_iterations == COLD_ITERATIONS


@given(iteration_lists)
def test_the_first_iterations_of_either_phase_are_cold(iterations: Iterations) -> None:
    meter = IterationMeter()
    run(meter, iterations)
    warm, prefills_seen, decodes_seen = [], 0, 0
    for each in iterations:
        prefills_seen += each[0] is not None
        decodes_seen += each[1] > 0
        cold = (each[0] is not None and prefills_seen <= COLD_ITERATIONS) or (
            each[1] > 0 and decodes_seen <= COLD_ITERATIONS
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


def summed(*windows: IterationWindow) -> list[float]:
    """Sums of everything over windows, by kind; quarters of seconds are exact."""
    rows = [[w.cold_iterations, *flat(w.prefill), *flat(w.decode), *flat(w.mixed)] for w in windows]
    return [sum(column) for column in zip(*rows, strict=True)]


@given(iteration_lists, st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3)), max_size=8))
def test_windows_and_the_rest_add_up_to_the_totals_whenever_reports_come(
    iterations: Iterations, reports: list[tuple[int, int]]
) -> None:
    """Reports of other moments than windows end at, some of them late: as if they had overtaken each other."""
    meter, cutter, windows = IterationMeter(), WindowCutter(1.0), list[IterationWindow]()
    done, now_s, said = 0, 0.0, [IterationWindow()]
    for more, halves in [*reports, (len(iterations), 1)]:
        run(meter, iterations[done : done + more])
        done += more
        now_s += halves / 2
        said.append(meter.totals())
        for totals in (said[-1], said[len(said) // 2]):
            window = cutter.add(now_s, "life", totals)
            windows += [window] if window is not None else []
    windows.append(cutter.rest(now_s))
    assert cutter.rest(now_s) == IterationWindow(), "it is in the window before"
    assert summed(*windows) == summed(meter.totals())
    for window in windows:
        assert window.reaches(IterationWindow())


def test_a_window_lasts_as_long_as_was_asked_for() -> None:
    meter, cutter = IterationMeter(), WindowCutter(2.0)
    assert cutter.add(10.0, "one", meter.totals()) is None
    run(meter, [(PrefillSums(1), 1, 1, 1)] * COLD_ITERATIONS)
    meter.add(0.5, requests=1, context_tokens=7)
    assert cutter.add(11.9, "one", meter.totals()) is None
    meter.add(0.5, requests=2, context_tokens=9)
    window = cutter.add(12.5, "one", meter.totals())
    assert window is not None
    assert (window.decode.requests, window.decode.context_tokens, window.cold_iterations) == (3, 16, COLD_ITERATIONS)
    assert cutter.add(14.4, "one", meter.totals()) is None, "it began when the one before ended"
    assert cutter.add(14.5, "one", meter.totals()) == IterationWindow()
    with pytest.raises(ValueError, match="positive"):
        WindowCutter(0.0)


@given(iteration_lists, iteration_lists)
def test_another_life_counts_from_nothing(first: Iterations, second: Iterations) -> None:
    """However far the one before it had come; and what that one says late is not of it."""
    meters, cutter = (IterationMeter(), IterationMeter()), WindowCutter(1.0)
    for meter, iterations in zip(meters, (first, second), strict=True):
        run(meter, iterations)
    cutter.add(0.0, "one", meters[0].totals())
    assert cutter.add(5.0, "two", meters[1].totals()) is None
    assert cutter.rest(5.5) == meters[1].totals()
    assert cutter.add(7.0, "two", IterationWindow()) == IterationWindow()


def test_new_tokens_and_the_restored_share_are_ratios_of_sums() -> None:
    meter = warm_meter()
    start = meter.totals()
    meter.add(0.1, PrefillSums(100, 1.0, 30, 50))
    meter.add(0.1, PrefillSums(100, 1.0))  # a later chunk reuses nothing
    meter.add(0.1, PrefillSums(10, 1.0, 0, 10), requests=2, context_tokens=5)
    assert measure_mix([meter.totals().since(start)]) == Mix(210 / 3, 30 / 60)
    assert measure_mix([]) == Mix(None, None)
