"""What goes wrong in a simulated cluster costs time, and no request."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim.small import READER, WORKER, WRITER, scenario

from evolving.core.config import PlannerConfig
from evolving.core.planner import DecisionKind
from evolving.core.terms import Role
from evolving_sim.arms.named import ARMS
from evolving_sim.driver import Run
from evolving_sim.faults import Fault, LostEvents, NodeDeath, PlannerFailover, SlowNode, UnknownNode

PLANNER = PlannerConfig(window_s=100.0, cooldown_s=20.0)
NODES = st.sampled_from(["n000", "n001", "n002", "n003"])
FAULTS = st.one_of(
    st.builds(NodeDeath, st.floats(1, 40), NODES, st.sampled_from([3.0, 10.0])),
    st.builds(SlowNode, st.floats(1, 40), NODES, st.just(3.0), st.just(5.0)),
    st.builds(LostEvents, st.floats(1, 40), NODES, st.integers(1, 3)),
    st.builds(PlannerFailover, st.floats(1, 40)),
)


@settings(max_examples=5)
@given(st.integers(0, 100), st.lists(FAULTS, max_size=5))
def test_whatever_fails_every_request_stays_in_one_place_and_is_served(seed: int, faults: list[Fault]) -> None:
    start = scenario("2P2D", {WORKER: 6, WRITER: 3}, PLANNER)
    deaths = [fault for fault in faults if isinstance(fault, NodeDeath)]
    faults = [fault for fault in faults if fault not in deaths[1:]]  # one node at a time
    run = Run(replace(start, seed=seed, faults=faults, debug=True))
    run.until(50.0)
    run.check_invariants()
    open_then = dict(run.cluster.requests)
    run.until(150.0)
    run.check_invariants()
    assert not open_then.keys() & run.cluster.requests.keys()
    assert all(each.sent_s <= each.first_token_s <= each.done_s for each in run.results.served)


def test_a_dead_nodes_requests_go_on_elsewhere_with_the_tokens_they_had() -> None:
    """DESIGN §6, §8; the split follows the members at once."""
    run = Run(replace(scenario("2P2D", {WRITER: 16}, PLANNER), faults=[NodeDeath(50.0, "n003", back_after_s=30.0)]))
    run.until(50.0 - 1e-3)
    node = run.cluster.nodes["n003"]
    decoding = [leg.request for leg in node.batch]
    first_s = [request.first_token_s for request in decoding]
    assert decoding
    run.until(50.0)
    cluster = run.cluster
    assert "n003" not in cluster.roles
    assert all(request.generated_tokens > 0 for request in decoding)
    assert all(request.request_id in cluster.requests for request in decoding)
    assert [request.first_token_s for request in decoding] == first_s
    assert run.planner is not None
    assert run.planner.decisions[-1].kind is DecisionKind.MEMBERSHIP
    assert "n003" not in cluster.split.roles
    run.until(79.0)
    assert not any(request.decode_node == "n003" for request in decoding)
    run.until(120.0)
    assert not any(math.isnan(request.done_s) for request in decoding)
    assert cluster.roles["n003"] in (Role.PREFILL, Role.DECODE)
    assert any(each.decode_node == "n003" or each.prefill_node == "n003" for each in run.results.served)


def test_a_slow_node_serves_less_and_is_sent_less() -> None:
    served = {}
    for factor in (1.0, 4.0):
        run = Run(replace(scenario("2P1D", {READER: 12}), faults=[SlowNode(0.0, "n000", factor)]))
        run.until(200.0)
        served[factor] = [each.prefill_node for each in run.results.served].count("n000")
    assert 0 < served[4.0] < 0.6 * served[1.0]


def test_another_planner_knows_what_was_decided_and_measures_anew() -> None:
    """DESIGN §8: a standby continues with history; of what was measured it knows nothing."""
    run = Run(replace(scenario("2P2D", {WORKER: 8}, PLANNER), faults=[PlannerFailover(250.0)]))
    run.until(249.0)
    assert run.planner is not None
    before = list(run.planner.decisions)
    assert [decision.decided_at_s for decision in before if decision.evaluation][:2] == [100.0, 200.0]
    run.until(349.0)
    assert run.planner.decisions == before
    run.until(350.0)
    (decision,) = run.planner.decisions[len(before) :]
    assert decision.evaluation is not None
    measured = [each for each in run.results.served if 250.0 <= each.done_s < 350.0]
    assert 0 < sum(each.completions for each in decision.evaluation.slices) <= len(measured)


def test_faults_that_cannot_be_are_refused() -> None:
    with pytest.raises(UnknownNode, match="there are n000"):
        Run(replace(scenario("1P1D"), faults=[NodeDeath(1.0, "nobody")]))
    with pytest.raises(ValueError, match="no planner"):
        Run(replace(scenario("1P1D"), arm=ARMS["ours-static"], faults=[PlannerFailover(1.0)]))
    with pytest.raises(ValueError, match="factor"):
        SlowNode(1.0, "n000", 0.0)
