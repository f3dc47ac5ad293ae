"""The reading end of the TCP transport: bytes that arrive go straight to where they are wanted."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

from xxhash import xxh3_64

from .authentication import Side, fresh_nonce, is_proof, proof
from .pages import Range
from .tcp_wire import (
    ACCEPTED,
    CONTROL_BYTES_MAX,
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
    Session,
    TcpLimits,
    checksum,
    memory,
)

logger = logging.getLogger(__name__)


class Read:
    """One read: over when all its bytes are here and good, or when none can arrive any more."""

    def __init__(self, ranges: Sequence[Range], over: Callable[[bool], None]) -> None:
        wanted = [each for each in ranges if each[2]]
        self.requests = [_request(wanted[at : at + RANGES_MAX]) for at in range(0, len(wanted), RANGES_MAX)]
        self.space = deque((own, size) for own, _, size in wanted)
        self.left_bytes = sum(size for _, _, size in wanted)
        self.over = over


def _request(ranges: Sequence[Range]) -> bytes:
    body = b"".join(RANGE.pack(peer, size) for _, peer, size in ranges)
    return REQUEST.pack(len(ranges), checksum(body)) + body


class ClientConnection(Connection):
    """The way to one life of one peer. Reads are answered in the order they were asked.

    `gone` is called once, when the connection has ended; reads that were not over have failed before that.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        session: Session,
        secret: bytes,
        limits: TcpLimits,
        gone: Callable[[ClientConnection], None],
    ) -> None:
        super().__init__(loop)
        self.session = session
        self._secret = secret
        self._limits = limits
        self._gone = gone
        self._reads: deque[Read] = deque()
        self._nonces: tuple[bytes, bytes] | None = None
        self._accepted = False
        self._head = memoryview(bytearray(FRAME.size))
        # The frame of data that is arriving.
        self._left_bytes = 0
        self._check = 0
        self._sum = xxh3_64()

    def submit(self, read: Read) -> None:
        """Begin a read; at once, when the peer has let us in."""
        self._reads.append(read)
        if self._accepted:
            self._ask(read)

    def _ask(self, read: Read) -> None:
        if len(self._reads) == 1:
            self.allow(self._limits.stall_s)
        self.transport.writelines(read.requests)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """From the loop."""
        super().connection_made(transport)
        self.allow(self._limits.handshake_s)
        self.expect(self._head, self._begin_frame)

    def connection_lost(self, exc: Exception | None) -> None:
        """From the loop: nothing arrives after this."""
        super().connection_lost(exc)
        self.fail()

    def fail(self) -> None:
        """There is no connection, or no more."""
        reads, self._reads = self._reads, deque()
        self._gone(self)
        for read in reads:
            read.over(False)

    def moved(self) -> None:
        """The peer sends what we wait for."""
        if self._accepted and self._reads:
            self.allow(self._limits.stall_s)

    def _begin_frame(self) -> None:
        kind, size, check = FRAME.unpack(self._head)
        if kind == DATA and self._reads and 0 < size <= self._reads[0].left_bytes:
            self._left_bytes, self._check = size, check
            self._sum.reset()
            self._expect_piece()
        elif kind in (HELLO, ACCEPTED, REFUSED) and 0 < size <= CONTROL_BYTES_MAX:
            payload = memoryview(bytearray(size))
            self.expect(payload, lambda: self._control(kind, payload, check))
        else:
            self._give_up("it sends what nobody asked for")

    def _expect_piece(self) -> None:
        """The next bytes of the frame that belong together here."""
        address, size = self._reads[0].space.popleft()
        if size > self._left_bytes:
            self._reads[0].space.appendleft((address + self._left_bytes, size - self._left_bytes))
            size = self._left_bytes
        piece = memory(address, size)
        self.expect(piece, lambda: self._piece_arrived(piece))

    def _piece_arrived(self, piece: memoryview) -> None:
        self._sum.update(piece)
        self._left_bytes -= len(piece)
        self._reads[0].left_bytes -= len(piece)
        if self._left_bytes:
            self._expect_piece()
        elif self._sum.intdigest() != self._check:
            self._give_up("bytes were damaged on the way")
        else:
            self.expect(self._head, self._begin_frame)
            if not self._reads[0].left_bytes:
                self._finish_first()

    def _finish_first(self) -> None:
        read = self._reads.popleft()
        self.allow(self._limits.stall_s if self._reads else self._limits.idle_s)
        read.over(True)

    def _control(self, kind: int, payload: memoryview, check: int) -> None:
        if checksum(payload) != check:
            self._give_up("bytes were damaged on the way")
        elif kind == REFUSED:
            self._give_up(f"it says: {bytes(payload).decode(errors='replace')}")
        elif kind == HELLO and self._nonces is None and len(payload) == GREETING.size:
            self._log_in(payload)
        elif kind == ACCEPTED and self._nonces is not None and not self._accepted and self._is_peer(payload):
            self._accepted = True
            self.allow(self._limits.stall_s if self._reads else self._limits.idle_s)
            self.expect(self._head, self._begin_frame)
            for read in self._reads:
                self._ask(read)
        else:
            self._give_up("it is not of this cluster")

    def _log_in(self, greeting: memoryview) -> None:
        magic, server_nonce = GREETING.unpack(greeting)
        if magic != MAGIC:
            self._give_up("it speaks another protocol")
            return
        own = fresh_nonce()
        self._nonces = (server_nonce, own)
        shown = proof(self._secret, PURPOSE + self.session.incarnation, Side.CLIENT, server_nonce, own)
        self.transport.write(LOGIN.pack(own, self.session.incarnation, shown))
        self.expect(self._head, self._begin_frame)

    def _is_peer(self, shown: memoryview) -> bool:
        assert self._nonces is not None
        return is_proof(bytes(shown), self._secret, PURPOSE + self.session.incarnation, Side.SERVER, *self._nonces)

    def _give_up(self, reason: str) -> None:
        logger.warning("reads from %s:%d ended: %s", self.session.host, self.session.port, reason)
        self.abort()
