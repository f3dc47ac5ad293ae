"""The pool on real engines: what only a peer's host memory has is fetched from there, decode's output too."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from cluster import ClusterSpec, LocalCluster
from credentials import make
from demo import kv_format
from engine.models import tiny_model
from engine.sglang.driving import prompt
from engine.sglang.reference import clear_prompts, reference
from waiting import eventually

from evolving.core.blocks import chain_names, root_digest, split_names
from evolving.v1 import directory_pb2, directory_pb2_grpc
from evolving_client import Branch, Client, Finished

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(600)]
BLOCK = 64
OUTPUT = 70
# Two nodes that prefill have room for a few sessions in L2, the one that decodes for all. L2 is larger than L1,
# for what is in L1 keeps its copy in L2, and fetched blocks need room there beside it.
SIZES = {
    "node-a": ("--l1-tokens=1024", "--l2-tokens=2048"),
    "node-b": ("--l1-tokens=1024", "--l2-tokens=2048"),
    "node-c": ("--l1-tokens=1536", "--l2-tokens=32768"),
}


class PoolCluster(LocalCluster):
    """Three nodes of different sizes, whose engines know each other by the cluster's token."""

    def start_node(self, node_id: str) -> None:
        """With the sizes of that node."""
        plain = self.spec
        flags = ("--chunk-tokens=128", "--transport=tcp", "--fetch-deadline-s=60")
        self.spec = replace(plain, node_flags=(*SIZES[node_id], *flags))
        super().start_node(node_id)
        self.spec = plain


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolCluster]:
    """Two prefill nodes and one that decodes."""
    secrets = tmp_path_factory.mktemp("secrets")
    make(secrets)
    files = f"{secrets}/services/credentials.toml", f"{secrets}/services/cluster.token"
    flags = ("--credentials-file", files[0], "--token-file", files[1])
    spec = ClusterSpec(
        state_dir=tmp_path_factory.mktemp("pool"), model_path=tiny_model(), gateway_port=0, service_flags=flags
    )
    running = PoolCluster(spec)
    running.start()
    try:
        yield running
    finally:
        assert running.stop() == [], "every process stops within its grace period"


def token(cluster: PoolCluster) -> str:
    """What services present to each other."""
    flags = cluster.spec.service_flags
    return Path(flags[flags.index("--token-file") + 1]).read_text().strip()


class Directory:
    """What the directory says of blocks."""

    def __init__(self, channel: grpc.aio.Channel, token: str, root: bytes) -> None:
        self._stub = directory_pb2_grpc.DirectoryServiceStub(channel)
        self._metadata = [("authorization", f"Bearer {token}")]
        self._root = root

    async def copies(self, tokens: Sequence[int]) -> list[set[tuple[str, str]]]:
        """Of each whole block of a context: the nodes that have it, and the tier."""
        data = b"".join(each.to_bytes(4, "little") for each in tokens)
        return [await self._copies(name) for name in split_names(chain_names(self._root, data, BLOCK))]

    async def _copies(self, name: bytes) -> set[tuple[str, str]]:
        request: Any = directory_pb2.GetBlockRequest(name=name)
        try:
            reply = await self._stub.GetBlock(request, metadata=self._metadata, timeout=20)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return set()
            raise
        tiers = [(copy.node_id, tier) for copy in reply.copies for tier in ("l1", "l2") if getattr(copy, f"in_{tier}")]
        return set(tiers)


@pytest.fixture
async def directory(cluster: PoolCluster) -> AsyncIterator[Directory]:
    """The cluster's."""
    root = root_digest(await kv_format(cluster.etcd_address, "p0"), "", "default")
    async with grpc.aio.insecure_channel(cluster.processes["directory"].address) as channel:
        yield Directory(channel, token(cluster), root)


@pytest.fixture
async def client(cluster: PoolCluster) -> AsyncIterator[Client]:
    """One that may use the gateway."""
    async with Client(cluster.gateway_address, token=token(cluster), timeout_s=120) as connected:
        yield connected


async def first_turn(branch: Branch, tokens: Sequence[int]) -> Finished:
    """A prompt and its output: enough of it for a block that decode alone has made."""
    return await branch.complete(token_ids=tokens, max_tokens=OUTPUT, ignore_eos=True)


async def test_what_only_a_peer_holds_is_fetched_and_not_computed(client: Client, directory: Directory) -> None:
    """A session is pushed out of both prefill nodes, and of the decode node's L1, by sessions that live as it does. Its
    next turn finds all of it in the decode node's L2: the prompt, and the block that decode filled."""
    tokens, output = next(clear_prompts(200, OUTPUT, 71_000))
    branch = client.branch()
    first = await first_turn(branch, tokens)
    assert list(first.output_token_ids) == output
    assert first.decode_node_id == "node-c"
    context = [*tokens, *output[:-1]]  # the last token has no KV yet
    only_there = [{("node-c", "l2")}] * (len(context) // BLOCK)
    assert len(only_there) == 4

    others: list[Branch] = []
    for seed in itertools.count(72_000):
        if await directory.copies(context) == only_there:
            break
        assert len(others) < 40, f"still: {await directory.copies(context)}"
        others.append(client.branch())
        await first_turn(others[-1], prompt(seed, 250))

    tail = prompt(71_500, 30)
    wanted, gap = reference([*tokens, *output, *tail], 8)
    assert gap > 1e-3
    second = await branch.complete(append=tail, max_tokens=8, ignore_eos=True)
    assert second.reuse.planned_tokens == 4 * BLOCK
    assert second.prefill_node_id in ("node-a", "node-b")
    assert (second.cached.own_l1, second.cached.own_l2, second.cached.peer_l2) == (0, 0, 4 * BLOCK)
    assert second.usage.computed_tokens == len(context) + 1 + len(tail) - 4 * BLOCK
    assert list(second.output_token_ids) == wanted

    async def both_have_it() -> bool:
        return all(
            {("node-c", "l2"), (second.prefill_node_id, "l2")} <= block for block in await directory.copies(context)
        )

    await eventually(both_have_it)
    for each in (branch, *others):
        await each.end()
