"""Nodes and prompts as routing policies see them, made by hand."""

from __future__ import annotations

from collections.abc import Sequence

from evolving.core.candidates import NodeView
from evolving.core.decode_routing import DecodeNode
from evolving.core.routing import Context, RoutingConfig
from evolving.core.terms import Role
from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients
from evolving.core.work import PrefillWork
from evolving_sim.arms.arm import Asked, PrefillNode

BLOCK_TOKENS = 64
ROUTING = RoutingConfig(fetch_bytes_per_s=1e11)
PREFILL = PrefillCoefficients(c0_s=0.015, c1_s=5.5e-5, c2_s=2.5e-10, c3_s=5e-7)
DECODE = DecodeCoefficients(d0_s=0.004, d1_s=0.0154, d2_s=0.0004, experts_per_token=8, experts=256)


def names(context: str, blocks: int, parent: Sequence[bytes] = ()) -> list[bytes]:
    """Names of a context's blocks: those of its parent, then its own, `blocks` in all."""
    own = [f"{context[:8]:8}{depth:8}".encode() for depth in range(len(parent), blocks)]
    return [*parent, *own]


def asked(
    request_id: str,
    prompt: Sequence[bytes],
    *,
    agent_id: str = "",
    pool_blocks: int = 0,
    block_tokens: int = BLOCK_TOKENS,
) -> Asked:
    """A prompt of these blocks, and one token of the next."""
    context = Context(request_id, len(prompt) * block_tokens + 1, block_tokens, pool_blocks)
    agent_id = agent_id or request_id
    return Asked(context, agent_id, agent_id, "", prompt)


def prefill_node(
    node_id: str,
    *,
    open_requests: int = 0,
    prefilling: Sequence[PrefillWork] = (),
    l1_blocks: int = 0,
    any_blocks: int = 0,
    fetchable_blocks: int = 0,
    wait_s: float = 0.0,
) -> PrefillNode:
    """A node that prefills."""
    view = NodeView(
        node_id=node_id,
        role=Role.PREFILL,
        ready=True,
        wait_s=wait_s,
        new_tokens_per_iteration=16_384.0,
        coefficients=PREFILL,
        kv_bytes_per_token=50e3,
        l1_blocks=l1_blocks,
        any_blocks=max(l1_blocks, any_blocks),
        fetchable_blocks=fetchable_blocks,
        fetch_tokens_per_s=2e6,
    )
    return PrefillNode(view, prefilling, open_requests)


def decode_node(node_id: str, *, decoding: int = 0, context_tokens: int = 0, slots_free: int = 64) -> DecodeNode:
    """A node that decodes."""
    view = NodeView(
        node_id=node_id,
        role=Role.DECODE,
        ready=True,
        wait_s=0.0,
        new_tokens_per_iteration=16_384.0,
        coefficients=PREFILL,
        kv_bytes_per_token=50e3,
        fetch_tokens_per_s=2e6,
    )
    return DecodeNode(view, slots_free, decoding, context_tokens, 5e6 - context_tokens, DECODE)
