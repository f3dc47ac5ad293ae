"""The nodes a request could go to: what is known of each, who may serve a phase, which of equals is picked. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from evolving.core.terms import Role
from evolving.core.timemodel import PrefillCoefficients
from evolving.core.work import PrefillWork

BORROWED = "; no node has the phase, one of the other serves it"
"""What a decision's reason ends with where `eligible_ids` borrowed."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """What a gateway knows of a node, and of what it holds of the context to place."""

    node_id: str
    role: Role
    ready: bool  # its engine serves and its lease lives
    wait_s: float  # W_n as the node last said
    new_tokens_per_iteration: float  # ū; the chunk size where nothing was observed
    coefficients: PrefillCoefficients  # equation 1 on this node
    kv_bytes_per_token: float  # bytes of KV of one token, all layers
    unacknowledged: Sequence[PrefillWork] = ()  # sent by this gateway and not yet in wait_s
    l1_blocks: int = 0  # leading blocks of the prompt in device memory
    any_blocks: int = 0  # leading blocks in device or host memory
    fetchable_blocks: int = 0  # blocks from any_blocks on that live peers' host memory holds without a gap
    fetch_tokens_per_s: float = 0.0  # what its reads from peers bring; 0: it has not said
    fetch_backlog_tokens: int = 0  # that legs sent there still have to get from peers
    room_tokens: float = math.inf  # of host memory: free, or held for no branch
    excluded: str = ""  # why this request must not go there (it just failed there); empty: it may


def eligible_ids(nodes: Iterable[NodeView], phase: Role) -> tuple[set[str], bool]:
    """Ids that may serve `phase`, and whether they had to be borrowed from the other one."""
    live = [node for node in nodes if node.ready and not node.excluded]
    with_phase = {node.node_id for node in live if node.role in (phase, Role.MIXED)}
    if with_phase:
        return with_phase, False
    return {node.node_id for node in live if node.role is not Role.DRAINING}, True


def why_not(node: NodeView) -> str:
    """Why a node is not eligible."""
    if node.excluded:
        return node.excluded
    return f"role {node.role.name.lower()}" if node.ready else "not ready"


def tie_key(request_id: str, node_id: str) -> bytes:
    """A hash of both, to pick by among equals."""
    return hashlib.blake2b(f"{request_id}\x00{node_id}".encode(), digest_size=8).digest()
