"""PNG charts beside the report. Simulated values and the paper's are told apart by colour everywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from evolving_sim.paper.compare import Row
from evolving_sim.paper.criteria import WITHIN, predicted
from evolving_sim.paper.figures import Metric, Side
from evolving_sim.paper.plays import WINDOW_S, Outcome, Play
from evolving_sim.paper.report import Charts
from evolving_sim.paper.runs import OURS, RATES, SENSITIVITY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Picture

_OURS = "tab:blue"
_COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:olive")


def draw(
    rows: Sequence[Row],
    outcomes: Mapping[Play, Outcome],
    sensitivity: Mapping[str, Mapping[str, Play]],
    folder: Path,
) -> Charts:
    """Draw what was played, into `folder`."""
    files: dict[str, list[tuple[str, str]]] = {}

    def add(table: str, name: str, caption: str, picture: Picture | None) -> None:
        if picture is not None:
            picture.savefig(folder / name, dpi=110, bbox_inches="tight")
            files.setdefault(table, []).append((name, f"{caption} (simulated)"))

    add("", "ratios.png", "Predicted ratios beside the paper's", _ratios(rows))
    for metric, caption in ((Metric.THROUGHPUT, "Throughput"), (Metric.E2E_MEAN, "Mean E2E latency")):
        add("Table 3", f"table-3-{metric}.png", f"{caption} under static load", _bars(rows, "Table 3", metric))
    add("Table 4", "table-4.png", "Throughput as work changes", _bars(rows, "Table 4", Metric.THROUGHPUT))
    shifts = _of_load(outcomes, "shift")
    add("Table 4", "shift.png", "Splits and throughput as work changes", _courses(shifts))
    add("Table 5", "table-5.png", "Throughput on the best split", _bars(rows, "Table 5", Metric.THROUGHPUT))
    add("Table 5", "splits.png", "Throughput of every split that stays", _splits(outcomes))
    add("Table 6", "table-6.png", "Latency by arrival rate", _open_loop(rows))
    planners = {play: outcome for play, outcome in _of_load(outcomes, "CC (90)").items() if outcome.switches}
    add("§2.1, §2.2", "planners.png", "Splits over time", _courses(planners))
    starts = {
        play: each
        for play, each in _of_load(outcomes, "CC (126)").items()
        if play.arm == OURS and SENSITIVITY not in play.stretches
    }
    add("§5.5", "convergence.png", "From four first splits", _courses(starts))
    for name, plays in sensitivity.items():
        add("", f"sensitivity-{name}.png", f"The planner's sensitivity: {name}", _sensitivity(name, plays, outcomes))
    return Charts(files)


def _subplots(count: int, width: float = 6.0, height: float = 3.6) -> tuple[Picture, list[Axes]]:
    from matplotlib.figure import Figure

    picture = Figure(figsize=(width * count, height))
    return picture, [picture.add_subplot(1, count, place + 1) for place in range(count)]


def _ratios(rows: Sequence[Row]) -> Picture | None:
    """Each predicted ratio: the paper's across, ours up."""
    known = [row for row in predicted(rows) if math.isfinite(row.ours) and row.ours > 0]
    if not known:
        return None
    picture, (axes,) = _subplots(1, 6.0, 6.0)
    values = [value for row in known for value in (row.paper, row.ours)]
    line = np.array([min(values) * 0.8, max(values) * 1.25])
    axes.fill_between(line, line * (1 - WITHIN), line * (1 + WITHIN), color="0.9", label=f"±{WITHIN:.0%}")
    axes.plot(line, line, color="0.6", linewidth=1)
    for table, colour in zip(dict.fromkeys(row.table for row in known), _COLOURS, strict=False):
        of_table = [row for row in known if row.table == table]
        axes.scatter(
            [row.paper for row in of_table], [row.ours for row in of_table], color=colour, s=18, label=table, zorder=3
        )
    for at in (axes.axvline, axes.axhline):
        at(1.0, color="0.6", linewidth=1, linestyle=":")
    axes.set(xscale="log", yscale="log", xlabel="ratio in the paper", ylabel="ratio simulated")
    axes.legend()
    return picture


def _bars(rows: Sequence[Row], table: str, metric: Metric) -> Picture | None:
    """One group of bars a row of the table: for each side the paper's value and ours."""
    known = [row for row in rows if row.table == table and row.metric in {f"{metric}_{side}" for side in Side}]
    names = list(dict.fromkeys(row.row for row in known))
    if not known:
        return None
    picture, (axes,) = _subplots(1, max(6.0, 1.5 * len(names)))
    sides = list(dict.fromkeys(row.metric.removeprefix(f"{metric}_") for row in known))
    width = 0.8 / (2 * len(sides))
    for place, (side, colour) in enumerate(zip(sides, _COLOURS, strict=False)):
        of_side = {row.row: row for row in known if row.metric == f"{metric}_{side}"}
        at = np.array([names.index(name) for name in of_side]) - 0.4 + (2 * place + 0.5) * width
        axes.bar(at, [row.paper for row in of_side.values()], width, color="white", edgecolor=colour, hatch="//")
        axes.bar(at + width, [row.ours for row in of_side.values()], width, color=colour, edgecolor=colour, label=side)
    axes.bar([0], [0], color="white", edgecolor="0.4", hatch="//", label="hatched: the paper")
    axes.set_xticks(range(len(names)), names, rotation=20, ha="right")
    axes.set_ylabel(f"{metric.replace('_', ' ')}, {metric.unit}")
    axes.legend(fontsize="small")
    return picture


def _courses(outcomes: Mapping[Play, Outcome]) -> Picture | None:
    """The split and the throughput of each run, over time."""
    if not outcomes:
        return None
    picture, (splits, served) = _subplots(2)
    for (play, outcome), colour in zip(outcomes.items(), _COLOURS, strict=False):
        times = [0.0, *(at_s for at_s, _ in outcome.switches), play.end_s]
        nodes = [_prefill(shape) for shape in (play.shape, *(shape for _, shape in outcome.switches))]
        label = f"{play.arm} from {play.shape}"
        splits.step([at_s / 60 for at_s in times], [*nodes, nodes[-1]], where="post", color=colour, label=label)
        at = (np.arange(len(outcome.windows)) + 0.5) * WINDOW_S / 60
        served.plot(at, outcome.windows, color=colour, label=label)
    splits.set(xlabel="minute", ylabel="prefill nodes")
    served.set(xlabel="minute", ylabel="requests/s, windows of 10 minutes", ylim=(0, None))
    splits.legend(fontsize="small")
    return picture


def _splits(outcomes: Mapping[Play, Outcome]) -> Picture | None:
    """What every split of those searched served."""
    curves = {(play.load, play.arm): outcome.searched for play, outcome in outcomes.items() if outcome.searched}
    loads = list(dict.fromkeys(load for load, _ in curves))
    if not loads:
        return None
    picture, all_axes = _subplots(len(loads), 4.0)
    for load, axes in zip(loads, all_axes, strict=True):
        for (of_load, arm), curve in curves.items():
            if of_load == load:
                axes.plot([_prefill(shape) for shape in curve], list(curve.values()), marker="o", label=arm)
        axes.set(title=load, xlabel="prefill nodes of 9", ylabel="requests/s", ylim=(0, None))
        axes.legend(fontsize="small")
    return picture


def _open_loop(rows: Sequence[Row]) -> Picture | None:
    """Latency over the arrival rate: each side, the paper's dashed."""
    metrics = (Metric.TTFT_P95, Metric.E2E_P50)
    known = {(row.row, row.metric): row for row in rows if row.table == "Table 6"}
    rates = [rate for rate in RATES if (f"{rate} agents/min", f"{Metric.TTFT_P95}_{Side.OURS}") in known]
    if not rates:
        return None
    picture, both = _subplots(2)
    for axes, metric in zip(both, metrics, strict=True):
        for side, colour in zip((Side.OURS, Side.BEST_STATIC, Side.DYNAMO), _COLOURS, strict=False):
            of_side = [known.get((f"{rate} agents/min", f"{metric}_{side}")) for rate in rates]
            at = [float(rate) for rate, row in zip(rates, of_side, strict=True) if row]
            axes.plot(at, [row.ours for row in of_side if row], color=colour, marker="o", label=side)
            axes.plot(at, [row.paper for row in of_side if row], color=colour, linestyle="--", alpha=0.6)
        axes.plot([], [], color="0.4", linestyle="--", label="dashed: the paper")
        axes.set(xlabel="agents/minute", ylabel=f"{metric.replace('_', ' ')}, s", yscale="log")
        axes.legend(fontsize="small")
    return picture


def _sensitivity(name: str, plays: Mapping[str, Play], outcomes: Mapping[Play, Outcome]) -> Picture | None:
    """Throughput and switches by what was changed."""
    known = {label: outcomes[play] for label, play in plays.items() if play in outcomes}
    if not known:
        return None
    picture, (served, switched) = _subplots(2)
    labels, places = list(known), range(len(known))
    throughput = [outcome.stretches[SENSITIVITY.name][Metric.THROUGHPUT] for outcome in known.values()]
    served.bar(places, throughput, color=_OURS)
    switched.bar(places, [len(outcome.switches) for outcome in known.values()], color=_OURS)
    served.set_ylabel(f"requests/s, {SENSITIVITY.name} after warm-up")
    switched.set_ylabel("switches, warm-up included")
    for axes in (served, switched):
        axes.set_xticks(places, labels, rotation=25, ha="right", fontsize="small")
        axes.set_title(name)
    served.set_ylim(0.9 * min(throughput), 1.02 * max(throughput))
    return picture


def _of_load(outcomes: Mapping[Play, Outcome], load: str) -> dict[Play, Outcome]:
    return {play: outcome for play, outcome in outcomes.items() if play.load == load}


def _prefill(shape: str) -> int:
    return int(shape.partition("P")[0])
