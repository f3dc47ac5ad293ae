"""Digests of a context's full blocks: D_i = SHA-256(D_{i-1} ‖ token ids as u32 little-endian); a name is 16 bytes."""

from __future__ import annotations

import hashlib

from evolving_node_agent.engines.port import TokenIds

NAME_BYTES = 16


def block_digests(root: bytes, tokens: TokenIds, block_tokens: int) -> list[bytes]:
    """Digests of all full blocks of `tokens`, 32 bytes each, chained from `root`."""
    data = tokens.astype("<u4").tobytes()
    step = 4 * block_tokens
    digests: list[bytes] = []
    before = root
    for start in range(0, len(data) - step + 1, step):
        before = hashlib.sha256(before + data[start : start + step]).digest()
        digests.append(before)
    return digests
