"""Engines that die or are stopped: only what they had is lost, another gets the KV, and a new life serves."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import pytest
from engine.conftest import Starter, kill
from engine.legs import FOREVER, LONG, Leg, all_room_is_back, until_status
from engine.sglang.driving import Node, greedy, jobs, prefill_only, prompt, serve

from evolving_node_agent.engines.port import (
    Aborted,
    DecodeLost,
    EngineDown,
    NoRoom,
    Prefilled,
    Reserved,
    SourceLost,
    Started,
    Taken,
    Tokens,
)

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]


async def test_where_a_decode_leg_never_reserved_another_gets_the_same_kv(start: Starter) -> None:
    """However the first one ends: aborted, without room, or with its engine; and on whichever node either is."""
    async with start("a", "b", decode_slots=1) as (source, target):
        ways = [("aborted", target, source), ("no room", source, target), ("killed", target, source)]
        for seed, (how, first, then) in enumerate(ways, start=160):
            slot_job, slot_decode_job = jobs(first, prompt(seed, 60), greedy(FOREVER))
            slot_taken = [Leg(first.engine.prefill(slot_job)), Leg(first.engine.decode(slot_decode_job))]
            await slot_taken[1].until(Started)
            prefill_job, decode_job = jobs(
                source, prompt(10 * seed, 300), greedy(8), reserve_deadline_s=0.5 if how == "no room" else 1000.0
            )
            prefill = Leg(source.engine.prefill(prefill_job))
            await prefill.until(Taken)
            decode = Leg(first.engine.decode(decode_job))
            await prefill.until(Prefilled)
            if how == "aborted":
                assert await first.engine.abort(decode_job.leg_id)
            elif how == "killed":
                kill(first)
            left = {"aborted": Aborted, "no room": NoRoom, "killed": EngineDown}[how]
            assert isinstance(await decode.error(), left)
            assert decode.events == []
            again = Leg(then.engine.decode(replace(decode_job, leg_id=f"{decode_job.leg_id}-again")))
            assert await again.error() is None
            assert await prefill.error() is None
            (prefilled,) = [event for event in prefill.events if isinstance(event, Prefilled)]
            ids = [token for event in again.events if isinstance(event, Tokens) for token in event.ids.tolist()]
            undisturbed = await serve(source, source if how == "killed" else then, prompt(10 * seed, 300), 8)
            assert [prefilled.first_token, *ids] == undisturbed.ids
            await first.engine.abort(slot_decode_job.leg_id)
            await asyncio.gather(*(leg.error() for leg in slot_taken))
        await all_room_is_back(source)


async def test_a_source_that_dies_loses_its_decode_legs_only(start: Starter) -> None:
    async with start("a", "b") as (source, target):
        staying = jobs(target, prompt(130, 100), greedy(60))
        stays = [Leg(target.engine.prefill(staying[0]))]
        await stays[0].until(Taken)
        stays.append(Leg(target.engine.decode(staying[1])))
        prefill_job, decode_job = jobs(source, prompt(131, LONG), greedy(8))
        prefill = Leg(source.engine.prefill(prefill_job))
        await prefill.until(Taken)
        decode = Leg(target.engine.decode(decode_job))
        await decode.until(Reserved)
        exited = asyncio.create_task(source.engine.exited())
        kill(source)
        assert isinstance(await decode.error(), SourceLost)
        assert isinstance(await prefill.error(), EngineDown)
        assert await exited < 0
        assert [await leg.error() for leg in stays] == [None, None]
        with pytest.raises(EngineDown):
            await prefill_only(source, prompt(132, 10))
        await all_room_is_back(target)


async def test_a_target_that_dies_loses_its_prefill_legs_only(start: Starter) -> None:
    async with start("a", "b") as (source, target):
        # Where the dead one had not come for its KV yet, only keep_s can tell.
        prefill_job, decode_job = jobs(source, prompt(140, LONG), greedy(8), keep_s=1.0)
        prefill = Leg(source.engine.prefill(prefill_job))
        await prefill.until(Taken)
        decode = Leg(target.engine.decode(decode_job))
        await decode.until(Reserved)
        kill(target)
        assert isinstance(await prefill.error(), DecodeLost)
        assert isinstance(await decode.error(), EngineDown)
        await all_room_is_back(source)


async def test_a_restart_is_another_life_that_serves(start: Starter) -> None:
    async with start("a", "b") as (source, target):
        tokens = prompt(150, 200)
        before = await serve(source, target, tokens, 8)
        kill(source)
        await source.engine.exited()
        info = await source.engine.start()
        assert info.incarnation != source.info.incarnation
        again = Node("a", source.engine, info)
        listening = asyncio.create_task(again.listen())
        served = await serve(again, target, tokens, 8)
        assert served.ids == before.ids
        assert served.cached.l1 == 0, "device memory died with the process"
        await source.engine.stop(0)
        await listening


async def test_stop_ends_legs_and_leaves_nothing(start: Starter) -> None:
    async with start("a", "b") as (source, target):
        job, decode_job = jobs(source, prompt(160, 100), greedy(FOREVER))
        legs = [Leg(source.engine.prefill(job))]
        await legs[0].until(Taken)
        legs.append(Leg(target.engine.decode(decode_job)))
        await legs[1].until(Tokens)
        await target.engine.stop(0)
        assert isinstance(await legs[1].error(), EngineDown)
        if target.info.pid != os.getpid():
            with pytest.raises(ProcessLookupError):
                os.kill(target.info.pid, 0)
        for address in {target.info.transfer_address, target.info.pool_address}:
            host, _, port = address.rpartition(":")
            with pytest.raises(OSError, match=r"Connect call failed|refused"):
                await asyncio.open_connection(host, int(port))
        with pytest.raises(EngineDown):
            await prefill_only(target, prompt(161, 10))


async def test_stop_lets_running_legs_end_within_the_grace(start: Starter) -> None:
    async with start("a") as (node,):
        serving = asyncio.create_task(serve(node, node, prompt(170, 100), 30))
        await until_status(node, lambda: node.engine.status().decoding == 1)
        await node.engine.stop(60)
        assert len((await serving).ids) == 30
