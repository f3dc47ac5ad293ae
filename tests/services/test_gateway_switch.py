"""Roles switch under requests: who waits moves at once, who runs stays, nobody pays for it (section 4.3)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import pytest
from gateway_harness import Bench, Stream, bench, failure
from scripted_nodes import ScriptedNode, bytes_ids, expected_output
from waiting import eventually

from evolving.v1 import common_pb2, gateway_pb2
from evolving.wire.status import ErrorDetail

PROMPT = list(range(1, 101))
LENGTH = 12
SAMPLING = gateway_pb2.Sampling(max_tokens=LENGTH)
WANT = expected_output(PROMPT, LENGTH)
NO_ROOM = ErrorDetail(grpc.StatusCode.RESOURCE_EXHAUSTED, "NO_ROOM", "no room")
FULL = ErrorDetail(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", "full", retry_after_s=0.1)


def generate(it: Bench) -> Stream:
    return it.generate(PROMPT, sampling=SAMPLING, model="tiny")


async def finish(*streams: Stream) -> list[gateway_pb2.GenerateFinished]:
    """Read to the end: every output whole, no attempt that counts as failed."""
    results = await asyncio.gather(*(stream.all() for stream in streams))
    for stream, finished in zip(streams, results, strict=True):
        assert stream.ids == bytes_ids(finished.output_token_ids) == WANT
        assert finished.attempts == 0
    return results


async def waiting_at(it: Bench, node_id: str, stage: str, count: int = 1) -> list[Stream]:
    """Requests that wait in a node's queue, or have been sent there and heard nothing."""
    script = it.nodes[node_id].script
    (script.take if stage == "queued" else script.hear).clear()
    streams = [generate(it) for _ in range(count)]
    await eventually(lambda: len(it.nodes[node_id].running) == count)
    if stage == "queued":
        await asyncio.gather(*(stream.until(lambda stream=stream: bool(stream.started)) for stream in streams))  # type: ignore[misc]
    return streams


def started(stream: Stream) -> Sequence[str]:
    return [each.prefill_node_id for each in stream.started]


def counted(it: Bench) -> list[float]:
    """Refused, moved for a failure."""
    refused = sum(it.metric("gateway_requests_total", outcome=outcome) for outcome in ("queue_full", "no_node"))
    moved = sum(it.metric("gateway_moves_total", reason=reason) for reason in ("CALL_CANCELLED", "UNKNOWN"))
    return [refused, moved]


@pytest.mark.parametrize("stage", ["sent", "queued"])
async def test_a_request_that_waits_leaves_at_once(stage: str) -> None:
    """Also one that the node has not answered yet; the client hears of a place in a queue for each it had."""
    async with bench("a", "b") as it:
        await it.split(1, a="prefill", b="decode")
        streams = await waiting_at(it, "a", stage, 3)
        await it.split(2, a="decode", b="prefill")
        for finished in await finish(*streams):
            assert (finished.prefill_node_id, finished.decode_node_id) == ("b", "a")
        assert len(it.nodes["a"].cut_off) == 3
        for stream in streams:
            assert started(stream) == (["a", "b"] if stage == "queued" else ["b"])
        assert it.metric("gateway_reroutes_total") == 3
        assert counted(it) == [0, 0]


@pytest.mark.parametrize("stage", ["sent", "queued"])
async def test_a_node_s_own_word_for_its_role_is_enough(stage: str) -> None:
    async with bench("a", "b") as it:
        await it.split(1, a="prefill", b="decode")
        streams = await waiting_at(it, "a", stage)
        it.store.set_available(False)
        it.nodes["b"].push(epoch=2, role=common_pb2.ROLE_PREFILL)
        it.nodes["a"].push(epoch=2, role=common_pb2.ROLE_DECODE)
        await finish(*streams)


async def test_a_request_stays_where_nobody_else_prefills_its_model() -> None:
    async with bench("a", "b", "other") as it:
        await it.register(it.nodes["other"], model="other")
        await it.split(1, a="prefill", b="decode", other="prefill")
        (stream,) = await waiting_at(it, "a", "queued")
        await it.split(2, a="decode", b="decode", other="prefill")
        await it.register(it.nodes["other"], model="other", decode_slots=9)
        it.nodes["a"].script.take.set()
        await finish(stream)
        assert started(stream) == ["a"]
        assert it.metric("gateway_reroutes_total") == 0


@pytest.mark.parametrize("stage", ["sent", "queued"])
async def test_full_queues_elsewhere_are_waited_for(stage: str) -> None:
    """Everybody who waited at one node comes to the others at once; those who had a place get one."""
    async with bench("a", "b", attempts_max=1, recover_s=0.0) as it:
        await it.split(1, a="prefill", b="decode")
        streams = await waiting_at(it, "a", stage, 3)
        for node in it.nodes.values():
            node.script.refuse_prefill = FULL
        await it.split(2, a="decode", b="prefill")
        it.nodes["a"].script.hear.set()  # where no queue of the phase has room, the other phase's are asked
        await eventually(lambda: len(it.nodes["b"].prefills) > 6)
        error = await failure(generate(it).all())
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, "a new request is told to come again"
        it.nodes["b"].script.refuse_prefill = None
        await finish(*streams)
        assert counted(it)[0] == 1


async def test_who_was_full_before_the_switch_is_asked_again() -> None:
    async with bench("a", "b", "c") as it:
        await it.split(1, a="prefill", b="prefill", c="decode")
        await it.wait("a", 1.0)
        it.nodes["b"].script.refuse_prefill = FULL
        (stream,) = await waiting_at(it, "a", "queued")
        it.nodes["b"].script.refuse_prefill = None
        await it.split(2, a="decode", b="prefill", c="decode")
        assert (await stream.all()).prefill_node_id == "b"
        assert started(stream) == ["a", "b"]
        assert stream.ids == WANT


@pytest.mark.parametrize("stage", ["sent", "queued"])
async def test_no_wait_elsewhere_is_too_long(stage: str) -> None:
    async with bench("a", "b", max_wait_s=2.0) as it:
        await it.split(1, a="prefill", b="decode")
        streams = await waiting_at(it, "a", stage)
        await it.wait("b", 60.0)
        await it.split(2, a="decode", b="prefill")
        await finish(*streams)


async def test_requotes_of_a_switch_leave_those_that_a_request_has() -> None:
    async with bench("a", "b", requotes_max=1) as it:
        await it.split(1, a="prefill", b="decode")
        it.nodes["a"].script.requotes = 1
        (stream,) = await waiting_at(it, "a", "queued")
        assert [leg.may_requote for leg in it.nodes["a"].prefills] == [True, False]
        it.nodes["b"].script.requotes = 1
        await it.split(2, a="decode", b="prefill")
        await finish(stream)
        assert [leg.may_requote for leg in it.nodes["b"].prefills] == [True, False]


async def test_a_node_that_dies_after_a_long_wait_is_recovered_from() -> None:
    """Time in a queue is no time without progress: how long one waited decides nothing when its node is lost."""
    async with bench("a", "b", recover_s=1.0) as it:
        await it.split(1, a="prefill", b="decode")
        (stream,) = await waiting_at(it, "a", "queued")
        await asyncio.sleep(1.2)
        await it.nodes["a"].die()
        finished = await stream.all()
        assert stream.ids == WANT
        assert finished.attempts == 1


async def test_roles_that_go_back_and_forth_lose_nobody() -> None:
    """Requests in every stage, twelve switches: all end whole, and what was decoding stays where it was."""
    async with bench("a", "b", "c") as it:
        nodes = list(it.nodes.values())
        for node in nodes:
            node.script.pause_at = LENGTH // 2
        streams: list[asyncio.Task[object]] = []
        for epoch in range(1, 13):
            prefill, other, decode = (nodes[(epoch + turn) % 3] for turn in range(3))
            roles = {prefill.node_id: "prefill", other.node_id: "prefill", decode.node_id: "decode"}
            (other.script.hear if epoch % 2 else other.script.take).clear()
            await it.split(epoch, **roles)  # type: ignore[arg-type]
            for node in nodes:
                if node is not other:
                    node.script.hear.set()
                    node.script.take.set()
            streams.extend(asyncio.create_task(finish(generate(it))) for _ in range(3))
            await eventually(lambda: it.metric("gateway_requests_running") == len(streams))
        for node in nodes:
            for event in (node.script.hear, node.script.take, node.script.resume):
                event.set()
        await asyncio.gather(*streams)
        moved = it.metric("gateway_reroutes_total")
        assert moved > 0
        legs = sum(len(node.prefills) + len(node.decodes) for node in nodes)
        assert legs <= 2 * len(streams) + moved, "only what waited left a node"
        assert counted(it) == [0, 0]


async def waiting_for_room(it: Bench) -> tuple[Stream, ScriptedNode, ScriptedNode]:
    """A request prefilled on p that waits for room in d or e: the stream, that node, the other one."""
    await it.split(1, p="prefill", d="decode", e="decode")
    nodes = [it.nodes["d"], it.nodes["e"]]
    for node in nodes:
        node.script.reserve.clear()
    stream = generate(it)
    await stream.until(lambda: bool(stream.ids))
    await eventually(lambda: any(node.running for node in nodes))
    first, other = sorted(nodes, key=lambda node: not node.running)
    return stream, first, other


@pytest.mark.parametrize("why", ["switched", "draining", "no room", "lost"])
async def test_a_request_that_waits_for_room_goes_to_another_node_with_what_was_computed(why: str) -> None:
    async with bench("p", "d", "e") as it:
        stream, first, other = await waiting_for_room(it)
        if why == "switched":
            await it.split(2, **{"p": "prefill", first.node_id: "prefill", other.node_id: "decode"})  # type: ignore[arg-type]
        elif why == "draining":
            first.push(role=common_pb2.ROLE_DRAINING)
        elif why == "no room":
            first.script.refuse_decode = NO_ROOM
            first.script.reserve.set()
        else:
            await first.die()
        if why in ("switched", "draining"):
            await eventually(lambda: len(first.cut_off) == 1)
        other.script.reserve.set()
        (finished,) = await finish(stream)
        assert (finished.prefill_node_id, finished.decode_node_id) == ("p", other.node_id)
        assert len(it.nodes["p"].prefills) == len(first.decodes) == len(other.decodes) == 1
        assert it.nodes["p"].cut_off == []
        legs = [*first.decodes, *other.decodes]
        assert {leg.transfer_id for leg in legs} == {it.nodes["p"].prefills[0].transfer_id}
        assert legs[0].leg_id != legs[1].leg_id
        assert it.metric("gateway_reroutes_total") == (why in ("switched", "draining"))
        assert it.metric("gateway_moves_total", reason="NO_ROOM") == (why == "no room")
        assert counted(it) == [0, 0]


async def test_a_request_waits_on_for_room_where_nobody_else_decodes() -> None:
    async with bench("p", "d", "e") as it:
        stream, first, other = await waiting_for_room(it)
        await it.split(2, p="prefill", d="prefill", e="prefill")
        first.script.reserve.set()
        (finished,) = await finish(stream)
        assert finished.decode_node_id == first.node_id
        assert other.decodes == []


@pytest.mark.parametrize("said_by", ["prefill", "decode"])
async def test_kv_lost_in_leaving_is_computed_again_and_counts_as_no_failure(said_by: str) -> None:
    """A leg may have reserved just as the gateway leaves it; then the engines end the prefill leg with it."""
    async with bench("p", "d", "e") as it:
        prefill = it.nodes["p"]
        prefill.script.send.clear()
        stream, first, other = await waiting_for_room(it)
        first.push(role=common_pb2.ROLE_DRAINING)
        await eventually(lambda: bool(other.running))
        prefill.script.take.clear()
        if said_by == "prefill":
            prefill.script.lose_prefilled = ErrorDetail(grpc.StatusCode.UNAVAILABLE, "DECODE_LOST", "gone")
            prefill.script.send.set()
        else:
            other.script.refuse_decode = ErrorDetail(grpc.StatusCode.UNAVAILABLE, "SOURCE_LOST", "gone")
            other.script.reserve.set()
        await eventually(lambda: len(prefill.prefills) == 2)
        prefill.script.lose_prefilled = other.script.refuse_decode = None
        for event in (prefill.script.take, prefill.script.send, other.script.reserve):
            event.set()
        await finish(stream)
        assert it.metric("gateway_reroutes_total") == 2


async def test_every_node_is_asked_for_room_once_an_attempt() -> None:
    async with bench("p", "d", "e", attempts_max=1) as it:
        await it.split(1, p="prefill", d="decode", e="decode")
        for node in it.nodes.values():
            node.script.refuse_decode = NO_ROOM
        error = await failure(generate(it).all())
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert [len(node.decodes) for node in it.nodes.values()] == [1, 1, 1], "in the end where it was prefilled"
        assert len(it.nodes["p"].prefills) == 1


async def test_a_request_is_decoded_by_the_split_that_holds_when_it_is_taken() -> None:
    async with bench("p", "d", "e") as it:
        await it.split(1, p="prefill", d="decode", e="prefill")
        await it.wait("e", 1.0)
        (stream,) = await waiting_at(it, "p", "queued")
        await it.split(2, p="prefill", d="prefill", e="decode")
        it.nodes["p"].script.take.set()
        (finished,) = await finish(stream)
        assert (finished.prefill_node_id, finished.decode_node_id) == ("p", "e")
        assert it.nodes["d"].decodes == []
