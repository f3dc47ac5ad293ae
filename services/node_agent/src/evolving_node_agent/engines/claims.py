"""Who is to come for the KV that a prefill leg holds. On one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable

from evolving.runtime.clock import Clock
from evolving.runtime.tasks import first_of


class Claims:
    """The decode legs that exist for one prefill leg and have not begun to take its KV. One may leave and another come:
    the KV goes when nobody has been there for `keep_s`."""

    def __init__(self) -> None:
        self._names: set[Hashable] = set()
        self._made = 0
        self._came = asyncio.Event()
        self._empty = asyncio.Event()

    def add(self, name: Hashable) -> None:
        """A decode leg will come."""
        self._names.add(name)
        self._made += 1
        self._came.set()
        self._empty.clear()

    def discard(self, name: Hashable) -> None:
        """It will not, if it was to."""
        self._names.discard(name)
        if not self._names:
            self._came.clear()
            self._empty.set()

    async def none_for(self, keep_s: float, clock: Clock) -> None:
        """Wait until there has been none for `keep_s`, counted from now at the earliest."""
        while True:
            if self._names:
                await self._empty.wait()
            made = self._made
            await first_of(self._came.wait(), clock.sleep(keep_s))
            if self._made == made and not self._names:
                return
