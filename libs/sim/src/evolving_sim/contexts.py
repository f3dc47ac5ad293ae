"""Names of the blocks of contexts that are drawn, not recorded: equal exactly where contexts are.

A real name is a digest of all tokens up to the block's end. Here nobody has tokens: who wrote a token, and where, tells
it from others. So a name is who completed the block, and the block's place; a context that starts with a part of
another one has the names of the full blocks of that part.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from evolving.core.terms import NAME_BYTES

_PLACE_BYTES = 6
_WRITER_BYTES = NAME_BYTES - _PLACE_BYTES


@dataclass(slots=True, eq=False, repr=False)
class BlockNames:
    """The context of one branch, as names. `writer`: whose it is, no other's in a run; it alone makes the names, so
    they are the same whatever else happens in the run.

    `names` is of the full blocks. Growing adds to that very list, and only a rewrite makes another one; so whoever
    keeps it for an earlier request has its names in front, and perhaps more behind them.
    """

    writer: str
    block_tokens: int
    names: list[bytes] = field(init=False, default_factory=list)
    tokens: int = field(init=False, default=0)  # of the context
    _rewrites: int = field(init=False, default=0)
    _prefix: bytes = field(init=False)

    def __post_init__(self) -> None:
        self._prefix = _prefix(self.writer, 0)

    def grow(self, tokens: int) -> None:
        """The context has so many tokens now, and starts with what it was."""
        assert tokens >= self.tokens, f"{tokens} tokens are less than the {self.tokens} there are"
        self.tokens = tokens
        prefix, places = self._prefix, range(len(self.names), tokens // self.block_tokens)
        self.names += [prefix + place.to_bytes(_PLACE_BYTES, "big") for place in places]

    def keep(self, tokens: int) -> None:
        """Of the context its first `tokens` stay; what is written from now on is new. No-op where that is all of it."""
        assert 0 <= tokens <= self.tokens, f"there are {self.tokens} tokens, not {tokens}"
        if tokens == self.tokens:
            return
        self._rewrites += 1
        self._prefix = _prefix(self.writer, self._rewrites)
        self.names = self.names[: tokens // self.block_tokens]
        self.tokens = tokens

    def fork(self, writer: str, tokens: int) -> BlockNames:
        """Another branch's context, which starts with the first `tokens` of this one."""
        assert 0 <= tokens <= self.tokens, f"there are {self.tokens} tokens, not {tokens}"
        child = BlockNames(writer, self.block_tokens)
        child.names = self.names[: tokens // self.block_tokens]
        child.tokens = tokens
        return child


def _prefix(writer: str, rewrites: int) -> bytes:
    return hashlib.blake2b(f"{rewrites} {writer}".encode(), digest_size=_WRITER_BYTES).digest()
