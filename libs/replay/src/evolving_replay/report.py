"""What a replay measured. `as_json` is its documented form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

CAUSES = ("eviction", "routing", "switch", "node", "fetch_failed")
SOURCES = ("own_l1", "own_l2", "peer_l2")


@dataclass(frozen=True, slots=True)
class Latency:
    """Of finished requests, seconds, as the client saw it; 0 where none finished."""

    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency:
        """Percentiles lie between the two nearest values, in proportion."""
        if not seconds:
            return cls(0.0, 0.0, 0.0, 0.0)
        p50, p95, p99 = np.percentile(seconds, (50, 95, 99))
        return cls(float(np.mean(seconds)), float(p50), float(p95), float(p99))


@dataclass(slots=True)
class NodeLoad:
    """What one node did for finished requests, by their last attempt. Tokens are of prompts it prefilled."""

    prefills: int = 0
    decodes: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """Rates and shares are of finished requests; shares are of their prompt tokens, from 0 to 1."""

    complete: bool
    """False: it was interrupted, and the figures are of what was played until then."""
    wall_s: float
    """From the first session's start to the last one's end, seconds."""
    sessions: int
    """Played to their end."""
    requests: int
    """Finished."""
    failed: int
    """Given up after the client's retries."""
    failures: Mapping[str, int]
    """How many failed, by reason."""
    unfinished: int
    """Still running when it was interrupted. Every request sent is one of `requests`, `failed` and `unfinished`."""
    resent: int
    """Times a request was sent again by the client."""
    moved: int
    """Times the cluster moved a request to another node."""
    branches_not_ended: int
    """Sessions whose branches the cluster could not be told the end of."""
    prompt_tokens: int
    output_tokens: int
    ttft: Latency
    """From sending a request to its first token."""
    e2e: Latency
    """From sending a request to its result."""
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    hit_rate: float
    """Prompt tokens reused."""
    ideal_hit_rate: float
    """Prompt tokens whose KV requests finished before had produced: what could be reused if all KV were kept."""
    lost_reuse: float
    """Prompt tokens of `ideal_hit_rate` that were computed again; the sum of `lost_by`."""
    beyond_ideal: float
    """Prompt tokens reused that no finished request of this replay had produced: of a request still running, or of
    what played before. hit_rate = ideal_hit_rate - lost_reuse + beyond_ideal."""
    lost_by: Mapping[str, float]
    """eviction: the pool no longer had it. switch, node: nor did it, for a role switch or a node that went away.
    routing: the pool had it and routing chose to compute. fetch_failed: it was to be reused and was not."""
    cached_by: Mapping[str, float]
    """Prompt tokens reused, by where they lay: own_l1, own_l2, peer_l2."""
    fetch_s: float
    """Time in which KV was read from other nodes, summed over requests."""
    hidden_share: float | None
    """Of fetch_s, what passed while the request had to wait anyway; None where nothing was fetched."""
    most_loaded_prefill: float
    """Computed prompt tokens of the node with most, over the mean of the nodes that prefilled; 0 where none did."""
    nodes: Mapping[str, NodeLoad] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)
