"""Reading the blocks of a prompt that peers hold in their L2, before it is queued. Service's thread.

A plain read with one deadline: what has not arrived by then is computed.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from evolving_node_agent.engines.port import Holder
from evolving_node_agent.engines.sglang.translate import NAME_BYTES

from .blocks import BlockStore
from .inbox import Inbox
from .legs import PrefillLeg
from .names import digests
from .pages import Layout, Range, l2_ranges
from .peers import Locate, Located, Peer, PeerLost, Peers
from .transport import Transport

logger = logging.getLogger(__name__)
_SUSPECT_S = 10.0  # a peer whose read failed is not asked again for this long
_WORD_BYTES = 8


@dataclass(slots=True)
class _Piece:
    """Consecutive blocks that one peer said it has."""

    peer: Peer
    first_block: int
    places: list[tuple[int, int]]  # (page, generation)


class Fetcher:
    """Brings blocks from peers' L2 into our own."""

    def __init__(self, inbox: Inbox, blocks: BlockStore, peers: Peers, transport: Transport, block_tokens: int) -> None:
        self._inbox = inbox
        self._blocks = blocks
        self._peers = peers
        self._transport = transport
        self._block_tokens = block_tokens
        self._suspects: dict[str, float] = {}  # incarnation -> until when

    async def fetch(self, leg: PrefillLeg) -> None:
        """Fetch what holders have and we lack; sets `leg.fetched`. Never raises for a peer's failure."""
        usable = (len(leg.tokens) - 1) // self._block_tokens
        chain = digests(leg.tokens, leg.root, self._block_tokens)[:usable]
        held = await self._inbox.call(lambda: self._blocks.cached_tokens(leg.tokens, leg.root))
        first = held // self._block_tokens
        if first >= usable or not any(holder.first_block + holder.blocks > first for holder in leg.command.holders):
            return
        try:
            async with asyncio.timeout(leg.command.fetch_deadline_s):
                pieces = await self._locate(leg.command.holders, chain, first)
                if pieces:
                    await self._read(leg, chain, first, pieces)
        except TimeoutError:
            logger.warning("leg %s: the fetch took longer than its deadline", leg.leg_id)

    async def _locate(self, holders: Sequence[Holder], chain: list[bytes], first: int) -> list[_Piece]:
        """Pieces that continue each other from block `first` on."""
        pieces: list[_Piece] = []
        for holder in sorted(holders, key=lambda holder: holder.first_block):
            end = min(holder.first_block + holder.blocks, len(chain))
            if holder.first_block > first or end <= first or self._is_suspect(holder.incarnation):
                continue
            try:
                peer = await self._peers.at(holder.pool_address)
                assert peer.welcome is not None
                if holder.incarnation and peer.welcome.incarnation != holder.incarnation:
                    continue
                names = b"".join(digest[:NAME_BYTES] for digest in chain[first:end])
                places = (await peer.ask(Locate(names), Located)).places
            except PeerLost as error:
                logger.warning("holder %s: %s", holder.node_id, error)
                self._suspect(holder.incarnation)
                continue
            if places:
                pieces.append(_Piece(peer, first, places))
                first += len(places)
        return pieces

    async def _read(self, leg: PrefillLeg, chain: list[bytes], first: int, pieces: list[_Piece]) -> None:
        count = sum(len(piece.places) for piece in pieces)
        slots = await self._allocate(count)
        if slots is None:
            return
        words = (ctypes.c_int64 * count)(*[-1] * count)
        reading = asyncio.ensure_future(self._read_pieces(slots, words, first, pieces))
        try:
            good = await asyncio.shield(reading)
        except (TimeoutError, asyncio.CancelledError):
            # Bytes may still arrive: the slots stay taken until the transport is done with them.
            for piece in pieces:
                assert piece.peer.welcome is not None
                self._suspect(piece.peer.welcome.incarnation)
            reading.add_done_callback(lambda _: self._free(slots))
            raise
        insert = self._blocks.insert_fetched
        cached = await self._inbox.call(lambda: insert(leg.tokens, leg.root, chain, first, slots, good))
        if cached > first * self._block_tokens:
            leg.fetched = (first * self._block_tokens, min(cached, (first + good) * self._block_tokens))

    async def _allocate(self, blocks: int) -> torch.Tensor | None:
        """Host slots; given back at once when the leg is gone before they come."""
        asked = asyncio.ensure_future(self._inbox.call(lambda: self._blocks.allocate_host(blocks)))
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            asked.add_done_callback(lambda done: self._free(done.result()))
            raise

    def _free(self, slots: torch.Tensor | None) -> None:
        if slots is not None:
            self._inbox.post(lambda: self._blocks.pages.free_host(slots))

    async def _read_pieces(
        self, slots: torch.Tensor, words: ctypes.Array[ctypes.c_int64], first: int, pieces: list[_Piece]
    ) -> int:
        """Read every piece, all peers at once; the leading blocks that arrived whole and unchanged."""
        pages = (slots[:: self._block_tokens] // self._block_tokens).tolist()
        oks = await asyncio.gather(
            *(
                self._read_piece(piece, pages[start : start + len(piece.places)], words, start)
                for piece in pieces
                for start in (piece.first_block - first,)
            )
        )
        good = 0
        for piece, ok in zip(pieces, oks, strict=True):
            for _, generation in piece.places:
                if not ok or words[good] != generation:
                    return good
                good += 1
        return good

    async def _read_piece(
        self, piece: _Piece, pages: list[int], words: ctypes.Array[ctypes.c_int64], start: int
    ) -> bool:
        assert piece.peer.welcome is not None
        theirs, ours = piece.peer.welcome.layout, self._blocks.pages.layout
        data = l2_ranges(ours, theirs, [(own, place[0]) for own, place in zip(pages, piece.places, strict=True)])
        session = piece.peer.welcome.session
        began_s = time.monotonic()
        ok = await self.read(session, data)
        # The words are read after the data: a page given away meanwhile has another one by now.
        ok = ok and await self.read(session, _word_ranges(theirs, piece.places, ctypes.addressof(words), start))
        if not ok:
            self._suspect(piece.peer.welcome.incarnation)
        logger.info("read %d blocks of %s in %.3f s", len(pages), session, time.monotonic() - began_s)
        return ok

    async def read(self, session: str, ranges: list[Range]) -> bool:
        """Read and wait until nothing more can arrive. Not to be cancelled: shield it."""
        loop = asyncio.get_running_loop()
        over: asyncio.Future[bool] = loop.create_future()

        def finish(ok: bool) -> None:
            loop.call_soon_threadsafe(over.set_result, ok)

        self._transport.read(session, ranges, finish)
        return await over

    def _is_suspect(self, incarnation: str) -> bool:
        return self._suspects.get(incarnation, 0.0) > time.monotonic()

    def _suspect(self, incarnation: str) -> None:
        now_s = time.monotonic()
        self._suspects = {name: until_s for name, until_s in self._suspects.items() if until_s > now_s}
        self._suspects[incarnation] = now_s + _SUSPECT_S


def _word_ranges(peer: Layout, places: list[tuple[int, int]], own: int, start: int) -> list[Range]:
    """The generation words of pages; neighbours together."""
    ranges: list[Range] = []
    for index, (page, _) in enumerate(places):
        word = (own + (start + index) * _WORD_BYTES, peer.generations + page * _WORD_BYTES, _WORD_BYTES)
        if ranges and ranges[-1][1] + ranges[-1][2] == word[1]:
            ranges[-1] = (ranges[-1][0], ranges[-1][1], ranges[-1][2] + _WORD_BYTES)
        else:
            ranges.append(word)
    return ranges
