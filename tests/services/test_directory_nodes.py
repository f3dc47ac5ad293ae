"""The node stream over the wire, on a real etcd: what nodes hold and what landed goes up, counts come down."""

from __future__ import annotations

from contextlib import AsyncExitStack

import grpc
import grpc.aio
import pytest
from directory_harness import KEYS, Directory, Node, blocks_of, context, directory, split_record
from etcd_process import Etcd
from planner_harness import join, leave, open_store
from waiting import WAIT_S, eventually

from evolving.core.terms import Phase, Role, Tier
from evolving.internal.v1 import directory_pb2
from evolving.runtime.etcd import EtcdStore
from evolving.v1 import common_pb2
from evolving.v1 import directory_pb2 as public_pb2
from evolving.wire.status import parse_error
from evolving_directory import internal_service


async def clean(to: Directory) -> None:
    audit = await to.audit()
    assert audit.mismatch_count == 0, audit.mismatches
    assert audit.nonzero_after_end == 0
    assert not audit.unreachable_node_ids


async def test_a_stream_that_says_nothing_is_ended(etcd: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internal_service, "_HELLO_S", 0.05)
    async with directory(etcd) as to:
        with pytest.raises(grpc.aio.AioRpcError, match="no hello came") as refused:
            await to.internal.ConnectNode(timeout=WAIT_S).read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_branch_across_two_nodes_from_first_prompt_to_end(etcd: Etcd) -> None:
    async with directory(etcd) as to, Node("p").connected(to) as p, Node("d").connected(to) as d:
        prompt, output = context("a", 5), context("out", 2, context("a", 5))
        begun = await to.begin("b", prompt)
        assert begun.kind == directory_pb2.BEGIN_KIND_NEW
        assert begun.version == 1
        assert begun.match.pool_blocks == 0
        await p.store(prompt, tier=Tier.L1)
        await p.store(prompt, tier=Tier.L2)
        await p.landed("b", 5, Phase.PREFILL)
        await d.store(prompt)
        await d.landed("b", 5, Phase.DECODE)
        await p.counts_become(dict.fromkeys(blocks_of(prompt), 1))
        await d.store(output, skip=5)
        await d.output("b", 5, output[5 * 16 :])
        await d.counts_become(dict.fromkeys(blocks_of(output), 1))
        await clean(to)

        view = await to.branch("b")
        assert (view.prompt_blocks, view.output_blocks, view.running_requests) == (5, 2, 1)
        assert {(home.phase, home.node_id, home.first_block, home.blocks) for home in view.homes} >= {
            (common_pb2.PHASE_PREFILL, "p", 0, 5)
        }
        await d.done("b")
        turn = await to.begin("b", context("tool", 1, output)[-16:], request="r2", base=output)
        assert turn.kind == directory_pb2.BEGIN_KIND_EXTEND
        assert turn.match.pool_blocks == 7
        depths = {node.node_id: (node.l1_blocks, node.l2_blocks, node.any_blocks) for node in turn.match.nodes}
        assert depths == {"p": (5, 5, 5), "d": (0, 7, 7)}
        whole = [run for run in turn.match.holders if run.first_block == 0]
        assert whole[0].node_ids == ["p", "d"] or whole[0].node_ids == ["d", "p"]
        await to.finish("b", "r2")

        assert await to.end("b") == ["b"]
        await p.counts_become({})
        await d.counts_become({})
        await clean(to)
        assert await to.end("b") == [], "a second end is no error and does nothing"


async def test_counts_of_a_stream_are_numbered_and_its_first_full_push_is_marked(etcd: Etcd) -> None:
    async with directory(etcd) as to, Node("n").connected(to) as node:
        await node.counts_become({})
        prompt = context("a", 3)
        await to.begin("b", prompt)
        await node.store(prompt)
        await node.landed("b", 3, Phase.PREFILL)
        await node.counts_become(dict.fromkeys(blocks_of(prompt), 1))
        assert node.count_sequences == list(range(1, len(node.count_sequences) + 1))
        assert not node.resyncs, "a node that starts with its first batch has nothing to send anew"


async def test_a_fork_counts_on_the_shared_blocks_and_a_copy_that_leaves_takes_its_counts_along(etcd: Etcd) -> None:
    async with directory(etcd) as to, Node("n").connected(to) as node:
        shared = context("a", 4)
        await node.store(shared)
        await to.begin("b", shared)
        await node.landed("b", 4, Phase.PREFILL)
        fork = context("fork", 1, shared)
        begun = await to.begin("f", fork, parent_branch_id="b")
        assert begun.match.pool_blocks == 4
        await node.store(fork, skip=4)
        await node.landed("f", 5, Phase.PREFILL)
        expected = dict.fromkeys(blocks_of(shared), 2) | {fork[-16:]: 1}
        await node.counts_become(expected)
        await node.remove(fork, keep=4)
        del expected[fork[-16:]]
        await node.counts_become(expected)
        await clean(to)
        assert sorted(await to.end("b", subtree=True)) == ["b", "f"]
        await node.counts_become({})


async def test_a_gap_is_answered_with_a_resync_and_the_snapshot_makes_all_right(etcd: Etcd) -> None:
    async with directory(etcd) as to, Node("n").connected(to) as node:
        first, second = context("a", 3), context("z", 2)
        await to.begin("b", first)
        await node.store(first)
        await node.landed("b", 3, Phase.PREFILL)
        await node.taken()
        node.sequence += 1  # a batch that never arrives
        await node.store(second)
        await node.taken()
        assert len(node.resyncs) == 1
        match = (await to.begin("", second)).match
        assert match.pool_blocks == 2
        await node.counts_become(dict.fromkeys(blocks_of(first), 1))
        await node.store(context("y", 1))
        await node.taken()
        assert len(node.resyncs) == 1, "the sequence goes on from the snapshot"
        assert (await to.stats()).resyncs == 1
        await clean(to)


async def test_a_run_on_an_unknown_parent_is_answered_with_a_resync(etcd: Etcd) -> None:
    async with directory(etcd) as to, Node("n").connected(to) as node:
        names = context("a", 20)
        node.held.append((Tier.L2, names))
        change = directory_pb2.KvChange(
            kind=directory_pb2.KvChange.KIND_STORED,
            tier=common_pb2.TIER_L2,
            first_block=16,
            names=names[16 * 16 :],
            skip=1,
        )
        await node.send_batch([change])
        await node.taken()
        assert len(node.resyncs) == 1
        assert (await to.begin("", names)).match.pool_blocks == 20


async def test_nodes_hear_which_of_their_counted_blocks_another_node_has(etcd: Etcd) -> None:
    """With the counts, when the only other copy goes, and with all counts of a new stream."""
    async with open_store(etcd) as store, directory(etcd) as to, Node("p").connected(to) as p:
        await join(store, "d")
        prompt, output = context("a", 5), context("out", 2, context("a", 5))
        await to.begin("b", prompt)
        await p.store(prompt)
        await p.landed("b", 5, Phase.PREFILL)
        await p.counts_become(dict.fromkeys(blocks_of(prompt), 1))
        assert p.elsewhere == set()
        d = Node("d")
        async with d.connected(to):
            await d.store(output)
            await d.landed("b", 5, Phase.DECODE)
            await d.output("b", 5, output[5 * 16 :])
            await d.counts_become(dict.fromkeys(blocks_of(output), 1))
            for node in (p, d):
                await node.elsewhere_becomes(blocks_of(prompt))
            await clean(to)
            await p.remove(prompt, keep=2)
            await d.elsewhere_becomes(blocks_of(prompt)[:2])
            await clean(to)
        d.told = dict.fromkeys(blocks_of(prompt), (1, True))
        async with d.connected(to):
            await d.counts_become(dict.fromkeys(blocks_of(output), 1))
            assert d.elsewhere == set(blocks_of(prompt)[:2])
            await clean(to)


async def test_a_node_that_reconnects_goes_on_where_it_was_and_gets_all_counts_again(etcd: Etcd) -> None:
    async with open_store(etcd) as store:
        await join(store, "n")
        async with directory(etcd) as to:
            node = Node("n")
            prompt = context("a", 3)
            async with node.connected(to):
                await node.store(prompt)
                await to.begin("b", prompt)
                await node.landed("b", 3, Phase.PREFILL)
                await node.counts_become(dict.fromkeys(blocks_of(prompt), 1))
            node.told = {prompt[:16]: (9, True), context("stale", 1): (3, False)}
            async with node.connected(to):
                await node.counts_become(dict.fromkeys(blocks_of(prompt), 1))
                assert not node.resyncs
                assert (await to.begin("", prompt)).match.pool_blocks == 3


async def test_a_new_life_of_a_node_holds_nothing_until_it_says_so(etcd: Etcd) -> None:
    async with open_store(etcd) as store:
        await join(store, "n")
        prompt = context("a", 3)
        async with directory(etcd) as to:
            async with Node("n").connected(to) as node:
                await node.store(prompt)
                await node.taken()
            async with Node("n", incarnation="2").connected(to) as node:
                await node.counts_become({})
                assert (await to.begin("", prompt)).match.pool_blocks == 0


async def test_a_newer_stream_of_a_node_replaces_the_older(etcd: Etcd) -> None:
    async with directory(etcd) as to, Node("n").connected(to) as older, Node("n").connected(to) as newer:
        detail = parse_error(await older.stream_ended())
        assert (detail.status, detail.reason) == (grpc.StatusCode.ABORTED, "STREAM_REPLACED")
        await newer.store(context("a", 2))
        await newer.taken()
        assert [node.connected for node in (await to.stats()).nodes] == [True]


async def test_a_node_is_gone_once_its_registration_and_its_stream_are(etcd: Etcd) -> None:
    prompt = context("a", 2)
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_store(etcd))
        await join(store, "n", "m")
        to = await stack.enter_async_context(directory(etcd))
        node = await stack.enter_async_context(Node("n").connected(to))
        other = await stack.enter_async_context(Node("m").connected(to))

        async def holders() -> list[str]:
            return [node for run in (await to.begin("", prompt)).match.holders for node in run.node_ids]

        async def nodes() -> list[str]:
            return [node.node_id for node in (await to.stats()).nodes]

        for one in (node, other):
            await one.store(prompt)
            await one.taken()
        await leave(store, "n")
        await seen_by(to, store)
        assert sorted(await holders()) == ["m", "n"], "a lease may be lost while all is well"
        await other.disconnect()

        async def in_doubt() -> bool:
            return await holders() == ["n"]

        await eventually(in_doubt)
        assert sorted(await nodes()) == ["m", "n"], "a stream may break while the node lives"
        await node.disconnect()

        async def gone() -> bool:
            return await nodes() == ["m"]

        await eventually(gone)
        assert [n.node_id for n in (await to.begin("", prompt)).match.nodes] == ["m"]


async def seen_by(to: Directory, store: EtcdStore) -> None:
    """Wait until the directory has seen all that was put into etcd before: the flip of one more node's role."""
    async with Node("marker").connected(to) as marker:
        await join(store, "marker")
        for epoch, role in ((1, Role.DECODE), (2, Role.PREFILL)):
            await store.put(KEYS.split, split_record(epoch, marker=role))

        async def told() -> bool:
            return bool(marker.retiers)

        await eventually(told)
    await leave(store, "marker")

    async def forgotten() -> bool:
        return all(node.node_id != "marker" for node in (await to.stats()).nodes)

    await eventually(forgotten)


async def test_a_node_that_turns_from_decode_to_prefill_keeps_what_branches_need(etcd: Etcd) -> None:
    prompt = context("a", 3)
    whole = context("out", 2, prompt)
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_store(etcd))
        await join(store, "p", "d")
        await store.put(KEYS.split, split_record(1, p=Role.PREFILL, d=Role.DECODE))
        to = await stack.enter_async_context(directory(etcd))
        p = await stack.enter_async_context(Node("p").connected(to))
        d = await stack.enter_async_context(Node("d").connected(to))
        await to.begin("b", prompt)
        await p.store(prompt)
        await p.landed("b", 3, Phase.PREFILL)
        await d.store(prompt)
        await d.landed("b", 3, Phase.DECODE)
        await d.store(whole, skip=3)
        await d.output("b", 3, whole[3 * 16 :])
        await p.counts_become(dict.fromkeys(blocks_of(prompt), 1))
        await d.counts_become(dict.fromkeys(blocks_of(whole), 1))
        await store.put(KEYS.split, split_record(2, p=Role.PREFILL, d=Role.PREFILL))

        async def told() -> bool:
            return len(d.retiers) == 1

        await eventually(told)
        await d.counts_become(dict.fromkeys(blocks_of(whole)[3:], 1))
        homes = {(h.phase, h.node_id, h.first_block, h.blocks) for h in (await to.branch("b")).homes}
        assert homes == {(common_pb2.PHASE_PREFILL, "p", 0, 3), (common_pb2.PHASE_PREFILL, "d", 3, 2)}
        assert not p.retiers
        await clean(to)
        await store.put(KEYS.split, split_record(3, p=Role.PREFILL, d=Role.DECODE))
        await store.put(KEYS.split, split_record(4, p=Role.DECODE, d=Role.DECODE))
        await store.put(KEYS.split, split_record(5, p=Role.PREFILL, d=Role.DECODE))

        async def p_told() -> bool:
            return len(p.retiers) == 1

        await eventually(p_told)
        assert len(d.retiers) == 1, "nothing is freed on the way back"
        await d.counts_become(dict.fromkeys(blocks_of(whole)[3:], 1))
        await clean(to)


async def test_a_snapshot_does_not_keep_others_waiting(etcd: Etcd) -> None:
    async with directory(etcd) as to, Node("n").connected(to) as node:
        changes = [
            directory_pb2.KvChange(
                kind=directory_pb2.KvChange.KIND_STORED, tier=common_pb2.TIER_L2, names=context(f"c{i}", 64)
            )
            for i in range(3000)
        ]
        node.sequence += 1
        batch = directory_pb2.KvBatch(sequence=node.sequence, changes=changes, snapshot=True, snapshot_end=True)
        await node.send(kv=batch)
        blocks_seen = set()
        while node.acknowledged < node.sequence:
            blocks_seen.add((await to.stats()).blocks)
        assert blocks_seen - {0, 192_000}, "others were answered while the snapshot was taken"
        assert (await to.stats()).blocks == 192_000


async def test_a_node_that_does_not_read_is_cut_and_made_whole_when_it_is_back(etcd: Etcd) -> None:
    names = context("a", 20_000)
    async with open_store(etcd) as store:
        await join(store, "n")
        async with directory(etcd, node_backlog_blocks=100_000) as to:
            node = Node("n")
            await node.connect(to, read=False)
            await node.store(names)
            branches = 0

            async def cut() -> bool:
                nonlocal branches
                branches += 1
                await to.begin(f"b{branches}", names)
                await node.landed(f"b{branches}", 20_000, Phase.PREFILL)
                return not (await to.stats()).nodes[0].connected

            await eventually(cut)
            await node.disconnect()
            async with node.connected(to):
                block = await to.public.GetBlock(public_pb2.GetBlockRequest(name=names[:16]), timeout=10)
                assert block.copies[0].prefill_count >= 1
                await node.counts_become(dict.fromkeys(blocks_of(names), block.copies[0].prefill_count))
                await clean(to)
