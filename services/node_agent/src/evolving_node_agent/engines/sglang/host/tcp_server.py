"""The serving end of the TCP transport: it reads registered memory out to whoever knows the secret."""

from __future__ import annotations

import asyncio
import bisect
import logging
from collections import deque
from typing import Protocol

from .authentication import Side, fresh_nonce, is_proof, proof
from .tcp_wire import (
    ACCEPTED,
    DATA,
    FRAME,
    GREETING,
    HELLO,
    LOGIN,
    MAGIC,
    PURPOSE,
    RANGE,
    RANGES_MAX,
    REFUSED,
    REQUEST,
    Connection,
    TcpLimits,
    checksum,
    frame,
    memory,
)

logger = logging.getLogger(__name__)
_IGNORED_BYTES = 4096


class Regions:
    """The memory that may be read. Added to from any thread."""

    def __init__(self) -> None:
        self._regions: list[tuple[int, int]] = []  # (first address, address past the last), ascending

    def add(self, address: int, size: int) -> None:
        """Allow reading [address, address + size)."""
        self._regions = sorted([*self._regions, (address, address + size)])

    def find(self, address: int, size: int) -> memoryview | None:
        """The memory, when it lies in one region."""
        at = bisect.bisect_right(self._regions, address, key=lambda region: region[0]) - 1
        if size <= 0 or at < 0 or address + size > self._regions[at][1]:
            return None
        return memory(address, size)


class Host(Protocol):
    """What connections share."""

    limits: TcpLimits
    regions: Regions
    incarnation: bytes
    secret: bytes
    connections: set[ServerConnection]


class ServerConnection(Connection):
    """One peer that reads. It is served one request at a time, and its next is not read before."""

    def __init__(self, loop: asyncio.AbstractEventLoop, host: Host) -> None:
        super().__init__(loop)
        self._host = host
        self._nonce = fresh_nonce()
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._next: asyncio.Handle | None = None
        self._full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """From the loop."""
        super().connection_made(transport)
        limits = self._host.limits
        self.transport.set_write_buffer_limits(high=limits.frame_bytes)
        self._host.connections.add(self)
        self.allow(limits.handshake_s)
        if len(self._host.connections) > limits.connections:
            self._refuse("too many connections")
            return
        self.transport.write(frame(HELLO, GREETING.pack(MAGIC, self._nonce)))
        said = memoryview(bytearray(LOGIN.size))
        self.expect(said, lambda: self._log_in(said))

    def connection_lost(self, exc: Exception | None) -> None:
        """From the loop."""
        super().connection_lost(exc)
        self._unsent.clear()
        self._unsent_bytes = 0
        self._host.connections.discard(self)

    def _log_in(self, said: memoryview) -> None:
        nonce, wanted, shown = LOGIN.unpack(said)
        host = self._host
        # What the client signs names the incarnation it wants, so this is checked with what it said.
        if not is_proof(shown, host.secret, PURPOSE + wanted, Side.CLIENT, self._nonce, nonce):
            self._refuse("authentication failed: another token")
        elif wanted != host.incarnation:
            self._refuse("this is another life of the node")
        else:
            own = proof(host.secret, PURPOSE + wanted, Side.SERVER, self._nonce, nonce)
            self.transport.write(frame(ACCEPTED, own))
            self._await_request()

    def _await_request(self) -> None:
        self.allow(2 * self._host.limits.idle_s)
        head = memoryview(bytearray(REQUEST.size))
        self.expect(head, lambda: self._begin_request(head))

    def _begin_request(self, head: memoryview) -> None:
        count, check = REQUEST.unpack(head)
        if not 1 <= count <= RANGES_MAX:
            self._refuse(f"a request of {count} ranges, {RANGES_MAX} at most")
            return
        self.allow(self._host.limits.stall_s)
        body = memoryview(bytearray(count * RANGE.size))
        self.expect(body, lambda: self._serve(body, check))

    def _serve(self, body: memoryview, check: int) -> None:
        if checksum(body) != check:
            self._refuse("a damaged request")
            return
        for address, size in RANGE.iter_unpack(body):
            piece = self._host.regions.find(address, size)
            if piece is None:
                self._refuse(f"{size} bytes at {address:#x} are not readable")
                return
            self._unsent.append(piece)
            self._unsent_bytes += size
        self.transport.pause_reading()
        self._send_soon()

    def _send_soon(self) -> None:
        """One frame a turn of the loop, so that no peer waits for the whole of another's request."""
        if self._unsent_bytes and not self._full and self._next is None:
            self._next = self.loop.call_soon(self._send)

    def _send(self) -> None:
        self._next = None
        if not self.connected or self._full or not self._unsent_bytes:
            return
        self.allow(self._host.limits.stall_s)
        self.transport.write(self._next_frame())
        if self._unsent_bytes:
            self._send_soon()
        else:
            self._await_request()
            self.transport.resume_reading()

    def _next_frame(self) -> bytearray:
        """Copied, so that the checksum is that of the bytes sent, whatever becomes of the memory meanwhile."""
        size = min(self._host.limits.frame_bytes, self._unsent_bytes)
        self._unsent_bytes -= size
        made = bytearray(FRAME.size + size)
        payload = memoryview(made)[FRAME.size :]
        filled = 0
        while filled < size:
            piece = self._unsent.popleft()
            taken = piece[: size - filled]
            payload[filled : filled + len(taken)] = taken
            filled += len(taken)
            if len(taken) < len(piece):
                self._unsent.appendleft(piece[len(taken) :])
        FRAME.pack_into(made, 0, DATA, size, checksum(payload))
        return made

    def pause_writing(self) -> None:
        """From the loop: the client reads more slowly than we send."""
        self._full = True

    def resume_writing(self) -> None:
        """From the loop."""
        self._full = False
        self._send_soon()

    def _refuse(self, reason: str) -> None:
        logger.warning("a peer's read was refused: %s", reason)
        self.allow(self._host.limits.handshake_s)
        self._unsent.clear()
        self._unsent_bytes = 0
        self.transport.write(frame(REFUSED, reason.encode()))
        self.transport.write_eof()
        self._ignore()

    def _ignore(self) -> None:
        """Until the client ends the connection: ending it with bytes unread would take the reason back."""
        self.expect(memoryview(bytearray(_IGNORED_BYTES)), self._ignore)
