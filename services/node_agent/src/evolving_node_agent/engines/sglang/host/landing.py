"""Host memory for blocks that peers send: taken, filled, put into the tree, and kept there until their leg is taken.

Scheduler's thread, except for `busy`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE

from evolving_node_agent.engines.sglang.translate import id_array

from .blocks import BlockStore
from .legs import Phase, PrefillLeg
from .names import namespace
from .stopwatch import Stopwatch

_PROTECTED_SHARE = 0.5  # of L2: what is kept for queued legs never takes all of it from the rest


@dataclass(frozen=True, slots=True)
class _Protection:
    """A host lock on the last node of a leg's cached prefix; its children alone could go, and it has none it needs."""

    node: Any
    receipt: Any
    tokens: int


class Landing:
    """What is on its way from peers, and what has come for legs that still wait."""

    def __init__(self, tree: Any, blocks: BlockStore, block_tokens: int, l2_tokens: int) -> None:
        self._tree = tree
        self._blocks = blocks
        self._block_tokens = block_tokens
        self._protections: dict[str, _Protection] = {}
        self._protected_tokens_max = int(l2_tokens * _PROTECTED_SHARE)
        self.blocks_taken = 0  # host pages of reads that have not ended
        self.fetched_tokens = 0
        self.busy = Stopwatch()  # the service's: reads under way

    def claim(self, leg: PrefillLeg, first_block: int, blocks: int) -> tuple[int, torch.Tensor | None]:
        """Slots for blocks [first_block, first_block + blocks), which a read will fill.

        Returns the leg's leading blocks that are cached now, and the slots; None when another number of blocks is
        cached than `first_block`, when there is no room, or when the leg waits no more.
        """
        held = self._blocks.cached_tokens(leg.tokens, leg.root) // self._block_tokens
        if leg.phase is not Phase.QUEUED:
            return held, None
        leg.known_cached_tokens = held * self._block_tokens
        self.protect(leg)
        if held != first_block:
            return held, None
        slots = self._blocks.pages.allocate_host(blocks, self._tree.evict_host)
        if slots is not None:
            self.blocks_taken += blocks
        return held, slots

    def release(self, slots: torch.Tensor) -> None:
        """Give back slots that no byte can arrive in any more."""
        self.blocks_taken -= len(slots) // self._block_tokens
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
        self.blocks_taken -= len(slots) // width
        self.fetched_tokens += blocks * width
        fresh, used = slots[: blocks * width], 0
        held = self._blocks.cached_tokens(leg.tokens, leg.root) // width
        known = held - first_block
        if 0 <= known < blocks:
            used = self._insert(leg, digests[held : first_block + blocks], held, fresh[known * width :])
            self._blocks.pages.free_host(fresh[: known * width])
            fresh = fresh[known * width : len(fresh) - used]
        self._blocks.pages.free_host(fresh)
        self._blocks.pages.free_host(slots[blocks * width :])
        leg.known_cached_tokens = self._blocks.cached_tokens(leg.tokens, leg.root)
        if used:
            leg.fetch.spans.append((held * width, (first_block + blocks) * width))
        if leg.phase is Phase.QUEUED:
            self.protect(leg)

    def _insert(self, leg: PrefillLeg, digests: list[bytes], first_block: int, slots: torch.Tensor) -> int:
        """Add host copies below the leg's first blocks; how many of the slots, the last ones, the tree took."""
        width = self._block_tokens
        start, end = first_block * width, first_block * width + len(slots)
        node = self._blocks.match(leg.tokens[:start], leg.root).best_match_node
        key = RadixKey(id_array(leg.tokens[start:end]), namespace(leg.root))
        result = self._tree.tree_core.insert_host(node, key, slots, [digest.hex() for digest in digests])
        self._tree._apply_cache_actions(result.cache_actions)
        return 0 if result.host_insert_dropped else len(slots) - int(result.prefix_len)

    # -- until the leg is taken

    def protect(self, leg: PrefillLeg) -> None:
        """Keep what L2 holds of the leg's prompt, within bounds: beyond them it may be evicted and is computed."""
        earlier = self._protections.get(leg.rid)
        others = sum(each.tokens for each in self._protections.values()) - (earlier.tokens if earlier else 0)
        tokens = leg.known_cached_tokens
        if others + tokens > self._protected_tokens_max:
            return
        node = self._blocks.match(leg.tokens[:-1], leg.root).best_match_node
        receipt = self._tree.inc_host_lock_ref(node).to_dec_params()
        self.unprotect(leg)
        if BASE_COMPONENT_TYPE in receipt.component_host_lock_uuids:
            self._protections[leg.rid] = _Protection(node, receipt, tokens)

    def unprotect(self, leg: PrefillLeg) -> None:
        """The leg was taken, or is gone."""
        protection = self._protections.pop(leg.rid, None)
        if protection is not None:
            self._tree.dec_host_lock_ref(protection.node, protection.receipt)
