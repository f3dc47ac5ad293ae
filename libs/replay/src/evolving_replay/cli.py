"""evolving-replay: the command line."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from evolving_client import Client, DeadlineExceeded, EvolvingError, RetryPolicy
from evolving_client.ctl.failure import Failure, from_error, refused, unreachable, usage
from evolving_replay.options import Arrivals, ReplayError, ReplayOptions
from evolving_replay.output import print_report, progress_bar, show, write_report
from evolving_replay.player import connect, replay, served_model
from evolving_replay.report import Report
from evolving_replay.selection import Limits, limits_of, select
from evolving_sim.trace_files import TraceError, read_sessions
from evolving_sim.traces import TraceSession

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(\d{1,5})")
_FIRST_ANSWER_S = 10.0
_INTERRUPTED = 130  # as a shell says it of a process that SIGINT ended

_HELP = """Play recorded agent sessions against a gateway, and report latency, reuse, and where reuse was lost.

TRACE is JSON lines, plain, .gz or .xz: agent sessions in the Weka/AgentX form, as of Claude Code, or Mooncake's
request trace. It carries no text; token ids are made from its block ids.

Ctrl-C ends a replay: branches are ended, and the report of what was played says that it is not complete. A second one
leaves at once.

Exit codes: 0 played; 1 refused by the gateway, or no request finished; 2 wrong usage; 3 the gateway can't be reached;
130 interrupted.
"""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(help=_HELP)
def _replay(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="file of recorded sessions")],
    gateway: Annotated[
        str, typer.Option(envvar="EVOLVING_GATEWAY", help="host:port of a gateway, or several, comma-separated")
    ],
    token_file: Annotated[
        Path | None, typer.Option(envvar="EVOLVING_TOKEN_FILE", help="file holding the bearer token")
    ] = None,
    model: Annotated[str, typer.Option(help="left out: the only one served")] = "",
    sessions: Annotated[int, typer.Option(min=0, help="play the first so many that keep the limits; 0: all")] = 0,
    max_session_hours: Annotated[
        float, typer.Option(min=0, help="leave out sessions that were recorded for longer; 0: no limit")
    ] = 6.0,
    max_prompt_tokens: Annotated[
        int, typer.Option(min=0, help="leave out sessions with a longer prompt; 0: the model's limit")
    ] = 0,
    arrivals: Annotated[
        Arrivals | None,
        typer.Option(help="so many sessions at a time, or requests when the trace says; left out: as the trace can"),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="closed arrivals: sessions at a time")] = 30,
    compression: Annotated[
        float, typer.Option(min=0.001, help="times in which agents think or come are divided by this")
    ] = 100.0,
    seed: Annotated[int, typer.Option(help="another one makes other tokens")] = 0,
    output: Annotated[Path | None, typer.Option(help="write the report here, as JSON")] = None,
) -> None:
    try:
        options = ReplayOptions(
            gateways=_addresses(gateway),
            token=_token_in(token_file),
            model=model,
            concurrency=concurrency,
            compression=compression,
            arrivals=arrivals or Arrivals.CLOSED,
            seed=seed,
        )
        if output is not None and output.is_dir():
            raise usage(f"--output: {output} is a directory; name a file")
        next(_sessions_of(trace), None)  # a bad trace is told before a gateway is asked
        limits = Limits(sessions, max_session_hours, max_prompt_tokens)
        report = asyncio.run(_play(trace, options, limits, as_recorded=arrivals is None))
        if output is not None:
            _write(output, report)
    except Failure as failure:
        typer.echo(f"evolving-replay: {' '.join(str(failure).split())}", err=True)
        raise typer.Exit(code=int(failure.code)) from failure
    print_report(report)
    if not report.complete:
        typer.echo("evolving-replay: interrupted: the report is of what was played until then", err=True)
        raise typer.Exit(code=_INTERRUPTED)
    if not report.requests:
        typer.echo("evolving-replay: no request finished; see failures in the report", err=True)
        raise typer.Exit(code=1)


async def _play(trace: Path, options: ReplayOptions, limits: Limits, *, as_recorded: bool) -> Report:
    """Raises Failure."""
    console = Console(stderr=True, highlight=False)
    first = replace(options, request_timeout_s=_FIRST_ANSWER_S, retry=RetryPolicy(max_failures=1))
    try:
        async with connect(first) as client:
            chosen = await _choose(client, trace, options, limits, console)
    except EvolvingError as error:
        raise _unanswered(error, options) from error
    if as_recorded and all(session.open_loop for session in chosen):
        options = replace(options, arrivals=Arrivals.OPEN)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, interrupt)
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    try:
        with progress_bar(console) as bar:
            return await replay(chosen, options, lambda progress: show(bar, progress), stop)
    except EvolvingError as error:
        raise _unanswered(error, options) from error
    except ReplayError as error:
        raise usage(str(error)) from error


async def _choose(
    client: Client, trace: Path, options: ReplayOptions, limits: Limits, console: Console
) -> list[TraceSession]:
    """The sessions that keep the limits, the model's among them. Raises Failure and EvolvingError."""
    try:
        served = await served_model(client, options.model)
    except ReplayError as error:
        raise refused(str(error)) from error
    chosen, left_out = select(_sessions_of(trace), limits_of(served, limits))
    if not chosen and not left_out:
        raise usage(f"{trace} holds no session")
    if not chosen:
        takes = f"the model takes prompts of {served.max_prompt_tokens} tokens"
        raise usage(f"no session of {trace} keeps the limits: {left_out} are too long; {takes}")
    if left_out:
        console.print(f"{len(chosen)} sessions; {left_out} left out: too long for the limits or the model")
    return chosen


def _sessions_of(trace: Path) -> Iterator[TraceSession]:
    """`read_sessions`. Raises Failure."""
    try:
        yield from read_sessions(trace)
    except OSError as error:
        raise usage(f"{trace} can't be read: {error.strerror or error}") from error
    except TraceError as error:
        raise usage(f"not a trace: {error}") from error


def _unanswered(error: EvolvingError, options: ReplayOptions) -> Failure:
    """The failure behind a gateway that doesn't say what it serves."""
    where = f"the gateway at {', '.join(options.gateways)}"
    if isinstance(error, DeadlineExceeded):
        return unreachable(f"{where} did not answer within {_FIRST_ANSWER_S:g} s")
    return from_error(error, where, _FIRST_ANSWER_S)


def _addresses(given: str) -> tuple[str, ...]:
    """Gateways of a list. Raises Failure."""
    addresses = tuple(address.strip() for address in given.split(","))
    for address in addresses:
        match = _ADDRESS.fullmatch(address)
        if match is None or not 0 < int(match[2]) < 65536:
            raise usage(f"--gateway: {address!r} is not host:port")
    return addresses


def _token_in(path: Path | None) -> str | None:
    """The token a file holds, if one is given. Raises Failure."""
    if path is None:
        return None
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise usage(f"--token-file: {path} can't be read ({error}); give a text file") from error
    if not token:
        raise usage(f"--token-file: {path} is empty; put the token in it")
    return token


def _write(path: Path, report: Report) -> None:
    try:
        write_report(path, report)
    except OSError as error:
        print_report(report)
        raise usage(f"--output: {path} can't be written: {error.strerror or error}") from error


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="evolving-replay")
