"""How long a gateway takes from a prompt's ids to a choice of node: hashing, Begin at a directory process, equation 7.

python tests/bench/bench_begin.py [--branches 60] [--json FILE]

For contexts of 1k to 128k tokens that grow by 1k, and for the same context of a branch seen for the first time; and
Begin alone, several at once. Each against a directory in memory and one with a journal on this machine's disk, in
turns. Wall milliseconds, medians and 99th percentiles; the directory runs as a process of its own on this machine and
holds every context on two of the nodes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "deploy" / "local"))
from cluster import ClusterSpec, LocalCluster

from evolving.core.blocks import chain_names, root_digest
from evolving.core.contexts import Contexts
from evolving.core.routing import Context
from evolving.core.terms import NAME_BYTES
from evolving.internal.v1 import directory_pb2, directory_pb2_grpc, node_agent_pb2, node_agent_pb2_grpc
from evolving.runtime.channel import open_channel
from evolving.runtime.clock import SystemClock
from evolving.runtime.etcd import EtcdStore
from evolving.runtime.keys import Keys, NodeRegistration, encode
from evolving.runtime.metrics import Metrics
from evolving.v1 import common_pb2
from evolving_gateway.beginning import Beginning
from evolving_gateway.directory import DirectoryClient
from evolving_gateway.metrics import GatewayMetrics
from evolving_gateway.node import Node
from evolving_gateway.nodes import Cluster
from evolving_gateway.router import Router
from evolving_gateway.settings import GatewaySettings

NODES = 9
BLOCK_TOKENS = 64
STEP_TOKENS = 1_024
CONTEXT_TOKENS = (1_024, 16_384, 65_536, 131_072)
BATCH_BLOCKS = 256
AT_ONCE = 16
ROUNDS = 2  # each kind of directory is measured so often, in turns, so that a busy machine disturbs both
ROOT = root_digest("bench", "", "default")
KEYS = Keys()


class Row(NamedTuple):
    """One figure, milliseconds."""

    what: str
    context_tokens: int
    journal: bool
    p50_ms: float
    p99_ms: float


def registration(node_id: str) -> NodeRegistration:
    """A node of the bench."""
    return NodeRegistration(
        node_id=node_id,
        incarnation="1",
        address="127.0.0.1:1",
        model="bench",
        kv_format="bench",
        block_tokens=BLOCK_TOKENS,
        vocab_size=100_000,
        max_prompt_tokens=200_000,
        max_context_tokens=200_000,
        l1_tokens=1_000_000,
        reserve_tokens=200_000,
        l2_tokens=4_000_000,
        decode_slots=64,
        chunk_tokens=8_192,
        kv_bytes_per_token=4,
        transfer_address="127.0.0.1:2",
        pool_address="127.0.0.1:3",
        prefill_coefficients=(0.01, 2e-5, 1e-9, 1e-6, 0.0),
        decode_coefficients=(0.01, 0.0, 1e-4, 1e-8),
    )


def add_node(cluster: Cluster, node_id: str) -> None:
    """Let the gateway see a node that serves."""
    channel = open_channel("127.0.0.1:1")
    node = Node(registration(node_id), channel, node_agent_pb2_grpc.NodeAgentServiceStub(channel), watching=True)
    node.take_status(node_agent_pb2.WatchStatusResponse(node_id=node_id, incarnation="1", ready=True, wait_s=0.1))
    cluster.nodes[node_id] = node


async def announce(
    stub: directory_pb2_grpc.DirectoryServiceAsyncStub, node_id: str, contexts: list[bytes], done: asyncio.Event
) -> None:
    """A node's stream: it holds these contexts in L2. Stays until cancelled; sets `done` once all is acknowledged."""
    last = sum(-(-len(names) // NAME_BYTES // BATCH_BLOCKS) for names in contexts)

    async def say() -> AsyncIterator[directory_pb2.ConnectNodeRequest]:
        hello = directory_pb2.NodeHello(partition_id="p0", node_id=node_id, incarnation="1", next_sequence=1)
        yield directory_pb2.ConnectNodeRequest(hello=hello)
        sequence = 0
        for names in contexts:
            for at in range(0, len(names) // NAME_BYTES, BATCH_BLOCKS):
                sequence += 1
                start = max(0, at - 16)
                change = directory_pb2.KvChange(
                    kind=directory_pb2.KvChange.KIND_STORED,
                    tier=common_pb2.TIER_L2,
                    first_block=start,
                    names=names[start * NAME_BYTES : (at + BATCH_BLOCKS) * NAME_BYTES],
                    skip=at - start,
                )
                yield directory_pb2.ConnectNodeRequest(kv=directory_pb2.KvBatch(sequence=sequence, changes=[change]))
        await asyncio.Event().wait()

    async for message in stub.ConnectNode(say()):
        assert message.WhichOneof("event") != "resync", message.resync.reason
        if message.ack.sequence >= last:
            done.set()


Samples = dict[tuple[str, int], list[float]]
"""Milliseconds by what was measured and the context's tokens."""


async def begin_at_once(stub: directory_pb2_grpc.DirectoryServiceAsyncStub, branches: int) -> list[float]:
    """Begins of one block each, by callers that each wait for one before they send the next."""

    async def caller(number: int) -> list[float]:
        taken = []
        for at in range(branches):
            request = directory_pb2.BeginRequest(
                partition_id="p0",
                tenant="default",
                branch=common_pb2.BranchMetadata(branch_id=f"alone-{number}-{at}"),
                request_id="r",
                new_names=f"alone-{number}-{at}".encode().rjust(NAME_BYTES),
            )
            started = time.perf_counter()
            await stub.Begin(request, timeout=30)
            taken.append((time.perf_counter() - started) * 1e3)
        return taken

    return [each for taken in await asyncio.gather(*map(caller, range(AT_ONCE))) for each in taken]


async def measure(address: str, store: EtcdStore, branches: int) -> Samples:
    """All samples against one directory."""
    clock, settings = SystemClock(), GatewaySettings()
    cluster = Cluster(store, KEYS, clock, Metrics(), token=None, max_message_bytes=1 << 25, silence_s=5.0)
    for number in range(NODES):
        add_node(cluster, f"n{number}")
        await store.put(KEYS.node(f"n{number}"), encode(registration(f"n{number}")))
    client = DirectoryClient(
        KEYS, clock, Metrics(), token=None, max_message_bytes=1 << 25, timeout_s=30.0, finish_retry_s=1.0
    )
    beginning = Beginning(client, Contexts(1 << 30), "p0")
    router = Router(cluster, settings.routing(), GatewayMetrics(Metrics()))
    watching = asyncio.create_task(client.follow(store))
    rng = np.random.default_rng(1)
    samples: Samples = {}
    async with open_channel(address) as channel:
        stub = directory_pb2_grpc.DirectoryServiceStub(channel)
        prompts = {
            tokens: [rng.integers(0, 90_000, tokens + STEP_TOKENS, dtype="<u4").tobytes() for _ in range(branches)]
            for tokens in CONTEXT_TOKENS
        }
        names = [
            chain_names(ROOT, prompt, BLOCK_TOKENS)[: tokens // BLOCK_TOKENS * NAME_BYTES]
            for tokens, group in prompts.items()
            for prompt in group
        ]
        events = [asyncio.Event(), asyncio.Event()]
        streams = [asyncio.create_task(announce(stub, f"n{at}", names, events[at])) for at in range(2)]
        for event in events:
            await event.wait()
        model = router.model("")

        async def once(branch_id: str, number: int, tokens: bytes) -> float:
            started = time.perf_counter()
            branch = common_pb2.BranchMetadata(branch_id=branch_id)
            begun = await beginning.begin("default", f"{branch_id}-{number}", branch, model, ROOT, tokens)
            context = Context(branch_id, len(tokens) // 4, BLOCK_TOKENS, begun.match.pool_blocks)
            decision = router.prefill(model, context, begun.match, {})
            assert decision.chosen is not None
            router.holders(begun.match, decision.chosen, 0)
            taken_ms = (time.perf_counter() - started) * 1e3
            expected = (len(tokens) // 4 - number * STEP_TOKENS) // BLOCK_TOKENS
            assert begun.match.pool_blocks == expected, (begun.match.pool_blocks, expected)
            return taken_ms

        for tokens, group in prompts.items():
            first, grown = [], []
            for at, prompt in enumerate(group):
                first.append(await once(f"{tokens}-{at}", 0, prompt[: 4 * tokens]))
                beginning.finish("default", f"{tokens}-{at}-0", common_pb2.BranchMetadata(branch_id=f"{tokens}-{at}"))
                await client.drain()
                grown.append(await once(f"{tokens}-{at}", 1, prompt))
            samples |= {("first seen", tokens): first, ("grown by 1k", tokens): grown}
        samples[f"Begin, {AT_ONCE} at once", BLOCK_TOKENS] = await begin_at_once(stub, branches)
        for stream in (*streams, watching):
            stream.cancel()
        await asyncio.gather(*streams, watching, return_exceptions=True)
    await client.close()
    await cluster.close()
    return samples


async def main(branches: int) -> list[Row]:
    """All rows: both kinds of directory, in turns."""
    pooled: dict[bool, Samples] = {False: {}, True: {}}
    for journal in (False, True) * ROUNDS:
        for key, samples in (await one_round(branches // ROUNDS, journal)).items():
            pooled[journal].setdefault(key, []).extend(samples)
    return [
        Row(*key, journal, *(round(float(np.percentile(pooled[journal][key], share)), 3) for share in (50, 99)))
        for key in pooled[False]
        for journal in (False, True)
    ]


async def one_round(branches: int, journal: bool) -> Samples:
    """Start etcd and a directory, measure, stop them."""
    with tempfile.TemporaryDirectory() as directory:
        local = LocalCluster(ClusterSpec(state_dir=Path(directory), grace_s=3))
        (local.spec.state_dir / "logs").mkdir()
        try:
            local.start_etcd()
            flags = ["--data-dir", str(local.spec.state_dir / "directory")] if journal else []
            local.start_service("directory", "directory", 0, *flags)
            local.wait_ready(["directory"])
            async with EtcdStore((local.etcd_address,), clock=SystemClock(), timeout_s=5) as store:
                return await measure(local.processes["directory"].address, store, branches)
        finally:
            local.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--branches", type=int, default=60)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = asyncio.run(main(arguments.branches))
    for result in results:
        times = f"p50 {result.p50_ms:7.3f} ms  p99 {result.p99_ms:7.3f} ms"
        kind = "journal" if result.journal else "memory"
        print(f"{result.what:18} {result.context_tokens:>8} tokens  {kind:8} {times}")
    if arguments.json:
        arguments.json.write_text(json.dumps([result._asdict() for result in results], indent=1))
