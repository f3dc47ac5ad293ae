"""The gateway with the real directory, planner and node agents (mock engines), each a process that can be killed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from typing import TypeAlias

import grpc
import grpc.aio
import pytest
from cluster import ClusterSpec, LocalCluster
from gateway_harness import Stream, failure
from scripted_nodes import ids_bytes
from waiting import eventually

from evolving.runtime.channel import open_channel
from evolving.v1 import (
    common_pb2,
    directory_pb2,
    directory_pb2_grpc,
    gateway_pb2,
    gateway_pb2_grpc,
    planner_pb2,
    planner_pb2_grpc,
)
from evolving.wire.status import parse_error

BLOCK = 64
WAIT_S = 60.0
Branch = common_pb2.BranchMetadata
Gateway: TypeAlias = "gateway_pb2_grpc.GatewayServiceAsyncStub"
_names = itertools.count()

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """etcd, directory, planner, gateway and three mock nodes, 2P1D."""
    state_dir = tmp_path_factory.mktemp("cluster")
    running = LocalCluster(
        ClusterSpec(state_dir=state_dir, engine="mock", gateway_port=0, start_timeout_s=60, grace_s=3)
    )
    running.start()
    yield running
    running.stop()


@pytest.fixture
async def channel(cluster: LocalCluster) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(cluster.gateway_address) as opened:
        yield opened


@pytest.fixture
def gateway(channel: grpc.aio.Channel) -> Gateway:
    return gateway_pb2_grpc.GatewayServiceStub(channel)


def new_branch(**fields: object) -> common_pb2.BranchMetadata:
    """A branch id nobody used."""
    return Branch(branch_id=f"branch-{next(_names)}", **fields)  # type: ignore[arg-type]


def new_prompt(tokens: int) -> list[int]:
    """A prompt no test had before, from its first block on."""
    return [next(_names) % 30_000, *range(1, tokens)]


def call(
    gateway: Gateway, prompt: list[int], branch: common_pb2.BranchMetadata | None = None, tokens: int = 40
) -> Stream:
    request = gateway_pb2.GenerateRequest(
        token_ids=ids_bytes(prompt), branch=branch, sampling=gateway_pb2.Sampling(max_tokens=tokens, ignore_eos=True)
    )
    return Stream(gateway.Generate(request, timeout=WAIT_S))


async def read_branch(gateway: Gateway, branch: common_pb2.BranchMetadata) -> common_pb2.Branch:
    return (await gateway.GetBranch(gateway_pb2.GetBranchRequest(branch_id=branch.branch_id))).branch


async def homes_settled(gateway: Gateway, branch: common_pb2.BranchMetadata, blocks: int) -> common_pb2.Branch:
    """The branch once both phases of its first `blocks` blocks have a home and nothing of it runs."""
    async with asyncio.timeout(WAIT_S):
        while True:
            seen = await read_branch(gateway, branch)
            covered = {phase: sum(home.blocks for home in seen.homes if home.phase == phase) for phase in (1, 2)}
            if seen.running_requests == 0 and min(covered.values()) >= blocks:
                return seen
            await asyncio.sleep(0.02)


async def end(gateway: Gateway, *branches: common_pb2.BranchMetadata, subtree: bool = False) -> list[str]:
    ids = [branch.branch_id for branch in branches]
    answer = await gateway.EndBranches(gateway_pb2.EndBranchesRequest(branch_ids=ids, subtree=subtree))
    return list(answer.ended_branch_ids)


async def test_turns_reuse_what_the_turn_before_left_and_counts_follow(cluster: LocalCluster, gateway: Gateway) -> None:
    root, prompt = new_branch(), new_prompt(10 * BLOCK + 5)
    stream = call(gateway, prompt, root)
    finished = await stream.all()
    assert finished.usage.cached_tokens == 0
    assert finished.reusable_blocks == (len(prompt) + 40 - 1) // BLOCK
    await homes_settled(gateway, root, 10)

    longer = [*prompt, *stream.ids, *range(100, 200)]
    second = await call(gateway, longer, root).all()
    assert second.usage.cached_tokens >= 10 * BLOCK
    seen = await homes_settled(gateway, root, len(longer) // BLOCK)
    assert (seen.version, seen.counts.shared_blocks) == (1, 0)

    fork = new_branch(parent_branch_id=root.branch_id)
    await call(gateway, [*longer, 7, 8, 9], fork).all()
    seen = await homes_settled(gateway, fork, len(longer) // BLOCK)
    assert seen.counts.shared_blocks >= len(longer) // BLOCK

    compacted = Branch(branch_id=root.branch_id, version=2)
    await call(gateway, [*prompt[:BLOCK], *range(500, 700)], compacted).all()
    assert (await read_branch(gateway, root)).version == 2

    assert set(await end(gateway, root, subtree=True)) == {root.branch_id, fork.branch_id}
    async with open_channel(cluster.processes["directory"].address) as channel:
        directory = directory_pb2_grpc.DirectoryServiceStub(channel)
        async with asyncio.timeout(WAIT_S):
            while True:
                audit = await directory.Audit(directory_pb2.AuditRequest())
                if (audit.mismatch_count, audit.nonzero_after_end) == (0, 0):
                    break
                await asyncio.sleep(0.05)


async def test_what_was_served_reaches_the_planner(cluster: LocalCluster, gateway: Gateway) -> None:
    """From nodes the work of each request, from the gateway how many were open: what decisions are made from."""
    async with open_channel(cluster.processes["planner"].address) as channel:
        planner = planner_pb2_grpc.PlannerServiceStub(channel)

        async def measured() -> tuple[int, float]:
            slices = (await planner.EvaluateSplit(planner_pb2.EvaluateSplitRequest())).evaluation.slices
            whole = sum(each.completions - each.without_prefill for each in slices)
            return whole, sum(each.open_requests * (each.from_age_s - each.to_age_s) for each in slices)

        whole_before, open_before_s = await measured()
        results = await asyncio.gather(*(call(gateway, new_prompt(100)).all() for _ in range(6)))
        decoded_s = sum(result.timings.total_s - result.timings.ttft_s for result in results)

        async def told() -> bool:
            whole, open_s = await measured()
            return whole >= whole_before + 6 and open_s - open_before_s > decoded_s / 2

        await eventually(told)


async def test_branch_rules_reach_the_client(gateway: Gateway) -> None:
    branch, prompt = new_branch(version=3), new_prompt(100)
    orphan = new_branch(parent_branch_id="nobody-ever-had-this")
    await call(gateway, prompt, branch).all()
    stream = call(gateway, prompt, orphan)
    await stream.all()
    assert stream.started[0].version == 1

    before = await read_branch(gateway, branch)
    stale = parse_error(await failure(call(gateway, prompt, Branch(branch_id=branch.branch_id, version=2)).all()))
    assert (stale.status, stale.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STALE_VERSION")
    assert stale.metadata["current_version"] == "3"
    after = await read_branch(gateway, branch)
    assert (after.version, after.prompt_blocks) == (before.version, before.prompt_blocks)

    assert await end(gateway, branch, Branch(branch_id="unknown")) == [branch.branch_id]
    assert await end(gateway, branch) == []
    ended = parse_error(await failure(call(gateway, prompt, Branch(branch_id=branch.branch_id)).all()))
    assert (ended.status, ended.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "BRANCH_ENDED")
    missing = await failure(gateway.GetBranch(gateway_pb2.GetBranchRequest(branch_id="unknown")))
    assert missing.code() is grpc.StatusCode.NOT_FOUND


async def test_end_after_ends_the_branch_with_its_request(gateway: Gateway) -> None:
    branch = new_branch(end_after=True)
    stream = call(gateway, new_prompt(100), branch, tokens=3000)
    await stream.until(lambda: len(stream.ids) >= 3)
    stream.call.cancel()
    async with asyncio.timeout(WAIT_S):
        while (await read_branch(gateway, branch)).state != common_pb2.BRANCH_STATE_ENDED:
            await asyncio.sleep(0.02)


async def test_a_killed_decode_node_costs_a_pause_and_nothing_else(cluster: LocalCluster, gateway: Gateway) -> None:
    prompt = new_prompt(300)
    undisturbed = call(gateway, prompt, tokens=300)
    await undisturbed.all()
    assert undisturbed.finished is not None
    victim = undisturbed.finished.decode_node_id
    stream = call(gateway, prompt, new_branch(), tokens=300)
    await stream.until(lambda: len(stream.ids) >= 20)
    cluster.kill(victim)
    finished = await stream.all()
    assert stream.ids == undisturbed.ids
    assert finished.decode_node_id != victim
    assert finished.attempts >= 1
    cluster.restart(victim)
    cluster.wait_ready([victim])
    await all_nodes(gateway)


async def test_a_killed_prefill_node_costs_a_pause_and_nothing_else(cluster: LocalCluster, gateway: Gateway) -> None:
    prompt = new_prompt(6000)
    undisturbed = call(gateway, prompt, tokens=10)
    await undisturbed.all()
    other = new_prompt(6000)
    stream = call(gateway, other, tokens=10)
    await stream.until(lambda: bool(stream.started))
    victim = stream.started[0].prefill_node_id
    cluster.kill(victim)
    await stream.all()
    again = call(gateway, other, tokens=10)
    await again.all()
    assert again.ids == stream.ids
    cluster.restart(victim)
    cluster.wait_ready([victim])
    await all_nodes(gateway)


async def test_roles_flip_under_streams_without_a_failure(cluster: LocalCluster, gateway: Gateway) -> None:
    async with open_channel(cluster.processes["planner"].address) as channel:
        planner = planner_pb2_grpc.PlannerServiceStub(channel)
        split = (await planner.GetSplit(planner_pb2.GetSplitRequest())).split
        prompts = [new_prompt(200) for _ in range(8)]
        streams = [call(gateway, prompt, new_branch(), tokens=200) for prompt in prompts]
        reading = [asyncio.create_task(stream.all()) for stream in streams]
        decoders = [node for node, role in split.roles.items() if role == common_pb2.ROLE_DECODE]
        prefillers = [node for node, role in split.roles.items() if role == common_pb2.ROLE_PREFILL]
        flipped = {decoders[0]: common_pb2.ROLE_PREFILL, prefillers[0]: common_pb2.ROLE_DECODE}
        back = {decoders[0]: common_pb2.ROLE_DECODE, prefillers[0]: common_pb2.ROLE_PREFILL}
        for roles in (flipped, back):
            await eventually(lambda: all(len(stream.ids) >= 5 for stream in streams))
            await planner.ProposeSplit(planner_pb2.ProposeSplitRequest(changes=planner_pb2.RoleChanges(roles=roles)))
            last = await call(gateway, new_prompt(50), tokens=3).all()
            assert last.usage.output_tokens == 3
        for finished in await asyncio.gather(*reading):
            assert finished.usage.output_tokens == 200
            assert finished.attempts == 0


async def test_a_killed_directory_costs_no_request(cluster: LocalCluster, gateway: Gateway) -> None:
    branch, prompt = new_branch(), new_prompt(5 * BLOCK)
    running = call(gateway, new_prompt(100), branch, tokens=200)
    await running.until(lambda: len(running.ids) >= 3)
    cluster.kill("directory")
    finished = await call(gateway, prompt, branch).all()
    assert finished.usage.output_tokens == 40
    assert (await running.all()).usage.output_tokens == 200
    cluster.restart("directory")
    cluster.wait_ready(["directory"])
    async with asyncio.timeout(WAIT_S):
        while True:
            await call(gateway, prompt, branch, tokens=2).all()
            error = None
            try:
                seen = await read_branch(gateway, branch)
            except grpc.aio.AioRpcError as failed:
                error = failed
            if error is None and seen.prompt_blocks == 5:
                break
            await asyncio.sleep(0.05)


async def all_nodes(gateway: Gateway) -> None:
    """Wait until the gateway counts on all three nodes again."""
    async with asyncio.timeout(WAIT_S):
        while sum(model.nodes for model in (await gateway.ListModels(gateway_pb2.ListModelsRequest())).models) < 3:
            await asyncio.sleep(0.02)
