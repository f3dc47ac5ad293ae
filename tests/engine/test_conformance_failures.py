"""The engine port when things go wrong: aborts in every stage on either side, lost sides, no room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import pytest
from engine.conftest import Starter
from engine.legs import FOREVER, LONG, Leg, all_room_is_back, until_status
from engine.sglang.driving import Node, greedy, jobs, prompt, serve

from evolving_node_agent.engines.mock import MockEngine
from evolving_node_agent.engines.port import (
    Aborted,
    DecodeLost,
    EngineError,
    EngineStatus,
    NoRoom,
    Prefilled,
    Rejected,
    Reserved,
    Sent,
    SourceLost,
    Started,
    Taken,
    Tokens,
)

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]


@pytest.fixture(params=["two nodes", "one node"])
def pair(request: pytest.FixtureRequest, nodes: list[Node]) -> tuple[Node, Node]:
    """Where the legs run."""
    return (nodes[0], nodes[1]) if request.param == "two nodes" else (nodes[0], nodes[0])


async def test_abort_in_the_queue(nodes: list[Node]) -> None:
    node = nodes[0]
    running_job, _ = jobs(node, prompt(10, LONG), greedy(8))
    queued_job, _ = jobs(node, prompt(11, LONG), greedy(8))
    running, queued = Leg(node.engine.prefill(running_job)), Leg(node.engine.prefill(queued_job))
    await running.until(Taken)
    assert queued.events == []
    assert await node.engine.abort(queued_job.leg_id)
    assert isinstance(await queued.error(), Aborted)
    assert queued.events == []
    await running.until(Prefilled)
    await node.engine.abort(running_job.leg_id)
    await running.task
    await all_room_is_back(node)


@pytest.mark.parametrize("stage", [Taken, Prefilled])
async def test_abort_of_a_prefill_leg_alone(nodes: list[Node], stage: type) -> None:
    node = nodes[0]
    job, _ = jobs(node, prompt(20, LONG), greedy(8))
    leg = Leg(node.engine.prefill(job))
    await leg.until(stage)
    assert await node.engine.abort(job.leg_id)
    assert isinstance(await leg.error(), Aborted)
    assert not await node.engine.abort(job.leg_id), "it is gone"
    await all_room_is_back(node)


async def aborted_while_waiting(source: Node, target: Node, side: str) -> tuple[EngineError | None, EngineError | None]:
    """Abort one leg of a request whose decode leg waits for the KV; how the prefill and the decode leg end.

    An abort that comes only after the KV was handed over is another case: then again, with another prompt.
    """
    for seed in range(40, 60):
        prefill_job, decode_job = jobs(source, prompt(seed, LONG), greedy(FOREVER), keep_s=1000.0)
        prefill = Leg(source.engine.prefill(prefill_job))
        await prefill.until(Taken)
        decode = Leg(target.engine.decode(decode_job))
        await decode.until(Reserved)
        if side == "decode" or not await source.engine.abort(prefill_job.leg_id):
            await target.engine.abort(decode_job.leg_id)
        ends = await prefill.error(), await decode.error()
        if not any(isinstance(event, Sent) for event in prefill.events):
            return ends
    raise AssertionError("every abort came too late")


async def test_a_context_that_reserved_is_told_until_it_decodes(nodes: list[Node]) -> None:
    """A leg that decodes before a status tells of its reservation is another case: then again, with another prompt."""
    source, target = nodes
    if isinstance(source.engine, MockEngine):
        source.engine.faults.transfer_delay_s = 0.1  # a page: the reservation lasts for several statuses
    for seed in range(30, 40):
        prefill_job, decode_job = jobs(source, prompt(seed, LONG), greedy(FOREVER))
        prefill = Leg(source.engine.prefill(prefill_job))
        await prefill.until(Taken)
        decode = Leg(target.engine.decode(decode_job))
        told = [await first_status(target, lambda status: bool(status.reserved or status.decoding))]
        told.append(await first_status(target, lambda status: bool(status.decoding)))
        await target.engine.abort(decode_job.leg_id)
        await asyncio.gather(prefill.error(), decode.error())
        assert (told[1].reserved, told[1].reserved_context_tokens) == (0, 0)
        assert told[1].decode_context_tokens > LONG
        if told[0].reserved:
            assert (told[0].reserved_context_tokens, told[0].decode_context_tokens) == (LONG, 0)
            break
    else:
        raise AssertionError("every leg decoded too soon")
    if isinstance(source.engine, MockEngine):
        source.engine.faults.transfer_delay_s = 0.0
    await all_room_is_back(*nodes)


async def first_status(node: Node, holds: Callable[[EngineStatus], bool]) -> EngineStatus:
    """The first status for which `holds`."""
    async with asyncio.timeout(60):
        async for status in node.engine.status_changes():
            if holds(status):
                return status
    raise AssertionError("the engine is down")


async def test_what_each_phase_leaves_to_the_other_is_room_for_the_longest_prompt(nodes: list[Node]) -> None:
    info = nodes[0].info
    assert info.max_prompt_tokens <= info.reserve_tokens <= info.l1_tokens - info.reserve_tokens


async def test_abort_of_the_prefill_leg_ends_a_waiting_decode_leg(pair: tuple[Node, Node]) -> None:
    prefill, decode = await aborted_while_waiting(*pair, "prefill")
    assert isinstance(prefill, Aborted)
    assert isinstance(decode, SourceLost)
    await all_room_is_back(*pair)


async def test_abort_of_a_waiting_decode_leg_ends_the_prefill_leg(pair: tuple[Node, Node]) -> None:
    prefill, decode = await aborted_while_waiting(*pair, "decode")
    assert isinstance(prefill, DecodeLost)
    assert isinstance(decode, Aborted)
    await all_room_is_back(*pair)


async def test_abort_while_decoding(pair: tuple[Node, Node]) -> None:
    source, target = pair
    prefill_job, decode_job = jobs(source, prompt(50, 100), greedy(FOREVER))
    prefill = Leg(source.engine.prefill(prefill_job))
    await prefill.until(Taken)
    decode = Leg(target.engine.decode(decode_job))
    await decode.until(Tokens)
    assert await prefill.error() is None, "the prefill leg is over once its KV has landed"
    assert not await source.engine.abort(prefill_job.leg_id)
    assert await target.engine.abort(decode_job.leg_id)
    assert isinstance(await decode.error(), Aborted)
    assert len([event for event in decode.events if isinstance(event, Tokens)]) < FOREVER - 1
    await all_room_is_back(source, target)


async def test_leaving_the_iterator_aborts(nodes: list[Node]) -> None:
    source, target = nodes
    prefill_job, decode_job = jobs(source, prompt(60, 100), greedy(FOREVER))
    prefill = Leg(source.engine.prefill(prefill_job))
    await prefill.until(Taken)
    events: Any = target.engine.decode(decode_job)
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Tokens):
                break
    assert await prefill.error() is None
    queued_job, _ = jobs(source, prompt(61, LONG), greedy(8))
    queued = Leg(source.engine.prefill(queued_job))
    await queued.until(Taken)
    queued.task.cancel()
    await all_room_is_back(source, target)
    assert not await target.engine.abort(decode_job.leg_id)
    assert not await source.engine.abort(queued_job.leg_id)


async def test_abort_of_nothing_is_no_error(nodes: list[Node]) -> None:
    assert not await nodes[0].engine.abort("no such leg")


async def test_computed_kv_is_dropped_when_nobody_comes(nodes: list[Node]) -> None:
    node = nodes[0]
    job, _ = jobs(node, prompt(70, 200), greedy(8), keep_s=0.2)
    leg = Leg(node.engine.prefill(job))
    assert isinstance(await leg.error(), DecodeLost)
    assert isinstance(leg.events[-1], Prefilled)
    await all_room_is_back(node)


async def test_an_unknown_source_is_lost(nodes: list[Node]) -> None:
    source, target = nodes
    _, decode_job = jobs(source, prompt(80, 100), greedy(8))
    assert isinstance(await Leg(target.engine.decode(decode_job)).error(), SourceLost)
    await all_room_is_back(target)


async def test_no_slot_within_the_deadline(start: Starter) -> None:
    async with start("a", "b", decode_slots=1) as (source, target):
        first = jobs(source, prompt(90, 100), greedy(FOREVER))
        second = jobs(source, prompt(91, 100), greedy(8), reserve_deadline_s=0.2, keep_s=0.5)
        legs = [Leg(source.engine.prefill(first[0]))]
        await legs[0].until(Taken)
        legs.append(Leg(target.engine.decode(first[1])))
        await legs[1].until(Started)
        waiting = Leg(source.engine.prefill(second[0]))
        await waiting.until(Taken)
        assert isinstance(await Leg(target.engine.decode(second[1])).error(), NoRoom)
        assert isinstance(await waiting.error(), DecodeLost)
        await target.engine.abort(first[1].leg_id)
        await all_room_is_back(source, target)


async def test_a_slot_that_frees_is_taken(start: Starter) -> None:
    async with start("a", "b", decode_slots=1) as (source, target):
        served = await asyncio.gather(*(serve(source, target, prompt(95 + n, 80), 12) for n in range(4)))
        assert [len(each.ids) for each in served] == [12] * 4


async def test_priority_then_arrival(nodes: list[Node]) -> None:
    """While prompts nobody decodes fill the node, legs queue; when these go, legs leave the queue in order."""
    node = nodes[0]
    blockers = []
    for number in range(4):  # 4 x 960 tokens: more than any prefill may hold of this pool
        job, _ = jobs(node, prompt(100 + number, 960), greedy(4), priority=10, keep_s=300)
        blockers.append(Leg(node.engine.prefill(job)))
    await blockers[1].until(Prefilled)
    await until_status(node, lambda: node.engine.status().holding + len(node.engine.status().queued) == len(blockers))
    waiting = len(node.engine.status().queued)
    order: list[int] = []

    async def queued(number: int, leg: Leg) -> None:
        await leg.until(Taken)
        order.append(number)
        assert await leg.error() is None

    legs = []
    for number, priority in enumerate([0, 5, 0, 5, -1]):
        job, _ = jobs(node, prompt(110 + number, 600), greedy(1), priority=priority)
        legs.append(asyncio.create_task(queued(number, Leg(node.engine.prefill(job)))))
        await until_status(node, partial(_queues, node, waiting + number + 1))
    for blocker in blockers:
        blocker.task.cancel()
    await asyncio.gather(*legs)
    assert order == [1, 3, 0, 2, 4]


def _queues(node: Node, legs: int) -> bool:
    return len(node.engine.status().queued) >= legs


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_impossible_jobs_are_rejected(nodes: list[Node], phase: str) -> None:
    node = nodes[0]
    info = node.info
    oversize = jobs(node, prompt(110, info.max_prompt_tokens + 1), greedy(4))
    foreign = jobs(node, [info.vocab_size], greedy(4))
    for prefill_job, decode_job in (oversize, foreign):
        leg = Leg(node.engine.prefill(prefill_job) if phase == "prefill" else node.engine.decode(decode_job))
        assert isinstance(await leg.error(), Rejected)
        assert leg.events == []
    await all_room_is_back(node)


async def test_the_longest_prompt_is_served(nodes: list[Node]) -> None:
    served = await serve(nodes[0], nodes[1], prompt(120, nodes[0].info.max_prompt_tokens), 4)
    assert len(served.ids) == 4
