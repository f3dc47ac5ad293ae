"""A service in the test's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from waiting import eventually

from evolving.runtime.service import Service


@asynccontextmanager
async def running(
    service: Service[Any], main: Coroutine[Any, Any, None], serves: Callable[[], bool] | None = None
) -> AsyncIterator[asyncio.Task[None]]:
    """Run a service's main, here once it `serves` (None: once it listens), and drained at the end of the block.

    Raises what main ends with before it serves.
    """
    body = asyncio.create_task(main)
    try:
        await eventually(lambda: body.done() or (serves() if serves else bool(service.address)))
        if body.done():
            body.result()
            raise AssertionError("the service ended before it served")
        yield body
    finally:
        service.stop()
        await body
        await service.close()
