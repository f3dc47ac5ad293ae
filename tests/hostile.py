"""Bytes no client would send, to every method of a server."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

LONGEST_BYTES = 300
_AT_ONCE = 32
_TIMEOUT_S = 30.0


async def send_random_bytes(
    channel: grpc.aio.Channel, methods: Sequence[str], count: int, seed: int
) -> Counter[grpc.StatusCode]:
    """Send `count` random byte strings, spread over unary methods ("/package.Service/Method"); statuses by number."""
    generator = random.Random(seed)
    payloads = [
        (methods[index % len(methods)], generator.randbytes(generator.randint(0, LONGEST_BYTES)))
        for index in range(count)
    ]
    seen: Counter[grpc.StatusCode] = Counter()
    gate = asyncio.Semaphore(_AT_ONCE)

    async def send(method: str, payload: bytes) -> None:
        async with gate:
            try:
                call: Any = channel.unary_unary(method)  # raw: bytes in, bytes out
                await call(payload, timeout=_TIMEOUT_S)
                seen[grpc.StatusCode.OK] += 1
            except grpc.aio.AioRpcError as error:
                seen[error.code()] += 1

    await asyncio.gather(*(send(method, payload) for method, payload in payloads))
    return seen


async def stream_random_bytes(
    channel: grpc.aio.Channel, method: str, count: int, seed: int, first: Sequence[bytes] = ()
) -> Counter[grpc.StatusCode]:
    """Open a stream per random byte string and send it after the `first` messages; statuses by number."""
    generator = random.Random(seed)
    seen: Counter[grpc.StatusCode] = Counter()
    for _ in range(count):
        open_stream: Any = channel.stream_stream(method)
        call = open_stream(timeout=_TIMEOUT_S)
        try:
            for payload in (*first, generator.randbytes(generator.randint(1, LONGEST_BYTES))):
                await call.write(payload)
            await call.done_writing()
            async for _ in call:
                pass
            seen[grpc.StatusCode.OK] += 1
        except grpc.aio.AioRpcError as error:
            seen[error.code()] += 1
        except asyncio.InvalidStateError:  # the server ended the call before everything was written
            seen[await call.code()] += 1
    return seen


def no_crash(seen: Counter[grpc.StatusCode]) -> bool:
    """Whether each answer was one a server gives on purpose."""
    return not set(seen) & {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE}
