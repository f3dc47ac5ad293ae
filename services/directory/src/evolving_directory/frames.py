"""Records in a file: each a frame of length, CRC-32 and bytes, so that what was only half written is recognised."""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

_HEAD = struct.Struct("<II")  # bytes that follow; CRC-32 of the length and of them


class BadFrame(Exception):
    """The file holds no whole frame at `offset`."""

    def __init__(self, offset: int, why: str) -> None:
        super().__init__(f"{why} at byte {offset}")
        self.offset = offset


def frame(payload: bytes) -> bytes:
    """A record as it is written."""
    return _HEAD.pack(len(payload), _checksum(payload)) + payload


def _checksum(payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(len(payload).to_bytes(4, "little")))


def goes_on_after(path: Path, offset: int) -> bool:
    """Whether a whole frame follows the bad one at `offset`, if its length is to be believed. Raises OSError."""
    with path.open("rb") as file:
        file.seek(offset)
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return False
        length, _ = _HEAD.unpack(head)
    try:
        return any(True for _ in read_frames(path, offset + _HEAD.size + length))
    except BadFrame:
        return False


def read_frames(path: Path, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """(offset, record) of each frame from `start`, first to last. Raises BadFrame at the first that is not whole,
    OSError."""
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            at = start
            while at < len(data):
                if len(data) - at < _HEAD.size:
                    raise BadFrame(at, "the head of a record is cut off")
                length, checksum = _HEAD.unpack_from(data, at)
                payload = data[at + _HEAD.size : at + _HEAD.size + length]
                if len(payload) < length:
                    raise BadFrame(at, "a record is cut off, or its length is damaged")
                if _checksum(payload) != checksum:
                    raise BadFrame(at, "a record's checksum is wrong")
                yield at, payload
                at += _HEAD.size + length
