"""TCP transports of a test's own, and memory for them to read and fill."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from random import Random

from evolving_node_agent.engines.sglang.host.tcp_transport import TcpTransport
from evolving_node_agent.engines.sglang.host.tcp_wire import TcpLimits

SECRET = b"the cluster's token"
# Small frames, so that a read has many; deadlines that only a test of deadlines reaches.
LIMITS = TcpLimits(frame_bytes=4096, handshake_s=60.0, stall_s=60.0, idle_s=60.0)
UNTOUCHED = 0xEE


class Memory:
    """Bytes at a known address."""

    def __init__(self, size: int, seed: int | None = None) -> None:
        """Random bytes by a seed; without one, all UNTOUCHED."""
        self._array = (ctypes.c_ubyte * size)()
        self.address = ctypes.addressof(self._array)
        self.size = size
        self.fill(bytes([UNTOUCHED]) * size if seed is None else Random(seed).randbytes(size))

    def fill(self, data: bytes) -> None:
        """Replace all of it."""
        memoryview(self._array).cast("B")[:] = data

    def bytes(self) -> bytes:
        """All of it."""
        return memoryview(self._array).tobytes()


@contextlib.contextmanager
def transport(
    secret: bytes = SECRET, limits: TcpLimits = LIMITS, port: int = 0, host: str = "127.0.0.1"
) -> Iterator[TcpTransport]:
    """One that listens; all its connections are over in the end."""
    opened = TcpTransport(host, "127.0.0.1", port, secret, limits)
    try:
        yield opened
    finally:
        opened.close()


class Outcome:
    """What a read told, each time it did."""

    def __init__(self, reader: TcpTransport, session: str, ranges: Sequence[tuple[int, int, int]]) -> None:
        self.told: list[bool] = []
        self._loop = asyncio.get_running_loop()
        self._first: asyncio.Future[bool] = self._loop.create_future()
        reader.read(session, ranges, self._over)

    def _over(self, ok: bool) -> None:
        self.told.append(ok)
        if len(self.told) == 1:
            self._loop.call_soon_threadsafe(self._first.set_result, ok)

    async def ok(self) -> bool:
        """Wait until it is over."""
        async with asyncio.timeout(60):
            return await self._first


async def read(reader: TcpTransport, session: str, ranges: Sequence[tuple[int, int, int]]) -> bool:
    """One read, to its end."""
    return await Outcome(reader, session, ranges).ok()


def through(session: str, address: tuple[str, int]) -> str:
    """The same peer, reached at another address."""
    return f"{address[0]}:{address[1]}#{session.partition('#')[2]}"


def port_of(session: str) -> int:
    """Where a transport listens."""
    return int(session.partition("#")[0].rpartition(":")[2])
