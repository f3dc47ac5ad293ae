"""A node that gets a phase takes its share of what waits at the others: a switch helps those who wait already."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter

import grpc
import pytest
from gateway_harness import Bench, Stream, bench
from scripted_nodes import bytes_ids, expected_output
from waiting import eventually

from evolving.v1 import gateway_pb2
from evolving.wire.status import ErrorDetail

PROMPT = [1 + at % 900 for at in range(3_000)]
LEG_S = 0.01 * len(PROMPT) / 256 + 0.001 * len(PROMPT)  # 3.1 s, by the nodes' coefficients
SHORT = PROMPT[:400]
LENGTH = 6
WANT = {len(prompt): expected_output(prompt, LENGTH) for prompt in (PROMPT, SHORT)}
DOWN = ErrorDetail(grpc.StatusCode.UNAVAILABLE, "ENGINE_DOWN", "gone")
FULL = ErrorDetail(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", "full", retry_after_s=0.1)


def generate(it: Bench, prompt: list[int] = PROMPT) -> Stream:
    return it.generate(prompt, sampling=gateway_pb2.Sampling(max_tokens=LENGTH), model="tiny")


async def queue(it: Bench, count: int, leg_s: float = LEG_S) -> list[Stream]:
    """So many requests in p's queue, in order."""
    it.nodes["p"].script.take.clear()
    it.nodes["p"].script.leg_s = leg_s
    streams = []
    for _ in range(count):
        stream = generate(it)
        await stream.until(lambda stream=stream: bool(stream.started))  # type: ignore[misc]
        streams.append(stream)
    await it.wait("p", count * leg_s)
    return streams


async def settled(it: Bench, node_id: str, count: int) -> None:
    """So many legs are in a node's queue, and its status covers them."""
    await eventually(lambda: len(it.nodes[node_id].running) == count)
    await it.wait(node_id, count * LEG_S)


async def finish(it: Bench, streams: list[Stream], attempts: int = 0) -> list[gateway_pb2.GenerateFinished]:
    """Read to the end: every output whole, so many attempts that count as failed."""
    for node in it.nodes.values():
        for event in (node.script.hear, node.script.take, node.script.reserve):
            event.set()
    results = await asyncio.gather(*(stream.all() for stream in streams))
    for stream, done in zip(streams, results, strict=True):
        assert stream.ids == bytes_ids(done.output_token_ids) == WANT[done.usage.prompt_tokens]
    assert sum(done.attempts for done in results) == attempts
    return results


async def waiting_for_room(it: Bench, count: int) -> list[Stream]:
    """So many requests that wait for room in d, the only node that decodes."""
    it.nodes["d"].script.reserve.clear()
    streams = [generate(it, SHORT) for _ in range(count)]
    await eventually(lambda: len(it.nodes["d"].running) == count)
    await asyncio.gather(*(stream.until(lambda stream=stream: bool(stream.ids)) for stream in streams))  # type: ignore[misc]
    return streams


async def heard(it: Bench, *node_ids: str) -> None:
    """The gateway knows what these nodes pushed before."""
    for node_id in node_ids:
        await it.wait(node_id, it.nodes[node_id].status.wait_s + 0.001)


async def test_a_new_prefill_node_takes_about_half_of_a_queue_and_both_keep_its_order() -> None:
    async with bench("p", "n", "d") as it:
        await it.split(1, p="prefill", n="decode", d="decode")
        streams = await queue(it, 8)
        it.nodes["n"].script.take.clear()
        await it.split(2, p="prefill", n="prefill", d="decode")
        await eventually(lambda: it.metric("gateway_reroutes_total") == len(it.nodes["n"].running) > 0)
        moved = len(it.nodes["n"].running)
        assert 3 <= moved <= 4
        at_new = [done.prefill_node_id == "n" for done in await finish(it, streams)]
        assert not at_new[0], "it is next where it is"
        assert not any(one and other for one, other in itertools.pairwise(at_new)), "every second one at most"
        assert len(it.nodes["p"].cut_off) == moved == sum(at_new)


async def test_nobody_leaves_a_queue_for_little() -> None:
    async with bench("p", "n", "d") as it:
        await it.split(1, p="prefill", n="decode", d="decode")
        streams = await queue(it, 1)
        await it.split(2, p="prefill", n="prefill", d="decode")
        assert [done.prefill_node_id for done in await finish(it, streams)] == ["p"]
        assert it.metric("gateway_reroutes_total") == 0


async def test_a_new_prefill_node_that_is_busy_gets_nobody() -> None:
    async with bench("p", "n", "d") as it:
        await it.split(1, p="prefill", n="decode", d="decode")
        streams = await queue(it, 4)
        await it.wait("n", 60.0)
        await it.split(2, p="prefill", n="prefill", d="decode")
        assert {done.prefill_node_id for done in await finish(it, streams)} == {"p"}


async def test_those_that_leave_go_where_they_were_meant_to() -> None:
    """What goes to the new node after them does not count against those before: they pass no other one by."""
    async with bench("p", "q", "n", "d") as it:
        await it.split(1, p="prefill", q="prefill", n="decode", d="decode")
        await it.wait("q", 100.0)
        streams = await queue(it, 8)
        await it.wait("q", 1.5 * LEG_S)
        it.nodes["n"].script.hear.clear()
        await it.split(2, p="prefill", q="prefill", n="prefill", d="decode")
        await eventually(lambda: it.metric("gateway_reroutes_total") == len(it.nodes["n"].running) > 0)
        assert it.nodes["q"].prefills == []
        quotes_s = sorted(leg.quoted_wait_s for leg in it.nodes["n"].prefills)
        assert quotes_s == pytest.approx([turn * LEG_S for turn in range(len(quotes_s))], rel=0.05)
        await finish(it, streams)


async def test_nodes_that_come_one_after_another_share_a_queue_evenly() -> None:
    """Whose turn came nearer as others left does not leave for what it would have gained before."""
    async with bench("p", "n", "m", "d") as it:
        await it.split(1, p="prefill", n="decode", m="decode", d="decode")
        streams = await queue(it, 9)
        for node_id in "nm":
            it.nodes[node_id].script.take.clear()
            it.nodes[node_id].script.leg_s = LEG_S
        await it.split(2, p="prefill", n="prefill", m="decode", d="decode")
        await settled(it, "n", 4)
        await settled(it, "p", 5)
        await it.split(3, p="prefill", n="prefill", m="prefill", d="decode")
        await eventually(lambda: it.metric("gateway_reroutes_total") == 4 + len(it.nodes["m"].running) > 5)
        share = Counter(done.prefill_node_id for done in await finish(it, streams))
        assert share["p"] == 3
        assert share["m"] in (2, 3), "as much as n leaves it, or one less"


async def test_a_node_that_comes_and_goes_gets_no_more_than_its_share() -> None:
    async with bench("p", "n", "d") as it:
        await it.split(1, p="prefill", n="decode", d="decode")
        streams = await queue(it, 8)
        it.nodes["n"].script.take.clear()
        it.nodes["n"].script.leg_s = LEG_S
        await it.split(2, p="prefill", n="prefill", d="decode")
        await settled(it, "n", 3)
        for _ in range(5):
            it.nodes["n"].push(ready=False)
            await heard(it, "n")
            it.nodes["n"].push(ready=True)
            await heard(it, "n")
        done = await finish(it, streams)
        assert Counter(each.prefill_node_id for each in done) == {"p": 5, "n": 3}
        assert it.metric("gateway_reroutes_total") == 3


async def test_a_queue_that_is_shorter_than_it_was_said_to_be_is_not_left() -> None:
    async with bench("p", "n", "d") as it:
        await it.split(1, p="prefill", n="decode", d="decode")
        streams = await queue(it, 4)
        await it.wait("p", LEG_S)
        await it.split(2, p="prefill", n="prefill", d="decode")
        assert {done.prefill_node_id for done in await finish(it, streams)} == {"p"}


async def test_nobody_leaves_for_a_node_that_would_lose_more_than_is_gained() -> None:
    async with bench("p", "n", "d", fetch="never") as it:
        await it.split(1, p="prefill", n="decode", d="decode")
        streams = await queue(it, 2)
        it.nodes["n"].push(l2_total_tokens=40_000, l2_used_tokens=40_000)
        await heard(it, "n")
        await it.split(2, p="prefill", n="prefill", d="decode")
        assert {done.prefill_node_id for done in await finish(it, streams)} == {"p"}


async def test_nobody_is_let_go_to_a_node_where_it_failed() -> None:
    async with bench("p", "n", "d") as it:
        await it.split(1, p="prefill", n="prefill", d="decode")
        await it.wait("p", 0.5)
        it.nodes["n"].script.refuse_prefill = DOWN
        failed = await queue(it, 1, 5 * LEG_S)
        it.nodes["n"].script.refuse_prefill = None
        await it.wait("n", 100.0)
        others = await queue(it, 3)
        it.nodes["n"].push(ready=False)
        await heard(it, "n")
        it.nodes["n"].push(ready=True, wait_s=0.0)
        await eventually(lambda: len(it.nodes["n"].prefills) > 1)
        streams = [*failed, *others]
        at_new = [done.prefill_node_id == "n" for done in await finish(it, streams, attempts=1)]
        assert not at_new[0]
        assert any(at_new)


@pytest.mark.parametrize("why", ["dies", "is full"])
async def test_a_new_node_that_does_not_take_those_it_gets_costs_them_nothing_but_their_place(why: str) -> None:
    async with bench("p", "n", "d", attempts_max=2, max_wait_s=8.0) as it:
        await it.split(1, p="prefill", n="decode", d="decode")
        streams = await queue(it, 3)
        new = it.nodes["n"]
        new.script.hear.clear()
        new.script.refuse_prefill = FULL
        await it.split(2, p="prefill", n="prefill", d="decode")
        await eventually(lambda: bool(new.running))
        moved = len(new.running)
        if why == "dies":
            await new.die()
        else:
            new.script.hear.set()
        await eventually(lambda: len(it.nodes["p"].running) == 3)
        done = await finish(it, streams, attempts=moved if why == "dies" else 0)
        assert {each.prefill_node_id for each in done} == {"p"}
        assert it.metric("gateway_requests_total", outcome="queue_full") == 0


async def test_a_client_that_leaves_a_moved_request_ends_it() -> None:
    async with bench("p", "n", "d") as it:
        await it.split(1, p="prefill", n="decode", d="decode")
        streams = await queue(it, 4)
        it.nodes["n"].script.take.clear()
        await it.split(2, p="prefill", n="prefill", d="decode")
        for stream in streams:
            stream.call.cancel()
        await eventually(lambda: not it.nodes["p"].running and not it.nodes["n"].running)
        await eventually(lambda: it.metric("gateway_requests_running") == 0)


@pytest.mark.parametrize("lacks", ["slots", "memory"])
async def test_who_waits_for_room_goes_to_the_new_decode_nodes_as_far_as_they_have_it(lacks: str) -> None:
    """What was computed goes along. Each new node gets one, the last of the three stays."""
    async with bench("p", "n", "m", "d") as it:
        await it.split(1, p="prefill", n="prefill", m="prefill", d="decode")
        streams = await waiting_for_room(it, 3)
        full = it.nodes["d"]
        if lacks == "slots":
            full.push(decode_slots_free=0)
        else:
            full.push(decode_context_tokens=5_900, decoding=3)
        for node_id in "nm":
            it.nodes[node_id].script.reserve.clear()
            if lacks == "slots":
                it.nodes[node_id].push(decode_slots_free=1)
            else:
                it.nodes[node_id].push(decode_context_tokens=5_500, decoding=3)
        await heard(it, "n", "m", "d")
        await it.split(2, p="prefill", n="decode", m="decode", d="decode")
        await eventually(lambda: len(full.cut_off) == 2)
        done = await finish(it, streams)
        assert Counter(each.decode_node_id for each in done) == {"d": 1, "n": 1, "m": 1}
        assert it.metric("gateway_reroutes_total") == 2
        assert sum(len(node.prefills) for node in it.nodes.values()) == 3


async def test_a_new_decode_node_without_memory_gets_nobody() -> None:
    """It has slots; but who waits for memory there has lost its place where it was."""
    async with bench("p", "n", "d") as it:
        await it.split(1, p="prefill", n="prefill", d="decode")
        streams = await waiting_for_room(it, 2)
        it.nodes["d"].push(decode_slots_free=0)
        it.nodes["n"].push(decode_context_tokens=5_700, decoding=3)
        await heard(it, "n", "d")
        await it.split(2, p="prefill", n="decode", d="decode")
        assert {done.decode_node_id for done in await finish(it, streams)} == {"d"}


async def test_nobody_leaves_a_decode_node_that_has_room() -> None:
    async with bench("p", "n", "d") as it:
        await it.split(1, p="prefill", n="prefill", d="decode")
        streams = await waiting_for_room(it, 1)
        await it.split(2, p="prefill", n="decode", d="decode")
        assert [done.decode_node_id for done in await finish(it, streams)] == ["d"]
