"""What every command does around its own part: read the global options, run, end with a line and a code."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NoReturn, TypeVar

import typer

from evolving_client.ctl.cluster import Cluster, Options
from evolving_client.ctl.failure import Failure

Result = TypeVar("Result")


def options_of(context: typer.Context) -> Options:
    """The global options of a command."""
    options = context.obj
    assert isinstance(options, Options)
    return options


def run(context: typer.Context, action: Callable[[Cluster], Awaitable[Result]]) -> Result:
    """Do the asynchronous part of a command. A Failure ends the process with its line and code."""

    async def run_once() -> Result:
        async with Cluster(options_of(context)) as cluster:
            return await action(cluster)

    try:
        return asyncio.run(run_once())
    except Failure as failure:
        fail(failure)


def fail(failure: Failure) -> NoReturn:
    """End the process."""
    line = " ".join(str(failure).split())
    typer.echo(f"evolvectl: {line}", err=True)
    raise typer.Exit(code=int(failure.code))
