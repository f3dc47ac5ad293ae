"""Real sessions against a gateway that keeps everything: what is asked, when, and what is reported."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from replay.pool_gateway import Kept, PoolGateway, answer_to, serving
from scripted_gateway import GONE, Play, pack, refusal
from waiting import eventually

from evolving.v1 import common_pb2
from evolving_client import RetryPolicy
from evolving_replay import Answered, Arrivals, Progress, ReplayError, ReplayOptions, replay
from evolving_sim.trace_files import read_sessions
from evolving_sim.traces import Step, TraceAgent, TraceRequest, TraceSession, branch_steps

FIXTURES = Path(__file__).parents[1] / "fixtures"
AGENTS = tuple(read_sessions(FIXTURES / "claude_code_small.jsonl.xz"))
MOONCAKE = tuple(read_sessions(FIXTURES / "mooncake_small.jsonl.gz"))
WITH_SUBAGENTS = next(session for session in AGENTS if len(session.agents) > 1)
AT_ONCE = 1e9  # so compressed that nobody thinks


def options(address: str, **changes: object) -> ReplayOptions:
    """Everything at once, few retries."""
    return ReplayOptions(
        gateways=(address,),
        **{  # type: ignore[arg-type]
            "compression": AT_ONCE,
            "retry": RetryPolicy(max_failures=2, initial_backoff_s=0.001, max_overload_wait_s=0.0),
            **changes,
        },
    )


def total_requests(sessions: Sequence[TraceSession]) -> int:
    return sum(session.request_count for session in sessions)


async def test_nothing_is_lost_where_everything_is_kept() -> None:
    gateway = PoolGateway()
    async with serving(gateway) as address:
        report = await replay(AGENTS, options(address, concurrency=3))
    assert report.complete
    assert (report.sessions, report.requests, report.failed) == (len(AGENTS), total_requests(AGENTS), 0)
    assert report.lost_reuse == 0
    assert report.ideal_hit_rate > 0.5
    assert report.hit_rate == pytest.approx(report.ideal_hit_rate + report.beyond_ideal), "what the gateway found"
    assert report.beyond_ideal < 0.01, "only what a sub-agent had from another still running"
    recorded = [request for session in AGENTS for agent in session.agents for request in agent.requests]
    assert report.prompt_tokens == sum(request.input_tokens for request in recorded)
    assert report.output_tokens == sum(request.output_tokens for request in recorded)
    assert sorted(len(each.token_ids) // 4 for each in gateway.requests) == sorted(r.input_tokens for r in recorded)
    assert all(each.sampling.ignore_eos for each in gateway.requests)
    assert gateway.most_running <= 3 + 1, "three sessions, one of them with two sub-agents"
    assert report.ttft.p99_s <= report.e2e.p99_s
    assert report.hidden_share == 0.5


async def test_each_answer_is_told_with_its_place() -> None:
    gateway, told = PoolGateway(), list[Answered]()
    async with serving(gateway) as address:
        report = await replay(AGENTS, options(address), on_answer=told.append)
    places = {
        (number, agent, index): asked
        for number, session in enumerate(AGENTS)
        for agent, each in enumerate(session.agents)
        for index, asked in enumerate(each.requests)
    }
    assert sorted((each.session, each.agent, each.request) for each in told) == sorted(places)
    for each in told:
        asked = places[each.session, each.agent, each.request]
        assert each.finished.usage.prompt_tokens == asked.input_tokens
        assert 0 <= each.sent_s <= each.sent_s + each.ttft_s <= each.sent_s + each.e2e_s <= report.wall_s
    assert sum(each.ideal_tokens for each in told) == pytest.approx(report.ideal_hit_rate * report.prompt_tokens)


async def test_answers_of_earlier_turns_are_reused() -> None:
    """Without them, only prompts would be found again."""
    gateway = PoolGateway()
    async with serving(gateway) as address:
        report = await replay(AGENTS, options(address, concurrency=1))
    reused = prompts_only = 0
    for session in AGENTS:
        for agent in session.agents:
            for before, request, step in zip(
                agent.requests, agent.requests[1:], list(branch_steps(agent.requests))[1:], strict=False
            ):
                prompts_only += step.shared_blocks * 64
                grown = request.input_tokens - before.input_tokens
                if step.shared_blocks == len(before.block_ids) and grown > 0:
                    held = before.input_tokens + min(before.output_tokens - 1, grown - 1)
                    reused += (held // 64 - step.shared_blocks) * 64
    assert reused > 0
    assert report.hit_rate * report.prompt_tokens >= prompts_only + reused - 64 * len(AGENTS)


async def test_branches_follow_the_trace() -> None:
    gateway = PoolGateway()
    async with serving(gateway) as address:
        await replay(AGENTS, options(address, concurrency=1))
        first_run = {each.branch.branch_id for each in gateway.requests}
        ended = list(gateway.ended)
        await replay(AGENTS[:1], options(address, concurrency=1))
    roots = dict.fromkeys(each.branch.branch_id for each in gateway.requests if not each.branch.parent_branch_id)
    assert len(roots) == len(AGENTS) + 1, "each session and each run has its own"
    assert next(reversed(roots)) not in first_run
    asked: dict[str, list[int]] = {}
    for each in gateway.requests:
        asked.setdefault(each.branch.branch_id, []).append(each.branch.version)
    for root, session in zip(roots, AGENTS, strict=False):
        assert asked[root] == [step.version for step in branch_steps(session.agents[0].requests)]
    assert max(max(versions) for versions in asked.values()) > 1, "some session rewrites its context"
    assert [(list(each.branch_ids), each.subtree) for each in ended] == [([root], True) for root in roots][:-1]
    children = {each.branch.branch_id: each.branch.parent_branch_id for each in gateway.requests if
                each.branch.parent_branch_id}  # fmt: skip
    parent = list(roots)[AGENTS.index(WITH_SUBAGENTS)]
    assert list(children.values()) == [parent] * 2
    lengths = {len(asked[child]) for child in children}
    assert lengths == {len(agent.requests) for agent in WITH_SUBAGENTS.agents[1:]}


async def test_an_agent_waits_for_its_sub_agents() -> None:
    gateway = PoolGateway()
    async with serving(gateway) as address:
        await replay([WITH_SUBAGENTS], options(address))
    root = gateway.requests[0].branch.branch_id
    starts_after = WITH_SUBAGENTS.agents[1].starts_after
    answered = [index for index, moment in enumerate(gateway.moments) if moment == (root, "answered")]
    sent = [index for index, moment in enumerate(gateway.moments) if moment == (root, "sent")]
    children = [index for index, (branch_id, _) in enumerate(gateway.moments) if branch_id != root]
    assert answered[starts_after] < min(children)
    assert max(children) < sent[starts_after + 1]


def asks(*prompts: list[int], tail_tokens: int = 0) -> tuple[TraceRequest, ...]:
    """Requests for prompts of these blocks."""
    return tuple(
        TraceRequest(0.0, len(ids) * 64 + tail_tokens, 5, np.array(ids, dtype=np.uint32), 0.0, 0.0) for ids in prompts
    )


async def test_sub_agents_are_branches_with_versions_and_sub_agents_of_their_own() -> None:
    agents = (
        TraceAgent("", "", -1, parent_waits=False, requests=asks([1], [1, 2], [1, 2, 3])),
        TraceAgent("early", "", -1, parent_waits=True, requests=asks([11], [12], [12, 13], [14])),
        TraceAgent("inner", "early", 1, parent_waits=True, requests=asks([21])),
        TraceAgent("aside", "", 1, parent_waits=False, requests=asks([31], [31, 32])),
    )
    gateway = PoolGateway()
    async with serving(gateway) as address:
        session = TraceSession("s", 64, ids_shared=False, open_loop=False, agents=agents)
        report = await replay([session], options(address))
    assert (report.requests, len(gateway.ended)) == (10, 1)
    asked = [each.branch for each in gateway.requests]
    root = next(branch.branch_id for branch in asked if not branch.parent_branch_id)
    versions: dict[str, list[int]] = {}
    parents: dict[str, str] = {}
    for branch in asked:
        versions.setdefault(branch.branch_id, []).append(branch.version)
        parents[branch.branch_id] = branch.parent_branch_id
    early = next(branch_id for branch_id, seen in versions.items() if seen == [1, 2, 2, 3])
    inner = next(branch_id for branch_id, parent in parents.items() if parent == early)
    aside = (set(versions) - {root, early, inner}).pop()
    assert (parents[early], parents[aside], len(versions)) == (root, root, 4)
    order = {moment: index for index, moment in reversed(list(enumerate(gateway.moments)))}
    last_of_early = max(index for index, moment in enumerate(gateway.moments) if moment == (early, "answered"))
    assert last_of_early < order[root, "sent"], "it started before the first request, which waits for it"
    assert order[early, "answered"] < order[inner, "sent"]


async def test_sessions_that_share_blocks_share_no_more() -> None:
    sessions = [
        TraceSession(
            name, 64, ids_shared=True, open_loop=True,
            agents=(TraceAgent("", "", -1, parent_waits=False, requests=asks([1, 2], tail_tokens=60)),),
        )
        for name in ("a", "b")
    ]  # fmt: skip
    gateway = PoolGateway()
    async with serving(gateway) as address:
        await replay(sessions, options(address))
    one, other = (each.token_ids for each in gateway.requests)
    assert one[:512] == other[:512]
    assert one[512:] != other[512:]


async def test_tokens_go_on_from_what_was_answered() -> None:
    gateway = PoolGateway()
    async with serving(gateway) as address:
        await replay(AGENTS[:1], options(address))
    asked = gateway.requests
    steps = list(branch_steps(AGENTS[0].agents[0].requests))
    extended = 0
    for before, following, step in zip(asked, asked[1:], steps[1:], strict=False):
        said = before.token_ids + pack(answer_to(before))
        if step.step is Step.EXTENDS and len(following.token_ids) > len(said):
            assert following.token_ids.startswith(said)
            extended += 1
    assert extended > 3


@pytest.mark.parametrize(
    ("kept", "cause"),
    [
        (lambda known: Kept(0, 0, 0), "eviction"),
        (lambda known: Kept(0, 0, 0, common_pb2.LOSS_CAUSE_SWITCH), "switch"),
        (lambda known: Kept(0, 0, 0, common_pb2.LOSS_CAUSE_NODE), "node"),
        (lambda known: Kept(known, 0, 0), "routing"),
        (lambda known: Kept(known, known, 0), "fetch_failed"),
    ],
)
async def test_lost_reuse_has_its_cause(kept: object, cause: str) -> None:
    gateway = PoolGateway(keeps=kept)  # type: ignore[arg-type]
    async with serving(gateway) as address:
        report = await replay(AGENTS[:2], options(address))
    assert report.hit_rate == 0
    assert report.lost_reuse == pytest.approx(report.ideal_hit_rate)
    assert report.lost_reuse > 0.5
    assert report.lost_by == {**dict.fromkeys(report.lost_by, 0), cause: report.lost_reuse}


async def test_open_arrivals_share_blocks_between_sessions() -> None:
    gateway = PoolGateway()
    seen: list[Progress] = []
    async with serving(gateway) as address:
        report = await replay(MOONCAKE, options(address, arrivals=Arrivals.OPEN, compression=100.0), seen.append)
    assert (report.requests, report.sessions) == (len(MOONCAKE), len(MOONCAKE))
    assert report.hit_rate > 0.02, "sessions of this trace share ids"
    assert report.lost_reuse == 0
    last_s = max(session.agents[0].requests[0].at_s for session in MOONCAKE)
    assert report.wall_s >= last_s / 100
    tokens = [len(each.token_ids) // 4 for each in gateway.requests]
    recorded = [session.agents[0].requests[0].input_tokens for session in MOONCAKE]
    assert sorted(tokens) == sorted(recorded)
    assert seen[-1].finished_requests == seen[-1].total_requests == len(MOONCAKE)
    assert seen[-1].running_requests == seen[-1].running_sessions == 0
    assert seen[-1].cached_tokens == round(report.hit_rate * report.prompt_tokens)


async def test_open_arrivals_need_a_trace_that_tells_them() -> None:
    async with serving(PoolGateway()) as address:
        with pytest.raises(ReplayError, match="closed"):
            await replay(AGENTS, options(address, arrivals=Arrivals.OPEN))


async def test_a_failed_request_is_counted_and_its_session_goes_on() -> None:
    gateway = PoolGateway()
    broken = Play(fail_at=0, error=refusal(GONE.status, "NOT_READY"))
    gateway.plays.extend([Play(), Play(), broken, broken])  # the client tries twice
    session = AGENTS[0]
    async with serving(gateway) as address:
        report = await replay([session], options(address))
    assert report.complete
    assert (report.requests, report.failed) == (session.request_count - 1, 1)
    assert report.failures == {"NOT_READY": 1}
    assert len(gateway.ended) == 1
    assert report.lost_reuse == 0


async def test_one_that_is_sent_again_is_no_failure() -> None:
    gateway = PoolGateway()
    gateway.plays.append(Play(fail_at=0))
    async with serving(gateway) as address:
        report = await replay(AGENTS[:1], options(address))
    assert (report.requests, report.failed, report.resent) == (AGENTS[0].request_count, 0, 1)


async def test_stopped_midway_it_ends_branches_and_reports_what_was_played() -> None:
    gateway = PoolGateway()
    gateway.plays.extend([*[Play()] * 20, Play(hang_at=0)])
    stop = asyncio.Event()
    seen: list[Progress] = []
    async with serving(gateway) as address:
        running = asyncio.create_task(replay(AGENTS[1:3], options(address, concurrency=2), seen.append, stop))
        await eventually(lambda: gateway.running > 0 and not gateway.plays)
        stop.set()
        report = await running
    assert not report.complete
    assert 0 < report.requests < total_requests(AGENTS[1:3])
    assert report.failed == 0, "what was interrupted did not fail"
    assert report.requests + report.unfinished >= len({each.request_id for each in gateway.requests})
    begun = {each.branch.branch_id for each in gateway.requests if not each.branch.parent_branch_id}
    assert {branch_id for each in gateway.ended for branch_id in each.branch_ids} == begun
    assert all(each.subtree for each in gateway.ended)
    assert seen[-1].running_requests == seen[-1].running_sessions == 0
    await eventually(lambda: gateway.running == 0)


async def test_cancelled_it_ends_branches_too() -> None:
    gateway = PoolGateway()
    gateway.plays.append(Play(hang_at=0))
    async with serving(gateway) as address:
        running = asyncio.create_task(replay(AGENTS[:1], options(address)))
        await eventually(lambda: gateway.running == 1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await eventually(lambda: len(gateway.ended) == 1)


async def test_ends_that_can_t_be_told_are_counted() -> None:
    gateway = PoolGateway()
    gateway.unary_errors.extend([GONE] * 2)
    async with serving(gateway) as address:
        report = await replay(AGENTS[1:2], options(address))
    assert report.branches_not_ended == 1


async def test_another_seed_makes_other_tokens() -> None:
    gateway = PoolGateway()
    async with serving(gateway) as address:
        await replay(AGENTS[:1], options(address))
        again = await replay(AGENTS[:1], options(address))
        other = await replay(AGENTS[:1], options(address, seed=1))
    assert again.beyond_ideal > 0, "the first run's KV"
    assert other.beyond_ideal == 0


async def test_compressed_thinking_is_kept() -> None:
    session = AGENTS[1]
    thought_s = sum(request.think_s for request in session.agents[0].requests)
    async with serving(PoolGateway()) as address:
        report = await replay([session], options(address, compression=50.0, stagger_s=0.0))
    assert thought_s > 0
    assert report.wall_s >= thought_s / 50
