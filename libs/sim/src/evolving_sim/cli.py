"""evolving-sim: the command line."""

from __future__ import annotations

import os
import signal
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from evolving_sim.arms.named import ARMS
from evolving_sim.cli_output import (
    print_compared,
    print_outcome,
    print_sweep,
    progress_bar,
    write_json,
)
from evolving_sim.outcomes import FORMAT, Outcome, play
from evolving_sim.pairing import pair
from evolving_sim.scenario_files.reading import ScenarioError, changed, parse, read, values_of
from evolving_sim.sweeps import Watch, play_all, sweep

_NOTHING_ANSWERED = 1
_USAGE = 2
_INTERRUPTED = 130  # as a shell says it of a process that SIGINT ended

_HELP = """Simulate a cluster of Evolving Infra: what would a split, a planner's setting or another policy do?

The routing, planner, directory and eviction are the product's own code; nodes, links and agents are simulated, in
virtual time. A scenario is one TOML file; `evolving-sim example` prints one to start from.

\b
  evolving-sim example > my.toml
  evolving-sim run my.toml --json out.json --charts charts/
  evolving-sim compare my.toml --arm ours --arm ours-static --split 3P6D --split 4P5D
  evolving-sim sweep my.toml --set planner.window_s=300,600 --set shape=3P6D,4P5D

The same scenario and seed give the same results anywhere. Ctrl-C ends what runs and gives what there is so far; a
second one leaves at once.

Exit codes: 0 done; 1 nothing was answered; 2 wrong usage, a bad scenario or trace; 130 interrupted.
"""

app = typer.Typer(
    help=_HELP, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True
)

File = Annotated[Path, typer.Argument(metavar="FILE", help="scenario, TOML", show_default=False)]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="instead of what the file says; KEY is dotted", show_default=False),
]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="write the results here")]
Charts = Annotated[Path | None, typer.Option(metavar="DIR", help="draw charts into this folder")]
Processes = Annotated[int, typer.Option(min=1, help="runs at a time")]
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@app.command("run")
def _run(file: File, settings: Settings = None, json: Json = None, charts: Charts = None) -> None:
    """Play one scenario.

    \b
    evolving-sim run my.toml
    evolving-sim run my.toml --set seed=2 --set shape=5P4D --json out.json
    """
    _check_outputs(json, charts)
    with _telling():
        scenario = parse(changed(read(file), _single(settings)), file.parent)
        with _interruptible() as stopped, progress_bar() as move:
            outcome = play(scenario, lambda far: move([far]), stopped)
    print_outcome(outcome)
    _write(json, outcome.as_json())
    if charts is not None:
        from evolving_sim.charts import draw_run

        _draw(charts, lambda: draw_run(outcome, charts))
    _leave([outcome], stopped())


@app.command("compare")
def _compare(
    file: File,
    arms: Annotated[list[str] | None, typer.Option("--arm", help=", ".join(ARMS), show_default=False)] = None,
    shapes: Annotated[
        list[str] | None, typer.Option("--split", metavar="4P5D", help="to begin with", show_default=False)
    ] = None,
    settings: Settings = None,
    json: Json = None,
    charts: Charts = None,
    processes: Processes = CORES,
) -> None:
    """Play one workload under several arms or splits.

    Side by side, and request by request each beside the first: what agents ask is the same in all.

    \b
    evolving-sim compare my.toml --arm ours --arm dynamo --arm arrow
    evolving-sim compare my.toml --arm ours-static --split 3P6D --split 4P5D --split 5P4D
    """
    if not arms and not shapes:
        _fail("give what to compare: --arm, --split, or both")
    _check_outputs(json, charts)
    with _telling():
        raw = changed(read(file), _single(settings))
        given = parse(raw, file.parent)
        keys = {"arm": arms or [given.arm], "shape": shapes or [str(given.shape)]}
        cases = [{"arm": arm, "shape": shape} for arm in keys["arm"] for shape in keys["shape"]]
        files = [parse(changed(raw, case), file.parent) for case in cases]
        names = [" ".join(str(case[key]) for key in keys if len(keys[key]) > 1) or str(case["arm"]) for case in cases]
        with _interruptible() as stopped, progress_bar() as move:
            played = play_all(files, processes, Watch(move, stopped), keep_answers=True)
    some = [(name, outcome) for name, outcome in zip(names, played, strict=True) if outcome is not None]
    if not some:
        raise typer.Exit(_INTERRUPTED)
    names, outcomes = [name for name, _ in some], [outcome for _, outcome in some]
    first = outcomes[0].answers
    pairs = [None, *(pair(first, each.answers) if first and each.answers else None for each in outcomes[1:])]
    print_compared(names, outcomes, pairs)
    runs = [
        {"name": name, "paired_with_first": paired and paired.as_json(), "outcome": outcome.as_json()}
        for (name, outcome), paired in zip(some, pairs, strict=True)
    ]
    _write(json, {"format": FORMAT, "runs": runs})
    if charts is not None:
        from evolving_sim.charts import draw_compared

        _draw(charts, lambda: draw_compared(names, outcomes, charts))
    _leave(outcomes, stopped())


@app.command("sweep")
def _sweep(
    file: File,
    settings: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE,VALUE", help="values of a dotted key", show_default=False)
    ],
    json: Json = None,
    charts: Charts = None,
    processes: Processes = CORES,
) -> None:
    """Play every combination of some keys' values.

    \b
    evolving-sim sweep my.toml --set shape=3P6D,4P5D,5P4D --set seed=1,2,3
    evolving-sim sweep my.toml --set planner.window_s=300,600,1200 --set planner.gate=paper,default
    """
    _check_outputs(json, charts)
    with _telling():
        grid = {key: values_of(text) for key, text in map(_split, settings)}
        with _interruptible() as stopped, progress_bar() as move:
            rows = sweep(read(file), grid, processes, file.parent, Watch(move, stopped))
    print_sweep(list(grid), [(row.settings, row.outcome) for row in rows])
    _write(json, {"format": FORMAT, "rows": [row.as_json() for row in rows]})
    if charts is not None and rows:
        from evolving_sim.charts import draw_sweep

        _draw(charts, lambda: draw_sweep(rows, charts))
    _leave([row.outcome for row in rows], stopped())


@app.command("paper")
def _paper(
    quick: Annotated[bool, typer.Option("--quick", help="shorter runs and fewer: under two minutes")] = False,
    out: Annotated[Path, typer.Option(metavar="DIR", help="for report.md, tables.json and charts")] = Path(
        "build/paper"
    ),
    only: Annotated[list[str] | None, typer.Option(metavar="TABLE", help="these alone", show_default=False)] = None,
    processes: Processes = CORES,
) -> None:
    """Play the runs of the paper, and put its tables beside ours.

    \b
    evolving-sim paper --quick
    evolving-sim paper --only "Table 3" --out build/table-3
    """
    from evolving_sim.paper import make_paper

    try:
        made = make_paper(out, quick=quick, processes=processes, only=only or ())
    except ValueError as error:  # a table that isn't one
        _fail(f"--only: {error}")
    except OSError as error:
        _fail(f"--out: {out} can't be written: {error.strerror or error}")
    for check in made.checks:
        if check.met is not None:
            typer.echo(f"{'met   ' if check.met else 'MISSED'}  {check.claim}: {check.found}")
    typer.echo(f"{made.report}, after {made.wall_s:.0f} s")


@app.command("example")
def _example(
    name: Annotated[str, typer.Argument(metavar="NAME", help="agents, trace", show_default=False)] = "agents",
) -> None:
    """Print a scenario to start from, with what its keys mean.

    \b
    evolving-sim example > my.toml
    evolving-sim example trace > traffic.toml
    """
    files = {path.name.removesuffix(".toml"): path for path in _examples()}
    if name not in files:
        _fail(f"there is no example {name!r}; there are {', '.join(sorted(files))}")
    typer.echo(files[name].read_text(encoding="utf-8"), nl=False)


def _examples() -> Iterator[Any]:
    return (path for path in resources.files("evolving_sim.scenario_files").iterdir() if path.name.endswith(".toml"))


# -- what the commands share


def _split(setting: str) -> tuple[str, str]:
    key, equals, text = setting.partition("=")
    if not equals or not key:
        _fail(f"--set: {setting!r} is not KEY=VALUE, such as planner.window_s=300")
    return key.strip(), text


def _single(settings: Sequence[str] | None) -> Mapping[str, Any]:
    """One value a key."""
    single = {}
    for key, text in map(_split, settings or ()):
        values = values_of(text)
        if len(values) != 1:
            _fail(f"--set: {key} takes one value here, got {text!r}; evolving-sim sweep plays several")
        single[key] = values[0]
    return single


@contextmanager
def _telling() -> Iterator[None]:
    """What is wrong with the input is told in a line or some, not in a traceback."""
    try:
        yield
    except ScenarioError as error:
        _fail(str(error))
    except BrokenProcessPool:
        _fail("a run's process was ended from outside, for want of memory perhaps: try fewer --processes")


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed; pressed again it does what it always does."""
    pressed = False

    def press(_number: int, _frame: types.FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _check_outputs(json: Path | None, charts: Path | None) -> None:
    """Before hours of simulation, not after."""
    if json is not None and json.is_dir():
        _fail(f"--json: {json} is a folder; name a file")
    if charts is not None and charts.exists() and not charts.is_dir():
        _fail(f"--charts: {charts} is a file; name a folder")


def _write(path: Path | None, document: Mapping[str, Any]) -> None:
    if path is None:
        return
    try:
        write_json(path, document)
    except OSError as error:
        _fail(f"--json: {path} can't be written: {error.strerror or error}")


def _draw(folder: Path, draw: Callable[[], None]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draw()
    except OSError as error:
        _fail(f"--charts: {folder} can't be written: {error.strerror or error}")


def _leave(outcomes: Sequence[Outcome], stopped: bool) -> None:
    """Exit with what the outcomes say."""
    if stopped:
        warming = "" if any(outcome.summary.requests for outcome in outcomes) else ", still in the warm-up"
        typer.echo(f"evolving-sim: interrupted: the figures are of what was simulated until then{warming}", err=True)
        raise typer.Exit(_INTERRUPTED)
    if not any(outcome.summary.requests for outcome in outcomes):
        typer.echo("evolving-sim: nothing was answered after the warm-up: see seconds and warm_up_s", err=True)
        raise typer.Exit(_NOTHING_ANSWERED)


def _fail(message: str) -> NoReturn:
    for line in message.splitlines():
        typer.echo(f"evolving-sim: {line}", err=True)
    raise typer.Exit(_USAGE)


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="evolving-sim")


if __name__ == "__main__":
    main()
