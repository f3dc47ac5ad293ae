"""The KV of one leg: leading blocks shared through the cache, then pages of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from evolving.core.blocks import chain
from evolving.core.terms import NAME_BYTES
from evolving_node_agent.engines.mock.block import Block, User
from evolving_node_agent.engines.mock.cache import BlockCache
from evolving_node_agent.engines.mock.config import MockConfig
from evolving_node_agent.engines.mock.model import ContextState, block_kv, partial_kv
from evolving_node_agent.engines.port import Tier, TokenIds


class ContextKv:
    """KV of a growing context on one engine. Room is taken once, by `reserve`, and returned by `release`."""

    def __init__(self, cache: BlockCache, config: MockConfig, user: User, root: bytes, tokens: TokenIds) -> None:
        self._cache = cache
        self._user = user
        self._config = config
        self._root = root
        self._tokens = tokens
        self._digests = self._chained(root, tokens)
        self.names = [digest[:NAME_BYTES] for digest in self._digests]  # of the full blocks of `tokens`
        self._blocks: list[Block] = []
        self._own: deque[int] = deque()
        self._tail: list[int] = []  # tokens with KV after the last full block
        self._state = ContextState()

    @property
    def tokens(self) -> int:
        """Tokens whose KV is here."""
        return len(self._blocks) * self._config.block_tokens + len(self._tail)

    def reserve(self, pages: int, reusable_blocks: int) -> tuple[int, int] | None:
        """Take room for `pages`, reusing up to `reusable_blocks` leading blocks that are here.

        Returns how many blocks were reused from L1 and from L2, or None, with nothing taken, where there is no room.
        Legs of either kind leave one context's worth of L1 alone. So two nodes full of prompts that wait for decode
        legs, or of decode legs that wait for prompts, never wait on each other for ever.
        """
        cache, config = self._cache, self._config
        reusable = self.names[:reusable_blocks]
        in_l1 = cache.matched(reusable, Tier.L1)
        blocks = cache.lock(reusable[:in_l1], self._user)
        missing = pages - in_l1
        share = cache.pages(Tier.L1) - config.pages(config.max_context_tokens)
        if cache.room < missing or cache.used_by(self._user) + missing > share:
            cache.unlock(blocks, self._user)
            return None
        for block in blocks:
            self._append(block)
        self._own.extend(cache.take_pages(missing, self._user))
        held = cache.held(reusable)
        for name in reusable[in_l1:held]:
            data = cache.read(name, Tier.L2)
            assert data is not None
            self._commit(name, data)
        return in_l1, held - in_l1

    def compute(self, tokens: int) -> None:
        """Prefill computed the next `tokens` of the prompt."""
        end = self.tokens + tokens
        size = self._config.block_tokens
        while (len(self._blocks) + 1) * size <= end:
            name = self.names[len(self._blocks)]
            self._tail = []
            self._commit(name, block_kv(name, self._config.page_bytes))
        self._set_tail(self._tokens[len(self._blocks) * size : end].tolist())

    def receive(self, pages: Sequence[bytes]) -> None:
        """The rest of the prompt's pages arrived, from the first block that wasn't here on."""
        size = self._config.block_tokens
        for data in pages:
            at = len(self._blocks)
            if at < len(self.names):
                self._commit(self.names[at], data)
            else:
                self._tail = self._tokens[at * size :].tolist()
                self._cache.write_page(self._own[0], data)

    def append(self, token: int) -> None:
        """Decode computed the KV of one more token."""
        tail = [*self._tail, token]
        if len(tail) < self._config.block_tokens:
            self._set_tail(tail)
            return
        (digest,) = self._chained(self._before, np.array(tail, dtype=np.uint32))
        self._digests.append(digest)
        self.names.append(digest[:NAME_BYTES])
        self._tail = []
        self._commit(digest[:NAME_BYTES], block_kv(digest[:NAME_BYTES], self._config.page_bytes))

    def page(self, index: int) -> bytes:
        """KV bytes of a page of the prompt; the last one may be incomplete."""
        if index == len(self._blocks):
            return self._partial()
        data = self._cache.read(self._blocks[index].name, Tier.L1)
        assert data is not None, "blocks of a leg are locked"
        return data

    def logits_seed(self) -> bytes:
        """What the next token's logits come from: a digest over all KV bytes of the context."""
        return self._state.logits_seed(self._partial())

    def release(self) -> None:
        """Return own pages and give up shared blocks."""
        while self._own:
            self._cache.give_back_page(self._own.pop(), self._user)
        self._cache.unlock(self._blocks, self._user)
        self._blocks = []
        self._tail = []

    def _chained(self, before: bytes, tokens: TokenIds) -> list[bytes]:
        return chain(before, tokens.astype("<u4").tobytes(), self._config.block_tokens)

    @property
    def _before(self) -> bytes:
        return self._digests[len(self._blocks) - 1] if self._blocks else self._root

    def _partial(self) -> bytes:
        return self._cache.read_page(self._own[0]) if self._tail else bytes(self._config.page_bytes)

    def _set_tail(self, tail: list[int]) -> None:
        self._tail = tail
        if tail:
            data = partial_kv(self._before, np.array(tail, dtype=np.uint32), self._config.page_bytes)
            self._cache.write_page(self._own[0], data)

    def _commit(self, name: bytes, data: bytes) -> None:
        page = self._own.popleft()
        self._cache.write_page(page, data)
        self._append(self._cache.commit(name, self._blocks[-1] if self._blocks else None, page, self._user))

    def _append(self, block: Block) -> None:
        self._blocks.append(block)
        data = self._cache.read(block.name, Tier.L1)
        assert data is not None
        self._state.add_block(data)
