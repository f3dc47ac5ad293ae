"""Which run makes each of the paper's numbers, how runs are put together, and the fit."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from sim.small import MACHINE, WORKER

from evolving.core.planner import SplitShape
from evolving.core.routing import RoutingConfig
from evolving_sim import machines
from evolving_sim.arms.arm import PolicySetup
from evolving_sim.arms.dynamo_planner import DynamoPlanner
from evolving_sim.arms.named import ARMS
from evolving_sim.arms.parameters import RESTART_S
from evolving_sim.machines import Fitted
from evolving_sim.mixes import AGENTS_PER_CODING_AGENT, ARRIVALS_PER_CODING_AGENT
from evolving_sim.paper import make_paper, making, performing
from evolving_sim.paper.calibration import TARGETS
from evolving_sim.paper.figures import FIGURES, FITTED, Metric, Side
from evolving_sim.paper.loads import Load, bursts, load_of
from evolving_sim.paper.plays import BEST, Outcome, Play, Stretch
from evolving_sim.paper.runs import (
    BY_NEED,
    HOUR,
    QUICK,
    RATES,
    SGLANG,
    STATIC_LOADS,
    WHOLE,
    of,
    plays_of,
    sensitivity,
    shortened,
    sources,
    spread_of,
    sum_of,
)
from evolving_sim.population import Period, WorkloadConfig

EVERY = sources()
PLAYS = [*plays_of(EVERY), *(play for some in sensitivity().values() for play in some.values())]


def outcome(served: float, shape: str = "4P5D", *switches: tuple[float, str], e2e_s: float = 1.0) -> Outcome:
    values = {Metric.THROUGHPUT: served, Metric.E2E_MEAN: e2e_s, Metric.SWITCHES: 0.0}
    whole = values | {Metric.SWITCHES: float(len(switches)), Metric.SWITCH_TIME: 2.5}
    return Outcome({HOUR.name: values, WHOLE.name: whole}, shape, switches)


def test_every_number_of_the_paper_has_a_run_and_every_run_a_number() -> None:
    places = {(figure.table, figure.row, side) for figure in FIGURES for side in (figure.side, figure.under) if side}
    unprinted = {place for place in EVERY if place[1] == "CC (126), eviction"}
    assert places == EVERY.keys() - unprinted
    assert set(QUICK) <= places


def test_every_play_can_be_made() -> None:
    for play in PLAYS:
        load = load_of(play.load)
        assert load.workload.periods or load.workload.arrivals
        assert play.arm in {*ARMS, BY_NEED}
        assert play.shape == BEST or SplitShape.parse(play.shape).total in {9, 64}
        assert 0 < play.end_s <= 3 * 3600.0


def test_equal_plays_are_played_once() -> None:
    assert len(set(plays_of(EVERY))) == len(list(plays_of(EVERY)))
    # Tables 1 to 3 and §5.5's first row are of the same runs.
    same = [EVERY[table, "CC (90)", Side.OURS] for table in ("Table 1", "Table 2", "Table 3")]
    assert len({source.plays for source in (*same, EVERY["§5.5", "36 GPUs", Side.OURS])}) == 1


def test_systems_that_adapt_begin_at_6p3d_and_warm_up_for_half_an_hour() -> None:
    """§5.1."""
    for load in STATIC_LOADS:
        for side in (Side.OURS, Side.DYNAMO):
            (play,) = EVERY["Table 3", load, side].plays
            assert play.shape == "6P3D"
            assert (HOUR.from_s, HOUR.to_s) == (1800.0, 5400.0)


def test_loads_have_the_papers_concurrencies() -> None:
    for name in STATIC_LOADS:
        (period,) = load_of(name).workload.periods
        per_agent = AGENTS_PER_CODING_AGENT if name.startswith("CC") else 1.0
        assert list(period.agents.values()) == [round(per_agent * int(name.split("(")[1].rstrip(")")))]
    for rate in RATES:
        (arrivals,) = load_of(f"CC, {rate} agents/min").workload.arrivals
        assert arrivals.per_min == ARRIVALS_PER_CODING_AGENT * float(rate)
    assert [sum(period.agents.values()) for period in load_of("shift").workload.periods] == [288, 216, 144]
    with pytest.raises(ValueError, match="no load is called"):
        load_of("CC")


def test_partitions_together_are_asked_nearly_the_same_at_any_time() -> None:
    """§5.5: total demand nearly constant. Of three compositions each is at two or three of eight partitions."""
    for number in range(3):
        at_each = [load_of(f"partition {at}").workload.periods[number].agents for at in range(8)]
        kinds = [tuple(sorted(kind.name for kind in agents)) for agents in at_each]
        assert sorted(kinds.count(each) for each in set(kinds)) == [2, 3, 3]


def test_bursts_are_spread_evenly_and_end_with_the_run() -> None:
    at = [burst.at_s for burst in bursts(6.0, 5400.0)]
    assert at == [300.0 + 600.0 * number for number in range(9)]
    assert bursts(0.0, 5400.0) == ()


def test_a_single_run_gives_its_stretch_and_the_switches_of_all_of_it() -> None:
    values = of(HOUR)([outcome(5.0, "4P5D", (600.0, "5P4D"), (1200.0, "4P5D"))])
    assert values[Metric.THROUGHPUT] == 5.0
    assert values[Metric.SWITCHES] == 2.0
    assert values[Metric.SWITCH_TIME] == 2.5
    assert values[Metric.PREFILL_NODES] == 4.0


def test_the_best_split_is_the_one_that_serves_most_in_a_search_over_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of the search are shorter; what is kept is of a whole run."""
    played: list[Play] = []

    def perform_at_once(play: Play, fit: Fitted = machines.FITTED) -> Outcome:
        if play.shape == BEST:
            return performing_perform(play, fit)
        played.append(play)
        prefill = SplitShape.parse(play.shape).prefill
        served = {each.name: {Metric.THROUGHPUT: 10.0 - abs(prefill - 3)} for each in play.stretches}
        return Outcome(served, play.shape, requests=1)

    performing_perform = performing.perform
    monkeypatch.setattr(performing, "perform", perform_at_once)
    best = performing.perform(Play("CC (90)", SGLANG, BEST, (HOUR,)))
    assert best.final_shape == "3P6D"
    assert list(best.stretches) == [HOUR.name]
    assert list(best.searched) == [f"{prefill}P{9 - prefill}D" for prefill in range(1, 9)]
    assert max(best.searched.values()) == best.searched["3P6D"]
    assert best.requests == len(played) == 9
    assert all(play.end_s < HOUR.to_s for play in played[:-1])


def test_a_spread_is_from_the_least_mean_of_seeds_to_the_greatest() -> None:
    of_seeds = [(10.0 + apart, 10.0, 10.0 - apart) for apart in (0.5, 1.0)] + [(10.2, 10.2, 10.2), (9.0, 9.8, 10.6)]
    runs = [outcome(5.0, e2e_s=e2e_s) for each in of_seeds for e2e_s in each]
    combined = spread_of(HOUR, Metric.E2E_MEAN)(runs)
    assert combined == {Metric.SPREAD: pytest.approx(100.0 * (10.2 / 9.8 - 1.0)), Metric.FINAL_SPLITS: 1.0}


def test_first_splits_that_end_on_one_only_on_average_do_not_end_on_one() -> None:
    runs = [outcome(5.0, shape) for _ in range(2) for shape in ("3P6D", "4P5D", "5P4D")]
    assert spread_of(HOUR, Metric.E2E_MEAN)(runs)[Metric.FINAL_SPLITS] == 3.0


def test_partitions_serve_together_and_the_widest_move_counts() -> None:
    runs = [outcome(5.0, "4P5D", (600.0, "7P2D"), (1200.0, "4P5D")), outcome(3.0, "5P4D")]
    assert sum_of(HOUR)(runs) == {Metric.THROUGHPUT: 8.0, Metric.SPREAD: pytest.approx(100.0 * 3 / 9)}


def test_quick_mode_keeps_the_parts_of_a_run() -> None:
    play = Play("CC (90)", SGLANG, "4P5D", (Stretch("hour", 1800.0, 5400.0),))
    (stretch,) = shortened(play, 0.5).stretches
    assert (stretch.from_s, stretch.to_s) == (900.0, 2700.0)
    assert replace(shortened(play, 0.5), stretches=play.stretches) == play


def test_outcomes_survive_json() -> None:
    before = replace(outcome(5.0, "4P5D", (600.0, "4P5D")), windows=(1.0, 2.0), requests=3, wall_s=4.0)
    before = replace(before, stretches={"hour": {Metric.THROUGHPUT: 5.0}})
    assert Outcome.from_json(json.loads(json.dumps(before.as_json()))) == before
    nothing = replace(before, stretches={"hour": {Metric.TTFT_MEAN: math.nan}})
    read = Outcome.from_json(json.loads(json.dumps(nothing.as_json())))
    assert math.isnan(read.stretches["hour"][Metric.TTFT_MEAN])


def test_each_fitted_number_has_its_run_of_static_sglang() -> None:
    wanted = [figure for target in TARGETS for figure in target.figures]
    assert sorted((each.table, each.row, each.side, each.metric) for each in wanted) == sorted(FITTED)
    for target in TARGETS:
        for each in target.figures:
            plays = EVERY[each.table, each.row, each.side].plays
            assert {(play.load, play.arm) for play in plays} == {(target.load, SGLANG)}


def test_a_table_that_is_not_known_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no table named Table 9; there are: .*Table 8"):
        make_paper(tmp_path, quick=True, processes=1, only=["Table 9"])


def check_table_8(folder: Path, processes: int) -> None:
    result = make_paper(folder, quick=True, processes=processes, only=["Table 8"])
    assert {row.table for row in result.rows} == {"Table 8"}
    assert {row.metric for row in result.rows} >= {"throughput_ours", "ratio_throughput_ours_best_static"}
    assert len(json.loads(result.tables.read_text())) == len(result.rows)
    assert "Quick mode" in result.report.read_text()
    assert (folder / "ratios.png").stat().st_size > 0
    assert len(json.loads((folder / "runs.json").read_text())["runs"]) == 2


def test_one_table_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small agents on slow nodes, in this process."""
    monkeypatch.setattr(making, "QUICK_SHARE", 0.05)
    few = Load(MACHINE, WorkloadConfig((Period(0.0, {WORKER: 5}),)))
    monkeypatch.setattr(performing, "load_of", lambda *_: few)
    check_table_8(tmp_path, processes=1)


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_one_table_of_the_papers_agents_on_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "QUICK_SHARE", 0.02)
    check_table_8(tmp_path, processes=2)


@pytest.mark.parametrize(
    ("load", "restart_s"),
    [("CC (90)", 681.0), ("OSWorld (160)", 748.0), ("CC (640)", RESTART_S), ("CC, 0.5 agents/min", RESTART_S)],
)
def test_dynamos_restarts_take_what_they_took_with_the_load(load: str, restart_s: float) -> None:
    """Table 1; of loads it doesn't have, the mean of all."""
    assert performing.dynamo_of(load).switching.out_of_service_s == restart_s


@pytest.mark.parametrize(("load", "tokens"), [("CC (90)", 1_048_576), ("OSWorld (128)", 262_144), ("shift", 262_144)])
def test_dynamos_planner_knows_the_longest_context_of_the_model(load: str, tokens: int) -> None:
    controller = performing.dynamo_of(load).policies(PolicySetup(RoutingConfig(1e11), 1)).controller
    assert isinstance(controller, DynamoPlanner)
    assert controller.config.context_tokens == tokens
