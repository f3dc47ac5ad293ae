"""The KV of one leg: leading blocks shared through the cache, then room of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from evolving.core.blocks import chain, hash_tokens, split_names
from evolving.core.pool_runs import Use
from evolving.core.terms import NAME_BYTES
from evolving_node_agent.engines.mock.cache import BlockCache
from evolving_node_agent.engines.mock.config import MockConfig
from evolving_node_agent.engines.mock.model import ContextState, block_kv, partial_kv
from evolving_node_agent.engines.port import DecodeJob, PrefillJob, Tier


class ContextKv:
    """KV of a growing context on one engine. Room is taken once, by `reserve`, and returned by `release`.

    Where KV isn't verified no bytes are made, and the next token comes from names instead of KV.
    """

    def __init__(self, cache: BlockCache, config: MockConfig, use: Use, job: PrefillJob | DecodeJob) -> None:
        self._cache = cache
        self._use = use
        self._config = config
        self._tokens = job.tokens
        self._given = job.blocks or hash_tokens(job.root, job.tokens.astype("<u4").tobytes(), config.block_tokens)
        self._grown: list[bytes] = []  # digests of blocks that decoding filled
        self._before = job.root  # the digest that what comes after the last full block follows
        self.names = split_names(self._given.names)  # of the full blocks of `tokens`, then of those
        self._blocks = 0  # leading ones that are here, kept for the leg
        self._own = 0  # blocks' worth of room that is no block yet
        self._tail: list[int] = []  # tokens with KV after the last full block
        self._partial = b""  # their KV
        self._state = ContextState()

    @property
    def tokens(self) -> int:
        """Tokens whose KV is here."""
        return self._blocks * self._config.block_tokens + len(self._tail)

    def fits(self, pages: int, reusable_blocks: int) -> bool:
        """Whether `reserve` would find room now.

        Legs of either kind leave one context's worth of L1 alone. So two nodes full of prompts that wait for decode
        legs, or of decode legs that wait for prompts, never wait on each other for ever.
        """
        pool, config = self._cache.pool, self._config
        in_l1 = pool.matched(self.names, reusable_blocks, Tier.L1)
        unused, unused_by_kind = pool.unused(self.names, in_l1, self._use)
        share = pool.capacity(Tier.L1) - config.pages(config.reserve_tokens)
        missing = pages - in_l1
        return pool.room - unused >= missing and pool.used_by(self._use) + unused_by_kind + missing <= share

    def reserve(self, pages: int, reusable_blocks: int) -> tuple[int, int] | None:
        """Take room for `pages`, reusing up to `reusable_blocks` leading blocks that are here.

        Returns how many blocks were reused from L1 and from L2, or None, with nothing taken, where there is no room.
        """
        if not self.fits(pages, reusable_blocks):
            return None
        pool = self._cache.pool
        in_l1 = pool.matched(self.names, reusable_blocks, Tier.L1)
        pool.lock(self.names, 0, in_l1, self._use)
        self._own = pages - in_l1
        pool.reserve(self._own, self._use)
        self._arrived(in_l1)
        held = pool.held(self.names, reusable_blocks)
        self._commit(held)
        return in_l1, held - in_l1

    def compute(self, tokens: int) -> None:
        """Prefill computed the next `tokens` of the prompt."""
        end = self.tokens + tokens
        size = self._config.block_tokens
        full = end // size
        if full > self._blocks:
            self._set_tail([])
            self._commit(full, self._new_kv(self.names[self._blocks : full]))
        self._set_tail(self._tokens[full * size : end].tolist())

    def receive(self, pages: Sequence[bytes]) -> None:
        """The rest of the prompt's pages arrived (none, where KV isn't verified), from the first block that wasn't
        here on."""
        missing = len(self.names) - self._blocks
        self._commit(len(self.names), pages[:missing])
        self._tail = self._tokens[len(self.names) * self._config.block_tokens :].tolist()
        if self._tail and pages[missing:]:
            (self._partial,) = pages[missing:]

    def append(self, token: int) -> None:
        """Decode computed the KV of one more token."""
        self._tail.append(token)
        if len(self._tail) < self._config.block_tokens:
            if self._config.verify_kv:
                self._set_tail(self._tail)
            return
        block = np.array(self._tail, dtype="<u4").tobytes()
        self._grown += chain(self._before, block, self._config.block_tokens)
        self.names.append(self._grown[-1][:NAME_BYTES])
        self._set_tail([])
        self._commit(len(self.names), self._new_kv(self.names[-1:]))

    def page(self, index: int) -> bytes:
        """KV bytes of a page of the prompt; the last one may be incomplete."""
        if index == self._blocks:
            return self._partial_page
        data = self._cache.read(self.names[index], Tier.L1)
        assert data is not None, "blocks of a leg are kept"
        return data

    def logits_seed(self) -> bytes:
        """What the next token's logits come from, 32 bytes: a digest over all KV bytes of the context, or over the
        last block's and the place after it."""
        if self._config.verify_kv:
            return self._state.logits_seed(self._partial_page)
        return hashlib.sha256(self._before + len(self._tail).to_bytes(4, "little")).digest()

    def release(self) -> None:
        """Return own room and give up shared blocks."""
        self._cache.pool.give_back(self._own, self._use)
        self._cache.pool.unlock(self.names, self._blocks, self._use)
        self._own = self._blocks = 0
        self._tail = []

    @property
    def _partial_page(self) -> bytes:
        return self._partial if self._tail else bytes(self._config.page_bytes)

    def _new_kv(self, names: Sequence[bytes]) -> list[bytes]:
        return [block_kv(name, self._config.page_bytes) for name in names] if self._config.verify_kv else []

    def _set_tail(self, tail: list[int]) -> None:
        self._tail = tail
        if tail and self._config.verify_kv:
            self._partial = partial_kv(self._before, np.array(tail, dtype=np.uint32), self._config.page_bytes)

    def _commit(self, last: int, data: Sequence[bytes] = ()) -> None:
        """Blocks up to `last` are here: `data` are their bytes, where L2 doesn't have them."""
        if last == self._blocks:
            return
        self._cache.commit(self.names, self._blocks, last, self._use, data)
        self._own -= last - self._blocks
        self._arrived(last)

    def _arrived(self, last: int) -> None:
        if self._config.verify_kv:
            for name in self.names[self._blocks : last]:
                data = self._cache.read(name, Tier.L1)
                assert data is not None
                self._state.add_block(data)
        self._blocks = last
        grown = last - self._given.blocks
        self._before = self._grown[grown - 1] if grown > 0 else self._given.digest_before(last)
