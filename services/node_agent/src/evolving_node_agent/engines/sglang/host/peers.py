"""The peer service: how nodes ask each other for the place of KV and hand prompts over.

Requests and answers are msgpack frames with a number, on one TCP connection a pair of nodes and direction. Bytes of KV
do not pass here. Before anything else both sides prove that they know the cluster's token, where there is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from evolving_node_agent.engines.port import FinishReason
from evolving_node_agent.engines.sglang.framing import BadFrame, read_frame, write_frame

from .authentication import Unauthenticated, admit, enter
from .pages import Layout

logger = logging.getLogger(__name__)
_HEARTBEAT_S = 1.0
_SILENCE_S = 8.0  # a peer that says nothing for this long is gone; more than the longest step of a busy one
_CONNECT_S = 3.0
_PURPOSE = b"evolving peers 1"


Place = tuple[int, int, int | None]  # page, generation, checksum if the peer keeps any


class Hello(msgspec.Struct, tag=True, frozen=True):
    """The first frame of the one that connects."""

    kv_format: str


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """The answer: who this is and where its KV lies. Equal formats mean that KV may be exchanged."""

    kv_format: str
    incarnation: str
    session: str
    layout: Layout


class Locate(msgspec.Struct, tag=True, frozen=True):
    """Where are these blocks in your L2?"""

    names: bytes


class Located(msgspec.Struct, tag=True, frozen=True):
    """Of the leading blocks that are there."""

    places: list[Place]


class Claim(msgspec.Struct, tag=True, frozen=True):
    """A decode leg for this transfer exists; keep the KV."""

    transfer_id: int
    leg_id: str


class Pull(msgspec.Struct, tag=True, frozen=True):
    """Room is reserved: answer when the prompt is computed, with its pages from this block on."""

    transfer_id: int
    leg_id: str
    from_block: int


class Pages(msgspec.Struct, tag=True, frozen=True):
    """The prompt is computed. Its pages stay as they are until Landed, or until the connection ends."""

    first_token: int
    finish: FinishReason | None
    pages: list[int]


class Landed(msgspec.Struct, tag=True, frozen=True):
    """The pages were read; are they still yours?"""

    transfer_id: int
    transfer_s: float
    bytes: int


class Release(msgspec.Struct, tag=True, frozen=True):
    """The decode leg ended before its KV landed."""

    transfer_id: int
    leg_id: str
    reason: str


class Done(msgspec.Struct, tag=True, frozen=True):
    """Yes."""


class Gone(msgspec.Struct, tag=True, frozen=True):
    """No: there is no such prefill leg, or its KV is lost."""

    reason: str


class Beat(msgspec.Struct, tag=True, frozen=True):
    """I am here."""


Request = Hello | Locate | Claim | Pull | Landed | Release | Beat
Reply = Welcome | Located | Pages | Done | Gone | Beat
ReplyT = TypeVar("ReplyT", bound=msgspec.Struct)


class _Asked(msgspec.Struct, frozen=True):
    number: int
    body: Request


class _Answered(msgspec.Struct, frozen=True):
    number: int
    body: Reply


_encode = msgspec.msgpack.Encoder().encode
_asked = msgspec.msgpack.Decoder(_Asked)
_answered = msgspec.msgpack.Decoder(_Answered)


class PeerLost(Exception):
    """The peer cannot be reached, is another one than expected, or went away."""


class Peer:
    """A connection to another node's peer service."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._next = 1
        self.lost = False
        self.welcome: Welcome | None = None
        self._tasks = [asyncio.create_task(self._listen(reader)), asyncio.create_task(self._beat())]

    async def ask(self, body: Request, expect: type[ReplyT]) -> ReplyT:
        """Send a request and wait for its answer. Raises PeerLost, also when the answer is Gone."""
        if self.lost:
            raise PeerLost("the connection is closed")
        number, self._next = self._next, self._next + 1
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._send(number, body)
        try:
            reply = await answer
        finally:
            self._waiting.pop(number, None)
        if isinstance(reply, Gone):
            raise PeerLost(reply.reason)
        if not isinstance(reply, expect):
            raise PeerLost(f"the peer answered {type(reply).__name__}, not {expect.__name__}")
        return reply

    def tell(self, body: Request) -> None:
        """Send a request nobody waits for."""
        if not self.lost:
            self._send(0, body)

    async def close(self) -> None:
        """End the connection."""
        self._lose()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _send(self, number: int, body: Request) -> None:
        write_frame(self._writer, _encode(_Asked(number, body)))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(TimeoutError, BadFrame, msgspec.DecodeError):
            while (frame := await asyncio.wait_for(read_frame(reader), _SILENCE_S)) is not None:
                answered = _answered.decode(frame)
                waiting = self._waiting.get(answered.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answered.body)
        self._lose()

    async def _beat(self) -> None:
        while not self.lost:
            self.tell(Beat())
            await asyncio.sleep(_HEARTBEAT_S)

    def _lose(self) -> None:
        self.lost = True
        self._writer.close()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(PeerLost("the peer went away"))


class Peers:
    """Connections to other nodes, one an address, opened when needed."""

    def __init__(self, kv_format: str, secret: bytes) -> None:
        self._kv_format = kv_format
        self._secret = secret
        self._peers: dict[str, asyncio.Task[Peer]] = {}

    async def at(self, address: str) -> Peer:
        """The peer at host:port. Raises PeerLost."""
        opening = self._peers.get(address)
        if opening is None or (opening.done() and (opening.exception() or opening.result().lost)):
            opening = self._peers[address] = asyncio.create_task(self._open(address))
            opening.add_done_callback(_observe)
        return await asyncio.shield(opening)

    async def _open(self, address: str) -> Peer:
        host, _, port = address.rpartition(":")
        try:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
                return await self._greet(address, reader, writer)
        except (OSError, TimeoutError, ValueError, Unauthenticated) as error:
            raise PeerLost(f"no peer at {address}: {error!r}") from error

    async def _greet(self, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Peer:
        peer: Peer | None = None
        try:
            await enter(reader, writer, self._secret, _PURPOSE)
            peer = Peer(reader, writer)
            peer.welcome = await peer.ask(Hello(self._kv_format), Welcome)
        except BaseException:
            writer.close()
            if peer is not None:
                await peer.close()
            raise
        if peer.welcome.kv_format != self._kv_format:
            await peer.close()
            raise PeerLost(f"the peer at {address} has KV of format {peer.welcome.kv_format}")
        return peer

    async def close(self) -> None:
        """End all connections."""
        for opening in self._peers.values():
            opening.cancel()
            with contextlib.suppress(PeerLost, asyncio.CancelledError):
                await (await opening).close()


class Guest:
    """A node connected to this one's peer service, as handlers see it."""

    def __init__(self) -> None:
        self.left = asyncio.Event()


Handler = Callable[[Guest, Any], Awaitable[Reply]]


async def serve_guest(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, handlers: dict[type[Any], Handler]
) -> None:
    """Answer one connection until it ends; each request has its own task."""
    try:
        async with asyncio.timeout(_CONNECT_S):
            await admit(reader, writer, secret, _PURPOSE)
    except (TimeoutError, Unauthenticated) as error:
        logger.warning("a peer was not let in: %r", error)
        writer.close()
        return
    guest, running = Guest(), set[asyncio.Task[None]]()

    async def answer(asked: _Asked) -> None:
        reply = await handlers[type(asked.body)](guest, asked.body)
        if asked.number:
            write_frame(writer, _encode(_Answered(asked.number, reply)))

    async def beat() -> None:
        while True:
            write_frame(writer, _encode(_Answered(0, Beat())))
            await asyncio.sleep(_HEARTBEAT_S)

    beating = asyncio.create_task(beat())
    try:
        while (frame := await asyncio.wait_for(read_frame(reader), _SILENCE_S)) is not None:
            asked = _asked.decode(frame)
            if isinstance(asked.body, Beat):
                continue
            task = asyncio.create_task(answer(asked))
            running.add(task)
            task.add_done_callback(running.discard)
    except (TimeoutError, BadFrame, msgspec.DecodeError, ConnectionError) as error:
        logger.warning("a peer's connection ended: %r", error)
    finally:
        guest.left.set()
        beating.cancel()
        for task in running:
            task.cancel()
        writer.close()


def _observe(opening: asyncio.Task[Peer]) -> None:
    if not opening.cancelled():
        opening.exception()
