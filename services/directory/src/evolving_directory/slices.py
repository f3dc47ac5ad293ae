"""Long work, a few milliseconds at a time, so that other calls get their turn in between."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TypeVar, cast

Answer = TypeVar("Answer")


async def in_turns(parts: Generator[None, None, Answer]) -> Answer:
    """What a read in parts answers."""
    try:
        while True:
            next(parts)
            await asyncio.sleep(0)
    except StopIteration as done:
        return cast("Answer", done.value)
    finally:
        parts.close()
