"""Random bytes to every method of the directory leave it alive and its counts unchanged."""

from __future__ import annotations

import grpc
from directory_harness import Node, blocks_of, context, directory
from etcd_process import Etcd
from hostile import no_crash, send_random_bytes, stream_random_bytes

from evolving.core.terms import Phase
from evolving.internal.v1 import directory_pb2
from evolving.v1 import directory_pb2 as public_pb2

METHODS = [
    *(f"/evolving.internal.v1.DirectoryService/{name}" for name in ("Begin", "Finish", "End", "ReadBranch")),
    *(
        f"/evolving.v1.DirectoryService/{name}"
        for name in ("GetBlock", "ReadBranch", "ListBranches", "GetStats", "Audit")
    ),
]
STREAM = "/evolving.internal.v1.DirectoryService/ConnectNode"


async def test_random_bytes_change_nothing(etcd: Etcd) -> None:
    async with directory(etcd) as to, Node("n").connected(to) as node:
        prompt = context("a", 3)
        await to.begin("b", prompt)
        await node.store(prompt)
        await node.landed("b", 3, Phase.PREFILL)
        expected = dict.fromkeys(blocks_of(prompt), 1)
        await node.counts_become(expected)
        before, branch = await to.stats(), await to.branch("b")

        seen = await send_random_bytes(to.channel, METHODS, 9_000, seed=1)
        assert no_crash(seen), seen
        assert seen[grpc.StatusCode.INVALID_ARGUMENT] > 1_000, seen
        seen = await stream_random_bytes(to.channel, STREAM, 700, seed=2)
        assert no_crash(seen), seen
        assert seen[grpc.StatusCode.OK] == 0, seen
        hello = directory_pb2.ConnectNodeRequest(
            hello=directory_pb2.NodeHello(partition_id="p0", node_id="hostile", incarnation="1", next_sequence=1)
        )
        seen = await stream_random_bytes(to.channel, STREAM, 300, seed=3, first=[hello.SerializeToString()])
        assert no_crash(seen), seen

        after = await to.stats()
        assert (after.blocks, after.live_branches, after.begins) == (before.blocks, 1, before.begins)
        assert [n for n in after.nodes if n.node_id == "n"] == list(before.nodes)
        now = await to.branch("b")
        now.idle_s = branch.idle_s = 0.0
        assert now == branch
        assert node.counts == expected
        audit = await to.public.Audit(public_pb2.AuditRequest(), timeout=30)
        assert (audit.mismatch_count, audit.nonzero_after_end) == (0, 0)
