"""Every number of the arms that was chosen, and where it is from.

They were fixed before the first comparison was run, and none is fitted to an outcome; what changed since is said in
paper/README.md. Sections and tables without a
name are the paper's (arXiv 2611.12304). What other systems default to is as their own documentation or source has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

# -- host memory

POOL_READ_TOKENS_PER_S = 64 * 1024 / 4.2
"""How fast a pool is read that isn't ours (§2.3). SGLang's HiCache with Mooncake's store as the pool, GLM-5.2: 64K
tokens that the store has take 4.2 s to the first token (sgl-project/sglang, issue 31600), what little is computed of
such a prompt included. The store serves a node's own part of it as it serves others'. HiCache keeps KV in host memory
for itself too, which takes four copies beside the store's, so that it can't hold much more than device memory does."""

# -- routing: SGLang Model Gateway (§2.3, §5.1)


@dataclass(frozen=True, slots=True)
class CacheAffinityConfig:
    """Policy `cache_aware`. Defaults: the gateway's launcher (`RouterArgs`) and its page "Load Balancing", alike."""

    # Share of the prompt above which the node with the longest match gets it.
    cache_threshold: float = 0.3
    # The least loaded node gets it where the most loaded has more than so many requests more than that ...
    balance_abs_threshold: int = 64
    # ... and more than so many times as many.
    balance_rel_threshold: float = 1.5


STICKY_NODES_MAX = 2
"""Policy `manual`: nodes remembered per routing key, the older ones for when the present one is gone; assigned at
random, its default. The idle time after which a key is forgotten, 4 hours by default, is longer than any run."""

# -- routing: Dynamo's KV router (§2.3)


@dataclass(frozen=True, slots=True)
class KvRouterConfig:
    """Defaults of "Configuration and Tuning" of Dynamo's router."""

    # --router-prefill-load-scale
    prefill_load_scale: float = 1.0
    # --router-kv-overlap-score-credit: of a block in device memory.
    device_credit: float = 1.0
    # --router-host-cache-hit-weight: of a block in host memory only.
    host_credit: float = 0.75
    # --shared-cache-multiplier: of a block that the pool has, beyond those in device memory. Off without a pool.
    pool_credit: float = 0.0


KV_ROUTER_WITH_POOL = KvRouterConfig(pool_credit=0.5)
"""As "Using HiCache" starts the router beside SGLang nodes that share a pool: `--shared-cache-type hicache
--shared-cache-multiplier 0.5`."""


# -- planners


@dataclass(frozen=True, slots=True)
class DynamoPlannerConfig:
    """Planner of Dynamo 1.5 (the paper has 1.5.1) with its default target, `throughput`: "static thresholds on queue
    depth and KV cache utilization" (Planner Guide). `min_gpu_budget` equal to `max_gpu_budget`, so that it only moves
    nodes between phases (Planner Configuration): the paper's cluster has a fixed number of them.
    """

    # load_adjustment_interval_seconds
    interval_s: float = 5.0
    # When it looks first: once the agents of a run are there, who begin spread over its first minute. An empty cluster
    # asks for less of both phases, and the paper's runs start at the same split under load (§5.1).
    first_look_s: float = 60.0
    # Thresholds of that target (planner/core/load_scaling.py). Prefill: prompt tokens that a node says are queued,
    # cached or not, over `context_tokens`. One more node when any node is at or above, one less when all are below.
    prefill_up: float = 1.0
    prefill_down: float = 0.1
    # Decode: KV of requests that a node decodes or says are queued, over what its device memory holds. One more node
    # when any node is above, one less when all are below.
    decode_up: float = 1.0
    decode_down: float = 0.6
    # Longest context the model takes; an engine's default. GLM-5.2's model card.
    context_tokens: int = 1_048_576
    # min_endpoint: nodes that each phase keeps.
    min_nodes: int = 1


KIMI_CONTEXT_TOKENS = 262_144
"""`DynamoPlannerConfig.context_tokens` where the model is Kimi K2.6 (its model card)."""

RESTART_S = 754.0
"""§5.2: mean of the restarts over all of Dynamo's runs: the means of Table 1 weighted by its switches."""

RESTARTS_S: Mapping[tuple[str, int], float] = MappingProxyType(
    {
        ("Putnam", 224): 798.0,
        ("Putnam", 256): 798.0,
        ("Putnam", 288): 800.0,
        ("CC", 90): 681.0,
        ("CC", 108): 831.0,
        ("CC", 126): 813.0,
        ("OSWorld", 128): 666.0,
        ("OSWorld", 144): 730.0,
        ("OSWorld", 160): 748.0,
    }
)
"""Table 1: Dynamo's mean switch time by workload and concurrent agents; §2.1 has that of CC with 90 agents too."""


@dataclass(frozen=True, slots=True)
class ArrowConfig:
    """Arrow (arXiv 2505.11916): requests and nodes are scheduled by what targets allow.

    The paper doesn't say what targets and thresholds it ran Arrow with. The targets here are the defaults of the
    service by Arrow's authors (xllm-service). The thresholds are the defaults of the one independent implementation
    that states which rule is from which section (Narwhal, "Configuration"); of the looks in a row it says that Arrow
    names no count.
    """

    # target_ttft, target_tpot
    ttft_target_s: float = 1.0
    tpot_target_s: float = 0.05
    # Load of the decoding nodes, mean time per token over its target, from which on they get a node ...
    expand: float = 1.0
    # ... and up to which they give one away. Also: the load of the prefilling nodes, predicted seconds of their
    # queues over the target, up to which they give one away while that of the decoding ones is above it.
    shrink: float = 0.5
    # Time between looks at the loads.
    interval_s: float = 1.0
    # Looks in a row after which decoding nodes get one.
    sustained_intervals: int = 3
    # After a node went from prefill to decode none follows it for so long. The other way has no such time.
    cooldown_s: float = 10.0
