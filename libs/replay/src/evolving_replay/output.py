"""What people see: a progress bar while it plays, a table after it, and the report as a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from evolving_replay.report import CAUSES, SOURCES, Latency, NodeLoad, Report
from evolving_replay.tally import Progress

_PIPE_WIDTH = 240  # columns; a pipe has none of its own


def progress_bar(console: Console) -> Bar:
    """A bar over requests; `show` moves it. Nothing is drawn where the console is no terminal."""
    return Bar(
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def show(bar: Bar, progress: Progress) -> None:
    """Draw how far it is."""
    if not bar.task_ids:
        bar.add_task("", total=progress.total_requests, state="")
    failed = f", {progress.failed_requests} failed" if progress.failed_requests else ""
    bar.update(
        bar.task_ids[0],
        completed=progress.finished_requests + progress.failed_requests,
        state=f"{progress.running_requests} running of {progress.running_sessions} sessions{failed}; "
        f"{progress.cached_tokens} tokens reused, {percent(progress.cached_tokens / max(1, progress.prompt_tokens))}",
    )


def print_report(report: Report) -> None:
    """A table on standard output."""
    console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=_PIPE_WIDTH)
    table = Table(box=box.SIMPLE_HEAD, show_header=False, show_edge=False, pad_edge=False)
    for name, value in _rows(report):
        table.add_row(name, value)
    console.print(table)


def write_report(path: Path, report: Report) -> None:
    """JSON. The file is whole or not there. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(report.as_json(), indent=2) + "\n", encoding="utf-8")
    part.replace(path)


def percent(share: float) -> str:
    """ "98.76 %"."""
    return f"{100 * share:.2f} %"


def _rows(report: Report) -> list[tuple[str, str]]:
    failures = ", ".join(f"{count} {reason}" for reason, count in sorted(report.failures.items()))
    causes = ", ".join(f"{cause} {percent(report.lost_by[cause])}" for cause in CAUSES if report.lost_by[cause])
    sources = ", ".join(f"{source} {percent(report.cached_by[source])}" for source in SOURCES)
    hidden = "nothing was fetched" if report.hidden_share is None else f"{percent(report.hidden_share)} hidden"
    speeds = (
        f"{report.requests_per_s:.2f} requests, {report.prompt_tokens_per_s:.0f} prompt tokens, "
        f"{report.output_tokens_per_s:.0f} output tokens"
    )
    unfinished = [("unfinished", f"{report.unfinished}")] if report.unfinished else []
    not_ended = (
        [("branches not ended", f"of {report.branches_not_ended} sessions")] if report.branches_not_ended else []
    )
    return [
        ("played", f"{report.sessions} sessions, {report.requests} requests in {report.wall_s:.1f} s"),
        ("failed", f"{report.failed}" + (f": {failures}" if failures else "")),
        *unfinished,
        ("sent again, moved", f"{report.resent}, {report.moved}"),
        *not_ended,
        ("first token", _latency(report.ttft)),
        ("whole answer", _latency(report.e2e)),
        ("a second", speeds),
        ("prompt tokens", f"{report.prompt_tokens}, the mean {report.prompt_tokens / max(1, report.requests):.0f}"),
        ("reused", f"{percent(report.hit_rate)}, of ideally {percent(report.ideal_hit_rate)}: {sources}"),
        ("lost", percent(report.lost_reuse) + (f": {causes}" if causes else "")),
        ("beyond ideal", percent(report.beyond_ideal)),
        ("fetched", f"in {report.fetch_s:.2f} s, {hidden}"),
        ("most loaded prefill", f"{report.most_loaded_prefill:.2f} of the mean"),
        *((f"  {node_id}", _load(load)) for node_id, load in report.nodes.items()),
    ]


def _load(load: NodeLoad) -> str:
    return (
        f"{load.prefills} prefills, {load.decodes} decodes, {load.computed_tokens} tokens computed, "
        f"{load.cached_tokens} reused"
    )


def _latency(latency: Latency) -> str:
    return f"mean {latency.mean_s:.3f} s, P50 {latency.p50_s:.3f}, P95 {latency.p95_s:.3f}, P99 {latency.p99_s:.3f}"
