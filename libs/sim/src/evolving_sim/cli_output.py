"""What people see of the command line: progress while runs are played, tables after them, results as files."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from evolving_sim.outcomes import Outcome
from evolving_sim.outcomes import Progress as HowFar
from evolving_sim.pairing import Paired
from evolving_sim.results import Summary

_PIPE_WIDTH = 240  # columns; a pipe has none of its own


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if value < 10 else f"{value:.1f} s"


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def _count(value: float) -> str:
    return f"{value:,.0f}"


FIGURES: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "requests": ("requests answered", _count),
    "requests_per_s": ("requests/s", lambda value: f"{value:.3f}"),
    "output_tokens_per_s": ("output tokens/s", _count),
    "ttft_s_mean": ("first token, mean", _seconds),
    "ttft_s_p50": ("first token, P50", _seconds),
    "ttft_s_p95": ("first token, P95", _seconds),
    "e2e_s_mean": ("whole answer, mean", _seconds),
    "e2e_s_p50": ("whole answer, P50", _seconds),
    "e2e_s_p95": ("whole answer, P95", _seconds),
    "tpot_s_mean": ("a token after the first, mean", lambda value: f"{1000 * value:.2f} ms"),
    "queue_s_mean": ("in the prefill queue, mean", _seconds),
    "most_loaded_wait_ratio": ("most loaded prefill node, of the mean", lambda value: f"{value:.2f}"),
    "prefill_idle_share": ("prefill nodes idle", _percent),
    "hit_rate": ("prompt tokens reused", _percent),
    "ideal_hit_rate": ("could have been reused", _percent),
    "lost_reuse_of_ideal": ("lost, of what could have been", _percent),
    "uncached_tokens_mean": ("computed prompt tokens a request", _count),
    "pause_s_mean": ("from an answer to the next request, mean", _seconds),
    "switches": ("switches", _count),
    "switch_s_mean": ("a switch took, mean", _seconds),
}
"""How each figure of a summary is shown: what it is called, and its value as text."""

_IN_ROWS = ("requests_per_s", "ttft_s_mean", "ttft_s_p95", "e2e_s_mean", "queue_s_mean", "hit_rate")
"""Those shown where runs or stretches are rows."""


def shown(name: str, value: float) -> str:
    """A figure of a summary as text; "-" where there is none."""
    return "-" if math.isnan(value) else FIGURES[name][1](value)


def console() -> Console:
    """Standard output; as wide as it needs where it is no terminal."""
    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=_PIPE_WIDTH)


def print_outcome(outcome: Outcome) -> None:
    """One run: its figures, the switches, its stretches, its kinds of requests."""
    out = console()
    table = _table("", "")
    for name in FIGURES:
        table.add_row(FIGURES[name][0], shown(name, getattr(outcome.summary, name)))
    out.print(table)
    for switch in outcome.switches:
        gain = "" if math.isnan(switch.gain) else f", {switch.gain:+.1%} expected"
        out.print(f"switch at {switch.at_s:.0f} s to {switch.shape}: {switch.moves} nodes{gain}")
    windows = _table("from", "split", *(FIGURES[name][0] for name in _IN_ROWS))
    for each in outcome.windows:
        windows.add_row(f"{each.from_s:.0f} s", each.shape, *_cells(each.summary))
    out.print(windows)
    if len(outcome.kinds) > 1:
        kinds = _table("kind", *(FIGURES[name][0] for name in _IN_ROWS))
        for kind, summary in outcome.kinds.items():
            kinds.add_row(kind, *_cells(summary))
        out.print(kinds)


def print_compared(names: Sequence[str], outcomes: Sequence[Outcome], paired: Sequence[Paired | None]) -> None:
    """Runs side by side, a column each; with what the first also answered, each but the first."""
    table = _table("", *names)
    table.add_row("split at the end", *(outcome.final_shape for outcome in outcomes))
    table.add_row("switches, those of the warm-up too", *(str(len(outcome.switches)) for outcome in outcomes))
    for name in FIGURES:
        table.add_row(FIGURES[name][0], *(shown(name, getattr(outcome.summary, name)) for outcome in outcomes))
    rows: Sequence[tuple[str, Callable[[Paired], str]]] = (
        (f"requests that {names[0]} answered too", lambda pair: _count(pair.requests)),
        ("  first token sooner by, mean", lambda pair: f"{pair.ttft_s_sooner:+.3f} s"),
        ("  first token sooner, of them", lambda pair: _percent(pair.ttft_sooner_share)),
        ("  whole answer sooner by, mean", lambda pair: f"{pair.e2e_s_sooner:+.3f} s"),
        ("  whole answer sooner, of them", lambda pair: _percent(pair.e2e_sooner_share)),
    )
    for title, text in rows if any(paired) else ():
        table.add_row(title, *(text(pair) if pair is not None and pair.requests else "-" for pair in paired))
    console().print(table)


def print_sweep(keys: Sequence[str], rows: Sequence[tuple[Mapping[str, Any], Outcome]]) -> None:
    """A row for each run; the best throughput is marked."""
    table = _table(*keys, "split at the end", *(FIGURES[name][0] for name in _IN_ROWS), "switches")
    best = max((outcome.summary.requests_per_s for _, outcome in rows), default=math.nan)
    for settings, outcome in rows:
        switches = str(len(outcome.switches))
        cells = [*(str(settings[key]) for key in keys), outcome.final_shape, *_cells(outcome.summary), switches]
        table.add_row(*cells, style="bold" if outcome.summary.requests_per_s == best else None)
    console().print(table)


def _cells(summary: Summary) -> list[str]:
    return [shown(name, getattr(summary, name)) for name in _IN_ROWS]


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_header=any(columns), show_edge=False, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """The file is whole or not there. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(path)


@contextmanager
def progress_bar() -> Iterator[Callable[[Sequence[HowFar]], None]]:
    """A bar over the simulated time of all runs, with how fast requests are answered; call it to move it.

    Nothing is drawn where standard error is no terminal.
    """
    error = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("{task.fields[runs]}simulated"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=error, disable=not error.is_terminal) as bar:
        task = bar.add_task("", total=None, runs="", speed="")
        begun_s = time.monotonic()

        def move(runs: Sequence[HowFar]) -> None:
            requests = sum(run.requests for run in runs)
            over = sum(run.now_s >= run.end_s for run in runs)
            bar.update(
                task,
                total=sum(run.end_s for run in runs),
                completed=sum(run.now_s for run in runs),
                runs=f"{over} of {len(runs)} runs, " if len(runs) > 1 else "",
                speed=f"{requests:,} requests, {requests / max(1e-3, time.monotonic() - begun_s):,.0f}/s",
            )

        yield move
