"""What the mock engine answers, computed without any engine: the output of a request nothing ever disturbed."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from evolving.core.blocks import chain, root_digest
from evolving.core.terms import NAME_BYTES
from evolving_node_agent.engines.mock.config import MockConfig
from evolving_node_agent.engines.mock.model import ContextState, block_kv, next_token, partial_kv
from evolving_node_agent.engines.port import Sampling

_CONFIG = MockConfig("oracle")
_NO_TOKENS = np.array([], dtype=np.uint32)


def output_of(prompt: Sequence[int], max_tokens: int, tenant: str = "default") -> tuple[int, ...]:
    """The first `max_tokens` greedy output ids, end tokens ignored."""
    size, page_bytes = _CONFIG.block_tokens, _CONFIG.page_bytes
    before = root_digest(_CONFIG.kv_format, "", tenant)
    state, output = ContextState(), list[int]()
    tail = list(prompt)
    while True:
        while len(tail) >= size:
            before = chain(before, struct.pack(f"<{size}I", *tail[:size]), size)[0]
            state.add_block(block_kv(before[:NAME_BYTES], page_bytes))
            tail = tail[size:]
        partial = partial_kv(before, np.array(tail, dtype=np.uint32), page_bytes)
        seed = state.logits_seed(partial)
        token = next_token(seed, Sampling(max_tokens=max_tokens), _NO_TOKENS, output, _CONFIG.vocab_size)
        output.append(token)
        if len(output) == max_tokens:
            return tuple(output)
        tail.append(token)
