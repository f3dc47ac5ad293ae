"""The paper's numbers as data, rows beside ours, and what is made of them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from evolving_sim.paper.compare import Measured, Row, compare
from evolving_sim.paper.criteria import (
    ADAPTATION,
    CONVERGENCE,
    DIAGNOSIS,
    EVICTION,
    ROUTING,
    ROUTING_ORDER,
    Check,
    evaluate,
    predicted,
    same_winner,
    within,
)
from evolving_sim.paper.figures import FIGURES, FITTED, Figure, Metric, Side
from evolving_sim.paper.report import Charts, write_report, write_tables

OURS, DYNAMO, BEST = Side.OURS, Side.DYNAMO, Side.BEST_STATIC
NAMES = {"table", "row", "metric", "paper", "ours", "ratio", "fitted"}


def as_printed() -> dict[tuple[str, str, Side], dict[Metric, float]]:
    """What a simulator that is right in everything would measure."""
    measured: dict[tuple[str, str, Side], dict[Metric, float]] = {}
    for figure in FIGURES:
        if figure.under is None:
            measured.setdefault((figure.table, figure.row, figure.side), {})[figure.metric] = figure.value
        else:
            measured.setdefault((figure.table, figure.row, figure.side), {})[figure.metric] = figure.value
            measured.setdefault((figure.table, figure.row, figure.under), {})[figure.metric] = 1.0
    return measured


def test_every_number_stands_once() -> None:
    places = [(figure.table, figure.row, figure.name) for figure in FIGURES]
    assert len(places) == len(set(places))


def test_only_numbers_of_static_sglang_are_fitted_to() -> None:
    fitted = {(figure.table, figure.row, figure.side, figure.metric) for figure in FIGURES if figure.fitted}
    assert fitted == FITTED
    assert {side for _, _, side, _ in fitted} == {BEST}


@pytest.mark.parametrize(
    ("table", "row", "metric", "over", "under", "said"),
    [
        # §5.2: throughput 1.10 to 2.73 times Dynamo's, E2E 3.80 to 4.12 times shorter with CC, P95 TTFT 13.92 times.
        ("Table 3", "CC (126)", Metric.THROUGHPUT, OURS, DYNAMO, 2.73),
        ("Table 3", "Putnam (256)", Metric.THROUGHPUT, OURS, DYNAMO, 1.10),
        ("Table 3", "CC (126)", Metric.E2E_MEAN, DYNAMO, OURS, 4.12),
        ("Table 3", "CC (90)", Metric.TTFT_P95, DYNAMO, OURS, 13.92),
        # §5.3
        ("§5.3", "CC (126), from 4P5D", Metric.THROUGHPUT, Side.OURS_STATIC, BEST, 1.37),
        ("Table D.5", "CC (126), 4P5D", Metric.THROUGHPUT, Side.ASYNC_FETCH, BEST, 1.12),
    ],
)
def test_ratios_that_the_text_names_follow_from_the_tables(
    table: str, row: str, metric: Metric, over: Side, under: Side, said: float
) -> None:
    values = {each.side: each.value for each in FIGURES if (each.table, each.row, each.metric) == (table, row, metric)}
    assert values[over] / values[under] == pytest.approx(said, abs=0.006)


def test_a_ratio_is_of_the_two_sides_and_fitted_where_one_of_them_is() -> None:
    figures = [
        Figure("T", "r", OURS, Metric.THROUGHPUT, 6.0),
        Figure("T", "r", DYNAMO, Metric.THROUGHPUT, 2.0),
        Figure("T", "r", BEST, Metric.THROUGHPUT, 4.0, fitted=True),
    ]
    measured: Measured = {("T", "r", side): {Metric.THROUGHPUT: value} for side, value in ((OURS, 5.0), (DYNAMO, 2.5))}
    rows = {row.metric: row for row in compare(measured, figures)}
    assert set(rows) == {"throughput_ours", "throughput_dynamo", "ratio_throughput_ours_dynamo"}
    ratio = rows["ratio_throughput_ours_dynamo"]
    assert (ratio.paper, ratio.ours, ratio.ratio, ratio.fitted) == (3.0, 2.0, 2.0 / 3.0, False)
    with_best = compare({**measured, ("T", "r", BEST): {Metric.THROUGHPUT: 4.0}}, figures)
    (to_best,) = (row for row in with_best if row.metric == "ratio_throughput_ours_best_static")
    assert to_best.fitted
    assert to_best.ours == 1.25


def test_a_ratio_that_the_paper_alone_prints_is_compared_with_ours() -> None:
    figures = [Figure("T", "r", OURS, Metric.THROUGHPUT, 1.42, under=BEST)]
    measured: Measured = {("T", "r", OURS): {Metric.THROUGHPUT: 30.0}, ("T", "r", BEST): {Metric.THROUGHPUT: 20.0}}
    (row,) = compare(measured, figures)
    assert (row.metric, row.paper, row.ours) == ("ratio_throughput_ours_best_static", 1.42, 1.5)
    assert compare({("T", "r", OURS): {Metric.THROUGHPUT: 30.0}}, figures) == []


def test_tables_json_has_the_agreed_form(tmp_path: Path) -> None:
    rows = [*compare(as_printed()), Row("T", "nothing", "throughput_ours", 0.0, math.nan, fitted=False)]
    write_tables(rows, tmp_path / "tables.json")
    read = json.loads((tmp_path / "tables.json").read_text())
    assert all(set(each) == NAMES for each in read)
    assert all(each["ratio"] is None or each["ratio"] == each["ours"] / each["paper"] for each in read)
    assert read[-1]["ours"] is read[-1]["ratio"] is None
    # Where everything is as printed, ours is the paper's.
    assert all(each["ratio"] == pytest.approx(1.0) for each in read[:-1] if each["paper"])


def row(paper: float, ours: float, metric: str = "ratio_throughput_ours_dynamo", *, fitted: bool = False) -> Row:
    return Row("Table 3", f"{paper} {ours}", metric, paper, ours, fitted)


def checks_of(rows: list[Row], measured: Measured) -> dict[str, Check]:
    return {check.claim: check for check in evaluate(rows, measured)}


def test_predicted_are_ratios_to_dynamo_and_the_best_static_split_that_nothing_was_fitted_to() -> None:
    kept = [row(2.0, 1.8), row(2.0, 1.8, "ratio_e2e_mean_ours_best_static")]
    left = [
        row(2.0, 1.8, fitted=True),
        row(2.0, 1.8, "throughput_ours"),
        row(2.0, 1.8, "ratio_throughput_dynamo_best_static"),
        Row("§5.3", "r", "ratio_throughput_ours_best_static", 2.0, 1.8, fitted=False),
    ]
    assert predicted([*kept, *left]) == kept


def test_a_winner_is_who_is_ahead() -> None:
    assert same_winner(row(2.0, 1.01))
    assert not same_winner(row(2.0, 0.99))
    assert same_winner(row(0.5, 0.9))
    assert same_winner(row(1.0, 0.9))
    assert not same_winner(row(2.0, math.nan))
    assert within(row(2.0, 2.5))
    assert within(row(2.0, 1.5))
    assert not within(row(2.0, 2.52))
    assert not within(row(2.0, math.nan))


def test_four_rows_of_five_have_to_be_close() -> None:
    near, far = row(2.0, 2.0), row(2.0, 4.0)
    winner, close = (check for check in evaluate([near] * 4 + [far], {}) if check.criterion == 1)
    assert (winner.met, close.met) == (True, True)
    winner, close = (check for check in evaluate([near] * 3 + [far] * 2, {}) if check.criterion == 1)
    assert (winner.met, close.met) == (True, False)
    winner, *_ = evaluate([near] * 9 + [row(2.0, 0.9)], {})
    assert winner.met is False


def test_what_was_not_played_is_neither_met_nor_missed() -> None:
    assert {check.met for check in evaluate([], {})} == {None}


def test_all_is_met_where_all_is_as_the_paper_says() -> None:
    measured = as_printed()
    measured[*EVICTION, BEST] = {Metric.LOST_REUSE: 6.0, Metric.KEPT_UNNEEDED: 50.0}
    measured[*EVICTION, OURS] = {Metric.LOST_REUSE: 0.5, Metric.KEPT_UNNEEDED: 10.0}
    checks = evaluate(compare(measured), measured)
    assert {check.criterion for check in checks} == {1, 2, 3}
    assert [check for check in checks if check.met is not True] == []


def test_diagnosis_and_stability_are_missed_where_they_do_not_hold() -> None:
    measured = {
        (*DIAGNOSIS, BEST): {Metric.PREFILL_NODES: 4.0},
        (*DIAGNOSIS, Side.ARROW): {Metric.PREFILL_NODES: 4.0},
        (*DIAGNOSIS, DYNAMO): {Metric.PREFILL_NODES: 5.0},
        **{
            (*ROUTING, side): {Metric.E2E_MEAN: 10.0, Metric.TTFT_P95: float(number)}
            for number, side in enumerate(ROUTING_ORDER)
        },
        (CONVERGENCE, "mean E2E from four splits", OURS): {Metric.SPREAD: 1.9, Metric.FINAL_SPLITS: 2.0},
        (*ADAPTATION, OURS): {Metric.THROUGHPUT: 9.9},
        (*ADAPTATION, Side.OURS_STATIC): {Metric.THROUGHPUT: 10.0},
    }
    missed = [check for check in evaluate([], measured) if check.met is False]
    met = [check for check in evaluate([], measured) if check.met is True]
    assert len(missed) == 6
    assert [check.claim for check in met] == [check.claim for check in met if str(Metric.TTFT_P95) in check.claim]


def test_the_report_says_that_values_are_simulated_and_which_are_fitted(tmp_path: Path) -> None:
    rows = compare(as_printed())
    charts = Charts({"Table 3": [("bars.png", "Bars")]})
    write_report(rows, evaluate(rows, as_printed()), charts, tmp_path / "report.md", notes=["A note."])
    text = (tmp_path / "report.md").read_text()
    assert "simulated" in text.splitlines()[2]
    assert text.count("*fitted* |") == sum(each.fitted for each in rows)
    assert "![Bars](bars.png)" in text
    for table in dict.fromkeys(figure.table for figure in FIGURES):
        assert f"## {table}: " in text
