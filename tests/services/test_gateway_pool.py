"""What a gateway knows of the pool, how it routes by it, and what it counts of reuse."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
from gateway_harness import Bench, bench
from scripted_nodes import BLOCK_TOKENS, ScriptedNode

from evolving.core.config import FetchRule
from evolving.core.work import PrefillWork
from evolving.internal.v1 import directory_pb2, node_agent_pb2
from evolving.runtime.metrics import Metrics
from evolving.v1 import common_pb2, gateway_pb2
from evolving_gateway.metrics import GatewayMetrics
from evolving_gateway.node import Arriving, DecodeArriving, Node
from evolving_node_agent.engines.sglang import SglangConfig

BLOCKS = 60
PROMPT = [1 + at % 900 for at in range(BLOCKS * BLOCK_TOKENS + 1)]
ONE_TOKEN = gateway_pb2.Sampling(max_tokens=1)


def held_by(*node_ids: str) -> directory_pb2.Match:
    """The match of a context whose every whole block these nodes hold in host memory."""
    return directory_pb2.Match(
        pool_blocks=BLOCKS,
        nodes=[directory_pb2.NodeMatch(node_id=name, l2_blocks=BLOCKS, any_blocks=BLOCKS) for name in node_ids],
        holders=[directory_pb2.HolderRun(first_block=0, blocks=BLOCKS, node_ids=node_ids)],
    )


async def tell(it: Bench, node_id: str, wait_s: float, **status: Any) -> None:
    """Let a node push a status, and wait until the gateway has it."""
    it.nodes[node_id].push(**status)
    await it.wait(node_id, wait_s)


async def served(it: Bench) -> gateway_pb2.GenerateFinished:
    """A request for the context that `held_by` knows."""
    return await it.generate(PROMPT, sampling=ONE_TOKEN).all()


async def decoded(it: Bench, tokens: int = 4, model: str = "") -> gateway_pb2.GenerateFinished:
    """The same, with something to decode."""
    return await it.generate(PROMPT, model=model, sampling=gateway_pb2.Sampling(max_tokens=tokens)).all()


async def test_a_node_says_what_its_fetches_take() -> None:
    """Both could fetch in no time, by the settings; one says it can't, then the other that others come first."""
    async with bench("holder", "a", "b") as it:
        it.directory.match = held_by("holder")
        await tell(it, "holder", 60.0)
        await tell(it, "a", 0.01, fetch_tokens_per_s=100.0)
        await tell(it, "b", 0.1, fetch_tokens_per_s=1e5)
        finished = await served(it)
        assert finished.prefill_node_id == "b"
        assert it.nodes["b"].prefills[0].holders[0].node_id == "holder"
        await tell(it, "a", 0.02, fetch_tokens_per_s=1e5)
        await tell(it, "b", 0.01, fetch_backlog_tokens=1_000_000)
        assert (await served(it)).prefill_node_id == "a"
        assert it.metric("gateway_choices_hung_on_total", term="fetch") == 2
        assert it.metric("gateway_choices_total") == 2


async def test_a_full_node_is_spared_duplicates() -> None:
    full = {"l2_total_tokens": 40_000, "l2_used_tokens": 40_000}
    async with bench("holder", "a", "b", fetch_bytes_per_s=1e8) as it:
        it.directory.match = held_by("holder")
        await tell(it, "holder", 60.0)
        await tell(it, "a", 0.01, **full)
        await tell(it, "b", 0.35, **full, l2_zero_tokens=len(PROMPT))
        assert (await served(it)).prefill_node_id == "b", "what no branch counts may go"
        assert it.metric("gateway_choices_hung_on_total", term="duplicate") == 1
        await tell(it, "b", 0.36, queued_tokens=len(PROMPT))
        assert (await served(it)).prefill_node_id == "a", "what is queued there will take that room"


@pytest.mark.parametrize(("fetch_bytes_per_s", "prefill_node_id"), [(1e7, "b"), (1e9, "a")])
async def test_a_new_context_goes_where_there_is_room(fetch_bytes_per_s: float, prefill_node_id: str) -> None:
    """What it evicts is taken to lie elsewhere too: worth a wait where it would take as long to bring back."""
    full = {"l2_total_tokens": 40_000, "l2_used_tokens": 40_000}
    async with bench("a", "b", fetch_bytes_per_s=fetch_bytes_per_s) as it:
        await tell(it, "a", 0.01, **full)
        await tell(it, "b", 0.35, **full, l2_zero_tokens=len(PROMPT))
        finished = await served(it)
        assert finished.prefill_node_id == prefill_node_id
        assert finished.reuse.pool_tokens == 0, "nobody held any of it"


async def test_a_branch_is_decoded_where_its_copy_lies_while_that_node_has_a_slot() -> None:
    async with bench("p", "d1", "d2", "d3") as it:
        await it.split(1, p="prefill", d1="decode", d2="decode", d3="decode")
        for at, node_id in enumerate(("d1", "d2", "d3"), 1):
            it.directory.match = held_by("p", node_id)
            for depth in it.directory.match.nodes:
                depth.l1_blocks = BLOCKS
            for other in ("d1", "d2", "d3"):
                await tell(it, other, at / 8, decode_slots_free=2 if other == node_id else 8)
            assert (await decoded(it)).decode_node_id == node_id
        await tell(it, "d3", 1.0, decode_slots_free=0)
        assert (await decoded(it)).decode_node_id != "d3"


async def test_what_sending_a_context_takes_is_by_what_reads_from_peers_took() -> None:
    """Decode nodes read nothing themselves. One has the context and a longer batch; the other would get it sent."""
    async with bench("p", "d1", "d2") as it:
        await it.split(1, p="prefill", d1="decode", d2="decode")
        it.directory.match = held_by("p", "d1")
        for depth in it.directory.match.nodes:
            depth.l1_blocks = BLOCKS
        await tell(it, "d1", 0.1, decoding=4)
        for wait_s, rate, decode_node_id in ((0.2, 1e3, "d1"), (0.3, 1e9, "d2")):
            await tell(it, "p", wait_s, fetch_tokens_per_s=rate)
            assert (await decoded(it, tokens=60)).decode_node_id == decode_node_id


async def test_what_reads_take_is_asked_of_the_nodes_of_the_model_that_serve() -> None:
    """By p's reads the context stays where it lies; another model's, and those of a node that left off, are quick."""
    async with bench("p", "d1", "d2", "quit", "other") as it:
        await it.register(it.nodes["other"], model="other", kv_format="other")
        await it.split(1, p="prefill", d1="decode", d2="decode", quit="prefill", other="prefill")
        it.directory.match = held_by("p", "d1")
        for depth in it.directory.match.nodes:
            depth.l1_blocks = BLOCKS
        await tell(it, "d1", 0.1, decoding=4)
        await tell(it, "p", 0.2, fetch_tokens_per_s=1e3)
        await tell(it, "other", 0.3, fetch_tokens_per_s=1e9)
        await tell(it, "quit", 0.4, fetch_tokens_per_s=1e9, ready=False)
        assert (await decoded(it, tokens=60, model="tiny")).decode_node_id == "d1"
        await tell(it, "quit", 0.5, ready=True)
        assert (await decoded(it, tokens=60, model="tiny")).decode_node_id == "d2"


async def test_nothing_is_sent_where_a_request_was_prefilled() -> None:
    """Nobody holds any of it before; the other node has more slots."""
    async with bench("a", "b") as it:
        await tell(it, "b", 0.5, decode_slots_free=99)
        finished = await decoded(it)
        assert (finished.prefill_node_id, finished.decode_node_id) == ("a", "a")


async def test_without_fetches_kv_is_used_where_it_lies_or_computed() -> None:
    async with bench("holder", "a", fetch=FetchRule.NEVER) as it:
        it.directory.match = held_by("holder")
        assert (await served(it)).prefill_node_id == "holder"
        await tell(it, "holder", 60.0)
        finished = await served(it)
        assert (finished.prefill_node_id, finished.reuse.planned_tokens) == ("a", 0)
        assert finished.reuse.pool_tokens == BLOCKS * BLOCK_TOKENS
        assert not it.nodes["a"].prefills[0].holders
        assert it.nodes["a"].prefills[0].expected_cached_tokens == 0


async def test_only_what_someone_can_be_asked_for_is_planned() -> None:
    """The pool has all of it, but half of that in device memory or on nodes nobody can reach."""
    async with bench("holder", "a") as it:
        it.directory.match = held_by("holder")
        half = directory_pb2.HolderRun(first_block=0, blocks=BLOCKS // 2, node_ids=["holder", "gone"])
        rest = directory_pb2.HolderRun(first_block=BLOCKS // 2, blocks=BLOCKS - BLOCKS // 2, node_ids=["gone"])
        del it.directory.match.holders[:]
        it.directory.match.holders.extend([half, rest])
        await tell(it, "holder", 60.0)
        finished = await served(it)
        assert finished.prefill_node_id == "a"
        assert finished.reuse.pool_tokens == BLOCKS * BLOCK_TOKENS
        assert finished.reuse.planned_tokens == BLOCKS // 2 * BLOCK_TOKENS
        assert [hint.blocks for hint in it.nodes["a"].prefills[0].holders] == [BLOCKS // 2]


# -- what a node's status does not say yet


def node(**facts: int) -> Node:
    """A node nobody is connected to."""
    nothing = cast("Any", None)
    return Node(ScriptedNode("n").registration(**facts), nothing, nothing)


def test_legs_count_until_a_status_that_came_after_they_were_acknowledged() -> None:
    it = node()
    status = node_agent_pb2.WatchStatusResponse(
        l2_total_tokens=1_000, l2_used_tokens=900, l2_zero_tokens=400, queued_tokens=50, fetch_backlog_tokens=20
    )
    it.take_status(status)
    assert (it.fetch_backlog_tokens, it.room_tokens, it.unacknowledged) == (20, 450, ())
    work = PrefillWork(60, 140)
    it.arriving["leg"] = Arriving(work, fetched_tokens=100)
    it.take_status(status)  # may have been on its way before the leg was sent
    assert (it.fetch_backlog_tokens, it.room_tokens, it.unacknowledged) == (120, 290, (work,))
    it.acknowledge("leg", 3.0)
    assert (it.fetch_backlog_tokens, it.room_tokens, it.unacknowledged) == (120, 290, ())
    it.take_status(status)
    assert (it.fetch_backlog_tokens, it.room_tokens, it.unacknowledged) == (20, 450, ())


def test_decode_legs_count_until_a_status_that_came_after_each_step() -> None:
    it = node(l1_tokens=8_192, reserve_tokens=4_096)
    status = node_agent_pb2.WatchStatusResponse(
        l2_total_tokens=1_000, decode_slots_free=4, decoding=2, reserved=1, decode_context_tokens=500
    )
    it.take_status(status)

    def known() -> tuple[float, ...]:
        return it.slots_free, it.decoding, it.decode_context_tokens, it.decode_memory_tokens, it.room_tokens

    assert known() == (4, 3, 500, 3_596, 1_000)
    leg = it.decode_arriving["leg"] = DecodeArriving(context_tokens=200, stored_tokens=160)
    assert known() == (3, 4, 700, 3_396, 840)
    leg.reserved = True
    assert known() == (3, 4, 700, 3_396, 840), "as long as the node's status doesn't say so"
    status.MergeFrom(node_agent_pb2.WatchStatusResponse(decode_slots_free=3, reserved=2, decode_context_tokens=700))
    it.take_status(status)
    assert known() == (3, 4, 700, 3_396, 840), "its slot and context are in the status, its KV is not here yet"
    leg.started = True
    assert known() == (3, 4, 700, 3_396, 840)
    it.take_status(status)
    assert known() == (3, 4, 700, 3_396, 1_000)


def test_an_idle_node_has_memory_for_the_longest_prompt_however_long_a_context_its_model_takes() -> None:
    """The facts of an SGLang node of 8,192 tokens: half of them are kept for prefill: a longest prompt, rounded."""
    config = SglangConfig("/model", l1_tokens=8_192)
    for max_context_tokens in (8_192, 131_072):
        it = node(
            l1_tokens=8_192,
            reserve_tokens=config.reserve_tokens,
            max_prompt_tokens=config.prompt_limit_tokens,
            max_context_tokens=max_context_tokens,
        )
        assert it.decode_memory_tokens == 4_096 > it.registration.max_prompt_tokens
        it.take_status(node_agent_pb2.WatchStatusResponse(decoding=3, decode_context_tokens=6_000))
        assert it.decode_memory_tokens == -1_904, "some of them wait for memory"


def test_room_is_never_negative_and_endless_without_host_memory() -> None:
    it = node()
    assert it.room_tokens == math.inf
    it.take_status(node_agent_pb2.WatchStatusResponse(l2_total_tokens=10, l2_used_tokens=10, queued_tokens=99))
    assert it.room_tokens == 0


# -- what is counted


@pytest.mark.parametrize(
    ("pool", "planned", "cached", "by_routing", "by_arrival"),
    [(100, 100, 100, 0, 0), (100, 60, 60, 40, 0), (100, 60, 50, 40, 10), (100, 60, 90, 10, 0), (0, 0, 30, 0, 0)],
)
def test_lost_reuse_by_cause(pool: int, planned: int, cached: int, by_routing: int, by_arrival: int) -> None:
    metrics = Metrics()
    reuse = gateway_pb2.Reuse(pool_tokens=pool, planned_tokens=planned, loss=common_pb2.LOSS_CAUSE_SWITCH)
    GatewayMetrics(metrics).reused(reuse, gateway_pb2.CachedTokens(own_l1=cached - 20, peer_l2=20))
    read = metrics.registry.get_sample_value
    assert read("evolving_gateway_lost_tokens_total", {"cause": "routing"}) == by_routing
    assert read("evolving_gateway_lost_tokens_total", {"cause": "arrival"}) == by_arrival
    assert read("evolving_gateway_losses_total", {"cause": "switch"}) == 1
    assert read("evolving_gateway_cached_tokens_total", {"source": "peer_l2"}) == 20


async def test_fetch_time_and_what_was_hidden_of_it_are_summed() -> None:
    async with bench("n") as it:
        await served(it)
        await served(it)
        assert it.metric("gateway_fetch_seconds_total") == 0.25
        assert it.metric("gateway_fetch_hidden_seconds_total") == 0.2
