"""Reading the blocks of a prompt that peers hold in their L2, while its leg is queued. Service's thread.

A fetch proceeds in chunks. Each takes a turn by the leg's rank, asks a holder where the blocks lie, reads them and puts
them into the tree, so what comes later, or not at all, costs nothing of what came before. Where a chunk could not be
kept until its leg is taken, the fetch waits for room, and without a turn.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from evolving.core.config import FetchConfig
from evolving.runtime.clock import SystemClock
from evolving_node_agent.engines.port import Holder
from evolving_node_agent.engines.sglang.translate import NAME_BYTES
from evolving_node_agent.engines.turns import ReadTurns

from .inbox import Inbox
from .legs import PrefillLeg
from .names import digests
from .pages import Layout, Range, l2_ranges
from .peers import Locate, Located, Peer, PeerLost, Peers, Place
from .transport import Transport

if TYPE_CHECKING:
    from .blocks import BlockStore
    from .landing import Claimed, Landing

logger = logging.getLogger(__name__)
_CHUNK_S = 4.0  # longest that finding and reading one chunk may take
_WORD_BYTES = 8


@dataclass(slots=True)
class _Fetch:
    """Where the fetch of one leg is."""

    leg: PrefillLeg
    chain: list[bytes]  # digests of the blocks that can be used
    first: int  # the next block wanted
    found: int  # leading blocks that were here, as few as there ever were
    spent: set[int] = field(default_factory=set)  # holders, by place, that have no more for this leg
    room: asyncio.Future[None] | None = None  # resolved when the next chunk may be kept

    def names(self, end: int) -> bytes:
        """The names from the next block wanted to `end`."""
        return b"".join(digest[:NAME_BYTES] for digest in self.chain[self.first : end])


class Reader:
    """Reads peers' memory. Service's thread."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def read(self, session: str, ranges: list[Range]) -> bool:
        """Read and wait until nothing more can arrive. Not to be cancelled: shield it."""
        loop = asyncio.get_running_loop()
        over: asyncio.Future[bool] = loop.create_future()

        def finish(ok: bool) -> None:
            loop.call_soon_threadsafe(over.set_result, ok)

        self._transport.read(session, ranges, finish)
        return await over


class Fetcher:
    """Brings blocks from peers' L2 into our own."""

    def __init__(
        self,
        inbox: Inbox,
        blocks: BlockStore,
        landing: Landing,
        peers: Peers,
        reader: Reader,
        config: FetchConfig,
        block_tokens: int,
    ) -> None:
        self._inbox = inbox
        self._layout = blocks.pages.layout
        self._checksums = blocks.checksums
        self._landing = landing
        self._peers = peers
        self._reader = reader
        self._chunk_blocks = config.chunk_blocks
        self._block_tokens = block_tokens
        self._turns = ReadTurns(config, SystemClock())
        self._suspect_s = config.suspect_s
        self._suspects: dict[str, float] = {}  # incarnation -> until when
        self._coming: dict[bytes, asyncio.Event] = {}  # first block of each chunk being read -> set at its end

    async def fetch(self, leg: PrefillLeg) -> None:
        """Fetch what holders have and we lack, chunk by chunk. Never raises for a peer's failure.

        Cancelling it leaves in place what has come; slots of an unfinished read stay taken until its end.
        """
        usable = (len(leg.tokens) - 1) // self._block_tokens
        chain = digests(leg.tokens, leg.root, self._block_tokens)[:usable]
        held = leg.known_cached_tokens // self._block_tokens
        fetch = _Fetch(leg, chain, held, held)
        while (place := self._next_holder(fetch)) is not None:
            await self._chunk(fetch, place)
            if fetch.room is not None:
                await fetch.room
                fetch.room = None

    def _next_holder(self, fetch: _Fetch) -> int | None:
        """The place of a holder that may have the next block, and what is missing then."""
        last = fetch.first
        found = None
        for place, holder in enumerate(fetch.leg.command.holders):
            end = min(holder.first_block + holder.blocks, len(fetch.chain))
            if place in fetch.spent or end <= fetch.first or self._is_suspect(holder.incarnation):
                continue
            last = max(last, end)
            if found is None and holder.first_block <= fetch.first:
                found = place
        fetch.leg.fetch.missing_tokens = (last - fetch.first) * self._block_tokens if found is not None else 0
        return found

    async def _chunk(self, fetch: _Fetch, place: int) -> None:
        """One chunk from one holder; moves `fetch.first` on, or gives the holder up."""
        holder = fetch.leg.command.holders[place]
        end = min(fetch.first + self._chunk_blocks, holder.first_block + holder.blocks, len(fetch.chain))
        name = fetch.chain[fetch.first]
        if (coming := self._coming.get(name)) is not None:
            await coming.wait()  # another leg reads the same
            fetch.first = max(fetch.first, await self._inbox.call(lambda: self._landing.look(fetch.leg)))
            return
        size_bytes = 2 * self._layout.l2_page_bytes * (end - fetch.first)
        async with self._turns.turn(fetch.leg.fetch.rank, size_bytes):
            if name in self._coming or self._is_suspect(holder.incarnation):
                return
            over = self._coming[name] = asyncio.Event()
            try:
                wanted = end - fetch.first
                if await self._bring(fetch, holder, end) < wanted:
                    fetch.spent.add(place)
            finally:
                del self._coming[name]
                over.set()

    async def _bring(self, fetch: _Fetch, holder: Holder, end: int) -> int:
        """Find, read and insert blocks from `fetch.first` to `end`, as many as the holder has.

        How many came; all of them where that says nothing about the holder, because they are here already or could not
        be kept yet. None where there is no memory, which says nothing about it either, but nobody tells when there is
        some: of L2, what L1 has as well and what is being written never leaves for a fetch.
        """
        try:
            async with asyncio.timeout(_CHUNK_S):
                peer, places = await self._locate(holder, fetch.names(end))
        except (PeerLost, TimeoutError) as error:
            logger.warning("holder %s: %r", holder.node_id, error)
            self._suspect(holder.incarnation)
            return 0
        if not places:
            return 0
        first = fetch.first
        room = asyncio.get_running_loop().create_future()
        claimed = await self._claim(fetch, len(places), room)
        if claimed.waits:
            fetch.room = room
            return end - first
        if claimed.held > first or claimed.held < fetch.found:
            fetch.first, fetch.found = claimed.held, min(fetch.found, claimed.held)
            return end - first
        slots = claimed.slots
        if slots is None:
            return 0
        reading = asyncio.ensure_future(self._read(peer, slots, places))
        watches = (fetch.leg.fetch.reading, self._landing.busy)
        for watch in watches:
            watch.start()
        try:
            async with asyncio.timeout(_CHUNK_S):
                good = await asyncio.shield(reading)
        except BaseException as error:
            # Bytes may still arrive: the slots stay taken until the transport is done with them.
            reading.add_done_callback(lambda _: self._release(slots))
            if not isinstance(error, TimeoutError):
                raise
            logger.warning("holder %s: a read took longer than %.1f s", holder.node_id, _CHUNK_S)
            self._suspect(holder.incarnation)
            return 0
        finally:
            for watch in watches:
                watch.stop()
        sums = [place[2] for place in places[:good]]
        self._inbox.post(lambda: self._landing.insert(fetch.leg, fetch.chain, first, slots, sums))
        fetch.first = first + good
        return good

    async def _locate(self, holder: Holder, names: bytes) -> tuple[Peer, list[Place]]:
        """Where the leading ones of these blocks are in a holder's L2. Raises PeerLost."""
        peer = await self._peers.at(holder.pool_address)
        assert peer.welcome is not None
        if holder.incarnation and peer.welcome.incarnation != holder.incarnation:
            return peer, []
        return peer, (await peer.ask(Locate(names), Located)).places

    async def _claim(self, fetch: _Fetch, blocks: int, room: asyncio.Future[None]) -> Claimed:
        """`Landing.claim`; given back at once when the leg is gone before its slots come."""
        first = fetch.first
        asked = asyncio.ensure_future(self._inbox.call(lambda: self._landing.claim(fetch.leg, first, blocks, room)))
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            asked.add_done_callback(lambda done: self._release(done.result().slots))
            raise

    def _release(self, slots: torch.Tensor | None) -> None:
        if slots is not None:
            self._inbox.post(lambda: self._landing.release(slots))

    async def _read(self, peer: Peer, slots: torch.Tensor, places: list[Place]) -> int:
        """Read pages of a peer; the leading ones that arrived whole, unchanged, and as they were stored."""
        assert peer.welcome is not None
        session, theirs = peer.welcome.session, peer.welcome.layout
        pages = (slots[:: self._block_tokens] // self._block_tokens).tolist()
        words = (ctypes.c_int64 * len(places))(*[-1] * len(places))
        ok = await self._reader.read(session, l2_ranges(self._layout, theirs, _pairs(pages, places)))
        # The words are read after the data: a page given away meanwhile has another one by now.
        ok = ok and await self._reader.read(session, _word_ranges(theirs, places, ctypes.addressof(words)))
        if not ok:
            logger.warning("a read of %d blocks from %s failed", len(pages), session)
            self._suspect(peer.welcome.incarnation)
            return 0
        good = 0
        while good < len(places) and words[good] == places[good][1]:
            good += 1
        if not self._checksums.enabled:
            return good
        intact = await asyncio.to_thread(self._checksums.intact, pages[:good], [place[2] for place in places[:good]])
        if intact < good:
            logger.error("a page of %s is not what was stored there: computed instead", session)
        return intact

    def _is_suspect(self, incarnation: str) -> bool:
        return self._suspects.get(incarnation, 0.0) > time.monotonic()

    def _suspect(self, incarnation: str) -> None:
        now_s = time.monotonic()
        self._suspects = {name: until_s for name, until_s in self._suspects.items() if until_s > now_s}
        self._suspects[incarnation] = now_s + self._suspect_s


def _pairs(pages: list[int], places: list[Place]) -> list[tuple[int, int]]:
    """(own page, peer's page)."""
    return [(own, place[0]) for own, place in zip(pages, places, strict=True)]


def _word_ranges(peer: Layout, places: list[Place], own: int) -> list[Range]:
    """The generation words of pages; neighbours together."""
    ranges: list[Range] = []
    for index, place in enumerate(places):
        word = (own + index * _WORD_BYTES, peer.generations + place[0] * _WORD_BYTES, _WORD_BYTES)
        if ranges and ranges[-1][1] + ranges[-1][2] == word[1]:
            ranges[-1] = (ranges[-1][0], ranges[-1][1], ranges[-1][2] + _WORD_BYTES)
        else:
            ranges.append(word)
    return ranges
