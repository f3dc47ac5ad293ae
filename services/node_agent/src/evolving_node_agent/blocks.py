"""Names of the blocks a request fills while it decodes. Pure."""

from __future__ import annotations

import numpy as np

from evolving.core.blocks import TOKEN_BYTES, HashedTokens, chain, hash_tokens, names_of
from evolving_node_agent.engines.port import TokenIds


class ContextBlocks:
    """The growing context of one request, and the names of its full blocks.

    A block counts as complete when all its tokens have KV; the last sampled token has none yet.
    """

    def __init__(self, root: bytes, tokens: TokenIds, block_tokens: int, known: HashedTokens | None = None) -> None:
        """known: the full blocks of `tokens`, where they are named already."""
        blocks = known or hash_tokens(root, _bytes(tokens), block_tokens)
        self._block_tokens = block_tokens
        self._previous = blocks.last_digest
        self.names = blocks.names  # of the full blocks of `tokens`, 16 bytes each
        self._count = blocks.blocks
        self._tail = bytearray(_bytes(tokens[self._count * block_tokens :]))
        self._pending = b""  # sampled last, without KV

    def sampled(self, ids: TokenIds) -> tuple[int, bytes]:
        """Ids were sampled, one after the other. Returns the depth of the first block this completes, and the names of
        all it completes, 16 bytes each (often none)."""
        first = self._count
        self._tail += self._pending
        data = _bytes(np.asarray(ids))
        self._tail += data[:-TOKEN_BYTES]
        self._pending = data[-TOKEN_BYTES:]
        digests = chain(self._previous, bytes(self._tail), self._block_tokens)
        if digests:
            self._previous = digests[-1]
            self._count += len(digests)
            del self._tail[: len(digests) * self._block_tokens * TOKEN_BYTES]
        return first, names_of(digests)


def _bytes(ids: TokenIds) -> bytes:
    return ids.astype("<u4", copy=False).tobytes()
