"""Block names of prompts, hashing only what a branch has not sent before."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from evolving.core.blocks import DIGEST_BYTES, TOKEN_BYTES, chain_digests, names_of
from evolving.core.terms import NAME_BYTES


@dataclass(frozen=True, slots=True)
class NamedContext:
    """A context's token ids and the digests of its whole blocks."""

    root: bytes  # 32 bytes: the digest before block 0
    block_tokens: int
    tokens: bytes  # ids as on the wire
    digests: bytes  # 32 bytes a block

    @property
    def blocks(self) -> int:
        """Whole blocks."""
        return len(self.digests) // DIGEST_BYTES

    @property
    def size_bytes(self) -> int:
        """Memory it takes, roughly."""
        return len(self.tokens) + len(self.digests) + 200

    def names(self, first_block: int = 0) -> bytes:
        """Names of the blocks from `first_block` on, 16 bytes each."""
        return names_of(memoryview(self.digests)[first_block * DIGEST_BYTES :])

    def name(self, block: int) -> bytes:
        """Name of one block."""
        return self.digests[block * DIGEST_BYTES : block * DIGEST_BYTES + NAME_BYTES]


def name_context(root: bytes, block_tokens: int, tokens: bytes, near: NamedContext | None = None) -> NamedContext:
    """Name the blocks of `tokens`. Blocks it shares with the start of `near` are not hashed again."""
    shared = common_blocks(root, block_tokens, tokens, near)
    known = near.digests[: shared * DIGEST_BYTES] if near else b""
    new = memoryview(tokens)[shared * TOKEN_BYTES * block_tokens :]
    digests = known + chain_digests(known[-DIGEST_BYTES:] or root, new, block_tokens)
    return NamedContext(root, block_tokens, tokens, digests)


def common_blocks(root: bytes, block_tokens: int, tokens: bytes, near: NamedContext | None) -> int:
    """Whole blocks at the start of `tokens` that `near` has too."""
    if near is None or near.root != root or near.block_tokens != block_tokens:
        return 0
    block_bytes = TOKEN_BYTES * block_tokens
    whole = near.blocks * block_bytes
    if len(tokens) >= whole and tokens.startswith(near.tokens[:whole]):  # one memcmp: the usual case
        return near.blocks
    length = min(len(tokens), whole)
    differs = np.frombuffer(tokens, np.uint8, length) != np.frombuffer(near.tokens, np.uint8, length)
    return (int(np.argmax(differs)) if differs.any() else length) // block_bytes


class Contexts:
    """The last context of each branch that the directory acknowledged, within a bound of memory."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[tuple[str, str], NamedContext] = OrderedDict()  # least recently used first

    @property
    def size_bytes(self) -> int:
        """Memory in use."""
        return self._bytes

    def get(self, tenant: str, branch_id: str) -> NamedContext | None:
        """A branch's last context, if it is still kept."""
        context = self._kept.get((tenant, branch_id))
        if context is not None:
            self._kept.move_to_end((tenant, branch_id))
        return context

    def keep(self, tenant: str, branch_id: str, context: NamedContext) -> None:
        """The directory knows this to be the branch's context."""
        self.forget(tenant, branch_id)
        self._kept[tenant, branch_id] = context
        self._bytes += context.size_bytes
        while self._bytes > self._max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= dropped.size_bytes

    def forget(self, tenant: str, branch_id: str) -> None:
        """The branch ended, or the directory doesn't know that context any more."""
        dropped = self._kept.pop((tenant, branch_id), None)
        if dropped is not None:
            self._bytes -= dropped.size_bytes
