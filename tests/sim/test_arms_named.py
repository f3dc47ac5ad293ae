"""The arms by name: what the paper says of each system is what it is made of."""

from __future__ import annotations

import math

import pytest
from sim.arm_views import ROUTING

from evolving.core.config import EvictionPolicy
from evolving_sim.arms.arm import IN_PLACE, IN_PLACE_LOSING, FetchMode, Policies, PolicySetup, Switching, restart
from evolving_sim.arms.arrow import ArrowDecode, ArrowPrefill, ArrowScheduler
from evolving_sim.arms.dynamo_planner import DynamoPlanner
from evolving_sim.arms.named import ARMS, dynamo
from evolving_sim.arms.parameters import RESTART_S, RESTARTS_S
from evolving_sim.arms.sglang import CacheAffinity, RoundRobin
from evolving_sim.machines import FITTED
from evolving_sim.planner_loop import PlannerLoop

OURS = {"ours", "ours-static", "ours-lru"}
POOLED = OURS | {"sglang-async-fetch", "dynamo-router-pool"}


def made(name: str) -> Policies:
    return ARMS[name].policies(PolicySetup(ROUTING, 1))


def test_names_are_their_own() -> None:
    assert all(arm.name == name for name, arm in ARMS.items())


@pytest.mark.parametrize("name", ARMS)
def test_baselines_evict_the_longest_unused_and_only_the_pool_keeps_kv_once(name: str) -> None:
    """§5.1: each node runs HiCache with LRU eviction; §4.1: the pool keeps one copy per node instead of one per GPU."""
    arm = ARMS[name]
    assert (arm.eviction is EvictionPolicy.AGENT) == (name in {"ours", "ours-static"})
    assert (arm.fetch is FetchMode.NONE) == (name not in POOLED)
    assert arm.host_copies == (1.0 if name in POOLED else FITTED.host_copies)
    assert math.isinf(arm.restored_tokens_per_s) == (arm.fetch is not FetchMode.AT_START)


@pytest.mark.parametrize("name", ARMS)
def test_engines_but_ours_reserve_on_the_decode_node_before_they_compute(name: str) -> None:
    """§4.1: "the decode engine reserves KV slots, receives KV"; Table D.5's data plane is ours."""
    assert ARMS[name].reserves_first == (name not in OURS | {"sglang-async-fetch"})


def test_only_one_pool_is_read_when_prefill_starts() -> None:
    """§2.3: "the pool loads KV to the GPU only when the request starts prefill"."""
    assert [name for name, arm in ARMS.items() if arm.fetch is FetchMode.AT_START] == ["dynamo-router-pool"]


@pytest.mark.parametrize("name", ["sglang-static", "dynamo"])
def test_baselines_are_routed_by_cache_affinity_and_decode_in_turn(name: str) -> None:
    """§5.1, "all baselines"; Table 2 compares the load balance of Dynamo's cache-affinity routing."""
    policies = made(name)
    assert isinstance(policies.prefill, CacheAffinity)
    assert isinstance(policies.decode, RoundRobin)


def test_arrow_is_routed_like_the_others_and_hears_of_requests() -> None:
    policies = made("arrow")
    assert isinstance(policies.controller, ArrowScheduler)
    assert isinstance(policies.prefill, ArrowPrefill)
    assert isinstance(policies.prefill.inner, CacheAffinity)
    assert isinstance(policies.decode, ArrowDecode)
    assert policies.prefill.scheduler is policies.decode.scheduler is policies.controller


def test_who_changes_the_split_and_what_that_costs() -> None:
    """§2.1: Dynamo restarts workers, Arrow's switched node loses its KV, ours neither."""
    found = {name: type(made(name).controller) for name in ARMS if made(name).controller is not None}
    assert found == {"ours": PlannerLoop, "dynamo": DynamoPlanner, "arrow": ArrowScheduler}
    assert ARMS["ours"].switching == IN_PLACE == Switching()
    assert ARMS["arrow"].switching == IN_PLACE_LOSING == Switching(0.0, loses_kv=True)
    assert ARMS["dynamo"].switching == restart(RESTART_S) == Switching(754.0, loses_kv=True)
    assert dynamo(restart_s=RESTARTS_S["CC", 90]).switching.out_of_service_s == 681.0


def test_policies_are_made_anew_for_each_run() -> None:
    for name in ARMS:
        one, other = made(name), made(name)
        assert one.controller is None or one.controller is not other.controller
        if hasattr(one.prefill, "_seen"):
            assert one.prefill is not other.prefill


def test_the_mean_restart_is_that_of_table_1_by_its_switches() -> None:
    """§6.2: "754 seconds average across runs"."""
    switches = dict(zip(RESTARTS_S, (2, 2, 3, 4, 4, 4, 5, 4, 4), strict=True))
    total_s = sum(count * RESTARTS_S[run] for run, count in switches.items())
    assert pytest.approx(total_s / sum(switches.values()), abs=0.5) == RESTART_S


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_a_switch_takes_a_time(seconds: float) -> None:
    with pytest.raises(ValueError, match="out_of_service_s"):
        restart(seconds)
