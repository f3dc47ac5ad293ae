"""Ending tasks and waiting for the first of several."""

from __future__ import annotations

import asyncio

import pytest

from evolving.runtime.tasks import end_tasks, first_of


async def stubborn(started: asyncio.Event, release: asyncio.Event) -> None:
    """Ends only when it is released, however often it is cancelled."""
    started.set()
    while not release.is_set():
        try:
            await release.wait()
        except asyncio.CancelledError:
            continue


async def test_ending_tasks_waits_for_them_and_keeps_their_failures_to_itself() -> None:
    async def fails_late() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("on the way out")

    tasks = [asyncio.create_task(asyncio.Event().wait()), asyncio.create_task(fails_late())]
    await asyncio.sleep(0)
    await end_tasks(*tasks)
    assert all(task.done() for task in tasks)
    await end_tasks()


async def test_ending_tasks_does_not_swallow_a_cancellation_of_the_caller() -> None:
    started, release = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(stubborn(started, release))
    await started.wait()
    ending = asyncio.create_task(end_tasks(task))
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    release.set()
    await task


async def test_the_first_ends_the_others() -> None:
    cancelled = asyncio.Event()

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    await first_of(waits(), asyncio.sleep(0))
    async with asyncio.timeout(10):
        await cancelled.wait()


async def test_a_failure_of_the_first_is_raised() -> None:
    async def fails() -> None:
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        await first_of(asyncio.Event().wait(), fails())
