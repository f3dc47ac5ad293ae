"""Block names in SGLang's tree.

D_i = SHA-256(D_(i-1) ‖ token ids as u32 little-endian), with the job's root as D_(-1). That is SGLang's own page hash,
except for where a chain begins, so the tree's hashes are made to begin at the root and the first 16 bytes name a block.
A root is also a namespace: requests of different roots never share a node.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from evolving.core.blocks import chain
from evolving_node_agent.engines.port import TokenIds
from evolving_node_agent.engines.sglang.translate import NAME_BYTES

_NAMESPACE = "root:"


def namespace(root: bytes) -> str:
    """The radix tree's extra key for requests of this root."""
    return _NAMESPACE + root.hex()


def digests(tokens: TokenIds, root: bytes, block_tokens: int) -> list[bytes]:
    """The 32-byte digests of the full blocks of `tokens`."""
    return chain(root, tokens.astype("<u4", copy=False).tobytes(), block_tokens)


def name_of_hash(page_hash: str) -> bytes:
    """The name of a block by its hash in the tree (64 hex digits)."""
    return bytes.fromhex(page_hash[: 2 * NAME_BYTES])


def names_of(node: Any) -> list[bytes]:
    """The names of a tree node's blocks by its hashes, remembered until a split gives it others."""
    if getattr(node, "named", None) is not node.hash_value:
        node.named = node.hash_value
        node.names = [name_of_hash(page_hash) for page_hash in node.hash_value]
    names: list[bytes] = node.names
    return names


def chain_seed(upstream: Callable[[str | None, str | None], str | None], *key: Any) -> str | None:
    """What a chain begins with: the root of our namespaces, upstream's seed for others."""
    extra_key = key[0]
    if extra_key is not None and extra_key.startswith(_NAMESPACE):
        return str(extra_key[len(_NAMESPACE) :])
    return upstream(*key)


def page_hashes(
    upstream: Callable[..., str | list[str]], token_ids: Any, prior_digest: bytes | None, page_size: int | None = None
) -> str | list[str]:
    """SGLang's page hash, 64 hex digits a page of `page_size` ids (the last may be shorter); of all ids when None.

    Upstream builds a C++ extension when the first hash is wanted: that takes a compiler the machine may not have, and
    ten seconds of the scheduler's thread. Keys that are no plain ids (bigrams of speculative decoding) stay upstream's.
    """
    raw = getattr(token_ids, "raw_token_ids", None)
    ids = raw() if raw is not None else getattr(token_ids, "token_ids", token_ids)
    if getattr(token_ids, "is_bigram", False) or (len(ids) > 0 and isinstance(ids[0], tuple)):
        return upstream(token_ids, prior_digest, page_size)
    words = np.asarray(ids[: len(token_ids)], dtype=np.int64)
    assert not words.size or 0 <= words.min() <= words.max() < 1 << 32, "token ids fit 32 bits"
    data, previous, hashes = memoryview(words.astype("<u4").tobytes()), prior_digest or b"", []
    width = 4 * page_size if page_size else max(1, len(data))
    for start in range(0, max(1, len(data)) if page_size is None else len(data), width):
        previous = hashlib.sha256(previous + data[start : start + width]).digest()
        hashes.append(previous.hex())
    return hashes if page_size else hashes[0]
