"""What a switch costs: in place, in place with KV lost, or by a new start."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from sim.small import READER, WORKER, scenario

from evolving.core.planner import Split, SplitShape, assign
from evolving.core.terms import Role, Tier
from evolving_sim.arms.arm import IN_PLACE, IN_PLACE_LOSING, Switching, restart
from evolving_sim.arms.named import ARMS
from evolving_sim.driver import Run


def switched(switching: Switching, shape: str = "2P2D", then: str = "1P3D") -> tuple[Run, str]:
    """A run at 20 s, its split just changed, and the node that moved."""
    arm = replace(ARMS["ours-static"], switching=switching)
    run = Run(replace(scenario(shape, {READER: 20, WORKER: 6}), arm=arm))
    run.until(20.0)
    before = dict(run.cluster.roles)
    run.cluster.change(Split(2, assign(SplitShape.parse(then), run.cluster.split.roles, run.cluster.nodes)))
    run.check_invariants()
    (moved,) = [node_id for node_id, role in run.cluster.split.roles.items() if before[node_id] is not role]
    return run, moved


def busy(run: Run, node_id: str) -> bool:
    node = run.cluster.nodes[node_id]
    return bool(node.running or node.holding)


@pytest.mark.parametrize("then", ["1P3D", "3P1D"])
def test_in_place_a_switch_lasts_until_what_ran_is_finished_and_kv_stays(then: str) -> None:
    """§5.2: it "includes the time to finish the requests that node was running"."""
    run, node_id = switched(IN_PLACE, then=then)
    node = run.cluster.nodes[node_id]
    assert node.kv.pool.used(Tier.L2) > 0
    assert run.cluster.roles[node_id] is run.cluster.split.roles[node_id]
    (change,) = run.cluster.changes.all
    while math.isnan(change.took_s):
        run.until(run.events.now_s + 10.0)
    assert change.in_service_s == change.decided_s == 20.0
    assert change.took_s == change.old_done_s - 20.0 > 0
    assert change.new_begun_s >= 20.0
    assert run.results.switch_times[0].took_s == change.took_s


def test_in_place_losing_the_nodes_kv_is_gone_at_once() -> None:
    """§2.1, Arrow: the KV left on the switched node becomes unusable."""
    run, node_id = switched(IN_PLACE_LOSING)
    pool = run.cluster.nodes[node_id].kv.pool
    kept = {Tier.L1, Tier.L2} if busy(run, node_id) else set()
    assert all(pool.used(tier) == 0 for tier in Tier if tier not in kept)
    assert run.cluster.roles[node_id] is Role.DECODE
    assert pool.used(Tier.L2) < max(node.kv.pool.used(Tier.L2) for node in run.cluster.nodes.values())


def test_a_new_start_takes_its_time_and_loses_all() -> None:
    """§2.1, Dynamo: workers are started anew, and serve nothing meanwhile."""
    run, node_id = switched(restart(30.0))
    cluster = run.cluster
    node = cluster.nodes[node_id]
    assert cluster.roles[node_id] is Role.DRAINING
    assert node not in [*cluster.candidates(Role.PREFILL), *cluster.candidates(Role.DECODE)]
    run.until(45.0)
    assert cluster.roles[node_id] is Role.DRAINING
    assert node.empty
    run.until(50.0)
    assert cluster.roles[node_id] is Role.DECODE
    (change,) = cluster.changes.all
    assert change.took_s == 30.0
    assert node.kv.pool.used(Tier.L2) == 0
    run.until(80.0)
    run.check_invariants()
    assert change.new_begun_s >= 50.0
    assert any(each.decode_node == node_id for each in run.results.served if each.done_s > 50.0)


def test_a_node_out_of_service_comes_back_as_what_it_is_to_be_then() -> None:
    run, _ = switched(restart(30.0))
    run.until(25.0)
    run.cluster.change(Split(3, assign(SplitShape.parse("2P2D"), run.cluster.split.roles, run.cluster.nodes)))
    run.until(60.0)
    assert dict(run.cluster.roles) == dict(run.cluster.split.roles)
    run.check_invariants()
