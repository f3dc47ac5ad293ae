"""Frames on streams: length and CRC-32 of what follows, four bytes little-endian each, then the bytes."""

from __future__ import annotations

import asyncio
import socket
import struct
import zlib

_HEAD = struct.Struct("<II")
FRAME_BYTES_MAX = 256 << 20


class BadFrame(Exception):
    """The peer announced a frame larger than any this protocol sends, or one was damaged on the way."""


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next frame, or None when the other side is gone (also in the middle of a frame). Raises BadFrame."""
    try:
        length, checksum = _HEAD.unpack(await reader.readexactly(_HEAD.size))
        if length > FRAME_BYTES_MAX:
            raise BadFrame(f"frame of {length} bytes")
        return _intact(await reader.readexactly(length), checksum)
    except (asyncio.IncompleteReadError, OSError):
        return None


def receive_frame(channel: socket.socket) -> bytes | None:
    """As `read_frame`, blocking, of a socket that nobody reads otherwise yet; not a byte more than the frame."""
    with channel.makefile("rb", buffering=0) as file:
        head = file.read(_HEAD.size) or b""
        if len(head) < _HEAD.size:
            return None
        length, checksum = _HEAD.unpack(head)
        return _intact(file.read(length) or b"", checksum)


def write_frame(writer: asyncio.StreamWriter, payload: bytes) -> None:
    """Queue one frame; nothing is lost by not draining, the transport buffers it."""
    writer.write(_HEAD.pack(len(payload), zlib.crc32(payload)) + payload)


def _intact(payload: bytes, checksum: int) -> bytes:
    if zlib.crc32(payload) != checksum:
        raise BadFrame(f"a frame of {len(payload)} bytes was damaged")
    return payload
