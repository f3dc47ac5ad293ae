"""Waiting for what must come true, however loaded the machine is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

WAIT_S = 30.0
"""Long enough for anything a test waits for; it is reached only by a test that fails."""


async def eventually(check: Callable[[], bool | Awaitable[bool]]) -> None:
    """Wait until `check` holds. Raises TimeoutError after WAIT_S."""
    async with asyncio.timeout(WAIT_S):
        while True:
            holds = check()
            if isinstance(holds, Awaitable):
                holds = await holds
            if holds:
                return
            await asyncio.sleep(0.02)
