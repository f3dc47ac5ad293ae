"""A simulated cluster: every request is served once, tokens add up, a switch costs nobody anything, a run is the same
anywhere."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim.small import HELPER, MACHINE, READER, WORKER, WRITER, scenario

from evolving.core.planner import Split, SplitShape, assign
from evolving.core.slices import PrefillDone
from evolving.core.terms import Role, Tier
from evolving_sim.arms.named import ARMS
from evolving_sim.driver import Run, Scenario
from evolving_sim.legs import Request
from evolving_sim.node_config import BothPhases
from evolving_sim.population import Burst, Period, WorkloadConfig
from evolving_sim.sim_cluster import Listeners, SimCluster, TooLong


def digest(run: Run) -> str:
    """All that was served, and when."""
    return hashlib.sha256(repr(run.results.served).encode()).hexdigest()


def switch(run: Run, shape: str, epoch: int) -> None:
    roles = assign(SplitShape.parse(shape), run.cluster.split.roles, run.cluster.nodes)
    run.cluster.change(Split(epoch, roles))


def test_host_memory_comes_no_faster_than_the_arm_has_it() -> None:
    """§2.3: the time it takes adds to prefill."""
    start = scenario("2P2D")
    machine, arm = replace(start.machine, l1_tokens=50_000), ARMS["dynamo-router-pool"]
    waits_s = []
    for rate in (math.inf, 2_000.0):
        run = Run(replace(start, machine=machine, arm=replace(arm, restored_tokens_per_s=rate)))
        run.until(120.0)
        waits_s.append(run.results.between(0.0, 120.0).ttft_s_mean)
    assert waits_s[1] > waits_s[0]


@settings(max_examples=15)
@given(
    st.integers(0, 1000),
    st.lists(st.tuples(st.floats(0.1, 20), st.sampled_from(["1P3D", "2P2D", "3P1D"])), max_size=4),
    st.sampled_from(BothPhases),
    st.sampled_from(sorted(ARMS)),
)
def test_every_request_is_in_one_place_whatever_the_split_does(
    seed: int, switches: list[tuple[float, str]], both: BothPhases, arm: str
) -> None:
    start = scenario("2P2D", {WORKER: 12, READER: 3, WRITER: 3})
    machine = replace(start.machine, both_phases=both, l1_tokens=50_000, l2_tokens=60_000)
    run = Run(replace(start, machine=machine, arm=ARMS[arm], seed=seed, debug=True))
    for epoch, (at_s, shape) in enumerate(sorted(switches), 2):
        run.until(at_s)
        switch(run, shape, run.cluster.split.epoch + epoch)
        run.check_invariants()
    run.until(60.0)
    run.check_invariants()
    assert all(each.sent_s <= each.taken_s <= each.first_token_s <= each.done_s for each in run.results.served)
    assert run.results.served


@dataclass
class Counting:
    """A cluster that notes what it is asked."""

    cluster: SimCluster
    block_tokens: int
    sent: list[Request] = field(default_factory=list)

    def submit(self, request: Request) -> None:
        self.sent.append(request)
        self.cluster.submit(request)

    def end_branch(self, branch_id: str) -> None:
        self.cluster.end_branch(branch_id)

    def recall(self, names: Sequence[bytes], blocks: int) -> None:
        self.cluster.recall(names, blocks)


@pytest.mark.parametrize("arm", sorted(ARMS))
def test_requests_and_tokens_that_came_are_those_served_and_open_computed_and_reused(arm: str) -> None:
    start = scenario("2P2D")
    run, done = Run(replace(start, workload=WorkloadConfig(), arm=ARMS[arm])), list[PrefillDone]()
    counting = Counting(run.cluster, run.cluster.block_tokens)
    sent = counting.sent
    run.cluster.listeners.append(Listeners(prefilled=done.append))
    start.workload.workload(1).begin(run.events, counting)
    run.until(120.0)
    cluster = run.cluster
    assert len(sent) == len(run.results.served) + cluster.open_requests
    assert {each.request_id for each in sent if each.done_s != each.done_s} == set(cluster.requests)
    prompts = {each.request_id: each.prompt_tokens for each in sent}
    assert all(each.work.uncached_tokens + each.work.cached_tokens == prompts[each.request_id] for each in done)
    running = sum(leg.computed_tokens for node in cluster.nodes.values() for leg in node.running)
    computed = sum(node.computed_tokens for node in cluster.nodes.values())
    assert computed == running + sum(each.work.uncached_tokens for each in done)
    assert all(each.fetched_tokens <= each.cached_tokens < each.prompt_tokens for each in sent)
    if ARMS[arm].fetch == "none":
        assert not any(each.fetched_tokens for each in sent)


def test_what_is_reused_was_produced_before() -> None:
    """Table 8: the ideal hit rate counts every prompt token whose KV an earlier request produced."""
    run = Run(scenario("2P2D"))
    run.until(300.0)
    served = run.results.served
    size = run.cluster.block_tokens
    assert all(each.ideal_tokens % size == 0 and each.ideal_tokens < each.prompt_tokens for each in served)
    assert sum(each.ideal_tokens for each in served) > 0.5 * sum(each.prompt_tokens for each in served)
    # KV of a request that still runs can be reused too, but hardly ever is.
    assert sum(each.cached_tokens for each in served) <= 1.01 * sum(each.ideal_tokens for each in served)


def test_at_a_switch_what_waits_goes_elsewhere_and_what_runs_finishes_in_place() -> None:
    """DESIGN §8; §4.4 of the paper, last paragraph."""
    run = Run(scenario("3P1D", {READER: 60}))
    run.until(20.0)
    node = run.cluster.nodes["n002"]
    assert node.queue
    assert node.running
    running, queued = list(node.running), [leg.request.request_id for leg in node.queue]
    held = node.kv.pool.used(Tier.L2)
    switch(run, "2P2D", 2)
    assert run.cluster.roles["n002"] is Role.DECODE
    assert node.queue == []
    assert node.running == running
    assert node.kv.pool.used(Tier.L2) == held
    elsewhere = {leg.request.request_id for each in run.cluster.nodes.values() for leg in (*each.queue, *each.running)}
    assert set(queued) <= elsewhere
    decoded_while_prefilling = False
    while node.running:
        run.until(run.events.now_s + 0.1)
        decoded_while_prefilling |= node.decoding > 0
    assert all(leg.request.first_token_s > 20.0 for leg in running)
    assert decoded_while_prefilling, "the new phase is served while the old one ends"
    assert node.queue == []


def test_in_a_closed_loop_open_requests_are_rate_times_time_in_the_system() -> None:
    """Little's law, which holds whatever is simulated."""
    run = Run(scenario("2P2D"))
    run.until(100.0)
    before = run.cluster.open_request_s()
    run.until(500.0)
    mean_open = (run.cluster.open_request_s() - before) / 400.0
    served = run.results.between(100.0, 500.0)
    assert mean_open == pytest.approx(served.requests_per_s * served.e2e_s_mean, rel=0.1)


def test_agents_that_are_in_their_sessions_at_the_start_have_their_contexts_in_the_pool() -> None:
    run = Run(scenario("2P2D", {WORKER: 20}))
    run.until(200.0)
    first = [each for each in run.results.served if each.sent_s < 60.0 and each.kind == "worker"]
    assert first
    assert all(each.cached_tokens >= each.ideal_tokens for each in first if each.sent_s < 1.0)
    assert any(each.ideal_tokens > 1_000 for each in first if each.sent_s < 1.0)


def test_agents_that_are_done_are_replaced_and_a_period_changes_who_runs() -> None:
    one = scenario("2P2D", {WORKER: 10})
    periods = (*one.workload.periods, Period(100.0, {WORKER: 4, WRITER: 5}))
    run = Run(replace(one, workload=replace(one.workload, periods=periods)))
    for second in range(0, 200, 5):
        run.until(float(second))
        run.check_invariants()
    assert run.results.between(150.0, 200.0).requests > 0
    kinds = {each.kind for each in run.results.served if each.sent_s > 120.0}
    assert kinds >= {"worker", "writer"}


def test_a_burst_of_agents_asks_at_once_and_is_gone_when_they_are_done() -> None:
    quiet = scenario("2P2D", {WRITER: 1})
    run = Run(replace(quiet, workload=replace(quiet.workload, bursts=(Burst(50.0, 20, HELPER),))))
    run.until(50.0)
    assert run.cluster.open_requests >= 20
    run.until(400.0)
    helpers = {each.kind for each in run.results.served if each.sent_s > 300.0}
    assert helpers == {"writer"}


def a_prompt(number: int) -> Request:
    """Of 1,000 tokens, shared with no other's, and an answer of 100."""
    names = [f"{number:06}{block:010}".encode() for block in range(17)]
    branch = f"branch {number}"
    return Request(f"{branch}#1", "kind", branch, branch, "", 1, names, 0, 1_000, 100, 0.0, lambda: None)


@pytest.mark.parametrize("first", [True, False])
def test_an_engine_that_reserves_first_computes_no_prompt_before_its_answer_has_room(first: bool) -> None:
    """§4.1: a decode engine reserves slots, then it gets the KV. With two slots the third prompt waits for an answer's
    end; an engine that computes first has the prompt by then."""
    one = scenario("3P1D", {})
    machine = replace(one.machine, decode_slots=2)
    arm = replace(ARMS["sglang-static"], reserves_first=first)
    run = Run(replace(one, machine=machine, workload=WorkloadConfig(), arm=arm, debug=True))
    prompts = [a_prompt(number) for number in range(3)]
    for prompt in prompts:
        run.cluster.submit(prompt)
    run.until(60.0)
    ends_s = min(prompt.done_s for prompt in prompts[:2])
    assert prompts[2].done_s > ends_s
    assert (prompts[2].taken_s >= ends_s) == first
    assert (prompts[2].first_token_s < ends_s) == (not first)


def test_a_request_is_routed_once_the_gateway_has_read_it_and_open_before() -> None:
    one = scenario("2P2D", {})
    run = Run(replace(one, workload=WorkloadConfig(), gateway_s=0.75, debug=True))
    prompt = a_prompt(1)
    run.cluster.submit(prompt)
    run.check_invariants()
    assert run.cluster.open_requests == 1
    run.until(60.0)
    assert prompt.taken_s == pytest.approx(0.75)
    assert run.cluster.open_requests == 0


def test_a_request_that_fits_nowhere_is_refused() -> None:
    run = Run(scenario("2P2D", {WORKER: 1}))
    long = Request("r", "kind", "a", "a", "", 1, [b""] * 2_000, 0, 100_000, 10, 0.0, lambda: None)
    with pytest.raises(TooLong, match="give nodes more l1_tokens"):
        run.cluster.submit(long)


def played() -> str:
    """A run with everything in it; the same in any process."""
    start: Scenario = scenario("2P2D", {WORKER: 20, READER: 5})
    machine = replace(MACHINE, l1_tokens=50_000, l2_tokens=60_000)
    bursts = (Burst(30.0, 5, HELPER),)
    run = Run(replace(start, machine=machine, workload=replace(start.workload, bursts=bursts)))
    run.until(40.0)
    switch(run, "1P3D", 2)
    run.until(80.0)
    return digest(run)


def test_a_run_is_the_same_in_any_process() -> None:
    tests = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-c", "from sim.test_sim_cluster import played; print(played())"]
    told = [
        subprocess.run(
            command,
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(tests)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    ]
    assert told == [played()] * 2
