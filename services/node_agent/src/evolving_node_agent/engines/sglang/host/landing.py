"""Host memory for blocks that peers send: taken, filled, and put into the tree.

Scheduler's thread, except for `busy`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .keeping import Keeping
from .legs import PrefillLeg
from .stopwatch import Stopwatch

if TYPE_CHECKING:
    from .blocks import BlockStore


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a claim came to."""

    held: int  # leading blocks of the leg that are cached now
    slots: torch.Tensor | None = None
    waits: bool = False  # until there is room to keep what would be read


class Landing:
    """What is on its way from peers, and what has come."""

    def __init__(self, tree: Any, blocks: BlockStore, keeping: Keeping, block_tokens: int) -> None:
        self._tree = tree
        self._blocks = blocks
        self._keeping = keeping
        self._block_tokens = block_tokens
        self.fetched_tokens = 0
        self.busy = Stopwatch()  # the service's: reads under way

    def look(self, leg: PrefillLeg) -> int:
        """Leading blocks of the leg that are cached now; of one that waits no more, those that were."""
        self._keeping.look(leg)
        return leg.known_cached_tokens // self._block_tokens

    def claim(self, leg: PrefillLeg, first_block: int, blocks: int, room: asyncio.Future[None]) -> Claimed:
        """Slots for blocks [first_block, first_block + blocks), which a read will fill.

        None when another number of blocks is cached than `first_block`, when there is no memory, when the leg waits no
        more, or when they could not be kept for it: then `room` is resolved once they may be.
        """
        held = self.look(leg)
        if held != first_block or not self._keeping.waits(leg):
            return Claimed(held)
        if not self._keeping.lets_in(leg, blocks, room):
            return Claimed(held, waits=True)
        slots = self._blocks.pages.allocate_host(blocks, self._tree.evict_host)
        if slots is not None:
            self._keeping.expect(blocks)
        return Claimed(held, slots)

    def release(self, slots: torch.Tensor) -> None:
        """Give back slots that no byte can arrive in any more."""
        self._keeping.give_up(len(slots) // self._block_tokens)
        self._blocks.pages.free_host(slots)

    def insert(
        self, leg: PrefillLeg, digests: list[bytes], first_block: int, slots: torch.Tensor, sums: list[int | None]
    ) -> None:
        """Put blocks from `first_block` on into the tree: as many as there are checksums in `sums`, whose bytes have
        arrived in the first slots. `digests` are those of the whole prompt. Slots that are not taken (a block came
        another way, or its parent left) are given back.
        """
        width, blocks = self._block_tokens, len(sums)
        self._blocks.checksums.put((slots[: blocks * width : width] // width).tolist(), sums)
        self.fetched_tokens += blocks * width
        fresh, used = slots[: blocks * width], 0
        held = self._blocks.cached_tokens(leg.tokens, leg.root) // width
        known = held - first_block
        if 0 <= known < blocks:
            new = digests[held : first_block + blocks]
            used = self._blocks.insert_host(leg.tokens, leg.root, held, new, fresh[known * width :])
            self._blocks.pages.free_host(fresh[: known * width])
            fresh = fresh[known * width : len(fresh) - used]
        self._blocks.pages.free_host(fresh)
        self._blocks.pages.free_host(slots[blocks * width :])
        if used:
            leg.fetch.spans.append((held * width, (first_block + blocks) * width))
        self._keeping.come(leg, len(slots) // width, used // width)
