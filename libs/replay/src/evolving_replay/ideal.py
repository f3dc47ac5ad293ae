"""What could be reused if all KV ever produced were kept, counted on this side of the gateway.

Blocks are named as the cluster names them, with a root of our own. Eight bytes of a name are kept, in a set: about 100
bytes a block, so a session of a million distinct tokens costs 1.6 MB, given back when it ends.
"""

from __future__ import annotations

from evolving.core.blocks import TOKEN_BYTES, HashedTokens, hash_tokens, reusable_blocks, root_digest
from evolving.core.terms import NAME_BYTES

_ROOT = root_digest("replay", "", "")
_SHORT_BYTES = 8  # of a name are kept


class ProducedKv:
    """Blocks whose KV finished requests produced: of one session, or of all where sessions share block ids."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._names: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._names)

    def known_blocks(self, names: bytes, blocks: int) -> int:
        """How many of the first `blocks` blocks were produced. Names, 16 bytes each, chain: none is known behind one
        that isn't."""
        low, high = 0, blocks
        while low < high:
            middle = (low + high) // 2
            if _short(names, middle) in self._names:
                low = middle + 1
            else:
                high = middle
        return low

    def add(self, names: bytes) -> None:
        """These blocks were produced, and all before them."""
        blocks = len(names) // NAME_BYTES
        self._names.update(_short(names, block) for block in range(self.known_blocks(names, blocks), blocks))


class AgentKv:
    """One agent's prompts against what was produced; only what is new in a prompt is hashed."""

    def __init__(self, produced: ProducedKv) -> None:
        self._produced = produced
        self._last: HashedTokens | None = None

    def reusable_tokens(self, prompt: bytes) -> int:
        """Leading prompt tokens whose KV was produced until now, in whole blocks. The last token is always computed."""
        block_tokens = self._produced.block_tokens
        self._last = hash_tokens(_ROOT, prompt, block_tokens, self._last)
        usable_blocks = max(0, len(prompt) // TOKEN_BYTES - 1) // block_tokens
        return self._produced.known_blocks(self._last.names, usable_blocks) * block_tokens

    def finished(self, prompt: bytes, output: bytes) -> None:
        """A request produced the KV of its prompt and its output, but for the last token sampled."""
        block_tokens = self._produced.block_tokens
        blocks = reusable_blocks(len(prompt) // TOKEN_BYTES, len(output) // TOKEN_BYTES, block_tokens)
        produced = (prompt + output)[: blocks * block_tokens * TOKEN_BYTES]
        self._last = hash_tokens(_ROOT, produced, block_tokens, self._last)
        self._produced.add(self._last.names)


def _short(names: bytes, block: int) -> bytes:
    """What is kept of a block's name."""
    return names[block * NAME_BYTES : block * NAME_BYTES + _SHORT_BYTES]
