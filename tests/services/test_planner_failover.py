"""Planners that die, lose their office or lose etcd: another leads, epochs grow, nothing is written unfenced."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import cast

import grpc
import grpc.aio
import pytest
from etcd_process import Etcd
from planner_harness import (
    HURRIED,
    KEYS,
    PREFILL_HEAVY,
    PlannerProcess,
    join,
    open_store,
    planner,
    planner_process,
    reporting,
)
from waiting import eventually

from evolving.core import planner as core_planner
from evolving.internal.v1 import planner_pb2 as internal_pb2
from evolving.runtime.clock import SystemClock
from evolving.runtime.election import Election
from evolving.runtime.etcd import EtcdStore
from evolving.runtime.keys import Split, decode
from evolving.runtime.metrics import Metrics
from evolving.runtime.store import Fenced, Guard
from evolving.v1 import common_pb2, planner_pb2
from evolving.wire.status import parse_error
from evolving_planner.metrics import PlannerMetrics
from evolving_planner.office import FirstSplit, Office, Situation
from evolving_planner.view import View

P, D = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE


def to_shape(prefill: int, decode: int) -> planner_pb2.ProposeSplitRequest:
    return planner_pb2.ProposeSplitRequest(shape=planner_pb2.SplitShape(prefill_nodes=prefill, decode_nodes=decode))


async def stored_split(store: EtcdStore) -> Split:
    found = await store.get(KEYS.split)
    assert found is not None
    return decode(Split, found.value)


async def test_a_killed_leader_is_succeeded_and_epochs_only_grow(etcd: Etcd) -> None:
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_store(etcd))
        await join(store, "a", "b", "c")
        planners = [await stack.enter_async_context(planner_process(etcd.endpoints[0])) for _ in range(3)]
        epochs: list[int] = []
        leaders: list[str] = []
        while planners:
            leader = await the_leader(planners)
            leaders.append(leader.client.address)
            for request in (to_shape(1, 2), to_shape(2, 1)):
                answer = await leader.client.public.ProposeSplit(request, timeout=10)
                epochs.append(answer.split.epoch)
                assert (await stored_split(store)).epoch == answer.split.epoch
            for follower in planners:
                if follower is not leader:
                    await refuses_as_follower(follower, leader.client.address)
            await leader.kill()
            planners.remove(leader)
            if planners:
                reasons = await history(await the_leader(planners))
                assert len(reasons) >= len(epochs) - 1, "a new leader has the history"
        assert len(set(leaders)) == 3
        assert epochs == sorted(set(epochs)), "strictly increasing"


async def the_leader(planners: list[PlannerProcess]) -> PlannerProcess:
    """Wait until one of these leads."""
    found: list[PlannerProcess] = []

    async def one_leads() -> bool:
        found[:] = [one for one in planners if await one.client.leads()]
        return bool(found)

    await eventually(one_leads)
    assert len(found) == 1
    return found[0]


async def refuses_as_follower(follower: PlannerProcess, leader_address: str) -> None:
    async def knows_the_leader() -> bool:
        return (await follower.client.get_split()).leader_address == leader_address

    await eventually(knows_the_leader)
    report = internal_pb2.ReportWorkRequest(partition_id="p0", node_id="a", sequence=1)
    for call in (
        follower.client.public.ProposeSplit(to_shape(1, 2), timeout=10),
        follower.client.internal.ReportWork(report, timeout=10),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        detail = parse_error(error.value)
        assert (detail.status, detail.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NOT_LEADER")
        assert detail.metadata["leader"] == leader_address


async def history(of: PlannerProcess) -> list[str]:
    return [decision.reason for decision in await of.client.decisions()]


async def follow_splits(store: EtcdStore, seen: list[Split]) -> None:
    """Every value the split has, as etcd tells it."""
    async for batch in store.watch(KEYS.split):
        seen.extend(decode(Split, found.value) for found in batch.puts)


async def test_a_leader_killed_within_a_window_is_succeeded_with_history_hold_and_model(etcd: Etcd) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in HURRIED.items()]
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_store(etcd))
        splits: list[Split] = []
        watching = asyncio.create_task(follow_splits(store, splits))
        stack.callback(watching.cancel)
        planners = [await stack.enter_async_context(planner_process(etcd.endpoints[0], *flags)) for _ in range(2)]
        await join(store, "a", "b", "c", "d")
        leader = await the_leader(planners)
        (standby,) = [one for one in planners if one is not leader]
        await stack.enter_async_context(reporting(PREFILL_HEAVY, "a", leader.client, standby.client))

        async def switched() -> bool:
            return bool(await leader.client.decisions("switch"))

        await eventually(switched)
        for sequence in range(1, 60):  # enough iterations of both phases for a fit
            report = internal_pb2.ReportWorkRequest(
                partition_id="p0", node_id="b", incarnation="b-1", sequence=sequence, windows=[window_of(sequence)]
            )
            await leader.client.internal.ReportWork(report, timeout=10)
        fitted = await leader.client.public.RefitModel(planner_pb2.RefitModelRequest(node_ids=["b"]), timeout=10)
        assert fitted.nodes[1].prefill_fit.node_id == fitted.nodes[1].decode_fit.node_id == "b"

        async def standby_knows() -> bool:
            known = await standby.client.public.GetModel(planner_pb2.GetModelRequest(), timeout=10)
            return [fit_of(node) for node in known.nodes] == [fit_of(node) for node in fitted.nodes]

        await eventually(standby_knows)
        await leader.client.public.ProposeSplit(to_shape(1, 3), timeout=10)
        hold = (await leader.client.get_split()).hold
        assert hold.author == "operator:default"
        decided = await leader.client.decisions(with_evaluations=True)
        await leader.kill()

        assert await the_leader([standby]) is standby
        after = await standby.client.decisions(with_evaluations=True)
        numbered = {decision.decided_at_s: decision for decision in after}
        assert [numbered.get(decision.decided_at_s) for decision in decided] == decided
        assert (await standby.client.get_split()).hold == hold
        assert await standby_knows()

        async def held_again() -> bool:
            stays = await standby.client.decisions("stay")
            return any(d.decided_at_s not in numbered and "holds the split" in d.reason for d in stays)

        await eventually(held_again)
        await standby.client.public.ReleaseSplit(planner_pb2.ReleaseSplitRequest(), timeout=10)

        async def switched_again() -> bool:
            return len(await standby.client.decisions("switch")) == 2

        await eventually(switched_again)
        epochs = [split.epoch for split in splits]
        assert epochs == sorted(set(epochs)), "each epoch is written once, and they grow"
        changes = [d for d in await standby.client.decisions() if d.epoch_after > d.epoch_before]
        assert sorted(d.epoch_after for d in changes) == epochs, "each write has its decision"


def fit_of(node: planner_pb2.NodeModel) -> tuple[object, ...]:
    """What a record in etcd tells of a node."""
    coefficients = (*node.prefill_coefficients_s, *node.decode_coefficients_s)
    return node.node_id, coefficients, node.prefill_fit.fitted_at_s, node.decode_fit.fitted_at_s


def window_of(number: int) -> internal_pb2.IterationWindow:
    """Iterations that took what a node takes whose coefficients are c0 0.02, c1 0.002, d0 0.03 and d2 0.002."""
    tokens, requests = 100 + 37 * number % 400, 1 + number % 7
    prefill = internal_pb2.IterationSums(
        iterations=2, busy_s=0.04 + 0.002 * tokens, uncached_tokens=tokens, query_key_pairs=tokens**2 / 2
    )
    decode = internal_pb2.IterationSums(
        iterations=10,
        busy_s=0.3 + 0.02 * requests,
        requests=10 * requests,
        context_tokens=(1000 + 400 * (number % 11)) * requests,
    )
    return internal_pb2.IterationWindow(incarnation="b-1", prefill=prefill, decode=decode)


async def test_a_leader_that_was_paused_finds_that_another_leads(etcd: Etcd) -> None:
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_store(etcd))
        await join(store, "a", "b", "c")
        planners = [await stack.enter_async_context(planner_process(etcd.endpoints[0])) for _ in range(2)]
        paused = await the_leader(planners)
        (other,) = [one for one in planners if one is not paused]
        before = await paused.client.public.ProposeSplit(to_shape(1, 2), timeout=10)
        paused.process.send_signal(signal.SIGSTOP)
        assert await the_leader([other]) is other
        after = await other.client.public.ProposeSplit(to_shape(2, 1), timeout=10)
        assert after.split.epoch > before.split.epoch
        late = paused.client.public.ProposeSplit(to_shape(1, 2), timeout=30)
        paused.process.send_signal(signal.SIGCONT)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await late
        assert parse_error(error.value).reason == "NOT_LEADER"
        assert (await stored_split(store)).epoch == after.split.epoch


class FormerLeader:
    """An election that still believes in an office it has lost: a process that was paused, a clock that stood."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def is_leader(self) -> bool:
        return True

    def fence(self) -> Guard:
        return self._guard

    async def leadership_changes(self) -> AsyncIterator[bool]:
        yield True
        await asyncio.Event().wait()


def to_2p1d(now: Situation) -> core_planner.Decision:
    shape = core_planner.SplitShape(2, 1)
    return core_planner.propose_shape(
        now.split, now.live, shape, expected_epoch=0, reason="", author="former", now_s=0.0
    )


async def test_a_former_leader_that_does_not_know_it_is_refused(etcd: Etcd) -> None:
    async with open_store(etcd) as store:
        former = await store.put(KEYS.leader("planner"), b"former")
        await store.delete(KEYS.leader("planner"))
        async with planner(etcd, initial_split="1P2D") as (_, client):
            await join(store, "a", "b", "c")

            async def split_written() -> bool:
                return (await client.get_split()).split.epoch > 0

            await eventually(split_written)
            before = await stored_split(store)
            clock, metrics = SystemClock(), PlannerMetrics(Metrics())
            view = View(store, KEYS, clock)
            office = Office(store, KEYS, view, first=FirstSplit(), decisions_kept=10, clock=clock, metrics=metrics)
            election = FormerLeader(Guard(KEYS.leader("planner"), former.create_revision))
            loops = [
                asyncio.create_task(view.run()),
                asyncio.create_task(office.run(cast("Election", election), "former")),
            ]
            try:
                await asyncio.wait_for(view.loaded.wait(), 30)
                with pytest.raises(Fenced):
                    await office.decide(to_2p1d)
            finally:
                for loop in loops:
                    loop.cancel()
                await asyncio.gather(*loops, return_exceptions=True)
            assert await stored_split(store) == before


async def test_the_decision_of_a_leader_that_died_before_keeping_it_is_found_by_the_next(etcd: Etcd) -> None:
    async with open_store(etcd) as store:
        await join(store, "a", "b")
        async with planner(etcd) as (_, client):

            async def decided() -> bool:
                return len(await client.decisions()) == 1

            await eventually(decided)
        assert (await store.get(KEYS.decision(0))) is not None
        split = await stored_split(store)
        await store.put(
            KEYS.split,
            (await store.get(KEYS.split)).value.replace(b'"epoch":1', b'"epoch":2').replace(b"first split", b"orphan"),  # type: ignore[union-attr]
        )
        async with planner(etcd) as (_, client):

            async def found() -> bool:
                return [d.epoch_after for d in await client.decisions()] == [split.epoch + 1, split.epoch]

            await eventually(found)
            assert (await client.decisions())[0].reason.startswith("orphan")


async def test_without_etcd_reads_go_on_and_nothing_is_written(etcd: Etcd) -> None:
    async with open_store(etcd) as store, planner(etcd) as (_, client):
        await join(store, "a", "b")

        async def split_written() -> bool:
            return (await client.get_split()).split.epoch > 0

        await eventually(split_written)
        split = (await client.get_split()).split
        etcd.members[0].kill()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.public.ProposeSplit(to_shape(1, 1), timeout=10)
        assert parse_error(error.value).reason in {"STORE_UNAVAILABLE", "NOT_LEADER"}

        async def stepped_down() -> bool:
            return (await client.get_split()).leader_address == ""

        await eventually(stepped_down)
        assert (await client.get_split()).split == split
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.public.ProposeSplit(to_shape(1, 1), timeout=10)
        assert parse_error(error.value).reason == "NOT_LEADER"
        await etcd.restart(etcd.members[0])
        await eventually(client.leads)
        swapped = planner_pb2.RoleChanges(roles={node: P if role == D else D for node, role in split.roles.items()})
        answer = await client.public.ProposeSplit(planner_pb2.ProposeSplitRequest(changes=swapped), timeout=10)
        assert answer.split.epoch > split.epoch
        assert dict(answer.split.roles) == dict(swapped.roles)
