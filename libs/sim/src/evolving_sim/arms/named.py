"""The arms by name, as runs and the paper's tables ask for them.

All baselines of the paper are SGLang, whose decode nodes reserve room before the prompt is computed ("the decode engine
reserves KV slots, receives KV", §4.1). They are routed as SGLang Model Gateway does, decode nodes in turn, and evict by
LRU (§5.1); that is so beside Dynamo's and Arrow's planners too, except where §2.3 compares routing. KV that another
node has is no use to them, but for the one with a pool (§2.3) and the one with our data plane (Table D.5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from evolving.core.config import EvictionPolicy
from evolving_sim.arms.arm import (
    IN_PLACE,
    IN_PLACE_LOSING,
    Arm,
    FetchMode,
    Policies,
    PolicySetup,
    Switching,
    restart,
)
from evolving_sim.arms.arrow import ArrowDecode, ArrowPrefill, ArrowScheduler
from evolving_sim.arms.dynamo_planner import DynamoPlanner
from evolving_sim.arms.dynamo_router import LeastActiveBlocks, LeastPrefillCost
from evolving_sim.arms.fetching import FetchesAll, FetchesSooner
from evolving_sim.arms.ours import LeastDecodeCost, LeastPredictedTtft
from evolving_sim.arms.parameters import (
    KV_ROUTER_WITH_POOL,
    POOL_READ_TOKENS_PER_S,
    RESTART_S,
    ArrowConfig,
    CacheAffinityConfig,
    DynamoPlannerConfig,
    KvRouterConfig,
)
from evolving_sim.arms.sglang import CacheAffinity, RoundRobin, StickySession
from evolving_sim.machines import FITTED
from evolving_sim.planner_loop import LoopConfig, PlannerLoop


def ours(loop: LoopConfig | None = None) -> Arm:
    """Evolving Infra, with its planner as `loop` has it."""
    config = loop or LoopConfig()
    return Arm("ours", lambda setup: replace(_our_routing(setup), controller=PlannerLoop(config)))


def dynamo(planner: DynamoPlannerConfig | None = None, restart_s: float = RESTART_S) -> Arm:
    """SGLang under Dynamo's planner: a node that changes phase is started anew, which takes so long."""
    config = planner or DynamoPlannerConfig()

    def policies(_: PolicySetup) -> Policies:
        return Policies(_cache_affinity(), RoundRobin(), DynamoPlanner(config))

    return _without_pool("dynamo", policies, restart(restart_s))


def arrow(scheduler: ArrowConfig | None = None) -> Arm:
    """SGLang with Arrow's switches."""
    config = scheduler or ArrowConfig()

    def policies(_: PolicySetup) -> Policies:
        shared = ArrowScheduler(config)
        return Policies(ArrowPrefill(_cache_affinity(), shared), ArrowDecode(RoundRobin(), shared), shared)

    return _without_pool("arrow", policies, IN_PLACE_LOSING)


def _cache_affinity() -> CacheAffinity:
    return CacheAffinity(CacheAffinityConfig())


def _our_routing(setup: PolicySetup) -> Policies:
    return Policies(LeastPredictedTtft(setup.routing), LeastDecodeCost(setup.routing))


def _without_pool(name: str, policies: Callable[[PolicySetup], Policies], switching: Switching = IN_PLACE) -> Arm:
    """Nodes with their own KV only, in host memory about once per GPU (§4.1)."""
    return Arm(name, policies, EvictionPolicy.LRU, FetchMode.NONE, switching, FITTED.host_copies, reserves_first=True)


_OURS_STATIC = Arm("ours-static", _our_routing)

_ARMS = (
    ours(),
    _OURS_STATIC,  # §5.3: no online split adaptation
    replace(_OURS_STATIC, name="ours-lru", eviction=EvictionPolicy.LRU),  # what eviction alone does (§2.3)
    # SGLang's PD disaggregation, whose best fixed split the paper compares with.
    _without_pool("sglang-static", lambda _: Policies(_cache_affinity(), RoundRobin())),
    _without_pool("sglang-sticky", lambda setup: Policies(StickySession(setup.seed), RoundRobin())),
    # Table D.5: routing as in SGLang, only the data plane is ours.
    Arm(
        "sglang-async-fetch",
        lambda setup: Policies(FetchesSooner(_cache_affinity(), setup.routing), RoundRobin()),
        EvictionPolicy.LRU,
    ),
    dynamo(),
    # §2.3: Dynamo's KV router, which spreads load evenly, without a pool and with one that is read when prefill starts.
    # All host memory is that pool: HiCache's own part of it holds about what device memory does (parameters.py).
    _without_pool(
        "dynamo-router-static",
        lambda setup: Policies(LeastPrefillCost(KvRouterConfig(), setup.seed), LeastActiveBlocks(setup.seed)),
    ),
    Arm(
        "dynamo-router-pool",
        lambda setup: Policies(
            FetchesAll(LeastPrefillCost(KV_ROUTER_WITH_POOL, setup.seed)), LeastActiveBlocks(setup.seed)
        ),
        EvictionPolicy.LRU,
        FetchMode.AT_START,
        reserves_first=True,
        restored_tokens_per_s=POOL_READ_TOKENS_PER_S,
    ),
    arrow(),
)

ARMS: Mapping[str, Arm] = MappingProxyType({arm.name: arm for arm in _ARMS})
"""With the parameters of `parameters`; `ours`, `dynamo` and `arrow` make those that differ."""
