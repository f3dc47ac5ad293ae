"""One-sided reads of peers' memory over TCP, between nodes that know the cluster's secret.

All of it runs in one thread with a loop of its own, so that moving bytes delays neither the scheduler's calls nor the
service's heartbeats. It reads and fills host memory only.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import cast

import uvloop

from evolving.runtime.settings import join_address
from evolving_node_agent.engines.sglang.config import refuse_strangers

from .pages import Range
from .tcp_client import ClientConnection, Read
from .tcp_server import Regions, ServerConnection
from .tcp_wire import INCARNATION_BYTES, Connection, Session, TcpLimits

logger = logging.getLogger(__name__)
_CHECKS_A_DEADLINE = 8  # how precisely deadlines are kept


class TcpTransport:
    """`Transport` over TCP. Raises ValueError without a secret when other machines could reach it, OSError when it
    cannot listen."""

    def __init__(
        self, bind_host: str, advertise_host: str, port: int, secret: bytes, limits: TcpLimits | None = None
    ) -> None:
        refuse_strangers(bind_host, secret)
        self.limits = limits or TcpLimits()
        self.regions = Regions()
        self.incarnation = secrets.token_bytes(INCARNATION_BYTES)
        self.secret = secret
        self.connections: set[ServerConnection] = set()
        self._links: dict[Session, ClientConnection] = {}
        self._opening: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tcp transport", daemon=True)
        self._thread.start()
        try:
            bound = asyncio.run_coroutine_threadsafe(self._listen(bind_host, port), self._loop).result()
        except OSError:
            self.close()
            raise
        self.session = f"{join_address(advertise_host, bound)}#{self.incarnation.hex()}"

    def register(self, address: int, size: int) -> None:
        """As the port says."""
        self.regions.add(address, size)

    def read(self, session: str, ranges: Sequence[Range], over: Callable[[bool], None]) -> None:
        """As the port says."""
        self._loop.call_soon_threadsafe(self._begin, session, Read(ranges, over))

    def close(self) -> None:
        """End all connections, reads under way with them, and the thread."""
        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._end()))
        self._thread.join()
        self._loop.close()

    async def _listen(self, host: str, port: int) -> int:
        """The port bound."""
        server = await self._loop.create_server(lambda: ServerConnection(self._loop, self), host, port)
        self._server = cast("asyncio.Server", server)
        self._check_deadlines()
        return int(self._server.sockets[0].getsockname()[1])

    def _begin(self, session: str, read: Read) -> None:
        if not read.left_bytes:
            read.over(True)
            return
        try:
            there = Session.parse(session)
        except ValueError as error:
            logger.warning("no read: %s", error)
            read.over(False)
            return
        link = self._links.get(there)
        if link is None:
            link = self._links[there] = ClientConnection(self._loop, there, self.secret, self.limits, self._forget)
            task = self._loop.create_task(self._open(link))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        link.submit(read)

    async def _open(self, link: ClientConnection) -> None:
        there = link.session
        try:
            async with asyncio.timeout(self.limits.handshake_s):
                await self._loop.create_connection(lambda: link, there.host, there.port)
        except (OSError, ValueError, OverflowError) as error:  # the address is the peer's word
            logger.warning("no connection to %s:%d: %r", there.host, there.port, error)
            if link.connected:
                link.abort()
            else:
                link.fail()

    def _forget(self, link: ClientConnection) -> None:
        if self._links.get(link.session) is link:
            del self._links[link.session]

    def _check_deadlines(self) -> None:
        now_s = self._loop.time()
        ends: list[Connection] = [*self.connections, *self._links.values()]
        for connection in ends:
            connection.check(now_s)
        shortest_s = min(self.limits.handshake_s, self.limits.stall_s, self.limits.idle_s)
        self._loop.call_later(shortest_s / _CHECKS_A_DEADLINE, self._check_deadlines)

    async def _end(self) -> None:
        if self._server is not None:
            self._server.close()
        while self.connections or self._links or self._opening:
            for connection in (*self.connections, *self._links.values()):
                connection.abort()
            await asyncio.sleep(0)
        self._loop.stop()
