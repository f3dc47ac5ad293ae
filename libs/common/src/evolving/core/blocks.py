"""Blocks of a context and their names.

A block is `block_tokens` consecutive tokens; only full blocks have a name. Digests chain:
D_i = SHA-256(D_{i-1} ‖ token ids of block i as u32 little-endian), all 32 bytes chained; the first 16 are the name.
That is SGLang's own scheme, so an engine names blocks as a gateway does. The chain starts at a root digest of all that
must not be shared: KV format, adapter and tenant realm.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from evolving.core.errors import InvalidArgument
from evolving.core.terms import NAME_BYTES

TOKEN_BYTES = 4
DIGEST_BYTES = 32
_CHECKPOINT_BLOCKS = 16  # full digests kept: one in so many blocks, and the last


def root_digest(kv_format: str, adapter: str, tenant_realm: str) -> bytes:
    """The digest before a context's first block; 32 bytes.

    kv_format: model revision, dtype and layout. Fields are length-prefixed, so no two triples give the same bytes.
    """
    hasher = hashlib.sha256()
    for field in (kv_format, adapter, tenant_realm):
        encoded = field.encode()
        hasher.update(len(encoded).to_bytes(4, "little"))
        hasher.update(encoded)
    return hasher.digest()


def chain(previous: bytes, tokens: bytes, block_tokens: int) -> list[bytes]:
    """Digests (32 bytes each) of the full blocks of `tokens`, which follow the block with the digest `previous`.

    tokens: u32 little-endian, four bytes a token; those after the last full block are left out. Raises InvalidArgument.
    """
    if len(previous) != DIGEST_BYTES:
        raise InvalidArgument(f"a digest has {DIGEST_BYTES} bytes, got {len(previous)}")
    if len(tokens) % TOKEN_BYTES:
        raise InvalidArgument(f"tokens must be {TOKEN_BYTES} bytes each, got {len(tokens)} bytes")
    if block_tokens < 1:
        raise InvalidArgument(f"block_tokens must be at least 1, got {block_tokens}")
    block_bytes = block_tokens * TOKEN_BYTES
    sha256 = hashlib.sha256
    digests = []
    for at in range(0, len(tokens) - block_bytes + 1, block_bytes):
        previous = sha256(previous + tokens[at : at + block_bytes]).digest()
        digests.append(previous)
    return digests


def names_of(digests: list[bytes]) -> bytes:
    """The names of blocks, 16 bytes each, joined."""
    return b"".join([digest[:NAME_BYTES] for digest in digests])


def chain_names(root: bytes, tokens: bytes, block_tokens: int) -> bytes:
    """The names of a context's full blocks, joined. Arguments and errors as `chain`."""
    return names_of(chain(root, tokens, block_tokens))


def split_names(names: bytes) -> list[bytes]:
    """Joined names, one by one."""
    return [names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)]


@dataclass(frozen=True, slots=True)
class HashedTokens:
    """Full blocks of a context, hashed, and what is needed to hash on from any of them cheaply."""

    root: bytes
    block_tokens: int
    tokens: bytes  # of the full blocks
    names: bytes  # 16 bytes a block
    checkpoints: tuple[bytes, ...]  # digests before blocks 0, 16, 32, …
    last_digest: bytes  # of the last full block; the root when there is none

    @property
    def blocks(self) -> int:
        """Number of full blocks."""
        return len(self.names) // NAME_BYTES

    def digest_before(self, block: int) -> bytes:
        """The digest that block `block` follows, at most one past the last; 32 bytes."""
        if block == self.blocks:
            return self.last_digest
        kept = block - block % _CHECKPOINT_BLOCKS
        previous = self.checkpoints[kept // _CHECKPOINT_BLOCKS]
        block_bytes = self.block_tokens * TOKEN_BYTES
        digests = chain(previous, self.tokens[kept * block_bytes : block * block_bytes], self.block_tokens)
        return digests[-1] if digests else previous


def hash_tokens(root: bytes, tokens: bytes, block_tokens: int, known: HashedTokens | None = None) -> HashedTokens:
    """Hash the full blocks of a context, going on from `known` as far as the two agree.

    A context that extends `known` costs its new blocks and one comparison of the old bytes; one that leaves it midway
    is hashed from the last checkpoint before. Raises InvalidArgument.
    """
    if known is None or known.root != root or known.block_tokens != block_tokens:
        known = HashedTokens(root, block_tokens, b"", b"", (root,), root)
    common = common_blocks(known, tokens)
    if common == known.blocks:
        kept, previous = common, known.last_digest
    else:
        kept = common - common % _CHECKPOINT_BLOCKS
        previous = known.checkpoints[kept // _CHECKPOINT_BLOCKS]
    block_bytes = block_tokens * TOKEN_BYTES
    digests = chain(previous, tokens[kept * block_bytes :], block_tokens)
    blocks = kept + len(digests)
    checkpoints = list(known.checkpoints[: kept // _CHECKPOINT_BLOCKS + 1])
    first = len(checkpoints) * _CHECKPOINT_BLOCKS  # the digest before block `first` is that of block first - 1
    checkpoints += [digests[block - 1 - kept] for block in range(first, blocks + 1, _CHECKPOINT_BLOCKS)]
    return HashedTokens(
        root,
        block_tokens,
        tokens[: blocks * block_bytes],
        known.names[: kept * NAME_BYTES] + names_of(digests),
        tuple(checkpoints),
        digests[-1] if digests else previous,
    )


def common_blocks(known: HashedTokens, tokens: bytes) -> int:
    """How many leading full blocks of `tokens` are those of `known`. Compares bytes, hashes nothing."""
    if tokens.startswith(known.tokens):
        return known.blocks
    block_bytes = known.block_tokens * TOKEN_BYTES
    low, high = 0, min(known.blocks, len(tokens) // block_bytes) + 1  # low blocks agree, high don't
    while high - low > 1:
        middle = (low + high) // 2
        if tokens.startswith(known.tokens[low * block_bytes : middle * block_bytes], low * block_bytes):
            low = middle
        else:
            high = middle
    return low


def reusable_blocks(
    prompt_tokens: int, output_tokens: int, block_tokens: int, next_prompt_tokens: int | None = None
) -> int:
    """Most full blocks of a turn that the next one can reuse when it extends prompt and output.

    The last sampled token has no KV yet, and at least one token of the next prompt (None: however long) is computed:
    min(⌊(prompt + output - 1) / block⌋, ⌊(next - 1) / block⌋).
    """
    reusable_tokens = prompt_tokens + output_tokens - 1
    if next_prompt_tokens is not None:
        reusable_tokens = min(reusable_tokens, next_prompt_tokens - 1)
    return max(0, reusable_tokens) // block_tokens
