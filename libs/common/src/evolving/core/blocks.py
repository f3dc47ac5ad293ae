"""Names of KV blocks: chained digests of token ids, the same in gateway, agent and engine.

Block i's digest is SHA-256(digest of block i - 1 ‖ its token ids as u32 little-endian), SGLang's own page hash; the
digest before block 0, the root, ties the chain to what the KV depends on besides tokens, so nothing is shared across
models, layouts or tenants. All 32 bytes are chained; a block's name is the first 16. Only whole blocks have one.
"""

from __future__ import annotations

import hashlib

from evolving.core.terms import NAME_BYTES

DIGEST_BYTES = 32
TOKEN_BYTES = 4


def root_digest(kv_format: str, tenant: str, adapter: str = "") -> bytes:
    """The 32-byte digest before block 0.

    kv_format: model revision, dtype and layout, as an engine registers it. Parts are length-prefixed, so no two
    triples give the same bytes.
    """
    digest = hashlib.sha256()
    for part in (kv_format, adapter, tenant):
        data = part.encode()
        digest.update(len(data).to_bytes(4, "little") + data)
    return digest.digest()


def chain_digests(previous: bytes, tokens: bytes | memoryview, block_tokens: int) -> bytes:
    """Digests of the whole blocks of `tokens`, 32 bytes each, joined.

    previous: digest of the block before the first, or the root. tokens: ids as u32 little-endian; a tail shorter than
    a block is left out.
    """
    assert len(previous) == DIGEST_BYTES and block_tokens > 0
    view, step = memoryview(tokens), TOKEN_BYTES * block_tokens
    digests = bytearray()
    for start in range(0, len(view) - step + 1, step):
        digest = hashlib.sha256(previous)
        digest.update(view[start : start + step])
        previous = digest.digest()
        digests += previous
    return bytes(digests)


def names_of(digests: bytes | memoryview) -> bytes:
    """The names, 16 bytes each, of digests of 32."""
    view = memoryview(digests)
    return b"".join(view[start : start + NAME_BYTES] for start in range(0, len(view), DIGEST_BYTES))


def split_names(names: bytes) -> list[bytes]:
    """Joined names, one by one."""
    return [names[start : start + NAME_BYTES] for start in range(0, len(names), NAME_BYTES)]


def reusable_blocks(context_tokens: int, next_prompt_tokens: int, block_tokens: int) -> int:
    """Most whole blocks of a turn's context that the next prompt, which extends it, can reuse.

    context_tokens: prompt and output together. The last sampled token has no KV yet, and at least one token of a prompt
    is always computed.
    """
    return max(0, min((context_tokens - 1) // block_tokens, (next_prompt_tokens - 1) // block_tokens))
