"""Decode slots and KV room for prompts that land on this node. Scheduler's thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang.srt.mem_cache.common import match_kv_cache, release_kv_cache

from .legs import DecodeLeg, Phase
from .memory import Ledger
from .requests import make_request


class Reservations:
    """Decode legs waiting for room, and the room of those that have it."""

    def __init__(self, scheduler: Any, ledger: Ledger, decodes: dict[str, DecodeLeg], slots: int) -> None:
        self._scheduler = scheduler
        self._ledger = ledger
        self._decodes = decodes
        self._slots = slots
        self._waiting: list[DecodeLeg] = []

    def wait(self, leg: DecodeLeg) -> None:
        """Queue the leg."""
        self._waiting.append(leg)

    def admit(self) -> Iterator[tuple[DecodeLeg, int]]:
        """Legs that get room now, with the prompt tokens already here. Oldest first; a leg that takes over KV on this
        node needs no memory and passes those that do."""
        full = False
        for leg in list(self._waiting):
            if len(self._decodes) >= self._slots:
                return
            if leg.local is None and full:
                continue
            cached_tokens = len(leg.tokens) if leg.local is not None else self._allocate(leg)
            if cached_tokens is None:
                full = True
                continue
            self._waiting.remove(leg)
            self._decodes[leg.rid] = leg
            leg.holds_slot = True
            yield leg, cached_tokens

    def forget(self, leg: DecodeLeg) -> None:
        """Stop waiting, or give the room back when the leg has it."""
        if leg in self._waiting:
            self._waiting.remove(leg)
        elif leg.holds_slot and not leg.running:
            self.drop(leg)

    def drop(self, leg: DecodeLeg) -> None:
        """Give the room back. Nothing may write to it any more."""
        self._decodes.pop(leg.rid, None)
        leg.holds_slot = False
        if leg.request is not None and leg.request.kv.holds_kv:
            release_kv_cache(leg.request, self._scheduler.tree_cache, checkpoint=False)

    def landing_pages(self, leg: DecodeLeg) -> list[int]:
        """The device pages the missing prompt KV goes to."""
        width = self._scheduler.page_size
        row = self._scheduler.req_to_token_pool.req_to_token[leg.request.kv.req_pool_idx]
        slots = row[leg.request.prefix_len : len(leg.tokens) : width]
        return [int(slot) // width for slot in slots.tolist()]

    def take_over(self, leg: DecodeLeg) -> bool:
        """Make the KV row of the prefill leg on this node the decode leg's; no byte moves."""
        source = leg.local
        assert source is not None
        if source.phase is not Phase.HOLDING or source.held_kv is None:
            return False
        request = self._request(leg)
        request.kv, source.held_kv = source.held_kv, None
        request.lock, source.request.lock = source.request.lock, None
        request.last_node = source.request.last_node
        request.prefix_len = request.kv.cache_protected_len
        leg.owned_tokens, source.owned_tokens = source.owned_tokens, 0
        source.phase = Phase.OVER
        return True

    def _request(self, leg: DecodeLeg) -> Any:
        sampling = leg.command.sampling
        leg.request = make_request(leg, sampling, sampling.max_tokens, 0, self._scheduler.model_config)
        self._scheduler.init_req_max_new_tokens(leg.request)
        return leg.request

    def _allocate(self, leg: DecodeLeg) -> int | None:
        """Pages for what of the prompt is not here, and a request row; the cached tokens, or None without room."""
        scheduler = self._scheduler
        request = leg.request or self._request(leg)
        length = len(leg.tokens)
        match_kv_cache(request, scheduler.tree_cache, max_prefix_len=length)
        request.lock = scheduler.tree_cache.lock(request.last_node)
        needed = self._ledger.in_blocks(length) - request.prefix_len
        slots = None
        if needed + self._ledger.for_prefill() <= self._ledger.free_tokens():
            rows = scheduler.req_to_token_pool.alloc([request])
            slots = self._ledger.allocate(needed) if rows is not None else None
            if slots is None and rows is not None:
                scheduler.req_to_token_pool.free(request)
        if slots is None:
            scheduler.tree_cache.unlock(request.lock)
            request.lock = None
            return None
        row, prefix = request.kv.req_pool_idx, request.prefix_len
        if prefix:
            known = scheduler.tree_cache.prefix_device_indices(request)
            scheduler.req_to_token_pool.write((row, slice(0, prefix)), known)
        scheduler.req_to_token_pool.write((row, slice(prefix, length)), slots[: length - prefix])
        request.kv.cache_protected_len = prefix
        request.kv.kv_committed_len = request.kv.kv_allocated_len = length
        leg.owned_tokens = needed
        return int(prefix)
