"""The engine's asyncio side: the channel to the node agent, the peer service, and the task of each leg."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from evolving.core.config import FetchConfig
from evolving_node_agent.engines.port import Aborted, EngineDown, EngineInfo, Rejected, Tier
from evolving_node_agent.engines.sglang import messages as m
from evolving_node_agent.engines.sglang.framing import read_frame, write_frame
from evolving_node_agent.engines.sglang.translate import split_names

from . import peers as p
from .decode import run_decode
from .desk import Desk, Outgoing
from .eviction import NeedStrategy
from .fetch import Fetcher, Reader
from .inbox import Inbox
from .legs import Leg, PrefillLeg, decode_leg, failure, prefill_leg
from .pages import Layout
from .peers import Guest, Peers, Reply
from .prefill import Handover, run_prefill
from .transport import Transport

logger = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(m.Command).decode


class Service:
    """Everything that is not the model. Its own thread."""

    def __init__(
        self,
        desk: Desk,
        inbox: Inbox,
        transport: Transport,
        fetch: FetchConfig,
        info: EngineInfo,
        secret: bytes,
        stop: Callable[[], None],
    ) -> None:
        self.desk = desk
        self.inbox = inbox
        self.block_tokens = info.block_tokens
        self.layout: Layout = desk.blocks.pages.layout
        self.peers = Peers(info.kv_format, secret)
        self.reader = Reader(transport)
        self.fetcher = Fetcher(inbox, desk.blocks, desk.landing, self.peers, self.reader, fetch, info.block_tokens)
        self.handover = Handover(self)
        self.address = ""
        self._info = info
        self._secret = secret
        self._session = transport.session
        self._stop = stop
        self._legs: dict[str, tuple[Leg, asyncio.Task[None]]] = {}
        self._transfers: dict[int, PrefillLeg] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._draining = False
        self._loop = asyncio.get_running_loop()

    async def run(self, channel: socket.socket, bind_host: str, advertise_host: str, port: int) -> None:
        """Serve until the node agent is gone."""
        server = await asyncio.start_server(self._serve_peer, bind_host, port)
        self.address = f"{advertise_host}:{server.sockets[0].getsockname()[1]}"
        reader, self._writer = await asyncio.open_connection(sock=channel)
        self.desk.deliver = self._deliver
        self.report(m.Ready(dataclasses.replace(self._info, transfer_address=self.address, pool_address=self.address)))
        while (frame := await read_frame(reader)) is not None:
            await self._command(_decode(frame))
        logger.info("the node agent is gone")
        os._exit(0)

    def report(self, report: m.Report) -> None:
        """Tell the node agent."""
        write_frame(self._writer, _encode(report))

    def prefill_of(self, transfer_id: int) -> PrefillLeg | None:
        """The prefill leg of this transfer while it runs."""
        return self._transfers.get(transfer_id)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run something beside the legs."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _deliver(self, outgoing: list[Outgoing]) -> None:
        """From the scheduler's thread."""
        self._loop.call_soon_threadsafe(self._take, outgoing)

    def _take(self, outgoing: list[Outgoing]) -> None:
        """What the scheduler's thread said, in order."""
        for item in outgoing:
            if not isinstance(item, tuple):
                self.report(item)
                continue
            future, result = item
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

    async def _command(self, command: m.Command) -> None:
        match command:
            case m.Prefill():
                leg = prefill_leg(command)
                if self._begin(leg):
                    self._transfers[leg.transfer_id] = leg
                    self._run(leg, run_prefill(self, leg))
            case m.Decode():
                other = decode_leg(command)
                if self._begin(other):
                    self._run(other, run_decode(self, other))
            case m.Abort(request, leg_id):
                found = self._legs.get(leg_id)
                if found is not None:
                    found[0].aborted = True
                    found[1].cancel()
                self._answer(request, m.Answer(request, found=found is not None))
            case m.SetNeeds(request, needs):
                self.spawn(self._set_needs(request, needs))
            case m.AskNeeds(request):
                self.spawn(self._answer_needs(request))
            case m.AskDigests(request, names, tier):
                self.spawn(self._digests(request, names, Tier(tier)))
            case m.Drop(request, l2):
                self.spawn(self._drop(request, l2))
            case m.Drain():
                self._draining = True
                self._stop_when_empty()

    def _begin(self, leg: Leg) -> bool:
        """Whether the leg may run; says so when not."""
        if self._draining:
            self.report(m.LegFailed(leg.leg_id, EngineDown.__name__, "the engine is stopping"))
        elif leg.leg_id in self._legs:
            self.report(m.LegFailed(leg.leg_id, Rejected.__name__, "the leg is running already"))
        else:
            return True
        return False

    def _run(self, leg: Leg, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._legs[leg.leg_id] = (leg, task)
        task.add_done_callback(lambda done: self._end(leg, done))

    def _end(self, leg: Leg, task: asyncio.Task[None]) -> None:
        self._legs.pop(leg.leg_id, None)
        if isinstance(leg, PrefillLeg):
            self._transfers.pop(leg.transfer_id, None)
            leg.over.set_result(None)
        if task.cancelled():  # before its first step
            self.report(failure(leg, Aborted("aborted")))
        if not task.cancelled() and (error := task.exception()) is not None:
            # A bug: nothing after it can be trusted, and the node agent restarts us.
            logger.error("leg %s failed", leg.leg_id, exc_info=error)
            os._exit(1)
        self._stop_when_empty()

    def _stop_when_empty(self) -> None:
        if self._draining and not self._legs:
            self.inbox.post(self._stop)

    def _answer(self, request: int, answer: m.Answer) -> None:
        if request:
            self.report(answer)

    async def _set_needs(self, request: int, needs: dict[bytes, int]) -> None:
        await self.inbox.call(lambda: NeedStrategy.needs.update(needs))
        self._answer(request, m.Answer(request))

    async def _answer_needs(self, request: int) -> None:
        needs = await self.inbox.call(NeedStrategy.needs.nonzero)
        self._answer(request, m.Answer(request, needs=needs))

    async def _digests(self, request: int, names: bytes, tier: Tier) -> None:
        found = await self.inbox.call(lambda: self.desk.blocks.digests(split_names(names), tier))
        self._answer(request, m.Answer(request, digests=found))

    async def _drop(self, request: int, l2: bool) -> None:
        leaving = self.desk.leaving
        blocks = await self.inbox.call(leaving.clear if l2 else leaving.free_l1)
        self._answer(request, m.Answer(request, blocks=blocks))

    # -- peers

    async def _serve_peer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await p.serve_guest(
            reader,
            writer,
            self._secret,
            {
                p.Hello: self._welcome,
                p.Locate: self._locate,
                p.Claim: self.handover.claim,
                p.Pull: self.handover.pull,
                p.Landed: self.handover.landed,
                p.Release: self.handover.release,
            },
        )

    async def _welcome(self, guest: Guest, hello: p.Hello) -> Reply:
        return p.Welcome(self._info.kv_format, self._info.incarnation, self._session, self.layout)

    async def _locate(self, guest: Guest, ask: p.Locate) -> Reply:
        """The leading blocks that are in our L2. The reader finds out by itself when one leaves."""
        places: list[p.Place] = []
        for name in split_names(ask.names):
            found = self.desk.blocks.residency.host_pages.get(name)
            if found is None:
                break
            places.append((*found, await self.desk.blocks.checksums.of(*found)))
        return p.Located(places)
