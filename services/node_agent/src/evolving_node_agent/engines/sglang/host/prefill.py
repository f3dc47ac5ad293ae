"""The life of a prefill leg. Service's thread."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from evolving.runtime.clock import SystemClock
from evolving_node_agent.engines.port import Aborted, DecodeLost, EngineError
from evolving_node_agent.engines.sglang import messages as m

from .legs import FirstToken, PrefillLeg, failure
from .peers import Claim, Done, Gone, Guest, Landed, Pages, Pull, Release, Reply

if TYPE_CHECKING:
    from .service import Service


logger = logging.getLogger(__name__)
_CLOCK = SystemClock()


async def run_prefill(service: Service, leg: PrefillLeg) -> None:
    """Queue and fetch, compute, hold, hand over; says how it ended."""
    try:
        await _run(service, leg)
    except EngineError as error:
        service.report(failure(leg, error))
    except asyncio.CancelledError:
        service.report(failure(leg, Aborted("aborted")))
    finally:
        leg.aborted = True
        service.inbox.post(lambda: service.desk.end_leg(leg))


async def _run(service: Service, leg: PrefillLeg) -> None:
    service.inbox.post(lambda: service.desk.start_prefill(leg))
    fetching = asyncio.ensure_future(_fetch(service, leg))
    # Not a moment longer than the leg is queued.
    leg.taken.add_done_callback(lambda _: fetching.cancel())
    try:
        # `ended` fails when SGLang gives the request up, in whatever stage.
        await first_of(leg.first, leg.ended)
    finally:
        fetching.cancel()
    if leg.ended.done():
        leg.ended.result()
    first = leg.first.result()
    if first.finish is not None:
        return
    transfer_s, size = await _handed_over(leg)
    service.report(m.LegSent(leg.leg_id, transfer_s=transfer_s, bytes=size))


async def _fetch(service: Service, leg: PrefillLeg) -> None:
    """Bring blocks from peers while the leg is queued."""
    await leg.fetch.due
    try:
        await service.fetcher.fetch(leg)
    except Exception:
        logger.exception("leg %s: the fetch failed", leg.leg_id)
    finally:
        service.inbox.post(lambda: service.desk.end_fetch(leg))


async def _handed_over(leg: PrefillLeg) -> tuple[float, int]:
    """Wait for a decode leg: `keep_s` without any, and as long as there is one."""
    keep_s = leg.command.keep_s
    nobody = asyncio.ensure_future(leg.claims.none_for(keep_s, _CLOCK))
    try:
        await first_of(nobody, leg.handed_over)
    finally:
        nobody.cancel()
    if not leg.handed_over.done() and not leg.puller:
        raise DecodeLost(f"no decode leg came within {keep_s} s")
    return await leg.handed_over


class Handover:
    """What decode legs elsewhere ask a prefill leg of this node."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def claim(self, guest: Guest, ask: Claim) -> Reply:
        """Remember that a decode leg exists, until its node leaves."""
        leg = self._service.prefill_of(ask.transfer_id)
        if leg is None:
            return Gone("the prefill leg is not here")
        leg.claims.add(ask.leg_id)
        self._service.spawn(self._watch(guest, leg, ask.leg_id))
        return Done()

    async def _watch(self, guest: Guest, leg: PrefillLeg, leg_id: str) -> None:
        leaving = asyncio.ensure_future(guest.left.wait())
        await first_of(leaving, leg.over)
        if not leaving.cancel():
            self.leave(leg, leg_id, "the decode node went away")

    async def pull(self, guest: Guest, ask: Pull) -> Reply:
        """The pages of the computed prompt, as soon as it is computed."""
        leg = self._service.prefill_of(ask.transfer_id)
        if leg is None or not self.come(leg, ask.leg_id):
            return Gone("the prefill leg is not here, or another decode leg has come for it")
        first = await first_token(leg)
        if first is None:
            return Gone("the prefill leg ended")
        if first.finish is not None:
            return Pages(first.token, first.finish, [])
        pages = await self._service.inbox.call(lambda: self._service.desk.held_pages(leg, ask.from_block))
        return Gone("the prefill leg ended") if pages is None else Pages(first.token, None, pages)

    async def landed(self, guest: Guest, ask: Landed) -> Reply:
        """The decode leg has read the pages; it may use them only if they were held all the while."""
        leg = self._service.prefill_of(ask.transfer_id)
        if leg is None or leg.handed_over.done():
            return Gone("the prefill leg ended")
        leg.handed_over.set_result((ask.transfer_s, ask.bytes))
        return Done()

    async def release(self, guest: Guest, ask: Release) -> Reply:
        """The decode leg ended before its KV landed."""
        leg = self._service.prefill_of(ask.transfer_id)
        if leg is not None:
            self.leave(leg, ask.leg_id, ask.reason)
        return Done()

    def come(self, leg: PrefillLeg, leg_id: str) -> bool:
        """A decode leg has room and comes for the KV; False: another one came first."""
        if leg.puller and leg.puller != leg_id:
            return False
        leg.puller = leg_id
        leg.claims.discard(leg_id)
        return True

    def leave(self, leg: PrefillLeg, leg_id: str, reason: str) -> None:
        """A decode leg is gone. Before it came for the KV another one still may; then, no more."""
        leg.claims.discard(leg_id)
        if leg.puller == leg_id and not leg.handed_over.done():
            leg.handed_over.set_exception(DecodeLost(reason))


async def first_token(leg: PrefillLeg) -> FirstToken | None:
    """Wait until the leg has sampled its first token; None when it ended before."""
    await first_of(leg.first, leg.over)
    return leg.first.result() if leg.first.done() else None


async def first_of(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of them is done; none is cancelled with the wait."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
