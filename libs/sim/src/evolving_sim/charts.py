"""Charts of runs, as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from evolving.core.planner import SplitShape
from evolving_sim.outcomes import Outcome
from evolving_sim.sweeps import Row

FIGURES = {
    "requests_per_s": "requests/s",
    "ttft_s_mean": "first token, mean (s)",
    "ttft_s_p95": "first token, P95 (s)",
    "e2e_s_mean": "whole answer, mean (s)",
    "hit_rate": "prompt tokens reused",
    "lost_reuse_of_ideal": "lost reuse",
}
"""What is drawn of a summary, and what its axis is called."""


def draw_run(outcome: Outcome, folder: Path) -> None:
    """`run.png`: what the stretches of a run served, one figure below the other, and its split."""
    _draw(folder / "run.png", {"": outcome})


def draw_compared(names: Sequence[str], outcomes: Sequence[Outcome], folder: Path) -> None:
    """`time.png`: the runs' stretches, a line each; `figures.png`: bars of the whole runs."""
    _draw(folder / "time.png", dict(zip(names, outcomes, strict=True)))
    figure = Figure(figsize=(11, 3 + 0.5 * len(names)), layout="constrained")
    for number, (axes, (name, title)) in enumerate(zip(_panels(figure, 2, 3), FIGURES.items(), strict=True)):
        axes.barh(range(len(names)), [getattr(outcome.summary, name) for outcome in outcomes])
        axes.set_yticks(range(len(names)), names if number % 3 == 0 else [""] * len(names))
        axes.invert_yaxis()
        axes.set_title(title)
    figure.savefig(folder / "figures.png", dpi=120)


def draw_sweep(rows: Sequence[Row], folder: Path) -> None:
    """`sweep.png`: each figure over the values of the first key; a line for each combination of the others."""
    first, *others = rows[0].settings
    ticks = list(dict.fromkeys(str(row.settings[first]) for row in rows))
    lines: dict[str, list[Row]] = {}
    for row in rows:
        name = ", ".join(f"{key.rpartition('.')[2]} {row.settings[key]}" for key in others)
        lines.setdefault(name, []).append(row)
    figure = Figure(figsize=(10, 6), layout="constrained")
    for axes, (figure_name, title) in zip(_panels(figure, 2, 3), FIGURES.items(), strict=True):
        for name, line in lines.items():
            places = [ticks.index(str(row.settings[first])) for row in line]
            axes.plot(places, [getattr(row.outcome.summary, figure_name) for row in line], marker="o", label=name)
        axes.set_xticks(range(len(ticks)), ticks)
        axes.set_title(title)
        axes.set_xlabel(first)
    if others:
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(folder / "sweep.png", dpi=120)


def _panels(figure: Figure, rows: int, columns: int) -> list[Axes]:
    """Row by row."""
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return panels


def _draw(path: Path, runs: Mapping[str, Outcome]) -> None:
    """Over time: the split, then figures of each stretch."""
    figure = Figure(figsize=(9, 10), layout="constrained")
    split, *others = _panels(figure, 5, 1)
    split.set_ylabel("prefill nodes")
    split.yaxis.set_major_locator(MaxNLocator(integer=True))
    for name, outcome in runs.items():
        shapes = [outcome.scenario["shape"], *(switch.shape for switch in outcome.switches)]
        edges_s = [0.0, *(switch.at_s for switch in outcome.switches), outcome.until_s]
        _steps(split, edges_s, [SplitShape.parse(shape).prefill for shape in shapes], name)
    for axes, (figure_name, title) in zip(others, list(FIGURES.items())[:4], strict=True):
        axes.set_ylabel(title)
        for name, outcome in runs.items():
            edges_s = [0.0, *(window.to_s for window in outcome.windows)]
            _steps(axes, edges_s, [getattr(window.summary, figure_name) for window in outcome.windows], name)
    for axes in (split, *others):
        axes.set_ylim(bottom=0)
        axes.sharex(split)
    others[-1].set_xlabel("minutes")
    if len(runs) > 1:
        figure.legend(*split.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=120)


def _steps(axes: Axes, edges_s: Sequence[float], values: Sequence[float], name: str) -> None:
    """A value for each stretch between two edges."""
    if values:
        axes.stairs(values, [edge_s / 60 for edge_s in edges_s], label=name, baseline=None)
