"""Turns to read from peers, for tasks that wait for them (`evolving.core.fetching`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from evolving.core.config import FetchConfig
from evolving.core.fetching import FetchTurns, Rank
from evolving.runtime.clock import Clock


class ReadTurns:
    """One per engine; all on one event loop."""

    def __init__(self, config: FetchConfig, clock: Clock) -> None:
        self._turns: FetchTurns[object] = FetchTurns(config)
        self._clock = clock
        self._granted: dict[object, asyncio.Event] = {}
        self._timer: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def turn(self, rank: Rank, size_bytes: int) -> AsyncIterator[None]:
        """Wait for a turn to read `size_bytes`; it ends with the block. Smallest rank first.

        A task that asks again without an `await` in between keeps its place: a turn that ended is given on only then.
        """
        key, granted = object(), asyncio.Event()
        self._granted[key] = granted
        self._turns.ask(key, rank, size_bytes)
        try:
            self._grant()
            await granted.wait()
            yield
        finally:
            del self._granted[key]
            self._turns.end(key)
            asyncio.get_running_loop().call_soon(self._grant)

    def close(self) -> None:
        """No more turns; those who wait are to be cancelled by whoever started them."""
        if self._timer is not None:
            self._timer.cancel()

    def _grant(self) -> None:
        now_s = self._clock.now_s()
        for key in self._turns.grant(now_s):
            self._granted[key].set()
        due_s = self._turns.next_wakeup_s(now_s)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due_s is not None:
            self._timer = asyncio.create_task(self._grant_later(due_s - now_s))

    async def _grant_later(self, delay_s: float) -> None:
        await self._clock.sleep(delay_s)
        self._timer = None
        self._grant()
