"""Checksummed frames over TCP, and what mock engines say to one another in them.

A frame is length (u32), CRC-32 of the payload (u32), payload: one msgpack message. A frame whose checksum is wrong is
reported as `Damaged` and the stream goes on, since its length field held.
"""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import AsyncIterator

import msgspec

from evolving.runtime.clock import Clock

_HEADER = struct.Struct("<II")
_MAX_FRAME_BYTES = 64 * 1024 * 1024


class Claim(msgspec.Struct, tag="claim", frozen=True):
    """Decode leg → prefill leg: keep the KV for as long as this connection stands; a Pull will follow."""

    transfer_id: int


class Pull(msgspec.Struct, tag="pull", frozen=True):
    """Decode leg → prefill leg it claimed: send the prompt's KV from block `first_block` on, when it is there."""

    kv_format: str
    first_block: int


class Dismiss(msgspec.Struct, tag="dismiss", frozen=True):
    """Decode node → prefill leg: the decode leg that had its room ended before the KV was there."""

    transfer_id: int


class Waiting(msgspec.Struct, tag="waiting", frozen=True):
    """The prefill leg isn't done, but lives."""


class Page(msgspec.Struct, tag="page", frozen=True):
    """KV of one block of the prompt; the last one may be incomplete."""

    index: int
    data: bytes


class Held(msgspec.Struct, tag="held", frozen=True):
    """In place of the next `pages` pages, where KV bytes follow from names."""

    pages: int


class PagesEnd(msgspec.Struct, tag="end", frozen=True):
    """All pages asked for were sent. `first_token`: what the prefill leg sampled."""

    first_token: int


class Resend(msgspec.Struct, tag="resend", frozen=True):
    """These pages came damaged."""

    indices: list[int]


class Landed(msgspec.Struct, tag="landed", frozen=True):
    """The decode leg has everything."""


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The other side's leg is over without success."""

    reason: str


class Read(msgspec.Struct, tag="read", frozen=True):
    """Send these blocks of your L2, as far as you have them without a gap."""

    incarnation: str
    kv_format: str
    names: list[bytes]


class Damaged(msgspec.Struct, tag="damaged", frozen=True):
    """Never sent: stands for a frame whose checksum was wrong."""


Message = Claim | Pull | Dismiss | Waiting | Page | Held | PagesEnd | Resend | Landed | Failed | Read | Damaged
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()


async def paced(clock: Clock, pages: int, page_s: float, silence_s: float) -> AsyncIterator[int]:
    """Let the time of sending pages pass; yields how many are due, often enough that no peer takes it for a stall."""
    step = pages if page_s * pages <= silence_s / 4 else max(1, int(silence_s / 4 / page_s))
    for first in range(0, pages, step or 1):
        due = min(step, pages - first)
        await clock.sleep(due * page_s)
        yield due


class Disconnected(Exception):
    """The connection broke, fell silent for too long, or carried something that is no frame."""


class Connection:
    """One TCP connection between two engines."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silence_s: float) -> None:
        self._reader = reader
        self._writer = writer
        self._silence_s = silence_s  # receive gives up after so many seconds without a message

    @classmethod
    async def open(cls, address: str, silence_s: float) -> Connection:
        """Connect to "host:port". Raises Disconnected."""
        host, _, port = address.rpartition(":")
        try:
            async with asyncio.timeout(silence_s):
                reader, writer = await asyncio.open_connection(host, int(port))
        except (OSError, TimeoutError, ValueError) as error:
            raise Disconnected(f"cannot reach {address}: {error}") from error
        return cls(reader, writer, silence_s)

    async def send(self, message: Message, *, damaged: bool = False) -> None:
        """Send one message; `damaged` flips a bit after the checksum was taken. Raises Disconnected."""
        payload = _encoder.encode(message)
        header = _HEADER.pack(len(payload), zlib.crc32(payload))
        if damaged:
            payload = payload[:-1] + bytes([payload[-1] ^ 1])
        if self._writer.is_closing():  # uvloop raises RuntimeError for a write then
            raise Disconnected("the peer is gone")
        try:
            self._writer.write(header + payload)
            async with asyncio.timeout(self._silence_s):
                await self._writer.drain()
        except (OSError, TimeoutError) as error:
            raise Disconnected(str(error)) from error

    async def receive(self, *, patient: bool = False) -> Message:
        """The next message; `patient` waits for ever. Raises Disconnected."""
        try:
            async with asyncio.timeout(None if patient else self._silence_s):
                length, checksum = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
                if length > _MAX_FRAME_BYTES:
                    raise Disconnected(f"a frame of {length} bytes")
                payload = await self._reader.readexactly(length)
        except (OSError, EOFError, TimeoutError) as error:
            raise Disconnected(f"{type(error).__name__}: {error}") from error
        if zlib.crc32(payload) != checksum:
            return Damaged()
        try:
            return _decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise Disconnected(f"not a message: {error}") from error

    async def close(self) -> None:
        """Send what was written and close; at once where the task is cancelled meanwhile. Never fails."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            return  # the peer was gone already, which is as closed as it gets
        except asyncio.CancelledError:
            self._writer.transport.abort()
            raise
