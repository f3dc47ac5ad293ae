"""Block names in SGLang's tree.

D_i = SHA-256(D_(i-1) ‖ token ids as u32 little-endian), with the job's root as D_(-1). That is SGLang's own page hash,
except for where a chain begins, so the tree's hashes are made to begin at the root and the first 16 bytes name a block.
A root is also a namespace: requests of different roots never share a node.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from evolving_node_agent.engines.port import TokenIds
from evolving_node_agent.engines.sglang.translate import NAME_BYTES

_NAMESPACE = "root:"


def namespace(root: bytes) -> str:
    """The radix tree's extra key for requests of this root."""
    return _NAMESPACE + root.hex()


def digests(tokens: TokenIds, root: bytes, block_tokens: int) -> list[bytes]:
    """The 32-byte digests of the full blocks of `tokens`."""
    data = memoryview(tokens.astype("<u4", copy=False).tobytes())
    width = 4 * block_tokens
    previous, out = root, []
    for start in range(0, len(data) - width + 1, width):
        previous = hashlib.sha256(previous + data[start : start + width]).digest()
        out.append(previous)
    return out


def name_of_hash(page_hash: str) -> bytes:
    """The name of a block by its hash in the tree (64 hex digits)."""
    return bytes.fromhex(page_hash[: 2 * NAME_BYTES])


def chain_seed(upstream: Callable[[str | None, str | None], str | None], *key: Any) -> str | None:
    """What a chain begins with: the root of our namespaces, upstream's seed for others."""
    extra_key = key[0]
    if extra_key is not None and extra_key.startswith(_NAMESPACE):
        return str(extra_key[len(_NAMESPACE) :])
    return upstream(*key)
