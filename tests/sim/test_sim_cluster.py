"""A simulated cluster: every request is served once, a switch costs nobody anything, a run is the same anywhere."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim.small import HELPER, MACHINE, READER, WORKER, WRITER, scenario

from evolving.core.planner import Split, SplitShape, assign
from evolving.core.slices import PrefillDone
from evolving.core.terms import Role
from evolving_sim.driver import Run, Scenario
from evolving_sim.node_config import BothPhases
from evolving_sim.population import Burst, Period
from evolving_sim.sessions import play
from evolving_sim.sim_cluster import Listeners


def digest(run: Run) -> str:
    """All that was served, and when."""
    return hashlib.sha256(repr(run.results.served).encode()).hexdigest()


def switch(run: Run, shape: str, epoch: int) -> None:
    roles = assign(SplitShape.parse(shape), run.cluster.split.roles, run.cluster.nodes)
    run.cluster.change(Split(epoch, roles))


@settings(max_examples=15)
@given(
    st.integers(0, 1000),
    st.lists(st.tuples(st.floats(0.1, 20), st.sampled_from(["1P3D", "2P2D", "3P1D"])), max_size=4),
    st.sampled_from(BothPhases),
)
def test_every_request_is_in_one_place_whatever_the_split_does(
    seed: int, switches: list[tuple[float, str]], both: BothPhases
) -> None:
    start = scenario("2P2D", {WORKER: 12, READER: 3, WRITER: 3})
    run = Run(replace(start, machine=replace(start.machine, both_phases=both), seed=seed))
    for epoch, (at_s, shape) in enumerate(sorted(switches), 2):
        for step in range(1, 5):
            run.until(max(run.events.now_s, at_s * step / 4))
            run.check_invariants()
        switch(run, shape, epoch)
        run.check_invariants()
    for second in range(21, 60, 3):
        run.until(float(second))
        run.check_invariants()
    assert all(each.sent_s <= each.first_token_s <= each.done_s for each in run.results.served)
    assert run.results.served


def test_at_a_switch_what_waits_goes_elsewhere_and_what_runs_finishes_in_place() -> None:
    """DESIGN §8; §4.4 of the paper, last paragraph."""
    run = Run(scenario("3P1D", {READER: 60}))
    run.until(20.0)
    node = run.cluster.nodes["n002"]
    assert node.queue
    assert node.running
    running, queued = list(node.running), [leg.request.request_id for leg in node.queue]
    switch(run, "2P2D", 2)
    assert run.cluster.roles["n002"] is Role.DECODE
    assert node.queue == []
    assert node.running == running
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
    run, done = Run(scenario("2P2D", {WORKER: 20})), list[PrefillDone]()
    run.cluster.listeners.append(Listeners(prefilled=done.append))
    run.until(200.0)
    cached = {each.request_id: each.work.cached_tokens for each in done}
    contexts = []
    for number in range(1, 21):
        draw = random.Random(f"{run.scenario.seed} worker {number}")
        turns = list(play(WORKER, draw))
        context = turns[draw.randrange(len(turns))].kept_tokens
        assert cached[f"worker {number}#1"] >= context // MACHINE.block_tokens * MACHINE.block_tokens
        contexts.append(context)
    assert any(contexts)


def test_agents_that_are_done_are_replaced_and_a_period_changes_who_runs() -> None:
    one = scenario("2P2D", {WORKER: 10})
    run = Run(replace(one, periods=(*one.periods, Period(100.0, {WORKER: 4, WRITER: 5}))))
    for second in range(0, 200, 5):
        run.until(float(second))
        run.check_invariants()
    assert run.results.between(150.0, 200.0).requests > 0
    kinds = {each.kind for each in run.results.served if each.sent_s > 120.0}
    assert kinds >= {"worker", "writer"}


def test_a_burst_of_agents_asks_at_once_and_is_gone_when_they_are_done() -> None:
    quiet = scenario("2P2D", {WRITER: 1})
    run = Run(replace(quiet, bursts=(Burst(50.0, 20, HELPER),)))
    run.until(50.0)
    assert run.cluster.open_requests >= 20
    run.until(400.0)
    helpers = {each.kind for each in run.results.served if each.sent_s > 300.0}
    assert helpers == {"writer"}


def played() -> str:
    """A run with everything in it; the same in any process."""
    start: Scenario = scenario("2P2D", {WORKER: 20, READER: 5})
    run = Run(replace(start, bursts=(Burst(30.0, 5, HELPER),)))
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
