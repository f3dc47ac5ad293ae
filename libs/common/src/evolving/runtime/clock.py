"""Time, injected: the wall clock of a running service and its virtual twin for tests."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from typing import Protocol


class Clock(Protocol):
    """Where the shell gets time from. Core never sees one: it is handed `now_s`."""

    def now_s(self) -> float:
        """Monotonic seconds from an arbitrary origin; for deadlines and durations."""
        ...

    def wall_s(self) -> float:
        """Unix seconds; for records that people or other machines read, never for deadlines."""
        ...

    async def sleep(self, duration_s: float) -> None:
        """Return after `duration_s`; at once (but after yielding) when it is not positive."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_s(self) -> float:
        """`time.monotonic()`."""
        return time.monotonic()

    def wall_s(self) -> float:
        """`time.time()`."""
        return time.time()

    async def sleep(self, duration_s: float) -> None:
        """`asyncio.sleep`."""
        await asyncio.sleep(max(0.0, duration_s))


class ManualClock:
    """Virtual time that moves only when a test calls `advance`."""

    def __init__(self, now_s: float = 0.0, wall_s: float = 1_700_000_000.0) -> None:
        self._now_s = now_s
        self._wall_offset_s = wall_s - now_s
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now_s(self) -> float:
        """Virtual monotonic seconds."""
        return self._now_s

    def wall_s(self) -> float:
        """Virtual unix seconds; they move with `now_s`."""
        return self._now_s + self._wall_offset_s

    async def sleep(self, duration_s: float) -> None:
        """Wait until `advance` has moved time by `duration_s`."""
        if duration_s <= 0:
            await asyncio.sleep(0)
            return
        wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_s + duration_s, next(self._order), wake))
        await wake

    def jump(self, duration_s: float) -> None:
        """Move time without waking anyone: an event loop that stalled for `duration_s`."""
        assert duration_s >= 0
        self._now_s += duration_s

    async def advance(self, duration_s: float) -> None:
        """Move time by `duration_s`, waking each sleeper at its own moment and letting it run before time goes on."""
        assert duration_s >= 0
        end_s = self._now_s + duration_s
        await self.settle()
        while self._sleepers and self._sleepers[0][0] <= end_s:
            wake_s, _, wake = heapq.heappop(self._sleepers)
            self._now_s = max(self._now_s, wake_s)
            if not wake.done():
                wake.set_result(None)
                await self.settle()
        self._now_s = max(self._now_s, end_s)
        await self.settle()

    async def settle(self, turns: int = 50) -> None:
        """Let everything that is ready run, without moving time."""
        for _ in range(turns):
            await asyncio.sleep(0)
