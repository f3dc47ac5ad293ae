"""What attempts at a request start with, and what becomes known of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from evolving.core.routing import PrefillScore
from evolving.internal.v1 import directory_pb2, node_agent_pb2
from evolving.v1 import gateway_pb2
from evolving_gateway.node import Node
from evolving_gateway.router import ModelFacts


@dataclass(frozen=True, slots=True)
class Job:
    """What all attempts at a request share."""

    partition_id: str
    tenant: str
    request_id: str
    model: ModelFacts
    prompt: bytes  # token ids as on the wire
    root: bytes  # 32 bytes: previous digest of block 0
    sampling: gateway_pb2.Sampling  # every default filled in; no stop texts
    priority: int
    branch_id: str
    version: int
    reserve_deadline_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What one attempt starts with."""

    node: Node
    score: PrefillScore
    match: directory_pb2.Match  # where the context's blocks lay
    holders: list[node_agent_pb2.Holder]
    generated: list[int]  # output of earlier attempts
    may_requote: bool
    excluded_prefill: Mapping[str, str]
    excluded_decode: Mapping[str, str]
    timeout_s: float  # what is left of the request's deadline


@dataclass(slots=True)
class Report:
    """What is known of an attempt so far."""

    decode_node_id: str = ""
    cached: gateway_pb2.CachedTokens = field(default_factory=gateway_pb2.CachedTokens)
    queue_s: float = 0.0
    fetch_s: float = 0.0
    fetch_hidden_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
