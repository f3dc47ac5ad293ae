"""What a node agent says of its engine's part of the pool: fetches from peers, and how full host memory is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import eventually

from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients
from evolving.internal.v1 import node_agent_pb2
from evolving.runtime.clock import SystemClock
from evolving.runtime.metrics import Metrics
from evolving_node_agent.engines.port import Engine, EngineInfo, EngineStatus, Taken
from evolving_node_agent.fetch_rate import FetchRate
from evolving_node_agent.node import Node
from evolving_node_agent.waits import LegSize

INFO = EngineInfo("1", "m", "m/f32", 16, 1000, 1024, 2048, 4096, 2048, 8192, 8, 128, 64, "n:1", "n:2", 1)


class ScriptedEngine:
    """Says the statuses it is given, and no more."""

    def __init__(self) -> None:
        self.statuses: asyncio.Queue[EngineStatus] = asyncio.Queue()
        self._status = EngineStatus()

    def status(self) -> EngineStatus:
        """The newest."""
        return self._status

    async def status_changes(self) -> AsyncIterator[EngineStatus]:
        """Each, as it is given."""
        while True:
            self._status = await self.statuses.get()
            yield self._status


def node_of(engine: ScriptedEngine, metrics: Metrics | None = None) -> Node:
    """A node whose engine is up."""
    prefill, decode = PrefillCoefficients(0.01, 1e-4, 0.0), DecodeCoefficients(0.01, 0.0, 0.001, 1e-6)
    node = Node("n", cast("Engine", engine), prefill, decode, SystemClock(), metrics or Metrics())
    node.engine_up(INFO)
    return node


async def said(engine: ScriptedEngine, node: Node, **fields: Any) -> node_agent_pb2.WatchStatusResponse:
    """What watchers get once the engine said this."""
    status = EngineStatus(**fields)
    engine.statuses.put_nowait(status)
    await eventually(lambda: engine.status() is status)
    await asyncio.sleep(0)  # the node takes what it was just given
    return node.status()


async def test_the_status_tells_of_the_pool() -> None:
    engine = ScriptedEngine()
    node = node_of(engine)
    following = asyncio.create_task(node.follow_engine(lambda _: None))
    try:
        before = await said(engine, node, l2_used_tokens=100, l2_zero_tokens=30, fetch_backlog_tokens=70)
        assert (before.l2_zero_tokens, before.fetch_backlog_tokens, before.fetch_tokens_per_s) == (30, 70, 0.0)
        during = await said(engine, node, fetching_blocks=4, fetched_tokens=64, fetch_busy_s=0.5)
        assert during.fetching_blocks == 4
        assert during.fetch_tokens_per_s == pytest.approx(128)
        node.engine_down()
        node.engine_up(INFO)
        again = await said(engine, node, fetched_tokens=32, fetch_busy_s=0.5)
        assert 64 < again.fetch_tokens_per_s < 128, "the next life counts from 0"
    finally:
        following.cancel()


async def test_contexts_that_reserved_are_told_with_those_that_decode_and_lengthen_no_wait() -> None:
    engine = ScriptedEngine()
    node = node_of(engine)
    following = asyncio.create_task(node.follow_engine(lambda _: None))
    try:
        prefilling = {"prefilling": {"leg": 100}, "decoding": 2, "decode_context_tokens": 500}
        node.running["leg"] = LegSize(100, 0)
        batch = await said(engine, node, **prefilling)
        both = await said(engine, node, **prefilling, reserved=1, reserved_context_tokens=300)
        assert (both.decoding, both.reserved, both.decode_context_tokens) == (2, 1, 800)
        assert both.wait_s == batch.wait_s > 0
    finally:
        following.cancel()


Reads = list[tuple[int, float]]
reads = st.lists(st.tuples(st.integers(0, 10_000), st.floats(0.001, 5.0)), min_size=1, max_size=30)


def rate_after(told: Reads, horizon_s: float = 2.0) -> FetchRate:
    """Told step by step of reads, one after the other, that brought so many tokens in so many seconds."""
    rate, tokens, busy_s = FetchRate(horizon_s), 0, 0.0
    for more, seconds in told:
        tokens, busy_s = tokens + more, busy_s + seconds
        rate.observe(tokens, busy_s, busy_s)
    return rate


@given(told=reads)
def test_the_rate_lies_between_the_slowest_and_the_fastest_read(told: Reads) -> None:
    each = [tokens / seconds for tokens, seconds in told]
    now_s = sum(seconds for _, seconds in told)
    assert min(each) * 0.999 <= rate_after(told).tokens_per_s(now_s) <= max(each) * 1.001


@given(told=reads)
def test_what_was_long_ago_in_time_of_reading_hardly_counts(told: Reads) -> None:
    now = [(500, 0.5)] * 60  # 15 horizons
    now_s = sum(seconds for _, seconds in told + now)
    assert rate_after(told + now).tokens_per_s(now_s) == pytest.approx(1000, rel=0.02)


def test_a_read_that_hangs_lowers_the_rate_and_a_pause_does_not() -> None:
    rate = rate_after([(1000, 1.0)])
    rate.observe(1000, 1.0, now_s=9.0)
    assert rate.tokens_per_s(9.0) == 1000
    rate.observe(1000, 2.0, now_s=10.0)
    assert 0 < rate.tokens_per_s(10.0) < 600


def test_a_rate_of_long_ago_is_unknown_so_that_reads_are_tried_again() -> None:
    rate = FetchRate(forget_s=30.0)
    rate.observe(10, 5.0, now_s=5.0)
    assert rate.tokens_per_s(34.9) == 2.0
    assert rate.tokens_per_s(35.0) == 0.0
    rate.observe(1010, 6.0, now_s=40.0)
    assert rate.tokens_per_s(40.0) == 1000, "nothing of the slow read is left"


async def test_counters_go_on_over_lives_of_the_engine() -> None:
    engine, metrics = ScriptedEngine(), Metrics()
    node = node_of(engine, metrics)
    following = asyncio.create_task(node.follow_engine(lambda _: None))
    try:
        await said(engine, node, fetched_tokens=64, fetch_busy_s=0.5, fetching_blocks=2)
        node.engine_up(INFO)
        await said(engine, node, fetched_tokens=32, fetch_busy_s=0.25, l2_used_tokens=9, l2_zero_tokens=4)
    finally:
        following.cancel()
    with node.prefill_leg("a", LegSize(10, 0)):
        node.leg_taken("a", Taken(queue_s=3.0, fetch_s=2.0, hidden_s=1.5))
    read = metrics.registry.get_sample_value
    assert read("evolving_node_fetched_tokens_total") == 96
    assert read("evolving_node_fetch_busy_seconds_total") == 0.75
    assert read("evolving_node_fetching_blocks") == 0
    assert (read("evolving_node_l2_used_tokens"), read("evolving_node_l2_zero_tokens")) == (9, 4)
    assert read("evolving_node_fetch_seconds_total") == 2.0
    assert read("evolving_node_fetch_hidden_seconds_total") == 1.5
