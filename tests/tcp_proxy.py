"""A TCP proxy that stands between two ends and does to their bytes what a bad network may do."""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import AsyncIterator
from dataclasses import dataclass

_CHUNK_BYTES = 16 << 10


class Way(enum.Enum):
    """Which way bytes go."""

    REQUEST = "from the client to the server"
    ANSWER = "from the server to the client"


@dataclass(frozen=True)
class At:
    """A byte of a connection, counted from its first."""

    way: Way
    byte: int


class TcpProxy:
    """Forwards connections. Faults may be set and taken back at any time; offsets count within each connection."""

    def __init__(self, target_host: str, target_port: int) -> None:
        self._target = (target_host, target_port)
        self.address = ("", 0)  # where it listens
        self.flip: At | None = None  # this byte arrives altered
        self.cut: At | None = None  # the connection ends before this byte passes
        self.delay_s = 0.0  # before each piece of at most 16 KiB is passed on
        self.open = asyncio.Event()  # while it is not set, no byte passes and no end is told
        self.open.set()
        self.forwarded = {Way.REQUEST: 0, Way.ANSWER: 0}  # bytes, over all connections
        self.connections = 0  # so far
        self._writers: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either side ends it."""
        self.connections += 1
        try:
            other_reader, other_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, other_writer}
        ways = [
            asyncio.create_task(self._forward(Way.REQUEST, reader, other_writer)),
            asyncio.create_task(self._forward(Way.ANSWER, other_reader, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            await self.open.wait()
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for end in (writer, other_writer):
                self._writers.discard(end)
                end.close()

    async def _forward(self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passed = 0
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_CHUNK_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self.open.wait()
                ends = self.cut is not None and self.cut.way is way and self.cut.byte < passed + len(data)
                if ends:
                    assert self.cut is not None
                    data = data[: max(0, self.cut.byte - passed)]
                writer.write(self._altered(way, passed, data))
                await writer.drain()
                passed += len(data)
                self.forwarded[way] += len(data)
                if ends:
                    return

    def _altered(self, way: Way, passed: int, data: bytes) -> bytes:
        if self.flip is None or self.flip.way is not way or not 0 <= self.flip.byte - passed < len(data):
            return data
        at = self.flip.byte - passed
        return data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]

    def close(self) -> None:
        """End every connection at once."""
        for writer in list(self._writers):
            writer.transport.abort()


@contextlib.asynccontextmanager
async def proxied(target: tuple[str, int], listen: tuple[str, int] = ("127.0.0.1", 0)) -> AsyncIterator[TcpProxy]:
    """A proxy that listens."""
    proxy = TcpProxy(*target)
    server = await asyncio.start_server(proxy.serve, *listen)
    proxy.address = server.sockets[0].getsockname()[:2]
    try:
        yield proxy
    finally:
        proxy.open.set()
        server.close()
        proxy.close()
        await server.wait_closed()
