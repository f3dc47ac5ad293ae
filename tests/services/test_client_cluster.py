"""The client and evolvectl on real services: two gateways, directory, planner and three nodes with the mock engine."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import tiny_tokenizer
from cluster import BIN, ClusterSpec, LocalCluster

from evolving_client import (
    Branch,
    BranchEnded,
    Client,
    Finished,
    InvalidRequest,
    RequestConflict,
    RetryPolicy,
    Reuse,
    StaleVersion,
    Tokens,
    UnknownBranch,
    UnknownModel,
)

USER = {"role": "user", "content": "What is wrong with the test? " * 20}
TOOL = {"role": "tool", "content": "1 failed, 20 passed " * 10}
PROMPT = range(10, 210)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Running processes. Tests leave no branch alive and no process dead."""
    directory = tmp_path_factory.mktemp("cluster")
    model = directory / "model"
    model.mkdir()
    vocabulary = tiny_tokenizer.write(model).get_vocab_size()
    flags = ("--mock-vocabulary-tokens", str(vocabulary), "--mock-speed-up", "4")
    spec = ClusterSpec(state_dir=directory / "state", engine="mock", gateway_port=0, node_flags=flags, grace_s=3)
    cluster = LocalCluster(spec)
    (spec.state_dir / "logs").mkdir(parents=True)
    try:
        cluster.start_etcd()
        cluster.start_service("directory", "directory", 0)
        cluster.start_service("planner", "planner", 0, "--initial-split", "2P1D")
        for name in ("gateway", "gateway-2"):
            # The mock's KV is a few bytes a token; reckoned as a real model's, computing would beat most fetches.
            cluster.start_service(name, "gateway", 0, "--tokenizer-path", str(model))
        for name in ("node-a", "node-b", "node-c"):
            cluster.start_node(name)
        cluster.wait_ready([name for name in cluster.processes if name != "etcd"])
        wait_until(lambda: evolvectl(cluster, "split", "show")["split"]["epoch"] > 0, "a first split")
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
async def client(cluster: LocalCluster) -> AsyncIterator[Client]:
    addresses = [cluster.processes[name].address for name in ("gateway", "gateway-2")]
    async with Client(*addresses, timeout_s=60, retry=RetryPolicy(initial_backoff_s=0.05)) as client:
        yield client


def evolvectl(cluster: LocalCluster, *arguments: str, code: int = 0) -> Any:
    """What a command prints as JSON, after checking its exit code."""
    result = subprocess.run(
        [BIN / "evolvectl", "--etcd", cluster.etcd_address, "--json", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == code, result.stderr
    return json.loads(result.stdout) if result.stdout else result.stderr


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 30) -> None:
    """Ask until it holds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.2)


async def settled(condition: Callable[[], bool], what: str) -> None:
    """`wait_until`, beside a running event loop."""
    await asyncio.to_thread(wait_until, condition, what)


def iterations(cluster: LocalCluster) -> int:
    """Iterations of all engines until now."""
    return sum(node["iterations"] for node in evolvectl(cluster, "status")["nodes"])


async def ended_and_clean(cluster: LocalCluster, client: Client, *branches: Branch) -> None:
    """End branches; then nothing is counted anywhere."""
    await client.end([branch.id for branch in branches], subtree=True)
    await settled(lambda: evolvectl(cluster, "audit")["nonzero_after_end"] == 0, "nothing is counted after the ends")
    live = {branch["branch_id"] for branch in evolvectl(cluster, "branch", "ls")["branches"]}
    assert not live & {branch.id for branch in branches}


async def told(cluster: LocalCluster, branch: Branch, blocks: int) -> None:
    """Until the directory has heard of so many blocks of a branch: of an answer it hears a little after the client."""

    def heard() -> bool:
        shown = evolvectl(cluster, "branch", "show", branch.id)
        return bool(shown["prompt_blocks"] + shown["output_blocks"] == blocks)

    await settled(heard, f"{blocks} blocks are known")


async def test_an_agents_session(cluster: LocalCluster, client: Client) -> None:
    root = client.branch()
    first = await root.complete(messages=[USER], max_tokens=400, ignore_eos=True)
    assert first.usage.output_tokens == len(first.output_token_ids) == 400
    assert (first.version, first.cached.total) == (1, 0)
    await told(cluster, root, first.reusable_blocks)
    second = await root.complete(append=[TOOL], max_tokens=400, ignore_eos=True)
    assert second.cached.total == 64 * first.reusable_blocks, "prompt and answer are reused"
    assert first.reusable_blocks == (first.usage.prompt_tokens + 400 - 1) // 64
    assert root.messages[1] == {"role": "assistant", "content": first.text, "token_ids": first.output_token_ids}

    await told(cluster, root, second.reusable_blocks)
    fork, helper = root.fork(), root.subagent()
    forked = await fork.complete(append=[USER], max_tokens=8, ignore_eos=True)
    assert forked.cached.total == 64 * second.reusable_blocks, "a fork shares its parent's context"
    alone = await helper.complete(messages=[{"role": "user", "content": "Look for the cause " * 20}], max_tokens=8)
    assert alone.cached.total == 0, "a sub-agent shares nothing"
    info = await root.info()
    assert set(info.child_branch_ids) == {fork.id, helper.id}
    assert info.counts.shared_blocks > 0

    root.compact([{"role": "user", "content": "Known so far: nothing. " * 20}])
    third = await root.complete(max_tokens=8, ignore_eos=True)
    assert (third.version, root.version) == (2, 2)
    assert (await root.info()).version == 2
    await fork.end()
    shown = evolvectl(cluster, "branch", "show", root.id)
    assert (shown["state"], shown["version"], shown["running_requests"]) == ("live", 2, 0)
    assert evolvectl(cluster, "branch", "show", fork.id)["state"] == "ended"
    await ended_and_clean(cluster, client, root)


async def test_token_ids_are_reused_to_the_last_whole_block(cluster: LocalCluster, client: Client) -> None:
    branch = client.branch()
    first = await branch.complete(token_ids=PROMPT, max_tokens=400, ignore_eos=True)
    await told(cluster, branch, first.reusable_blocks)
    second = await branch.complete(append=[1, 2, 3], max_tokens=2, ignore_eos=True)
    # The last sampled token has no KV yet.
    assert second.cached.total == (len(PROMPT) + 400 - 1) // 64 * 64
    assert second.cached.peer_l2 > 0, "the answer's KV is fetched from the node that decoded it"
    assert first.reusable_blocks * 64 == second.cached.total
    assert first.reuse == Reuse(pool_tokens=0, planned_tokens=0, loss=None)
    assert second.reuse == Reuse(pool_tokens=second.cached.total, planned_tokens=second.cached.total, loss=None)
    assert 0 <= second.timings.fetch_hidden_s <= second.timings.fetch_s
    await ended_and_clean(cluster, client, branch)


async def test_a_killed_gateway_is_a_pause(cluster: LocalCluster, client: Client) -> None:
    expected = await client.generate(token_ids=PROMPT, max_tokens=150, ignore_eos=True).finish()
    branch = client.branch()
    ids: list[int] = []
    text = ""
    async for event in branch.generate(token_ids=PROMPT, max_tokens=150, ignore_eos=True):
        if isinstance(event, Tokens):
            assert event.index == len(ids)
            ids.extend(event.token_ids)
            text += event.text
            if len(ids) == 40:
                cluster.kill("gateway")
        if isinstance(event, Finished):
            assert event.reconnects >= 1
            assert event.text == text == expected.text
    assert tuple(ids) == expected.output_token_ids
    assert branch.tokens == (*PROMPT, *ids)
    await ended_and_clean(cluster, client, branch)
    cluster.restart("gateway")
    await asyncio.to_thread(cluster.wait_ready, ["gateway"])


async def test_leaving_a_generation_frees_its_node(cluster: LocalCluster, client: Client) -> None:
    branch = client.branch()
    before = iterations(cluster)
    async for event in branch.generate(token_ids=PROMPT, max_tokens=20_000, ignore_eos=True):
        if isinstance(event, Tokens):
            break

    def idle() -> bool:
        nodes = evolvectl(cluster, "status")["nodes"]
        return all(node["decoding"] == node["reserved"] == node["prefilling_legs"] == 0 for node in nodes)

    await settled(idle, "no node works on it any more")
    assert iterations(cluster) - before < 10_000, "the output was not generated to its end"
    assert (await branch.info()).running_requests == 0
    assert branch.tokens == ()
    await ended_and_clean(cluster, client, branch)


async def test_what_is_refused_has_its_type(cluster: LocalCluster, client: Client) -> None:
    with pytest.raises(UnknownBranch):
        await client.branch("nobody's").info()
    with pytest.raises(UnknownModel):
        await client.generate(token_ids=[1], model="none").finish()
    with pytest.raises(InvalidRequest):
        await client.generate(token_ids=[2**31]).finish()
    with pytest.raises(InvalidRequest):
        await client.generate(text="").finish()
    await client.generate(token_ids=[1], max_tokens=1, request_id="same").finish()
    with pytest.raises(RequestConflict):
        await client.generate(token_ids=[2], max_tokens=1, request_id="same").finish()

    branch = client.branch()
    await branch.complete(token_ids=PROMPT, max_tokens=1)
    other = client.branch(branch.id)
    other.compact(range(100))
    await other.complete(max_tokens=1)
    with pytest.raises(StaleVersion) as caught:
        await branch.complete(append=[1], max_tokens=1)
    assert caught.value.current_version == other.version == 2
    await ended_and_clean(cluster, client, branch)
    with pytest.raises(BranchEnded):
        await client.branch(branch.id).complete(token_ids=PROMPT, max_tokens=1)


async def test_a_split_is_set_while_streams_run(cluster: LocalCluster, client: Client) -> None:
    generations = [client.generate(token_ids=range(each, 100 + each), max_tokens=200, ignore_eos=True)
                   for each in range(8)]  # fmt: skip
    expected = [await client.generate(token_ids=range(each, 100 + each), max_tokens=200, ignore_eos=True).finish()
                for each in range(2)]  # fmt: skip
    results = asyncio.gather(*(generation.finish() for generation in generations))
    before = {node["node_id"]: node for node in evolvectl(cluster, "status")["nodes"]}
    assert sorted(node["role"] for node in before.values()) == ["decode", "prefill", "prefill"]
    flipped = next(name for name, node in before.items() if node["role"] == "prefill")
    split = await asyncio.to_thread(evolvectl, cluster, "split", "set", f"{flipped}=decode", "--reason", "a test")
    assert split["roles"][flipped] == "decode"
    finished = await results
    assert [each.output_token_ids for each in finished[:2]] == [each.output_token_ids for each in expected]

    def adopted() -> bool:
        nodes = {node["node_id"]: node for node in evolvectl(cluster, "status")["nodes"]}
        return bool(nodes[flipped]["role"] == "decode" and nodes[flipped]["epoch"] == split["epoch"])

    await settled(adopted, "the node has its new role")
    after = {node["node_id"]: node for node in evolvectl(cluster, "status")["nodes"]}
    assert {name: node["engine_pid"] for name, node in after.items()} == {
        name: node["engine_pid"] for name, node in before.items()
    }
    newest = evolvectl(cluster, "decisions", "--limit", "1")["decisions"][0]
    assert (newest["kind"], newest["reason"], newest["epoch_after"]) == ("operator", "a test", split["epoch"])
    assert "epoch" in evolvectl(cluster, "split", "set", "2P1D", "--expected-epoch", "1", code=1)
    evolvectl(cluster, "split", "set", "2P1D")


async def test_status_models_and_generate_find_the_cluster(cluster: LocalCluster) -> None:
    status = evolvectl(cluster, "status")
    assert {node["state"] for node in status["nodes"]} == {"ready"}
    assert {service["kind"] for service in status["services"]} == {"directory", "gateway", "planner"}
    assert [service["kind"] for service in status["services"] if service["leads"]] == ["planner"]
    model = evolvectl(cluster, "models")["models"][0]
    assert model["nodes"] == 3
    text = evolvectl(cluster, "generate", "Hello", "--max-tokens", "5")
    assert text["usage"]["output_tokens"] <= 5
