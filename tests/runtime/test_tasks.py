"""Ending tasks, waiting for the first of several, staying with a thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from evolving.runtime.tasks import end_tasks, first_of, in_thread


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


async def test_a_thread_is_not_left_before_its_end() -> None:
    started, release, lock = asyncio.Event(), threading.Event(), asyncio.Lock()
    loop = asyncio.get_running_loop()

    def work() -> None:
        loop.call_soon_threadsafe(started.set)
        release.wait()

    async def alone() -> None:
        async with lock:
            await in_thread(work)

    try:
        task = asyncio.create_task(alone())
        await started.wait()
        task.cancel()
        await asyncio.sleep(0.01)
        assert lock.locked()
    finally:
        release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not lock.locked()


async def test_what_a_thread_returns_or_raises_is_its_callers() -> None:
    assert await in_thread(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)
