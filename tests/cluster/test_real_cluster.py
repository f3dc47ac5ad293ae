"""A cluster of real engines, started as docker-compose.yml says: right tokens whatever happens, roles that flip under
load, nodes that die. A tiny random model in float32, so that tokens can be compared one by one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import grpc
import pytest
from cluster import BIN, ClusterSpec
from compose import ComposeCluster
from credentials import make
from engine.models import tiny_model
from engine.sglang.driving import prompt
from engine.sglang.reference import clear_prompts, reference

from evolving.internal.v1 import node_agent_pb2, node_agent_pb2_grpc
from evolving_client import Client, Finished, Tokens, Unauthenticated

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]
NODES = ("node-a", "node-b", "node-c")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposeCluster]:
    """etcd, the services and three nodes with a token each call needs."""
    state = tmp_path_factory.mktemp("compose")
    make(state / "secrets")
    mounts = {
        "/etc/evolving": state / "secrets" / "services",
        "/models/smollm2": tiny_model(),
        "/var/lib/evolving": state / "directory",
    }
    running = ComposeCluster(ClusterSpec(state_dir=state, start_timeout_s=300), mounts)
    running.start()
    try:
        yield running
    finally:
        assert running.stop() == [], "every process stops within its grace period"


@pytest.fixture
async def client(cluster: ComposeCluster) -> AsyncIterator[Client]:
    """A client with the clients' token."""
    token = (cluster.spec.state_dir / "secrets" / "client.token").read_text().strip()
    async with Client(cluster.gateway_address, token=token, timeout_s=120) as connected:
        yield connected


async def evolvectl(cluster: ComposeCluster, *arguments: str) -> str:
    """What a command prints. It must succeed."""
    token = (cluster.spec.state_dir / "secrets" / "services" / "cluster.token").read_text().strip()
    process = await asyncio.create_subprocess_exec(
        BIN / "evolvectl", "--etcd", cluster.etcd_address, "--token", token, *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


async def engine_pids(cluster: ComposeCluster) -> dict[str, int]:
    """The engine process of each node, as its agent tells."""
    token = (cluster.spec.state_dir / "secrets" / "services" / "cluster.token").read_text().strip()
    pids = {}
    for name in NODES:
        async with grpc.aio.insecure_channel(cluster.processes[name].address) as channel:
            stub = node_agent_pb2_grpc.NodeAgentServiceStub(channel)
            request = node_agent_pb2.WatchStatusRequest(partition_id="p0")
            stream = stub.WatchStatus(request, metadata=[("authorization", f"Bearer {token}")], timeout=20)
            async for status in stream:
                pids[name] = status.engine_pid
                break
            stream.cancel()
    return pids


async def generate(client: Client, tokens: Sequence[int], count: int) -> Finished:
    """One greedy request without a branch."""
    return await client.generate(token_ids=tokens, max_tokens=count, ignore_eos=True).finish()


def test_every_health_check_of_the_file_passes(cluster: ComposeCluster) -> None:
    assert {name: cluster.check_health(name) for name in cluster.services if name != "etcd"} == dict.fromkeys(
        (name for name in cluster.services if name != "etcd"), 0
    )


async def test_no_call_without_a_token(cluster: ComposeCluster) -> None:
    async with Client(cluster.gateway_address) as stranger:
        with pytest.raises(Unauthenticated):
            await stranger.models()


async def test_tokens_equal_those_of_transformers_alone_cached_and_many_at_once(client: Client) -> None:
    wanted = list(islice(clear_prompts(150, 24, 20_000), 12))
    alone = await generate(client, wanted[0][0], 24)
    assert list(alone.output_token_ids) == wanted[0][1]
    assert alone.prefill_node_id != alone.decode_node_id, "its KV was transferred"
    again = await generate(client, wanted[0][0], 24)
    assert list(again.output_token_ids) == wanted[0][1]
    assert again.cached.total == 128, "both full blocks of 150 tokens"
    together = await asyncio.gather(*(generate(client, tokens, 24) for tokens, _ in wanted))
    assert [list(each.output_token_ids) for each in together] == [output for _, output in wanted]


async def test_a_branch_goes_on_right_through_a_flip_with_its_kv(cluster: ComposeCluster, client: Client) -> None:
    tokens, output = next(clear_prompts(200, 70, 21_000))
    branch = client.branch()
    first = await branch.complete(token_ids=tokens, max_tokens=70, ignore_eos=True)
    assert list(first.output_token_ids) == output
    await evolvectl(cluster, "split", "set", f"{first.prefill_node_id}=decode")
    try:
        tail = prompt(22_000, 10)
        wanted, _ = reference([*tokens, *output, *tail], 8)
        second = await branch.complete(append=tail, max_tokens=8, ignore_eos=True)
        assert list(second.output_token_ids) == wanted
        assert second.prefill_node_id != first.prefill_node_id
        assert second.cached.total == 256, "four full blocks of 269 tokens with KV, prompt and output"
    finally:
        await evolvectl(cluster, "split", "set", f"{first.prefill_node_id}=prefill")
    await branch.end()


async def test_roles_flip_under_load_and_no_stream_fails(cluster: ComposeCluster, client: Client) -> None:
    """Nine streams while node-a goes prefill → decode → prefill: all tokens right, the same engine processes, and what
    was matched before is matched after."""
    kept = prompt(23_000, 400)
    await generate(client, kept, 2)
    before = (await generate(client, kept, 2)).cached.total
    pids = await engine_pids(cluster)
    wanted = list(islice(clear_prompts(100, 120, 24_000), 9))
    flipped = asyncio.Event()
    streamed: list[int] = []

    async def stream(tokens: list[int]) -> list[int]:
        output: list[int] = []
        while not output or not flipped.is_set():  # go on, stream after stream, until the flips are over
            output = []
            async for event in client.generate(token_ids=tokens, max_tokens=120, ignore_eos=True):
                if isinstance(event, Tokens):
                    output += event.token_ids
                    streamed.append(len(event.token_ids))
        return output

    async def flip() -> None:
        while len(streamed) < 50:
            await asyncio.sleep(0.05)
        for role in ("decode", "prefill"):
            await evolvectl(cluster, "split", "set", f"node-a={role}")
            mark = len(streamed)
            while len(streamed) < mark + 200:  # the new split serves a good while
                await asyncio.sleep(0.05)
        flipped.set()

    flips = asyncio.create_task(flip())
    outputs = await asyncio.gather(*(stream(tokens) for tokens, _ in wanted))
    await flips
    assert outputs == [output for _, output in wanted]
    assert await engine_pids(cluster) == pids
    assert (await generate(client, kept, 2)).cached.total == before == 384


async def test_a_node_killed_while_it_decodes_costs_a_pause(cluster: ComposeCluster, client: Client) -> None:
    """Agent and engine of the decode node die in the middle of nine streams; every stream ends with the right tokens,
    none twice, none missing. Then the node comes back on its ports and serves again."""
    wanted = list(islice(clear_prompts(100, 150, 25_000), 9))
    victims: list[str] = []

    async def stream(tokens: list[int]) -> Finished:
        output: list[int] = []
        async for event in client.generate(token_ids=tokens, max_tokens=150, ignore_eos=True):
            if isinstance(event, Tokens):
                assert event.index == len(output)
                output += event.token_ids
            if isinstance(event, Finished):
                assert list(event.output_token_ids) == output
                return event
            if len(output) > 20 and not victims:
                victims.append("node-c")
                await kill_node(cluster, "node-c")
        raise AssertionError("the stream ended without a result")

    finished = await asyncio.gather(*(stream(tokens) for tokens, _ in wanted))
    assert victims == ["node-c"]
    assert [list(each.output_token_ids) for each in finished] == [output for _, output in wanted]
    assert any(each.attempts for each in finished), "somebody was moved"
    cluster.restart("node-c")
    await asyncio.to_thread(cluster.wait_ready, ["node-c"])
    await evolvectl(cluster, "split", "set", "node-a=prefill", "node-b=prefill", "node-c=decode")
    tokens, output = next(clear_prompts(120, 10, 26_000))
    served = await generate(client, tokens, 10)
    assert list(served.output_token_ids) == output
    assert served.decode_node_id == "node-c"


async def test_an_engine_killed_while_roles_change_costs_a_pause(cluster: ComposeCluster, client: Client) -> None:
    """The engine alone dies, decoding, under an agent that lives on and starts it again; meanwhile node-a goes to and
    fro. Every stream ends with the right tokens."""
    await evolvectl(cluster, "split", "set", "node-a=prefill", "node-b=prefill", "node-c=decode")
    wanted = list(islice(clear_prompts(100, 100, 27_000), 6))
    before = await engine_pids(cluster)
    decoding: list[int] = []

    async def stream(tokens: list[int]) -> Finished:
        output: list[int] = []
        async for event in client.generate(token_ids=tokens, max_tokens=100, ignore_eos=True):
            if isinstance(event, Tokens):
                assert event.index == len(output)
                output += event.token_ids
            if isinstance(event, Finished):
                return event
            if len(output) > 20 and not decoding:
                decoding.append(before["node-c"])
                os.kill(before["node-c"], signal.SIGKILL)
        raise AssertionError("the stream ended without a result")

    async def change() -> None:
        for role in cycle(("decode", "prefill")):
            await evolvectl(cluster, "split", "set", f"node-a={role}")
            await asyncio.sleep(0.5)

    changing = asyncio.create_task(change())
    finished = await asyncio.gather(*(stream(tokens) for tokens, _ in wanted))
    assert [list(each.output_token_ids) for each in finished] == [output for _, output in wanted]
    assert any(each.attempts for each in finished), "node-c had some of them"
    changing.cancel()
    await asyncio.wait({changing})
    assert changing.cancelled(), "every change was made"
    await asyncio.to_thread(cluster.wait_ready, ["node-c"])
    after = await engine_pids(cluster)
    assert {name for name in NODES if after[name] != before[name]} == {"node-c"}
    await evolvectl(cluster, "split", "set", "node-a=prefill", "node-b=prefill", "node-c=decode")


async def kill_node(cluster: ComposeCluster, name: str) -> None:
    """SIGKILL to a node's agent and to its engine, at once."""
    engine = (await engine_pids(cluster))[name]
    os.kill(engine, signal.SIGKILL)
    await asyncio.to_thread(cluster.kill, name)


async def test_after_all_that_the_counts_agree(cluster: ComposeCluster) -> None:
    assert "0 mismatches" in await evolvectl(cluster, "audit")


def test_nothing_is_left_of_a_stopped_engine(cluster: ComposeCluster, tmp_path: Path) -> None:
    """An agent's own SIGKILL takes its engine along."""
    pids: dict[str, Any] = asyncio.run(engine_pids(cluster))
    cluster.kill("node-b")
    deadline = 200
    while Path(f"/proc/{pids['node-b']}").exists() and deadline:
        deadline -= 1
        signal.sigtimedwait([], 0.05)
    assert deadline, "the engine outlived its agent"
