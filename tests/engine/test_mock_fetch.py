"""Fetches from peers while legs wait (the paper, section 4.4): what is hidden, who goes first, what holds up whom."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from engine.legs import Leg
from engine.sglang.driving import BLOCK, Node, greedy, jobs, prefill_only, prompt
from engine.test_conformance import names_of
from engine.test_mock_engine import mock, mocks

from evolving.core.config import FetchConfig, FetchStart
from evolving.runtime.clock import ManualClock
from evolving_node_agent.engines.port import CachedTokens, EngineStatus, Prefilled, Stored, Taken, Tier

PROMPT = 8 * BLOCK + 1  # eight blocks are reusable
PAGE_BYTES = 4 * BLOCK


async def pass_time_until(clock: ManualClock, done: Callable[[], bool]) -> None:
    """Let virtual time go by, with real time in between for what goes over sockets."""
    async with asyncio.timeout(60):
        while not done():
            await asyncio.sleep(0.001)
            await clock.advance(0.05)


async def until_status(node: Node, condition: Callable[[EngineStatus], bool]) -> EngineStatus:
    """Wait for a status that fulfils the condition."""
    async with asyncio.timeout(60):
        async for status in node.engine.status_changes():
            if condition(status):
                return status
    raise AssertionError("the engine is gone")


def fetching(node: Node, tokens: list[int], source: Node, blocks: int = 8, **job: Any) -> Leg:
    """A leg that may fetch its first blocks from `source`."""
    return Leg(node.engine.prefill(jobs(node, tokens, greedy(1), holders=(source.holder(0, blocks),), **job)[0]))


def event(leg: Leg, kind: type) -> Any:
    """A leg's event of this kind."""
    return next(each for each in leg.events if isinstance(each, kind))


async def test_what_is_fetched_while_nothing_can_be_taken_is_hidden() -> None:
    async with mocks("a", "b") as (a, b):
        tokens = prompt(1, PROMPT)
        await prefill_only(a, tokens)
        mock(b).faults.stall()
        leg = fetching(b, tokens, a)
        await b.until_holds(Tier.L2, names_of(tokens))
        await until_status(b, lambda status: status.fetching_blocks == status.fetch_backlog_tokens == 0)
        assert leg.events == []
        mock(b).faults.resume()
        assert await leg.error() is None
        taken = event(leg, Taken)
        assert 0 < taken.fetch_s == taken.hidden_s < taken.queue_s
        assert event(leg, Prefilled).cached == CachedTokens(peer=8 * BLOCK)


@pytest.mark.parametrize("verify_kv", [True, False])
async def test_what_is_fetched_while_only_the_fetch_is_waited_for_is_not_hidden(verify_kv: bool) -> None:
    """Each block takes page_bytes / fetch_bytes_per_s / speed_up."""
    clock = ManualClock()
    timed: dict[str, Any] = {"fetch_bytes_per_s": float(PAGE_BYTES), "speed_up": 2.0, "verify_kv": verify_kv}
    async with mocks("a", "b", clock=clock, **timed) as (a, b):
        tokens = prompt(1, PROMPT)
        computed = asyncio.ensure_future(prefill_only(a, tokens))
        await pass_time_until(clock, computed.done)
        leg = fetching(b, tokens, a, fetch_deadline_s=1e6)
        await pass_time_until(clock, leg.task.done)
        taken = event(leg, Taken)
        assert 8 / 2.0 <= taken.fetch_s <= taken.queue_s
        assert taken.hidden_s == 0
        assert event(leg, Prefilled).cached == CachedTokens(peer=8 * BLOCK)
        status = b.engine.status()
        assert status.fetch_busy_s == pytest.approx(taken.fetch_s)
        assert status.fetched_tokens == 8 * BLOCK


async def test_modelled_time_of_a_fetch_is_divided_by_the_speed_up() -> None:
    clock = ManualClock()
    limited = FetchConfig(chunk_blocks=2, bytes_per_s=1e-3)
    async with mocks("a", "b", clock=clock, fetch_bytes_per_s=1e-3, fetch=limited) as (a, b):  # speed_up: inf
        tokens = prompt(1, PROMPT)
        await prefill_only(a, tokens)
        fetched = await prefill_only(b, tokens, holders=(a.holder(0, 8),))
        assert fetched.cached.peer == 8 * BLOCK
        assert b.engine.status().fetch_busy_s == 0 == clock.now_s()


async def test_a_leg_is_held_up_for_its_deadline_and_waits_in_the_queue_for_free() -> None:
    clock = ManualClock()
    async with mocks("a", "b", clock=clock) as (a, b):
        tokens = prompt(1, PROMPT)
        await prefill_only(a, tokens)
        mock(a).faults.transfer_delay_s = 1e6
        mock(b).faults.stall()
        leg = fetching(b, tokens, a, fetch_deadline_s=5.0)
        await clock.advance(100.0)
        mock(b).faults.resume()
        await clock.advance(4.9)
        assert leg.events == []
        assert b.engine.status().fetching_blocks == 8
        await clock.advance(0.2)
        await leg.until(Prefilled)
        taken = event(leg, Taken)
        assert (taken.queue_s, taken.fetch_s, taken.hidden_s) == pytest.approx((105.0, 105.0, 100.0))
        assert event(leg, Prefilled).cached == CachedTokens()
        await until_status(b, lambda status: status.fetching_blocks == 0)


async def test_a_busy_engine_holds_up_nobody() -> None:
    """While the chunks of others are full a leg could not be taken, so its deadline doesn't run."""
    clock = ManualClock()
    async with mocks("a", "b", clock=clock, speed_up=0.1) as (a, b):
        tokens = prompt(1, PROMPT)
        computed = asyncio.ensure_future(prefill_only(a, tokens))
        await pass_time_until(clock, computed.done)
        mock(a).faults.transfer_delay_s = 1e6
        long = Leg(b.engine.prefill(jobs(b, prompt(2, 1500), greedy(1))[0]))
        await long.until(Taken)
        leg = fetching(b, tokens, a, fetch_deadline_s=0.2)
        await pass_time_until(clock, leg.task.done)
        assert event(leg, Taken).hidden_s >= event(long, Prefilled).prefill_s / 2


async def test_a_finished_fetch_does_not_wait_for_a_slower_one_ahead() -> None:
    async with mocks("a", "b", "c") as (a, b, c):
        slow, fast = prompt(1, PROMPT), prompt(2, PROMPT)
        await prefill_only(a, slow)
        await prefill_only(c, fast)
        mock(a).faults.transfer_delay_s = 1e6
        ahead = fetching(b, slow, a, priority=5, fetch_deadline_s=1e6)
        behind = fetching(b, fast, c, fetch_deadline_s=1e6)
        assert await behind.error() is None
        assert event(behind, Prefilled).cached == CachedTokens(peer=8 * BLOCK)
        assert ahead.events == []
        ahead.task.cancel()
        await until_status(b, lambda status: not status.queued and status.fetching_blocks == 0)


async def test_the_most_urgent_leg_reads_first() -> None:
    """It overtakes at the next chunk, and keeps its place from chunk to chunk."""
    clock = ManualClock()
    narrow = FetchConfig(readers=1, chunk_blocks=2)
    async with mocks("a", "b", clock=clock, fetch=narrow) as (a, b):
        patient, urgent = prompt(1, PROMPT), prompt(2, PROMPT)
        await prefill_only(a, patient)
        await prefill_only(a, urgent)
        mock(a).faults.transfer_delay_s = 1.0
        mock(b).faults.stall()
        fetching(b, patient, a)
        await pass_time_until(clock, lambda: len(b.held[Tier.L2]) == 2)
        fetching(b, urgent, a, priority=1)
        await pass_time_until(clock, lambda: len(b.held[Tier.L2]) == 16)
        came = [name for each in b.events if isinstance(each, Stored) and each.tier is Tier.L2 for name in each.names]
        assert came[:2] == names_of(patient)[:2]
        overtaken = came[2 : came.index(names_of(urgent)[-1])]
        assert len([name for name in overtaken if name in names_of(patient)]) <= narrow.chunk_blocks


async def test_a_fetch_at_admission_begins_when_nothing_else_is_waited_for() -> None:
    async with mocks("a", "b", fetch_start=FetchStart.ADMISSION) as (a, b):
        tokens = prompt(1, PROMPT)
        await prefill_only(a, tokens)
        mock(b).faults.stall()
        leg = fetching(b, tokens, a)
        await until_status(b, lambda status: len(status.queued) == 1)
        await prefill_only(a, prompt(2, PROMPT))
        status = b.engine.status()
        assert (status.fetching_blocks, status.fetched_tokens) == (0, 0)
        assert status.fetch_backlog_tokens == 8 * BLOCK
        mock(b).faults.resume()
        assert await leg.error() is None
        taken = event(leg, Taken)
        assert taken.fetch_s > 0
        assert taken.hidden_s == 0
        assert event(leg, Prefilled).cached == CachedTokens(peer=8 * BLOCK)


@pytest.mark.parametrize("fetch_start", FetchStart)
async def test_only_a_fetch_at_admission_holds_up_those_behind_it(fetch_start: FetchStart) -> None:
    async with mocks("a", "b", fetch_start=fetch_start) as (a, b):
        tokens = prompt(1, PROMPT)
        await prefill_only(a, tokens)
        mock(a).faults.transfer_delay_s = 0.2 if fetch_start is FetchStart.ADMISSION else 1e6
        slow = fetching(b, tokens, a, fetch_deadline_s=1e6)
        await until_status(b, lambda status: status.fetching_blocks > 0)
        await prefill_only(b, prompt(2, PROMPT))
        assert slow.task.done() is (fetch_start is FetchStart.ADMISSION)


async def test_a_fetch_waits_for_room_in_which_it_is_kept() -> None:
    """Twelve legs fetch 96 blocks, and half of 56 may be kept for them: the rest comes as legs are taken, and nothing
    is read twice or computed."""
    async with mocks("a", "b", l2_tokens=56 * BLOCK) as (_, b), mocks("c", l2_tokens=256 * BLOCK) as (c,):
        prompts = [prompt(seed, PROMPT) for seed in range(12)]
        for tokens in prompts:
            await prefill_only(c, tokens)
        mock(b).faults.stall()
        legs = [fetching(b, tokens, c, fetch_deadline_s=1e6) for tokens in prompts]
        status = await until_status(b, lambda s: s.fetched_tokens >= 24 * BLOCK and not s.fetching_blocks)
        assert (status.fetched_tokens, status.fetch_backlog_tokens) == (24 * BLOCK, 72 * BLOCK)
        mock(b).faults.resume()
        assert [await leg.error() for leg in legs] == [None] * 12
        assert [event(leg, Prefilled).cached.peer for leg in legs] == [8 * BLOCK] * 12
        assert b.engine.status().fetched_tokens == 96 * BLOCK
        mock(b).check_invariants()
        assert mock(b).kept_for_legs() == 0


async def test_blocks_kept_for_another_leg_anyway_take_no_room() -> None:
    """Twelve forks of one context, each with a block of its own, are fetched into room for 28 blocks."""
    async with mocks("a", "b", l2_tokens=56 * BLOCK) as (_, b), mocks("c", l2_tokens=256 * BLOCK) as (c,):
        shared = prompt(1, 8 * BLOCK)
        forks = [[*shared, *prompt(seed, BLOCK + 1)] for seed in range(100, 112)]
        for tokens in forks:
            await prefill_only(c, tokens)
        mock(b).faults.stall()
        legs = [fetching(b, tokens, c, blocks=9) for tokens in forks]
        await until_status(b, lambda status: len(status.queued) == 12 and not status.fetch_backlog_tokens)
        assert mock(b).kept_for_legs() == 8 + 12
        mock(b).faults.resume()
        assert [await leg.error() for leg in legs] == [None] * 12


async def test_room_goes_to_those_before_first() -> None:
    """A leg that has all it will reuse itself doesn't get the room that the fetch of one before it waits for."""
    async with mocks("a", "b", l2_tokens=56 * BLOCK) as (_, b), mocks("c", l2_tokens=256 * BLOCK) as (c,):
        fetched, own = [prompt(seed, PROMPT) for seed in range(4)], prompt(100, PROMPT)
        for tokens in fetched:
            await prefill_only(c, tokens)
        await prefill_only(b, own)
        mock(b).faults.stall()
        first = jobs(b, fetched[0], greedy(1), holders=(c.holder(0, 8),))[0]
        legs = [Leg(b.engine.prefill(first)), *(fetching(b, tokens, c) for tokens in fetched[1:3])]
        await until_status(b, lambda s: s.fetched_tokens == 24 * BLOCK and not s.fetching_blocks)
        waiting = fetching(b, fetched[3], c)
        late = Leg(b.engine.prefill(jobs(b, own, greedy(1))[0]))
        await until_status(b, lambda status: len(status.queued) == 5)
        assert await b.engine.abort(first.leg_id)
        await until_status(b, lambda status: status.fetched_tokens == 32 * BLOCK)
        mock(b).faults.resume()
        assert [await leg.error() for leg in (*legs[1:], waiting, late)] == [None] * 4


async def test_a_read_that_fails_leaves_room_for_others() -> None:
    async with mocks("a", "b", l2_tokens=56 * BLOCK) as (_, b), mocks("c", "d", l2_tokens=256 * BLOCK) as (c, d):
        prompts = [prompt(seed, PROMPT) for seed in range(4)]
        for tokens in prompts:
            await prefill_only(d if tokens is prompts[0] else c, tokens)
        mock(b).faults.stall()
        mock(d).faults.transfer_delay_s = 1.0
        lost = fetching(b, prompts[0], d)
        await until_status(b, lambda status: status.fetching_blocks == 8)
        others = [fetching(b, tokens, c) for tokens in prompts[1:]]
        await until_status(b, lambda status: status.fetched_tokens == 16 * BLOCK)
        await d.engine.stop(0)
        await until_status(b, lambda status: status.fetched_tokens == 24 * BLOCK)
        mock(b).faults.resume()
        assert [await leg.error() for leg in (lost, *others)] == [None] * 4


async def test_the_first_in_the_queue_gets_on_however_much_is_kept_for_others() -> None:
    async with mocks("a", "b", l2_tokens=64 * BLOCK) as (_, b), mocks("c", l2_tokens=256 * BLOCK) as (c,):
        prompts = [prompt(seed, PROMPT) for seed in range(5)]
        for tokens in prompts:
            await prefill_only(c, tokens)
        mock(b).faults.stall()
        others = [fetching(b, tokens, c) for tokens in prompts[:4]]
        await until_status(b, lambda status: status.fetched_tokens == 32 * BLOCK)
        urgent = fetching(b, prompts[4], c, priority=1)
        await until_status(b, lambda status: status.fetched_tokens == 40 * BLOCK)
        mock(b).faults.resume()
        assert [await leg.error() for leg in (urgent, *others)] == [None] * 5


async def test_what_a_waiting_leg_will_reuse_is_kept_for_it() -> None:
    """Its own copies, too: what others compute meanwhile doesn't drive them out."""
    async with mocks("a") as (node,):
        tokens = prompt(1, PROMPT)
        await prefill_only(node, tokens)
        await node.engine.free_l1()
        mock(node).faults.stall()
        leg = Leg(node.engine.prefill(jobs(node, tokens, greedy(1))[0]))
        await until_status(node, lambda status: len(status.queued) == 1)
        assert mock(node).kept_for_legs() == 8
        mock(node).faults.resume()
        assert await leg.error() is None
        assert event(leg, Prefilled).cached == CachedTokens(l2=8 * BLOCK)
        assert mock(node).kept_for_legs() == 0
