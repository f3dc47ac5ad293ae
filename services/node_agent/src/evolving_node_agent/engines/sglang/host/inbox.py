"""Work that other threads hand to the scheduler's thread."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class Inbox:
    """Calls, run in order between two iterations of the scheduler."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` soon. From any thread."""
        self._calls.put(call)

    async def call(self, function: Callable[[], Result]) -> Result:
        """Run `function` in the scheduler's thread and wait for its result here.

        Cancelling the wait does not take the call back: whatever `function` acquires must be releasable by a later
        call, and calls keep their order.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Result] = loop.create_future()

        def run() -> None:
            try:
                value = function()
            except Exception as error:  # noqa: BLE001 - handed to the waiter, whoever that is
                loop.call_soon_threadsafe(_fail, result, error)
            else:
                loop.call_soon_threadsafe(_finish, result, value)

        self.post(run)
        return await result

    def run(self, wait_s: float) -> None:
        """Run what has come; when there is nothing, wait up to `wait_s` for the first call."""
        deadline = time.monotonic() + wait_s
        while True:
            try:
                call = self._calls.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return
            call()
            deadline = 0.0


def _finish(result: asyncio.Future[Result], value: Result) -> None:
    if not result.done():
        result.set_result(value)


def _fail(result: asyncio.Future[Result], error: Exception) -> None:
    if not result.done():
        result.set_exception(error)
