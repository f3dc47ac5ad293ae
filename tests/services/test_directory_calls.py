"""Gateways' and operators' calls over the wire: branch rules as statuses, reads, pages, limits, and terms."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from directory_harness import KEYS, Node, blocks_of, context, directory
from etcd_process import Etcd
from planner_harness import join, open_store
from waiting import eventually

from evolving.core.terms import Phase
from evolving.internal.v1 import directory_pb2
from evolving.runtime.clock import SystemClock
from evolving.v1 import common_pb2
from evolving.v1 import directory_pb2 as public_pb2
from evolving.wire.status import ErrorDetail, parse_error
from evolving_directory.term import take_term


async def refusal(call: object) -> ErrorDetail:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call  # type: ignore[misc]
    return parse_error(error.value)


async def test_a_version_below_the_current_one_is_refused_with_the_current_one(etcd: Etcd) -> None:
    async with directory(etcd) as to:
        await to.begin("b", context("a", 3), version=2)
        detail = await refusal(to.begin("b", context("a", 4), request="r2", version=1))
        assert (detail.status, detail.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STALE_VERSION")
        assert detail.metadata["current_version"] == "2"


async def test_an_ended_branch_is_refused_and_an_unknown_base_asks_for_all(etcd: Etcd) -> None:
    async with directory(etcd) as to:
        prompt = context("a", 3)
        assert (await to.begin("b", context("tail", 1), base=prompt)).need_full
        await to.begin("b", prompt)
        assert await to.end("b") == ["b"]
        detail = await refusal(to.begin("b", prompt, request="r2"))
        assert (detail.status, detail.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "BRANCH_ENDED")
        assert await to.end("b", "never-seen") == []


async def test_a_request_of_the_same_version_beside_a_running_one_is_a_side_request(etcd: Etcd) -> None:
    async with directory(etcd) as to:
        await to.begin("b", context("a", 3))
        side = await to.begin("b", context("z", 2), request="r2")
        assert side.kind == directory_pb2.BEGIN_KIND_SIDE
        replay = await to.begin("b", context("a", 3))
        assert replay.kind == directory_pb2.BEGIN_KIND_REPLAY
        await to.finish("b", "r1")
        await to.finish("b", "r2")
        await to.finish("b", "r2")
        rewrite = await to.begin("b", context("y", 2), request="r3")
        assert rewrite.kind == directory_pb2.BEGIN_KIND_REWRITE
        stats = await to.stats()
        assert (stats.begins, stats.side_requests, stats.unannounced_rewrites) == (3, 1, 1)


async def test_end_after_ends_the_branch_with_its_request(etcd: Etcd) -> None:
    async with directory(etcd) as to:
        await to.begin("b", context("a", 3), end_after=True)
        assert (await to.branch("b")).state == common_pb2.BRANCH_STATE_LIVE
        await to.finish("b")
        assert (await to.branch("b")).state == common_pb2.BRANCH_STATE_ENDED


async def test_an_unknown_parent_is_accepted_and_counted(etcd: Etcd) -> None:
    async with directory(etcd) as to:
        await to.begin("b", context("a", 3), parent_branch_id="never-seen")
        assert (await to.stats()).unknown_parents == 1


async def test_an_idle_branch_expires_and_its_next_request_revives_it(etcd: Etcd) -> None:
    async with directory(etcd, idle_ttl_s=0.2) as to:
        await to.begin("b", context("a", 3))
        await to.finish("b")

        async def expired() -> bool:
            return (await to.branch("b")).state == common_pb2.BRANCH_STATE_EXPIRED

        await eventually(expired)
        revived = await to.begin("b", context("a", 3), request="r2")
        assert revived.kind == directory_pb2.BEGIN_KIND_NEW
        assert (await to.branch("b")).state == common_pb2.BRANCH_STATE_LIVE


async def test_a_request_without_a_branch_is_matched_and_leaves_nothing(etcd: Etcd) -> None:
    async with directory(etcd) as to, Node("n").connected(to) as node:
        prompt = context("a", 4)
        await node.store(prompt)
        await node.taken()
        answer = await to.begin("", context("b", 1, prompt))
        assert answer.kind == directory_pb2.BEGIN_KIND_NO_BRANCH
        assert answer.match.pool_blocks == 4
        assert (await to.begin("", context("b", 1), base=prompt)).need_full
        assert (await to.stats()).live_branches == 0


async def test_another_partitions_call_is_refused_by_every_method(etcd: Etcd) -> None:
    async with directory(etcd) as to:
        branch = common_pb2.BranchMetadata(branch_id="b")
        for call in (
            to.internal.Begin(directory_pb2.BeginRequest(partition_id="p1", branch=branch, request_id="r"), timeout=10),
            to.internal.Finish(directory_pb2.FinishRequest(partition_id="p1", branch_id="b"), timeout=10),
            to.internal.End(directory_pb2.EndRequest(partition_id="p1", branch_ids=["b"]), timeout=10),
            to.internal.ReadBranch(directory_pb2.ReadBranchRequest(partition_id="p1", branch_id="b"), timeout=10),
        ):
            detail = await refusal(call)
            assert (detail.status, detail.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "WRONG_PARTITION")
            assert detail.metadata["partition_id"] == "p0"
        stream = to.internal.ConnectNode()
        hello = directory_pb2.NodeHello(partition_id="p1", node_id="n", incarnation="1", next_sequence=1)
        await stream.write(directory_pb2.ConnectNodeRequest(hello=hello))
        assert (await refusal(stream.read())).reason == "WRONG_PARTITION"


@pytest.mark.parametrize(
    "request_",
    [
        directory_pb2.BeginRequest(request_id="r", new_names=b"x" * 15),
        directory_pb2.BeginRequest(request_id="", new_names=b"x" * 16),
        directory_pb2.BeginRequest(request_id="r" * 300, new_names=b"x" * 16),
        directory_pb2.BeginRequest(request_id="r", base_blocks=1, base_name=b"short", new_names=b"x" * 16),
    ],
)
async def test_what_no_gateway_sends_is_refused(etcd: Etcd, request_: directory_pb2.BeginRequest) -> None:
    async with directory(etcd) as to:
        request_.partition_id, request_.tenant, request_.branch.branch_id = "p0", "default", "b"
        detail = await refusal(to.internal.Begin(request_, timeout=10))
        assert detail.status is grpc.StatusCode.INVALID_ARGUMENT
        assert (await to.stats()).live_branches == 0


async def test_a_stream_begins_with_hello_and_has_one(etcd: Etcd) -> None:
    async with directory(etcd) as to:
        hello = directory_pb2.NodeHello(partition_id="p0", node_id="n", incarnation="1", next_sequence=1)
        kv = directory_pb2.KvBatch(sequence=1)
        for events in (
            [directory_pb2.ConnectNodeRequest(kv=kv)],
            [directory_pb2.ConnectNodeRequest()],
            [directory_pb2.ConnectNodeRequest(hello=hello)] * 2,
            [directory_pb2.ConnectNodeRequest(hello=hello), directory_pb2.ConnectNodeRequest()],
        ):
            stream = to.internal.ConnectNode()
            for event in events:
                await stream.write(event)
            assert (await refusal(_read_all(stream))).status is grpc.StatusCode.INVALID_ARGUMENT


async def _read_all(stream: grpc.aio.StreamStreamCall) -> None:  # type: ignore[type-arg]
    while await stream.read() is not grpc.aio.EOF:
        pass


async def test_an_event_that_cannot_be_is_skipped_and_the_stream_goes_on(etcd: Etcd) -> None:
    async with directory(etcd) as to, Node("n").connected(to) as node:
        await node.send(landed=directory_pb2.Landed(tenant="default", branch_id="b", request_id="r", blocks=1))
        await node.output("b", 0, b"odd")
        await node.landed("never-seen", 3, Phase.PREFILL)
        await node.done("never-seen")
        await node.store(context("a", 2))
        await node.taken()
        assert (await to.begin("", context("a", 2))).match.pool_blocks == 2
        assert sum((await to.stats()).ignored_events.values()) >= 2


async def test_operators_read_a_block_with_its_copies_and_branches(etcd: Etcd) -> None:
    async with directory(etcd) as to, Node("n").connected(to) as node:
        prompt = context("a", 3)
        await to.begin("b", prompt)
        await node.store(prompt)
        await node.landed("b", 3, Phase.PREFILL)
        await node.counts_become(dict.fromkeys(blocks_of(prompt), 1))
        block = await to.public.GetBlock(public_pb2.GetBlockRequest(name=blocks_of(prompt)[1]), timeout=10)
        assert block.depth == 1
        assert list(block.branch_ids) == ["b"]
        assert block.copies == [
            public_pb2.BlockCopy(node_id="n", in_l1=False, in_l2=True, prefill_count=1, decode_count=0)
        ]
        absent = await refusal(to.public.GetBlock(public_pb2.GetBlockRequest(name=b"?" * 16), timeout=10))
        assert absent.status is grpc.StatusCode.NOT_FOUND
        short = await refusal(to.public.GetBlock(public_pb2.GetBlockRequest(name=b"?"), timeout=10))
        assert short.status is grpc.StatusCode.INVALID_ARGUMENT


async def test_branches_are_paged_in_order_while_others_come_and_go(etcd: Etcd) -> None:
    async with directory(etcd) as to:
        names = [f"b{index}" for index in range(5)]
        for name in names:
            await to.begin(name, context(name, 1))
            await to.finish(name)
        seen: list[str] = []
        token = ""
        while True:
            request = public_pb2.ListBranchesRequest(page_size=2, page_token=token)
            page = await to.public.ListBranches(request, timeout=10)
            seen += [branch.branch_id for branch in page.branches]
            token = page.next_page_token
            if not token:
                break
            await to.begin(f"a{len(seen)}", context("early", 1))
        assert seen == names
        await to.end("b0")
        with_ended = public_pb2.ListBranchesRequest(tenant="default", include_ended=True, page_size=1000)
        states = {b.branch_id: b.state for b in (await to.public.ListBranches(with_ended, timeout=10)).branches}
        assert states["b0"] == common_pb2.BRANCH_STATE_ENDED
        assert states["b1"] == common_pb2.BRANCH_STATE_LIVE
        other = public_pb2.ListBranchesRequest(tenant="other")
        assert not (await to.public.ListBranches(other, timeout=10)).branches
        for token in ("x", "e30=", "WzEsMl0=", "é"):
            detail = await refusal(to.public.ListBranches(public_pb2.ListBranchesRequest(page_token=token), timeout=10))
            assert detail.status is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_unknown_branch_is_not_found(etcd: Etcd) -> None:
    async with directory(etcd) as to:
        assert (await refusal(to.branch("b"))).status is grpc.StatusCode.NOT_FOUND
        request = directory_pb2.ReadBranchRequest(partition_id="p0", tenant="default", branch_id="b")
        detail = await refusal(to.internal.ReadBranch(request, timeout=10))
        assert detail.status is grpc.StatusCode.NOT_FOUND


async def test_an_audit_names_what_a_node_has_wrong_and_who_does_not_answer(etcd: Etcd) -> None:
    async with directory(etcd, audit_timeout_s=1.0) as to, Node("n").connected(to) as node:
        prompt = context("a", 3)
        await to.begin("b", prompt)
        await node.store(prompt)
        await node.landed("b", 3, Phase.PREFILL)
        await node.counts_become(dict.fromkeys(blocks_of(prompt), 1))
        node.told[prompt[:16]] = (5, False)
        stray = context("stray", 1)
        node.told[stray] = (1, False)
        node.told[prompt[16:32]] = (1, True)
        audit = await to.audit()
        assert audit.mismatch_count == 3
        found = {m.name: (m.node_id, m.incremental, m.recounted, m.node) for m in audit.mismatches}
        assert found == {prompt[:16]: ("n", 1, 1, 5), stray: ("n", 0, 0, 1), prompt[16:32]: ("n", 1, 1, 1)}
        assert {m.name: m.elsewhere for m in audit.mismatches if m.HasField("elsewhere")} == {
            prompt[:16]: False,
            prompt[16:32]: False,
        }
        assert {m.name for m in audit.mismatches if m.node_elsewhere} == {prompt[16:32]}
        assert audit.nonzero_after_end == 1
        silent = Node("silent")
        await silent.connect(to, read=False)
        await silent.store(context("s", 1))

        async def known() -> bool:
            return len((await to.stats()).nodes) == 2

        await eventually(known)
        assert list((await to.audit()).unreachable_node_ids) == ["silent"]
        await silent.disconnect()


async def test_a_restarted_directory_has_a_higher_term_and_is_rebuilt_by_what_it_is_told(etcd: Etcd) -> None:
    async with open_store(etcd) as store:
        await join(store, "n")
        node = Node("n")
        prompt = context("a", 4)
        async with directory(etcd) as to:
            await node.connect(to)
            await to.begin("b", prompt)
            await node.store(prompt)
            await node.landed("b", 4, Phase.PREFILL)
            await node.counts_become(dict.fromkeys(blocks_of(prompt), 1))
            first_term = node.known_term
            await to.finish("b")
        assert parse_error(await node.stream_ended()).status is grpc.StatusCode.UNAVAILABLE
        assert node.counts == dict.fromkeys(blocks_of(prompt), 1), "unknown is not zero"
        await node.disconnect()
        async with directory(etcd) as to:
            turn = context("t", 1, prompt)
            assert (await to.begin("b", turn[-16:], request="r2", base=prompt)).need_full
            async with node.connected(to):
                await node.taken()
                assert node.known_term > first_term
                assert len(node.resyncs) == 1
                begun = await to.begin("b", turn, request="r2")
                assert begun.match.pool_blocks == 4
                await node.landed("b", 4, Phase.PREFILL, request="r2")
                await node.counts_become(dict.fromkeys(blocks_of(prompt), 1))
                audit = await to.audit()
                assert (audit.mismatch_count, audit.nonzero_after_end) == (0, 0)


async def test_a_directory_steps_aside_for_a_higher_term(etcd: Etcd) -> None:
    async with (
        open_store(etcd) as store,
        directory(etcd) as older,
        Node("n").connected(older) as node,
        directory(etcd) as newer,
    ):
        detail = parse_error(await node.stream_ended())
        assert (detail.status, detail.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STALE_TERM")
        assert (await refusal(older.begin("b", context("a", 1)))).reason == "STALE_TERM"

        async def stepped_aside() -> bool:
            return not older.service.ready.ready

        await eventually(stepped_aside)
        assert (await newer.stats()).term > (await older.stats()).term
        await newer.begin("b", context("a", 1))
        found = await store.list(KEYS.services("directory"))
        assert [newer.service.address.encode() in item.value for item in found.items] == [True]


async def test_a_node_that_knows_a_higher_term_makes_a_directory_step_aside(etcd: Etcd) -> None:
    async with directory(etcd) as to:
        term = (await to.stats()).term
        node = Node("n", known_term=term + 1)
        await node.connect(to)
        detail = parse_error(await node.stream_ended())
        assert (detail.status, detail.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STALE_TERM")
        assert detail.metadata["term"] == str(term + 1)
        await node.disconnect()


async def test_terms_taken_at_once_are_all_different(etcd: Etcd) -> None:
    async with open_store(etcd) as store:
        terms = await asyncio.gather(*(take_term(store, KEYS, SystemClock()) for _ in range(8)))
        assert sorted(terms) == list(range(1, 9))
        assert await take_term(store, KEYS, SystemClock()) == 9


async def test_sizes_are_shown_as_metrics(etcd: Etcd) -> None:
    async with directory(etcd) as to, Node("n").connected(to) as node:
        prompt = context("a", 3)
        await to.begin("b", prompt)
        await node.store(prompt)
        await node.taken()

        async def shown() -> bool:
            value = to.service.metrics.registry.get_sample_value
            return (
                value("evolving_directory_live_branches") == 1
                and value("evolving_directory_blocks") == 3
                and value("evolving_directory_copies", {"node": "n", "tier": "l2"}) == 3
                and value("evolving_directory_begin_seconds_count") == 1
                and value("evolving_directory_connected_nodes") == 1
            )

        await eventually(shown)
