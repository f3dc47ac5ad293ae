"""bench-split compares planners with the search as it says."""

from __future__ import annotations

import math

import pytest
from bench.bench_split import Planned, Searched

from evolving_sim.planner_loop import Switch
from evolving_sim.results import Summary


def served(requests_per_s: float) -> Summary:
    return Summary(0, requests_per_s, 0.0, math.nan, math.nan, math.nan)


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
