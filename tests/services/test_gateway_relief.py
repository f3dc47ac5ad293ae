"""A node that gets a phase takes its share of what waits at the others: a switch helps those who wait already."""

from __future__ import annotations

import asyncio
import itertools

from gateway_harness import Bench, Stream, bench
from scripted_nodes import bytes_ids, expected_output
from waiting import eventually

from evolving.v1 import gateway_pb2

PROMPT = list(range(1, 401))  # 0.42 s by the nodes' coefficients
LEG_S = 0.42
LENGTH = 6
WANT = expected_output(PROMPT, LENGTH)


async def queue(it: Bench, count: int) -> list[Stream]:
    """So many requests in p's queue, in order."""
    it.nodes["p"].script.take.clear()
    it.nodes["p"].script.leg_s = LEG_S
    streams = []
    for _ in range(count):
        stream = it.generate(PROMPT, sampling=gateway_pb2.Sampling(max_tokens=LENGTH), model="tiny")
        await stream.until(lambda stream=stream: bool(stream.started))  # type: ignore[misc]
        streams.append(stream)
    return streams


async def finish(it: Bench, streams: list[Stream]) -> list[gateway_pb2.GenerateFinished]:
    """Read to the end: every output whole, no attempt that counts as failed."""
    for node in it.nodes.values():
        for event in (node.script.take, node.script.reserve):
            event.set()
    results = await asyncio.gather(*(stream.all() for stream in streams))
    assert all(
        stream.ids == bytes_ids(done.output_token_ids) == WANT for stream, done in zip(streams, results, strict=True)
    )
    assert not any(done.attempts for done in results)
    return results


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


async def test_a_new_decode_node_takes_as_many_as_it_has_slots_for_of_those_that_wait_for_one() -> None:
    async with bench("p", "q", "n", "d") as it:
        await it.split(1, p="prefill", q="prefill", n="prefill", d="decode")
        full = it.nodes["d"]
        full.script.reserve.clear()
        it.nodes["n"].script.reserve.clear()
        streams = [
            it.generate(PROMPT, sampling=gateway_pb2.Sampling(max_tokens=LENGTH), model="tiny") for _ in range(3)
        ]
        await eventually(lambda: len(full.running) == 3)
        await asyncio.gather(*(stream.until(lambda stream=stream: bool(stream.ids)) for stream in streams))  # type: ignore[misc]
        full.push(decode_slots_free=0)
        it.nodes["n"].push(decode_slots_free=2)
        for node_id in ("d", "n"):
            await it.wait(node_id, 0.25)
        await it.split(2, p="prefill", q="prefill", n="decode", d="decode")
        await eventually(lambda: len(full.cut_off) == 2)
        assert [done.decode_node_id for done in await finish(it, streams)].count("n") == 2
        assert it.metric("gateway_reroutes_total") == 2
        prefills = sum(len(it.nodes[node_id].prefills) for node_id in "pqnd")
        assert prefills == 3, "what was computed went with them"


async def test_nobody_leaves_a_decode_node_that_has_room() -> None:
    async with bench("p", "n", "d") as it:
        await it.split(1, p="prefill", n="prefill", d="decode")
        it.nodes["d"].script.reserve.clear()
        stream = it.generate(PROMPT, sampling=gateway_pb2.Sampling(max_tokens=LENGTH), model="tiny")
        await eventually(lambda: len(it.nodes["d"].running) == 1)
        await it.split(2, p="prefill", n="decode", d="decode")
        assert [done.decode_node_id for done in await finish(it, [stream])] == ["d"]
