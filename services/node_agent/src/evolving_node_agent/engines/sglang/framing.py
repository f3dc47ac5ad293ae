"""Length-prefixed frames on asyncio streams: four bytes little-endian, then that many bytes."""

from __future__ import annotations

import asyncio
import struct

LENGTH = struct.Struct("<I")
FRAME_BYTES_MAX = 256 << 20


class BadFrame(Exception):
    """The peer announced a frame larger than any this protocol sends."""


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next frame, or None when the other side is gone (also in the middle of a frame). Raises BadFrame."""
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        if length > FRAME_BYTES_MAX:
            raise BadFrame(f"frame of {length} bytes")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def write_frame(writer: asyncio.StreamWriter, payload: bytes) -> None:
    """Queue one frame; nothing is lost by not draining, the transport buffers it."""
    writer.write(LENGTH.pack(len(payload)) + payload)
