"""`make paper`: play what is needed, each run once, on some processes; then tables, charts and the report."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from evolving_sim.paper.charts import draw
from evolving_sim.paper.compare import Measured, Place, Row, compare
from evolving_sim.paper.criteria import Check, evaluate
from evolving_sim.paper.performing import cost, perform
from evolving_sim.paper.plays import Outcome, Play
from evolving_sim.paper.report import write_report, write_tables
from evolving_sim.paper.runs import QUICK, Source, plays_of, sensitivity, shortened, sources

QUICK_SHARE = 0.4
"""Of the time that each run of quick mode takes."""


@dataclass(frozen=True, slots=True)
class PaperResult:
    """What was made."""

    rows: list[Row]
    checks: list[Check]
    report: Path
    tables: Path
    wall_s: float


def make_paper(output: Path, *, quick: bool, processes: int, only: Sequence[str] = ()) -> PaperResult:
    """Write report.md, its charts, tables.json and runs.json into `output`.

    `quick`: a few rows, and less than half of each run's time. `only`: the tables with these names, as the report has
    them; ValueError where one isn't known.
    """
    begun_s = time.monotonic()
    wanted = _wanted(quick=quick, only=only)
    variants = {} if quick or only else sensitivity()
    plays = list(plays_of(wanted))
    plays += [play for some in variants.values() for play in some.values()]
    outcomes = play_all(list(dict.fromkeys(plays)), processes)
    output.mkdir(parents=True, exist_ok=True)
    _write_runs(outcomes, output / "runs.json")
    measured = {place: source.combine([outcomes[play] for play in source.plays]) for place, source in wanted.items()}
    wall_s = time.monotonic() - begun_s
    notes = [_how_long(outcomes, wall_s, processes)]
    if quick:
        notes.insert(
            0, f"Quick mode: few rows, runs cut to {QUICK_SHARE:.0%} of their time, so no claim of the paper's."
        )
    return _write(output, measured, outcomes, variants, notes, wall_s)


def _write(
    output: Path,
    measured: Measured,
    outcomes: Mapping[Play, Outcome],
    variants: Mapping[str, Mapping[str, Play]],
    notes: Sequence[str],
    wall_s: float,
) -> PaperResult:
    rows = compare(measured)
    checks = evaluate(rows, measured)
    charts = draw(rows, outcomes, variants, output)
    write_tables(rows, output / "tables.json")
    write_report(rows, checks, charts, output / "report.md", notes=notes)
    _show(checks, output / "report.md")
    return PaperResult(rows, checks, output / "report.md", output / "tables.json", wall_s)


def _show(checks: Sequence[Check], report: Path) -> None:
    table = Table("", "claim", "", "found (simulated)", title="What bears out")
    words = {True: "yes", False: "no", None: "not played"}
    for check in checks:
        table.add_row(str(check.criterion), check.claim, words[check.met], check.found)
    Console().print(table, f"{report}, with tables.json, runs.json and charts beside it", sep="\n")


def _wanted(*, quick: bool, only: Sequence[str]) -> dict[Place, Source]:
    every = sources()
    if unknown := sorted(set(only) - {table for table, _, _ in every}):
        known = ", ".join(dict.fromkeys(table for table, _, _ in every))
        raise ValueError(f"no table named {', '.join(unknown)}; there are: {known}")
    wanted = {place: source for place, source in every.items() if not only or place[0] in only}
    if not quick:
        return wanted
    return {
        place: replace(source, plays=(shortened(source.plays[0], QUICK_SHARE),))  # the first seed alone
        for place, source in wanted.items()
        if place in QUICK
    }


def play_all(plays: Sequence[Play], processes: int) -> dict[Play, Outcome]:
    """Play each, the longest first, with a progress bar (in a file: lines); in the order given. One process: this."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    outcomes: dict[Play, Outcome] = {}
    with Progress(*columns) as progress:
        task = progress.add_task("simulating", total=len(plays))
        for play, outcome in _played(sorted(plays, key=cost, reverse=True), processes):
            outcomes[play] = outcome
            progress.update(task, advance=1, description=f"simulated {play.label}"[:48].ljust(48))
            if not progress.console.is_terminal:
                print(f"{len(outcomes)} of {len(plays)}: {play.label}, {outcome.wall_s:.0f} s", flush=True)
    return {play: outcomes[play] for play in plays}


def _played(plays: Sequence[Play], processes: int) -> Iterator[tuple[Play, Outcome]]:
    """As each is over."""
    if processes == 1:
        yield from ((play, perform(play)) for play in plays)
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        futures = {pool.submit(perform, play): play for play in plays}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _write_runs(outcomes: Mapping[Play, Outcome], path: Path) -> None:
    runs = [asdict(play) | outcome.as_json() for play, outcome in outcomes.items()]
    path.write_text(json.dumps({"simulated": True, "runs": runs}, ensure_ascii=False, indent=1) + "\n")


def _how_long(outcomes: Mapping[Play, Outcome], wall_s: float, processes: int) -> str:
    requests, played_s = (sum(getattr(each, name) for each in outcomes.values()) for name in ("requests", "wall_s"))
    return (
        f"{len(outcomes)} runs, {requests:,} requests, in {wall_s / 60:.0f} minutes on {processes} processes: "
        f"{requests / max(played_s, 1e-9):,.0f} simulated requests per second of a process."
    )
