"""One attempt by itself: however a leg ends, the attempt ends too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest
from gateway_harness import KEYS
from scripted_nodes import BLOCK_TOKENS, VOCABULARY, ScriptedNode, ids_bytes
from waiting import eventually

from evolving.core.routing import Context
from evolving.runtime.clock import SystemClock
from evolving.runtime.keys import encode
from evolving.runtime.memory_store import MemoryStore
from evolving.runtime.metrics import Metrics
from evolving.runtime.tasks import end_tasks
from evolving.v1 import gateway_pb2
from evolving_gateway.attempt import Attempt
from evolving_gateway.leg_events import LegFailed, NewTokens, Queued, SoonerElsewhere
from evolving_gateway.metrics import GatewayMetrics
from evolving_gateway.nodes import Cluster
from evolving_gateway.plan import Job, Plan
from evolving_gateway.router import NOWHERE, Router
from evolving_gateway.settings import GatewaySettings

PROMPT = list(range(1, 101))


@asynccontextmanager
async def attempt(node: ScriptedNode | None = None) -> AsyncIterator[tuple[Attempt, Cluster]]:
    """An attempt on a node that takes nothing from its queue yet."""
    node = node or ScriptedNode("n")
    node.script.take.clear()
    await node.start()
    async with MemoryStore(SystemClock()) as store:
        await store.put(KEYS.node("n"), encode(node.registration()))
        cluster = Cluster(store, KEYS, SystemClock(), Metrics(), token=None, max_message_bytes=1 << 20, silence_s=10.0)
        watching = asyncio.create_task(cluster.watch_nodes())
        await eventually(lambda: "n" in cluster.nodes and cluster.nodes["n"].ready)
        metrics = GatewayMetrics(Metrics())
        router = Router(cluster, GatewaySettings().routing(), metrics)
        model = router.model("")
        score = router.prefill(model, Context("r", len(PROMPT), BLOCK_TOKENS), NOWHERE, {}).chosen
        assert score is not None
        assert model.vocabulary_tokens == VOCABULARY
        job = Job("p0", "default", "r", model, ids_bytes(PROMPT), b"\0" * 32, gateway_pb2.Sampling(max_tokens=5),
                  priority=0, branch_id="", version=0, reserve_deadline_s=5.0)  # fmt: skip
        plan = Plan(cluster.nodes["n"], score, NOWHERE, [], [], may_requote=False, excluded_prefill={},
                    excluded_decode={}, timeout_s=60.0)  # fmt: skip
        try:
            yield Attempt(job, plan, cluster, router, metrics), cluster
        finally:
            node.script.take.set()
            await cluster.close()
            watching.cancel()
            await node.die()


async def test_a_call_cut_off_by_its_channel_is_a_lost_leg() -> None:
    async with attempt() as (it, cluster), aclosing(it.run()) as events:
        node = cluster.nodes["n"]
        assert isinstance(await anext(events), Queued)
        await node.channel.close()
        with pytest.raises(LegFailed, match="CALL_CANCELLED"):
            await anext(events)
        assert node.legs == 0


async def test_a_node_that_leaves_keeps_its_channel_while_a_leg_runs() -> None:
    async with attempt() as (it, cluster), aclosing(it.run()) as events:
        node = cluster.nodes["n"]
        assert isinstance(await anext(events), Queued)
        await cluster._store.delete(KEYS.node("n"))
        await eventually(lambda: not cluster.nodes)
        assert node.legs == 1
        await events.aclose()
        assert node.legs == 0


async def test_a_decode_leg_counts_where_the_node_has_not_said_yet_that_it_runs() -> None:
    scripted = ScriptedNode("n")
    async with attempt(scripted) as (it, cluster), aclosing(it.run()) as events:
        node = cluster.nodes["n"]
        assert isinstance(await anext(events), Queued)
        scripted.script.silent = True
        scripted.script.start.clear()
        scripted.script.pause_at = 2
        scripted.script.take.set()
        assert isinstance(await anext(events), NewTokens)
        await eventually(lambda: any(leg.reserved for leg in node.decode_arriving.values()))
        (leg,) = node.decode_arriving.values()
        assert (leg.context_tokens, leg.stored_tokens, leg.started) == (len(PROMPT), 0, False), "prefilled here"
        assert (node.decoding, node.slots_free) == (1, 7)
        scripted.script.start.set()
        await eventually(lambda: leg.started)
        assert node.decoding == 1
        scripted.script.silent = False
        await eventually(lambda: not node.decode_arriving)


async def test_a_decode_leg_that_ends_counts_no_more() -> None:
    scripted = ScriptedNode("n")
    async with attempt(scripted) as (it, cluster):
        async with aclosing(it.run()) as events:
            assert isinstance(await anext(events), Queued)
            scripted.script.silent = True
            scripted.script.pause_at = 2
            scripted.script.take.set()
            await eventually(lambda: bool(cluster.nodes["n"].decode_arriving))
        assert not cluster.nodes["n"].decode_arriving


async def test_a_prefill_leg_counts_from_the_start_on_and_no_more_when_it_is_over() -> None:
    """Who is routed in the same moment knows of it, whether the leg has done its first step or not."""
    async with attempt() as (it, cluster):
        node, events = cluster.nodes["n"], it.run()
        first = asyncio.create_task(anext(events))
        await asyncio.sleep(0)
        assert len(node.arriving) == 1
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert (len(node.arriving), node.legs) == (0, 0)


@pytest.mark.parametrize("client_gone", [False, True])
async def test_what_a_leg_reserves_at_the_node_it_leaves_for_ends_with_it(client_gone: bool) -> None:
    scripted, other = ScriptedNode("n"), ScriptedNode("m")
    scripted.script.leg_s = scripted.status.wait_s = 50.0
    async with attempt(scripted) as (it, cluster), aclosing(it.run()) as events:
        assert isinstance(await anext(events), Queued)
        telling = asyncio.create_task(cluster.tell_newcomers())
        await other.start()
        try:
            await cluster._store.put(KEYS.node("m"), encode(other.registration()))
            await eventually(lambda: "m" in cluster.nodes and bool(cluster.nodes["m"].arriving))
            if client_gone:
                await events.aclose()
            else:
                with pytest.raises(SoonerElsewhere) as caught:
                    await anext(events)
                assert caught.value.decision.chosen is not None
                assert caught.value.decision.chosen.node_id == "m"
            assert not cluster.nodes["m"].arriving
            assert not cluster.nodes["n"].arriving
        finally:
            await end_tasks(telling)
            await other.die()
