"""A TCP proxy that stands between two ends and does to their bytes what a bad network may do."""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import AsyncIterator
from dataclasses import dataclass

from listening import listening

_CHUNK_BYTES = 16 << 10


class Way(enum.Enum):
    """Which way bytes go."""

    REQUEST = "from the client to the server"
    ANSWER = "from the server to the client"


@dataclass(frozen=True)
class At:
    """A byte of each connection, counted from its first, or from where the connection was when the fault began."""

    way: Way
    byte: int


class TcpProxy:
    """Forwards connections. Faults begin and end at any time."""

    def __init__(self, target_host: str, target_port: int) -> None:
        self._target = (target_host, target_port)
        self.address = ("", 0)  # where it listens
        self.delay_s = 0.0  # before each piece of at most 16 KiB is passed on
        self.open = asyncio.Event()  # while it is not set, no byte passes and no end is told
        self.open.set()
        self.forwarded = {Way.REQUEST: 0, Way.ANSWER: 0}  # bytes, over all connections
        self.met = 0  # times that the present fault was met
        self._flip: At | None = None
        self._cut: At | None = None
        self._faults = 0
        self._writers: set[asyncio.StreamWriter] = set()

    def harm(self, flip: At | None = None, cut: At | None = None) -> None:
        """From now on, in every connection: this byte arrives altered, or the connection ends before it."""
        self._flip, self._cut = flip, cut
        self._faults += 1
        self.met = 0

    def heal(self) -> None:
        """Be a good network again."""
        self.harm()
        self.delay_s = 0.0
        self.open.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either side ends it."""
        try:
            other_reader, other_writer = await asyncio.open_connection(*self._target)
        except OSError:
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
            self._writers -= {writer, other_writer}
            other_writer.close()

    async def _forward(self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passed, faults = 0, self._faults
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_CHUNK_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self.open.wait()
                if faults != self._faults:
                    passed, faults = 0, self._faults
                kept = self._harmed(At(way, passed), data)
                writer.write(kept)
                await writer.drain()
                passed += len(kept)
                self.forwarded[way] += len(kept)
                if len(kept) < len(data):
                    return

    def _harmed(self, start: At, data: bytes) -> bytes:
        """What arrives of the data that begins there."""
        if (at := self._place(self._flip, start, data)) is not None:
            data = data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]
        if (at := self._place(self._cut, start, data)) is not None:
            data = data[:at]
        return data

    def _place(self, fault: At | None, start: At, data: bytes) -> int | None:
        if fault is None or fault.way is not start.way or not 0 <= fault.byte - start.byte < len(data):
            return None
        self.met += 1
        return fault.byte - start.byte

    def close(self) -> None:
        """End every connection at once."""
        for writer in self._writers:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def proxied(target: tuple[str, int], listen: tuple[str, int] = ("127.0.0.1", 0)) -> AsyncIterator[TcpProxy]:
    """A proxy that listens."""
    proxy = TcpProxy(*target)
    async with listening(proxy.serve, *listen) as proxy.address:
        try:
            yield proxy
        finally:
            proxy.close()
