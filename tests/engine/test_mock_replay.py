"""What lets the mock replay long traces: several tokens an iteration (t_acc of the paper, section 4.2), KV by name."""

from __future__ import annotations

import asyncio
import math

import pytest
from engine.sglang.driving import BLOCK, greedy, prefill_only, prompt, serve
from engine.test_conformance import names_of
from engine.test_mock_engine import mock, mocks
from engine.test_mock_fetch import until_status

from evolving.core.config import EvictionPolicy, FetchStart
from evolving.runtime.clock import ManualClock
from evolving_node_agent.engine_factory import make_engine
from evolving_node_agent.engines.mock import MockEngine
from evolving_node_agent.engines.mock.model import block_kv
from evolving_node_agent.engines.port import CachedTokens, FinishReason, Tier
from evolving_node_agent.settings import NodeAgentSettings


@pytest.mark.parametrize("verify_kv", [True, False])
async def test_several_tokens_an_iteration_are_the_same_tokens(verify_kv: bool) -> None:
    """The prefill leg's token, then so many an iteration: n_it = ⌈(t_out - 1) / t_acc⌉, whatever ends the output."""
    tokens = prompt(1, 3 * BLOCK - 7)
    async with (
        mocks("one", verify_kv=verify_kv) as (one,),
        mocks("a", tokens_per_iteration=4, verify_kv=verify_kv) as (node,),
    ):
        for length in (2, 20, 21, 22):
            single, several = await serve(one, one, tokens, length), await serve(node, node, tokens, length)
            assert several.ids == single.ids
            assert several.finished.reason is FinishReason.LENGTH
            assert several.finished.iterations == len(several.token_events) == -(-(length - 1) // 4)
        stop_at = next(at for at in range(6, 20) if single.ids[at] not in single.ids[:at] and at % 4 != 0)
        stopped = await serve(node, node, tokens, greedy(22, stop_token_ids=(single.ids[stop_at],)))
        assert stopped.ids == single.ids[: stop_at + 1]
        assert stopped.finished.reason is FinishReason.STOP


async def test_kv_by_name_goes_every_way_and_moves_no_bytes() -> None:
    """A page of 64 MB is larger than any message may be."""
    async with mocks("a", "b", verify_kv=False, bytes_per_token=1_000_000) as (a, b):
        tokens = prompt(1, 5 * BLOCK + 9)
        alone = await serve(a, a, tokens, 70)
        moved = await serve(a, b, tokens, 70)
        assert moved.ids == alone.ids
        assert moved.sent.bytes == 6 * mock(a).config.page_bytes
        resumed = await serve(b, a, tokens + alone.ids[:30], greedy(70), generated=30)
        assert alone.ids[:30] + resumed.ids == alone.ids
        longer = tokens + alone.ids + prompt(2, 5)
        assert (await prefill_only(b, longer)).cached == CachedTokens(l1=6 * BLOCK)
        async with mocks("c", verify_kv=False, bytes_per_token=1_000_000) as (c,):
            fetched = await prefill_only(c, longer, holders=(b.holder(0, 6),))
            assert fetched.cached == CachedTokens(peer=6 * BLOCK)
            assert fetched.first_token == (await prefill_only(a, longer)).first_token


async def test_kv_by_name_has_the_digests_it_would_have() -> None:
    tokens = prompt(1, 4 * BLOCK)
    names = names_of(tokens)
    async with mocks("a") as (real,), mocks("b", verify_kv=False) as (named,):
        await asyncio.gather(prefill_only(real, tokens), prefill_only(named, tokens))
        for tier in Tier:
            wanted = await real.engine.block_digests(names, tier)
            assert len(wanted) == 4
            assert await named.engine.block_digests([*names, bytes(16)], tier) == wanted
        assert block_kv(names[0], 8) != block_kv(names[1], 8)


async def test_nodes_with_and_without_bytes_share_nothing() -> None:
    async with mocks("real") as (real,), mocks("named", verify_kv=False) as (named,):
        tokens = prompt(1, 3 * BLOCK + 1)
        await prefill_only(named, tokens)
        assert (await prefill_only(real, tokens, holders=(named.holder(0, 3),))).cached == CachedTokens()


def test_settings_reach_the_engine() -> None:
    settings = NodeAgentSettings(
        node_id="a",
        engine="mock",
        eviction=EvictionPolicy.LRU,
        fetch_start=FetchStart.ADMISSION,
        fetch_readers=3,
        fetch_bytes_per_s=1e9,
        mock_verify_kv=False,
        mock_bytes_per_token=100_000,
        mock_tokens_per_iteration=3,
        mock_fetch_bytes_per_s=2e9,
    )
    engine = make_engine(settings, ManualClock())
    assert isinstance(engine, MockEngine)
    config = engine.config
    assert (config.eviction, config.fetch_start) == (EvictionPolicy.LRU, FetchStart.ADMISSION)
    assert (config.fetch.readers, config.fetch.bytes_per_s, config.fetch_bytes_per_s) == (3, 1e9, 2e9)
    assert (config.verify_kv, config.bytes_per_token, config.tokens_per_iteration) == (False, 100_000, 3)
    assert config.transfer_bytes_per_s == math.inf


async def test_a_page_evicted_while_it_is_read_is_a_miss() -> None:
    """By name alone, too, only what the peer still holds once the time of the read has passed counts as read."""
    clock = ManualClock()
    async with mocks("a", "b", clock=clock, verify_kv=False) as (a, b):
        tokens = prompt(1, 8 * BLOCK + 1)
        wanted = await prefill_only(a, tokens)
        mock(a).faults.transfer_delay_s = 100.0
        reading = asyncio.create_task(prefill_only(b, tokens, holders=(a.holder(0, 8),), fetch_deadline_s=1e6))
        await until_status(b, lambda status: status.fetching_blocks == 8)
        while clock.now_s() < 50.0:
            await asyncio.sleep(0.001)
            await clock.advance(1.0)
        await a.engine.clear()
        while not reading.done():
            await asyncio.sleep(0.001)
            await clock.advance(10.0)
        assert reading.result().cached == CachedTokens()
        assert reading.result().first_token == wanted.first_token
