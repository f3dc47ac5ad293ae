"""Waiting for what must come true, however loaded the machine is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
import grpc.aio

Answer = TypeVar("Answer")

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


async def answered(call: Callable[[], Awaitable[Answer]]) -> Answer:
    """The answer to a call, made again while nobody can take it. Raises TimeoutError after WAIT_S."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
                    raise
            await asyncio.sleep(0.02)
