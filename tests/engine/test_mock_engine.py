"""What only the mock promises: time by the model, KV that matters, faults on demand."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from engine.legs import Leg
from engine.sglang.driving import Node, greedy, jobs, prefill_only, prompt, serve
from engine.test_conformance import names_of

from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients, PrefillSums
from evolving.core.work import query_key_pairs
from evolving.runtime.clock import Clock, ManualClock
from evolving_node_agent.engines.mock import FaultPlan, MockConfig, MockEngine
from evolving_node_agent.engines.mock.model import next_token
from evolving_node_agent.engines.port import (
    Aborted,
    CachedTokens,
    DecodeJob,
    EngineDown,
    EngineError,
    Sampling,
    SourceLost,
    Stored,
    Taken,
    Tier,
    Tokens,
)

BLOCK = 64
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "l1_tokens": 4096,
    "l2_tokens": 8192,
    "chunk_tokens": 128,
    "max_prompt_tokens": 1500,
    "max_context_tokens": 2000,
    "speed_up": math.inf,
}


@asynccontextmanager
async def mocks(*names: str, clock: Clock | None = None, **config: Any) -> AsyncIterator[list[Node]]:
    """Started mocks and what they say they hold."""
    engines = [MockEngine(MockConfig(name, **(SIZES | config)), clock) for name in names]
    nodes = [Node(engine.config.node_id, engine, await engine.start()) for engine in engines]
    listeners = [asyncio.create_task(node.listen()) for node in nodes]
    try:
        yield nodes
    finally:
        for engine in engines:
            await engine.stop(0)
        await asyncio.gather(*listeners)


def mock(node: Node) -> MockEngine:
    """The node's engine, as what it is."""
    assert isinstance(node.engine, MockEngine)
    return node.engine


# -- KV matters


async def test_pages_damaged_on_the_way_are_sent_again() -> None:
    async with mocks("a", "b") as (a, b):
        tokens = prompt(1, 5 * BLOCK + 9)
        alone = await serve(a, a, tokens, 12)
        mock(a).faults.corrupt_pages = 4
        moved = await serve(a, b, tokens, 12)
        assert moved.ids == alone.ids
        assert moved.sent.bytes == (6 + 4) * mock(a).config.page_bytes
        names = names_of(tokens)
        assert await a.engine.block_digests(names, Tier.L1) == await b.engine.block_digests(names, Tier.L1)


async def test_a_link_that_damages_everything_is_given_up() -> None:
    async with mocks("a", "b") as (a, b):
        prefill_job, decode_job = jobs(a, prompt(1, 200), greedy(4))
        mock(a).faults.corrupt_pages = 1000
        legs = [Leg(a.engine.prefill(prefill_job)), Leg(b.engine.decode(decode_job))]
        assert isinstance(await legs[1].error(), SourceLost)
        assert isinstance(await legs[0].error(), EngineError)


async def test_a_damaged_page_of_a_peer_is_a_miss() -> None:
    async with mocks("a", "b") as (a, b):
        tokens = prompt(1, 5 * BLOCK + 1)
        wanted = await prefill_only(a, tokens)
        mock(a).faults.corrupt_pages = 1
        fetched = await prefill_only(b, tokens, holders=(a.holder(0, 5),))
        assert fetched.cached == CachedTokens()
        assert fetched.first_token == wanted.first_token
        names = names_of(tokens)
        assert await a.engine.block_digests(names, Tier.L2) == await b.engine.block_digests(names, Tier.L2)


async def test_wrong_kv_gives_wrong_tokens_and_another_digest() -> None:
    async with mocks("a") as (node,):
        tokens = prompt(1, 3 * BLOCK + 1)
        right = await serve(node, node, tokens, 8)
        second = names_of(tokens)[1]
        before = await node.engine.block_digests([second], Tier.L1)
        mock(node).damage(second, Tier.L1)
        assert await node.engine.block_digests([second], Tier.L1) != before
        assert (await serve(node, node, tokens, 8)).ids != right.ids


# -- time (equations 1 and 2 of the paper)

PREFILL = PrefillCoefficients(0.5, 0.01, 1e-5, 0.002, 1e-4)
DECODE = DecodeCoefficients(0.25, 0.0, 0.125, 1e-3)
TIMED: dict[str, Any] = {"prefill": PREFILL, "decode": DECODE, "speed_up": 2.0}


async def pass_time(clock: ManualClock, until: asyncio.Future[Any]) -> None:
    """Let virtual time go by in small steps until `until` is done."""
    while not until.done():
        await clock.advance(0.01)


async def test_a_prefill_takes_what_equation_1_says() -> None:
    clock = ManualClock()
    async with mocks("a", clock=clock, **TIMED) as (node,):
        tokens = prompt(1, 200)
        work = asyncio.ensure_future(prefill_only(node, tokens))
        await pass_time(clock, work)
        chunks = [PrefillSums(128, query_key_pairs(128, 0)), PrefillSums(72, query_key_pairs(72, 128))]
        whole_s = sum(PREFILL.prefill_iteration_s(chunk) for chunk in chunks) / 2.0
        assert work.result().prefill_s == pytest.approx(whole_s)
        await node.engine.free_l1()
        again = asyncio.ensure_future(prefill_only(node, tokens))
        await pass_time(clock, again)
        restored = PrefillSums(8, query_key_pairs(8, 192), 192, 192)
        assert again.result().cached == CachedTokens(l2=192)
        assert again.result().prefill_s == pytest.approx(PREFILL.prefill_iteration_s(restored) / 2.0)


async def test_decode_goes_first_and_waits_for_one_chunk_at_most() -> None:
    """While a long prompt is computed, no gap between tokens exceeds one decode iteration and one chunk."""
    clock = ManualClock()
    async with mocks("a", clock=clock, **TIMED) as (node,):
        times: list[float] = []
        prefill_job, decode_job = jobs(node, prompt(1, 10), greedy(30))
        prefill = Leg(node.engine.prefill(prefill_job))

        async def decode() -> None:
            times.extend([clock.now_s() async for event in node.engine.decode(decode_job) if isinstance(event, Tokens)])

        decoding = asyncio.ensure_future(decode())
        while not times and node.engine.status().decoding == 0:
            await clock.advance(0.01)
        long_job, _ = jobs(node, prompt(2, 1500), greedy(1))
        competing = Leg(node.engine.prefill(long_job))
        await pass_time(clock, decoding)
        await pass_time(clock, competing.task)
        assert prefill.task.done()
        alone_s = DECODE.decode_iteration_s(1, 40) / 2.0
        chunk_s = PREFILL.prefill_iteration_s(PrefillSums(128, query_key_pairs(128, 1400))) / 2.0
        gaps = np.diff(times)
        assert gaps.max() <= alone_s + chunk_s
        assert (gaps > alone_s).sum() >= 10, "chunks and decode iterations took turns"


async def test_two_nodes_full_of_prompts_never_wait_on_each_other() -> None:
    """Each computes as many prompts as it has room for before any decode leg comes; all wait for the other's room."""
    async with mocks("a", "b") as (a, b):
        full = asyncio.Event()

        async def decode_late(leg: Leg, target: Node, job: DecodeJob) -> EngineError | None:
            await leg.until(Taken)
            await full.wait()
            return await Leg(target.engine.decode(job)).error()

        decoding = []
        for seed in range(12):
            source, target = (a, b) if seed % 2 else (b, a)
            prefill_job, decode_job = jobs(
                source, prompt(seed, 900), greedy(300), keep_s=1000.0, reserve_deadline_s=1000.0
            )
            leg = Leg(source.engine.prefill(prefill_job))
            decoding.append(asyncio.create_task(decode_late(leg, target, decode_job)))
        await asyncio.gather(filled(a), filled(b))
        full.set()
        assert await asyncio.gather(*decoding) == [None] * 12


async def filled(node: Node) -> None:
    """Wait until the node holds prompts, has more in its queue, and gets no further: every iteration changes the
    status."""
    last = None
    async for status in node.engine.status_changes():
        if status == last and status.holding and status.queued:
            return
        last = status


# -- faults


async def test_a_stall_stops_iterations_and_nothing_else() -> None:
    async with mocks("a") as (node,):
        mock(node).faults.stall()
        jobs_ = [jobs(node, prompt(seed, 300), greedy(1))[0] for seed in (1, 2)]
        legs = [Leg(node.engine.prefill(job)) for job in jobs_]
        async for status in node.engine.status_changes():
            if len(status.queued) == 2:
                break
        assert await node.engine.abort(jobs_[0].leg_id)
        assert isinstance(await legs[0].error(), Aborted)
        assert legs[1].events == []
        mock(node).faults.resume()
        assert await legs[1].error() is None


async def test_what_is_slow_to_fetch_is_computed() -> None:
    async with mocks("a", "b") as (a, b):
        tokens = prompt(1, 8 * BLOCK + 1)
        wanted = await prefill_only(a, tokens)
        mock(a).faults.transfer_delay_s = 30.0
        late = await prefill_only(b, tokens, holders=(a.holder(0, 8),), fetch_deadline_s=0.2)
        assert late.cached.peer == 0
        assert late.first_token == wanted.first_token


async def test_one_fetch_never_blocks_another_request() -> None:
    async with mocks("a", "b") as (a, b):
        tokens = prompt(1, 8 * BLOCK + 1)
        await prefill_only(a, tokens)
        mock(a).faults.transfer_delay_s = 30.0
        fetching_job, _ = jobs(b, tokens, greedy(1), holders=(a.holder(0, 8),), fetch_deadline_s=60.0)
        fetching = Leg(b.engine.prefill(fetching_job))
        assert (await prefill_only(b, prompt(2, 300))).cached == CachedTokens()
        assert fetching.events == []
        await b.engine.abort(fetching_job.leg_id)
        assert isinstance(await fetching.error(), Aborted)


async def test_a_planned_crash() -> None:
    async with mocks("a", faults=FaultPlan(crash_after_iterations=3, crash_status=7)) as (node,):
        leg = Leg(node.engine.prefill(jobs(node, prompt(1, 1500), greedy(1))[0]))
        assert isinstance(await leg.error(), EngineDown)
        assert [type(event) for event in leg.events] == [Taken]
        assert await node.engine.exited() == 7


@pytest.mark.parametrize("survives", [True, False])
async def test_the_first_events_of_a_life_say_what_is_held(survives: bool) -> None:
    async with mocks("a", l2_survives_crash=survives) as (node,):
        tokens = prompt(1, 4 * BLOCK + 1)
        await prefill_only(node, tokens)
        await node.engine.set_needs(dict.fromkeys(names_of(tokens), 1))
        mock(node).faults.crash()
        await node.engine.start()
        events = node.engine.kv_events()
        first = await anext(aiter(events))
        names = tuple(names_of(tokens))
        assert list(first) == ([Stored(Tier.L2, None, names)] if survives else [])
        assert await node.engine.needs() == {}, "counts died with the process"
        mock(node).check_invariants()
        again = await prefill_only(node, tokens)
        assert again.cached == CachedTokens(l2=4 * BLOCK if survives else 0)


async def test_a_start_that_was_told_to_fail() -> None:
    engine = MockEngine(MockConfig("a", **SIZES))
    engine.faults.fail_starts = 1
    with pytest.raises(EngineError):
        await engine.start()
    await engine.start()
    await engine.stop(0)
    await engine.start()
    await engine.stop(0)


@pytest.mark.parametrize(
    "bad",
    [
        {"node_id": ""},
        {"block_tokens": 0},
        {"speed_up": 0.0},
        {"l1_tokens": 4100},
        {"max_prompt_tokens": 2000},
        {"max_context_tokens": 2049},
    ],
)
def test_impossible_configurations(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|need"):
        MockConfig(**({"node_id": "a"} | SIZES | bad))


# -- drawing tokens

NOBODY = np.array([], dtype=np.uint32)


def drawn(sampling: Sampling, seed: int, output: list[int] | None = None) -> int:
    """A token of one context."""
    return next_token(seed.to_bytes(32, "little"), sampling, NOBODY, output or [], 512)


def test_greedy_is_the_limit_of_a_low_temperature() -> None:
    cold, greedy_ = Sampling(4, temperature=1e-3), Sampling(4)
    assert all(drawn(cold, seed) == drawn(greedy_, seed) for seed in range(1, 50))


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_narrow_sampling_is_greedy(narrow: dict[str, Any]) -> None:
    hot = Sampling(4, temperature=5.0, **narrow)
    assert all(drawn(hot, seed) == drawn(Sampling(4), seed) for seed in range(1, 50))


def test_seeds_and_temperature_spread() -> None:
    assert len({drawn(Sampling(4, temperature=5.0, seed=seed), 7) for seed in range(50)}) > 1


@pytest.mark.parametrize(
    "penalty", [{"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 2.0}]
)
def test_penalties_avoid_what_was_said(penalty: dict[str, Any]) -> None:
    first = drawn(Sampling(4), 7)
    assert drawn(Sampling(4, **penalty), 7, [first] * 4) != first
