"""A running request lost its node: the gateway asks again where its blocks are, its output so far among them."""

from __future__ import annotations

from directory_harness import Directory, Node, context, directory
from etcd_process import Etcd

from evolving.internal.v1 import directory_pb2
from evolving.v1 import common_pb2


async def rematch(to: Directory, names: bytes, base: bytes = b"") -> directory_pb2.BeginResponse:
    return await to.internal.Begin(
        directory_pb2.BeginRequest(
            partition_id="p0",
            tenant="default",
            branch=common_pb2.BranchMetadata(branch_id="b"),
            request_id="r1",
            base_blocks=len(base) // 16,
            base_name=base[-16:],
            new_names=names,
            rematch=True,
        ),
        timeout=5.0,
    )


async def test_a_longer_context_is_matched_and_the_branch_stays_as_it_was(etcd: Etcd) -> None:
    async with directory(etcd) as to, Node("n").connected(to) as node:
        whole = context("a", 6)
        prompt = whole[: 4 * 16]
        await to.begin("b", prompt)
        await node.store(whole)
        await node.taken()
        answer = await rematch(to, whole[4 * 16 :], base=prompt)
        assert not answer.need_full
        assert answer.match.pool_blocks == 6
        branch = await to.branch("b")
        assert (branch.prompt_blocks, branch.output_blocks, branch.running_requests) == (4, 0, 1)


async def test_an_ended_branch_is_no_hindrance(etcd: Etcd) -> None:
    async with directory(etcd) as to, Node("n").connected(to) as node:
        whole = context("a", 6)
        await to.begin("b", whole[: 4 * 16])
        await node.store(whole)
        await node.taken()
        await to.end("b")
        assert (await rematch(to, whole)).match.pool_blocks == 6
        assert (await to.audit()).mismatch_count == 0
