"""bench-split compares planners with the search as it says."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import cast

import pytest
from bench.bench_split import Bench, Planned, Searched, Shifted
from bench.split_cases import BURST_AT_S, CASES, END_S, SHIFT_PERIODS, SHIFT_WINDOWS, WINDOW_S

from evolving_sim.arms.arm import Switch
from evolving_sim.results import Results, Summary


def served(requests_per_s: float) -> Summary:
    return replace(Results().between(0.0, 1.0), requests_per_s=requests_per_s)


def test_a_split_is_short_by_what_it_serves_less_than_the_best() -> None:
    searched = Searched({"1P2D": served(4.0), "2P1D": served(5.0)})
    assert searched.short("2P1D") == 0.0
    assert searched.short("1P2D") == pytest.approx(0.2)
    told = searched.as_json()
    assert (told["best"], told["runner_up"], told["margin"]) == ("2P1D", "1P2D", pytest.approx(0.2))


def test_a_planner_stands_on_its_last_switch_up_to_then() -> None:
    switches = (Switch(600.0, "2P1D", 1, 0.1), Switch(1200.0, "1P2D", 1, 0.1))
    planned = Planned("3P1D", "default", switches, (), 0.0)
    assert [planned.stands_at(at_s) for at_s in (0.0, 599.9, 600.0, 1200.0, 9e9)] == [
        "3P1D",
        "3P1D",
        "2P1D",
        "1P2D",
        "1P2D",
    ]


# What 4P5D serves is the best, 5P4D is within the bar, 3P6D is not.
SERVED = Searched({"3P6D": served(9.7), "4P5D": served(10.0), "5P4D": served(9.81)})


ALL = [f"{prefill}P{9 - prefill}D" for prefill in range(1, 9)]


def good(*shapes: str) -> Searched:
    """A search that finds these equally good and the others not."""
    return Searched({shape: served(10.0 if shape in shapes else 9.0) for shape in ALL})


def bench() -> Bench:
    """All work was searched, and nothing runs."""
    searched = Bench(cast("ProcessPoolExecutor", None))
    searched.searched = {case.name: SERVED for case in CASES}
    searched.shifted = Shifted([good("4P5D")] * len(SHIFT_WINDOWS), [SERVED] * len(SHIFT_PERIODS))
    return searched


def planned(*switches: tuple[float, str], start: str = "3P6D", gate: str = "default") -> Planned:
    return Planned(start, gate, tuple(Switch(at_s, shape, 1, 0.1) for at_s, shape in switches), (), 0.0)


@pytest.mark.parametrize(
    ("run", "met"),
    [
        (planned((600.0, "5P4D"), (END_S, "4P5D")), True),
        (planned((600.0, "5P4D")), True),
        (planned(start="4P5D"), True),
        (planned(), False),
        (planned((600.0, "4P5D"), (END_S, "3P6D")), False),
        (planned((600.0, "4P5D"), (1200.0, "3P6D"), (1800.0, "4P5D")), False),
    ],
)
def test_a_planner_has_to_end_within_the_bar_after_two_switches_at_most(run: Planned, met: bool) -> None:
    found = bench()
    found._steady(CASES[0], run)
    assert [bar.met for bar in found.bars] == [met]


def test_after_a_burst_nothing_may_change() -> None:
    found = bench()
    found._burst(planned((600.0, "4P5D")))
    found._burst(planned((BURST_AT_S + 1.0, "4P5D")))
    assert [bar.met for bar in found.bars] == [True, False]


def test_a_planner_may_be_two_windows_behind_the_best_split_and_on_its_way() -> None:
    """Work shifts in the third of these windows."""
    late = good("7P2D")
    shifted = Shifted([good("2P7D"), good("2P7D"), good("5P4D", "6P3D"), late, late, late], [])
    in_range = [[shape for shape in ALL if shifted.in_range(window, shape)] for window in range(1, 6)]
    assert in_range == [ALL[1:2], ALL[1:6], ALL[1:7], ALL[4:7], ALL[6:7]]


def test_a_shift_has_to_be_followed() -> None:
    found = bench()
    found._shift(planned((WINDOW_S, "3P6D"), (2 * WINDOW_S, "4P5D"), (SHIFT_PERIODS[-1][1] - 1.0, "3P6D")))
    found._shift(planned((2 * WINDOW_S + 1.0, "4P5D")))
    assert [bar.met for bar in found.bars] == [True, True, False, True, True, True, True, False]


def test_the_best_split_has_to_be_one_of_the_papers() -> None:
    found = bench()
    for case in CASES:
        found._best(case)
    assert [bar.met for bar in found.bars] == [False, False], "and of coding nothing was asked"


def test_what_the_papers_gate_does_is_kept_without_a_bar() -> None:
    found = bench()
    found._steady(CASES[0], planned(gate="paper"))
    found._burst(planned((BURST_AT_S + 1.0, "4P5D"), gate="paper"))
    found._shift(planned(gate="paper"))
    assert found.bars == []
    assert {name: len(runs) for name, runs in found.planned.items()} == {"coding": 1, "burst": 1, "shift": 1}
