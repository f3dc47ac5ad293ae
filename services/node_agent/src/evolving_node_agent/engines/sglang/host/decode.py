"""The life of a decode leg. Service's thread."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol

from evolving_node_agent.engines.port import Aborted, EngineError, NoRoom, SourceLost
from evolving_node_agent.engines.sglang import messages as m

from .legs import DecodeLeg, PrefillLeg, failure
from .pages import l1_ranges
from .peers import Claim, Done, Landed, Pages, Peer, PeerLost, Pull, Release
from .prefill import first_token

if TYPE_CHECKING:
    from .service import Service


class _Source(Protocol):
    """Where the prompt's KV comes from."""

    async def claim(self) -> None: ...

    async def pull(self, from_block: int) -> Pages: ...

    async def read(self, pages: list[int]) -> None: ...

    async def confirm(self, transfer_s: float) -> None: ...

    def release(self, reason: str) -> None: ...


async def run_decode(service: Service, leg: DecodeLeg) -> None:
    """Reserve, bring the KV, decode; says how it ended."""
    source: _Source | None = None
    reason = "the decode leg was aborted"
    try:
        source = await _source(service, leg)
        await _run(service, leg, source)
        source = None
    except PeerLost as error:
        reason = str(error)
        service.report(failure(leg, SourceLost(reason)))
    except EngineError as error:
        reason = str(error)
        service.report(failure(leg, error))
    except asyncio.CancelledError:
        service.report(failure(leg, Aborted("aborted")))
    finally:
        leg.aborted = True
        if source is not None:
            source.release(reason)
        await _end(service, leg)


async def _source(service: Service, leg: DecodeLeg) -> _Source:
    command = leg.command
    if command.source_address == service.address:
        source = service.prefill_of(leg.transfer_id)
        if source is None:
            raise SourceLost("the prefill leg is not here")
        leg.local = source
        return _Local(service, leg, source)
    return _Remote(service, leg, await service.peers.at(command.source_address))


async def _run(service: Service, leg: DecodeLeg, source: _Source) -> None:
    await source.claim()
    service.inbox.post(lambda: service.desk.reservations.wait(leg))
    try:
        cached_tokens = await asyncio.wait_for(leg.reserved, leg.command.reserve_deadline_s)
    except TimeoutError:
        raise NoRoom(f"no room within {leg.command.reserve_deadline_s} s") from None
    service.report(m.LegReserved(leg.leg_id))
    pulled = await source.pull(cached_tokens // service.block_tokens)
    if pulled.finish is not None:
        # The first token was the last: there is nothing to decode and nothing to move.
        service.report(m.LegStarted(leg.leg_id, 0.0, cached_tokens=cached_tokens, first_token=pulled.first_token))
        service.report(m.LegFinished(leg.leg_id, pulled.finish, 0))
        return
    began_s = time.monotonic()
    await source.read(pulled.pages)
    transfer_s = time.monotonic() - began_s
    await source.confirm(transfer_s)
    started = m.LegStarted(leg.leg_id, transfer_s, cached_tokens=cached_tokens, first_token=pulled.first_token)
    if not await service.inbox.call(lambda: service.desk.start_decode(leg, started)):
        raise SourceLost("the prefill leg ended")
    await leg.ended


async def _end(service: Service, leg: DecodeLeg) -> None:
    """Give the leg's room back, but not before the transport is done with it."""
    if leg.reading is not None and not leg.reading.done():
        leg.reading.add_done_callback(lambda _: service.inbox.post(lambda: service.desk.end_leg(leg)))
    else:
        service.inbox.post(lambda: service.desk.end_leg(leg))


class _Local:
    """The prefill leg is on this node: nothing moves."""

    def __init__(self, service: Service, leg: DecodeLeg, source: PrefillLeg) -> None:
        self._service = service
        self._leg = leg
        self._source = source

    async def claim(self) -> None:
        """Let the prefill leg wait for as long as this leg lives."""
        self._source.claims.add(self._leg.leg_id)

    async def pull(self, from_block: int) -> Pages:
        if not self._service.handover.come(self._source, self._leg.leg_id):
            raise SourceLost("another decode leg has come for the KV")
        first = await first_token(self._source)
        if first is None:
            raise SourceLost("the prefill leg ended")
        return Pages(first.token, first.finish, [])

    async def read(self, pages: list[int]) -> None:
        """The KV is where it has to be."""

    async def confirm(self, transfer_s: float) -> None:
        """`start_decode` finds out whether it is still there."""

    def release(self, reason: str) -> None:
        self._service.handover.leave(self._source, self._leg.leg_id, reason)


class _Remote:
    """The prefill leg is on another node."""

    def __init__(self, service: Service, leg: DecodeLeg, peer: Peer) -> None:
        self._service = service
        self._leg = leg
        self._peer = peer
        self._bytes = 0

    async def claim(self) -> None:
        await self._peer.ask(Claim(self._leg.transfer_id, self._leg.leg_id), Done)

    async def pull(self, from_block: int) -> Pages:
        return await self._peer.ask(Pull(self._leg.transfer_id, self._leg.leg_id, from_block), Pages)

    async def read(self, pages: list[int]) -> None:
        service, leg, welcome = self._service, self._leg, self._peer.welcome
        assert welcome is not None
        own = await service.inbox.call(lambda: service.desk.reservations.landing_pages(leg))
        ranges = l1_ranges(service.layout, welcome.layout, list(zip(own, pages, strict=True)))
        self._bytes = sum(size for _, _, size in ranges)
        leg.reading = asyncio.ensure_future(service.reader.read(welcome.session, ranges))
        if not await asyncio.shield(leg.reading):
            raise SourceLost("reading the prompt's KV failed")

    async def confirm(self, transfer_s: float) -> None:
        await self._peer.ask(Landed(self._leg.transfer_id, transfer_s, self._bytes), Done)

    def release(self, reason: str) -> None:
        self._peer.tell(Release(self._leg.transfer_id, self._leg.leg_id, reason))
