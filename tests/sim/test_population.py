"""Who asks and when: the same requests whatever the cluster does, each once what it waits for is over."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim.answering import content, play
from sim.naive_pool import main_agent, request, session, sessions
from sim.small import HELPER, READER, WORKER, WRITER

from evolving_sim.interleaving import Kind as Happens
from evolving_sim.interleaving import interleave
from evolving_sim.kinds import Agents, Kind
from evolving_sim.population import Arrivals, Burst, Period, Spacing, WorkloadConfig
from evolving_sim.sessions import AgentKind
from evolving_sim.trace_files import read_sessions
from evolving_sim.traced import TraceKind
from evolving_sim.traces import TraceAgent, TraceSession, branch_steps

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
CLAUDE_CODE = FIXTURES / "claude_code_small.jsonl.xz"
MOONCAKE = FIXTURES / "mooncake_small.jsonl.gz"
CODING = TraceKind("coding", CLAUDE_CODE, compression=10.0, think_s_max=300.0)


def closed(agents: Agents, **more: Any) -> WorkloadConfig:
    return WorkloadConfig((Period(0.0, agents),), **more)


SOME: dict[Kind, int] = {WORKER: 6, CODING: 3}
OTHERS: dict[Kind, int] = {WORKER: 2, WRITER: 4, CODING: 5}
EVERYTHING = WorkloadConfig(
    periods=(Period(0.0, SOME), Period(150.0, OTHERS)),
    arrivals=(Arrivals(READER, per_min=3.0), Arrivals(HELPER, per_min=2.0, spacing=Spacing.EVEN, from_s=30.0)),
    bursts=(Burst(100.0, 5, HELPER),),
)


# -- drawn or recorded


@pytest.mark.parametrize("kind", [WORKER, HELPER, CODING], ids=lambda kind: kind.name)
@pytest.mark.parametrize("begun", [False, True])
def test_what_is_asked_does_not_hang_on_the_cluster(kind: AgentKind | TraceKind, begun: bool) -> None:
    """Slow or fast, it is asked the same, only more or less of it."""
    slow, fast = (play(closed({kind: 3}, begun=begun), 600.0, delays=delay_s) for delay_s in (9.0, 2.0))
    contents = {request.request_id: content(request) for request in fast.requests}
    assert len(contents) == len(fast.requests) > len(slow.requests)
    first = [request for request in slow.requests if request.request_id in contents]
    assert len(first) > 0.5 * len(slow.requests)
    assert [content(request) for request in first] == [contents[request.request_id] for request in first]
    assert [list(names) for names in slow.recalled[:3]] == [list(names) for names in fast.recalled[:3]]
    assert bool(slow.recalled) == begun


def test_another_seed_asks_something_else_and_the_same_one_the_same() -> None:
    one, again, other = (play(EVERYTHING, 200.0, seed=seed, delays=3) for seed in (1, 1, 2))
    assert [*map(content, one.requests)] == [*map(content, again.requests)]
    assert [*map(content, one.requests)] != [*map(content, other.requests)]


@pytest.mark.parametrize("delays", [1, 2])
def test_as_many_agents_as_wanted_are_there(delays: int) -> None:
    """`play` checks invariants as it goes; here what is seen from outside."""
    played = play(EVERYTHING, 300.0, delays=delays)
    kinds = Counter(request.kind for request in played.requests)
    assert kinds.keys() >= {"worker", "reader", "writer", "helper", "coding"}
    late = {request.branch_id for request in played.requests if request.kind == "worker" and request.sent_s > 250.0}
    assert len(late - played.ended.keys()) <= 2
    assert len([request for request in played.requests if request.sent_s == 100.0 and request.kind == "helper"]) == 5


def test_names_and_shared_blocks_are_those_of_contexts() -> None:
    """Of each branch: the names of a context begin with as many of the last one's as it says, and no more."""
    for played in (play(EVERYTHING, 300.0, delays=1), play(closed({WORKER: 10}, begun=False), 300.0)):
        last: dict[str, list[bytes]] = {}
        versions: dict[str, int] = {}
        for request_ in played.requests:
            blocks = (request_.prompt_tokens + request_.output_tokens - 1) // played.block_tokens
            names = list(request_.names[:blocks])
            assert len(names) == blocks
            before = last.get(request_.branch_id)
            if before is None:
                assert request_.shared_blocks == 0
            else:
                same = [one == other for one, other in zip(before, names, strict=False)]
                assert request_.shared_blocks == (same.index(False) if False in same else len(same))
                assert request_.version >= versions[request_.branch_id]
            last[request_.branch_id], versions[request_.branch_id] = names, request_.version
        assert any(version > 1 for version in versions.values())


def test_agents_of_a_kind_begin_alike_and_share_nothing_else() -> None:
    played = play(closed({WORKER: 8}, begun=False), 300.0)
    common = WORKER.system_tokens // played.block_tokens
    first = {request_.branch_id: request_.names for request_ in reversed(played.requests) if request_.kind == "worker"}
    heads = {tuple(names[:common]) for names in first.values()}
    assert len(heads) == 1
    rests = [set(names[common:]) for names in first.values()]
    assert sum(map(len, rests)) == len(set().union(*rests))


def test_sub_agents_have_their_parents_agent_and_are_waited_for() -> None:
    played = play(closed({WORKER: 30}, begun=False), 300.0, delays=4)
    helpers = [request_ for request_ in played.requests if request_.kind == "helper"]
    assert helpers
    assert {request_.agent_id for request_ in helpers} == {request_.parent_branch_id for request_ in helpers}
    for helper in helpers:
        asked_s = [request_.sent_s for request_ in played.requests if request_.branch_id == helper.parent_branch_id]
        end_s = played.ended.get(helper.branch_id, math.inf)
        assert not any(helper.sent_s < at_s < end_s for at_s in asked_s)


def test_pauses_are_the_thoughts_of_the_kind() -> None:
    """Table 3's pause can be read from when requests are sent and answered."""
    kind = replace(WORKER, sub_agents=None)
    played = play(closed({kind: 50}), 600.0, delays=2.5)
    answered: dict[str, float] = {}
    pauses = []
    for request_ in played.requests:
        if request_.branch_id in answered:
            pauses.append(request_.sent_s - answered[request_.branch_id])
        answered[request_.branch_id] = request_.sent_s + 2.5
    assert sum(pauses) / len(pauses) == pytest.approx(kind.think_s.mean, rel=0.1)


# -- arrivals


@pytest.mark.parametrize("spacing", Spacing)
def test_agents_arrive_at_a_rate_run_to_their_ends_and_are_not_replaced(spacing: Spacing) -> None:
    config = WorkloadConfig(arrivals=(Arrivals(HELPER, 30.0, spacing, from_s=100.0, until_s=1300.0),))
    played = play(config, 3000.0, delays=1)
    first: dict[str, float] = {}
    for request_ in played.requests:
        first.setdefault(request_.branch_id, request_.sent_s)
    came_s = sorted(first.values())
    gaps_s = [after - before for before, after in itertools.pairwise(came_s)]
    assert 100.0 <= came_s[0] < came_s[-1] < 1300.0
    assert len(came_s) == pytest.approx(600, rel=0.15)
    if spacing is Spacing.EVEN:
        assert all(gap_s == pytest.approx(2.0) for gap_s in gaps_s)
    else:
        assert sum(gap_s > 2.0 for gap_s in gaps_s) / len(gaps_s) == pytest.approx(math.exp(-1.0), abs=0.06)
    assert played.ended.keys() == first.keys(), "each ended, and nobody came for it"


def test_whole_recorded_sessions_arrive_too_and_end() -> None:
    config = WorkloadConfig(arrivals=(Arrivals(replace(CODING, repeated=False), 60.0, Spacing.EVEN),))
    played = play(config, 10_000.0, delays=1.0)
    recorded = list(read_sessions(CLAUDE_CODE))
    assert len(played.requests) == sum(each.request_count for each in recorded)
    assert not played.open


# -- recorded sessions


@settings(max_examples=60)
@given(sessions(ids_shared=False), st.integers(1, 3), st.integers(0, 3))
def test_recorded_sessions_are_asked_in_order_with_their_tokens(
    recorded: list[TraceSession], places: int, delays: int
) -> None:
    kind = TraceKind("agents", tuple(recorded), shuffled=False, repeated=False)
    played = play(closed({kind: places}, begun=False, spread_s=0.0), 1e5, delays=delays, block_tokens=4)
    asked = {request_.request_id: request_ for request_ in played.requests}
    assert len(asked) == len(played.requests) == sum(each.request_count for each in recorded)
    assert not played.open
    for number, each in enumerate(recorded):
        for at, agent in enumerate(each.agents):
            sent_s = []
            for index, (one, step) in enumerate(zip(agent.requests, branch_steps(agent.requests), strict=True)):
                request_ = asked[kind.request_id(number, at, index)]
                assert request_.branch_id == kind.branch_id(number, at)
                assert request_.agent_id == kind.branch_id(number, 0)
                assert request_.parent_branch_id == (kind.branch_id(number, 0) if at else "")
                assert (request_.prompt_tokens, request_.output_tokens) == (one.input_tokens, max(1, one.output_tokens))
                assert request_.version == step.version
                sent_s.append(request_.sent_s)
            assert sent_s == sorted(sent_s)


@settings(max_examples=60)
@given(sessions(ids_shared=False), st.integers(1, 3))
def test_times_are_those_of_the_interleaving_where_answers_take_as_long(
    recorded: list[TraceSession], places: int
) -> None:
    """Answers of the random sessions take a second; so `interleave` tells when each request comes."""
    kind = TraceKind("agents", tuple(recorded), shuffled=False, repeated=False)
    places = min(places, len(recorded))
    played = play(closed({kind: places}, begun=False, spread_s=0.0), 1e5, delays=1.0, block_tokens=4)
    sent_s = {request_.request_id: request_.sent_s for request_ in played.requests}
    for moment in interleave(recorded, places):
        if moment.kind is Happens.REQUEST_BEGINS:
            name = kind.request_id(moment.session, moment.agent, moment.request)
            assert sent_s[name] == pytest.approx(moment.at_s)


def test_sub_agents_that_are_waited_for_hold_their_parent_and_others_do_not() -> None:
    main = main_agent(request([1], think_s=0.0), request([1, 2], think_s=1.0), request([1, 2, 3], think_s=1.0))
    awaited = TraceAgent("awaited", "", 0, True, (request([9], think_s=5.0), request([9, 8], think_s=5.0)))
    background = TraceAgent("background", "", 0, False, (request([7], think_s=50.0),))
    kind = TraceKind("agents", (session(main, awaited, background),), shuffled=False, repeated=False)
    played = play(closed({kind: 1}, begun=False), 200.0, delays=2.0, block_tokens=4)
    assert {(request_.request_id, request_.sent_s) for request_ in played.requests} == {
        ("agents 0.0#0", 0.0),
        ("agents 0.1#0", 7.0),
        ("agents 0.1#1", 14.0),
        ("agents 0.0#1", 17.0),
        ("agents 0.0#2", 20.0),
        ("agents 0.2#0", 52.0),
    }
    assert {request_.kind for request_ in played.requests} == {"agents", "agents sub-agent"}
    assert played.ended == {"agents 0.0": 22.0, "agents 0.1": 16.0, "agents 0.2": 54.0}


def test_a_session_is_replaced_once_its_last_agent_is_done_and_played_again_with_other_names() -> None:
    background = TraceAgent("background", "", 0, False, (request([7], think_s=50.0),))
    kind = TraceKind("agents", (session(main_agent(request([1, 2], think_s=0.0)), background),))
    played = play(closed({kind: 1}, begun=False), 120.0, delays=2.0, block_tokens=4)
    mains = [request_ for request_ in played.requests if request_.kind == "agents"]
    assert [request_.sent_s for request_ in mains] == [0.0, 54.0, 108.0]
    assert not set(mains[0].names) & set(mains[1].names)


def test_agents_in_mid_session_go_on_with_what_was_computed() -> None:
    """Long sessions are met more often, anywhere in them."""
    long = session(main_agent(*(request(range(1, 2 + at)) for at in range(90))))
    short = session(main_agent(*(request([100, *range(101, 101 + at)]) for at in range(10))))
    kind = TraceKind("agents", (short, long))
    played = play(closed({kind: 400}, spread_s=0.0), 1.0, delays=10.0, block_tokens=4)
    assert len(played.requests) == 400
    firsts = Counter(int(request_.request_id.partition("#")[2]) for request_ in played.requests)
    assert sum(count for first, count in firsts.items() if first >= 10) == pytest.approx(320, abs=40)
    recalled = {names[-1] for names in played.recalled}
    begun = [request_ for request_ in played.requests if not request_.request_id.endswith("#0")]
    assert len(played.recalled) == len(begun)
    assert all(request_.names[request_.prompt_tokens // 4 - 2] in recalled for request_ in begun)
    assert all(request_.shared_blocks == 0 for request_ in played.requests)


def test_compression_and_the_longest_thought_change_times_alone() -> None:
    asked = main_agent(request([1], think_s=0.0), request([1, 2], think_s=40.0), request([1, 2, 3], think_s=5000.0))
    kind = TraceKind("agents", (session(asked),), compression=10.0, think_s_max=100.0, repeated=False)
    played = play(closed({kind: 1}, begun=False), 100.0, delays=1.0, block_tokens=4)
    assert [request_.sent_s for request_ in played.requests] == [0.0, 5.0, 16.0]


def test_requests_of_a_trace_with_times_come_at_them_however_slow_the_answers() -> None:
    recorded = sorted(each.agents[0].requests[0].at_s for each in read_sessions(MOONCAKE))
    played = play(WorkloadConfig(recorded=(TraceKind("chat", MOONCAKE, compression=2.0),)), 1e4, delays=500.0)
    assert [request_.sent_s for request_ in played.requests] == [pytest.approx(at_s / 2.0) for at_s in recorded]
    with pytest.raises(ValueError, match="doesn't tell when its requests come"):
        WorkloadConfig(recorded=(CODING,))


def test_what_is_not_possible_is_refused() -> None:
    with pytest.raises(ValueError, match="called 'worker'"):
        closed({WORKER: 1, replace(READER, name="worker"): 1})
    for wrong in ({"compression": 0.0}, {"think_s_max": -1.0}, {"output_scale": math.inf}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            replace(CODING, **wrong)  # type: ignore[arg-type]
    chat = TraceKind("chat", MOONCAKE)
    with pytest.raises(ValueError, match="nobody else's"):
        closed({chat: 1}, recorded=(chat,))
    with pytest.raises(ValueError, match="per_min"):
        Arrivals(WORKER, 0.0)
    with pytest.raises(ValueError, match="until_s"):
        Arrivals(WORKER, 1.0, from_s=2.0, until_s=1.0)


def asked() -> str:
    """A digest of all that is asked; the same in any process."""
    played = play(EVERYTHING, 200.0, delays=1)
    return hashlib.sha256(repr([(each.sent_s, content(each)) for each in played.requests]).encode()).hexdigest()


def test_a_workload_is_the_same_in_any_process() -> None:
    tests = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-c", "from sim.test_population import asked; print(asked())"]
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
    assert told == [asked()] * 2
