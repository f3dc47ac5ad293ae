"""What the two ends of the TCP transport say.

The server greets with its nonce. The client answers with its own, the incarnation it wants and its proof; the server
with its proof, or with the reason why not. Then the client sends requests, each a list of (address, bytes), and the
server answers them in order: the bytes of all ranges of a request, one after another, cut into frames. Requests and
frames carry a checksum: it finds damage, not forgery.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from xxhash import xxh3_64_intdigest

from .authentication import NONCE_BYTES, PROOF_BYTES

MAGIC = b"evkv\0\0\0\1"
PURPOSE = b"evolving kv transport 1 "  # and the server's incarnation
INCARNATION_BYTES = 16
RANGES_MAX = 4096  # of one request

GREETING = struct.Struct(f"<8s{NONCE_BYTES}s")  # magic, nonce; a frame's payload
LOGIN = struct.Struct(f"<{NONCE_BYTES}s{INCARNATION_BYTES}s{PROOF_BYTES}s")  # nonce, wanted incarnation, proof
REQUEST = struct.Struct("<IQ")  # ranges, checksum of them
RANGE = struct.Struct("<QQ")  # address, bytes
FRAME = struct.Struct("<IIQ")  # kind, payload bytes, checksum of the payload

# Kinds of frames; payload: a GREETING; the server's proof; a reason in UTF-8; bytes of ranges.
HELLO, ACCEPTED, REFUSED, DATA = 1, 2, 3, 4
CONTROL_BYTES_MAX = 1024  # payload of every kind but DATA

checksum = xxh3_64_intdigest


@dataclass(frozen=True, slots=True)
class TcpLimits:
    """Bounds of one node's TCP transport."""

    frame_bytes: int = 512 << 10  # most payload of a frame; what a connection buffers is about two of them
    connections: int = 256  # served at once; a further one is refused
    handshake_s: float = 3.0  # from connecting to being accepted
    stall_s: float = 5.0  # a transfer that does not move for this long is over
    idle_s: float = 60.0  # the client ends a connection nobody has used for this long; the server waits twice as long


@dataclass(frozen=True, slots=True)
class Session:
    """Where a transport listens, and which life of it: "host:port#incarnation"."""

    host: str
    port: int
    incarnation: bytes

    @classmethod
    def parse(cls, text: str) -> Session:
        """Raises ValueError, also for a session of another transport."""
        address, _, incarnation = text.partition("#")
        host, _, port = address.rpartition(":")
        if not host or len(incarnation) != 2 * INCARNATION_BYTES:
            raise ValueError(f"{text!r} is not a session of transport tcp")
        return cls(host.strip("[]"), int(port), bytes.fromhex(incarnation))


def memory(address: int, size: int) -> memoryview:
    """Memory of this process as it is, not a copy."""
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


def frame(kind: int, payload: bytes) -> bytes:
    """A whole frame."""
    return FRAME.pack(kind, len(payload), checksum(payload)) + payload


class Connection(asyncio.BufferedProtocol):
    """One end: fills given buffers, one after another, with what arrives, and has one deadline at a time."""

    transport: asyncio.Transport

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.connected = False
        self._space = memoryview(bytearray(1))
        self._filled: Callable[[], None] = self.abort
        self._deadline_s = math.inf

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """From the loop."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none, but has all of its methods
        self.connected = True

    def connection_lost(self, exc: Exception | None) -> None:
        """From the loop."""
        self.connected = False

    def expect(self, space: memoryview, filled: Callable[[], None]) -> None:
        """Put the next bytes that arrive into `space` (not empty); `filled` is called when it is full."""
        self._space, self._filled = space, filled

    def get_buffer(self, sizehint: int) -> memoryview:
        """From the loop."""
        return self._space

    def buffer_updated(self, nbytes: int) -> None:
        """From the loop."""
        self._space = self._space[nbytes:]
        self.moved()
        if not self._space:
            self._filled()

    def moved(self) -> None:
        """Bytes came in."""

    def allow(self, seconds: float) -> None:
        """The connection ends that much later, unless this is called again."""
        self._deadline_s = self.loop.time() + seconds

    def check(self, now_s: float) -> None:
        """End the connection when its deadline has passed."""
        if now_s > self._deadline_s:
            self.abort()

    def abort(self) -> None:
        """End the connection: from now on, no byte goes anywhere."""
        if self.connected:
            self.transport.abort()
