"""What asyncio leaves to its users: ending tasks without losing one's own cancellation, waiting for whichever comes
first, and staying with a thread to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they have ended, with whatever outcome; who needs to know it looks at the task.

    Awaiting a cancelled task and suppressing CancelledError would also swallow a cancellation of the caller.
    """
    for task in tasks:
        task.cancel()
        task.add_done_callback(_look_away)
    if tasks:
        await asyncio.wait(tasks)


async def first_of(*works: Coroutine[Any, Any, Any]) -> None:
    """Return once one of these is done; the others are cancelled. Raises what the one that is done raised."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread. A caller that is cancelled meanwhile leaves only when `work` has ended, for nothing can
    stop it: a lock around it still means that there is one at a time."""
    task = asyncio.create_task(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_look_away)
        await asyncio.wait((task,))
        raise


def _look_away(task: asyncio.Task[Any]) -> None:
    """Keep asyncio from reporting an outcome that nobody wants."""
    if not task.cancelled():
        task.exception()
