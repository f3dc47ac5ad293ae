"""Deciding by measurement, over the wire on a real etcd: what each mode does, holds, what-if, and the cooldown."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from etcd_process import Etcd
from planner_harness import (
    DECODE_HEAVY,
    HURRIED,
    KEYS,
    PREFILL_HEAVY,
    Client,
    Load,
    join,
    open_store,
    planner,
    reporting,
    work_report,
)
from waiting import eventually

from evolving.core.planner import DecisionKind
from evolving.core.replan import evaluate
from evolving.v1 import common_pb2, planner_pb2
from evolving.wire.status import parse_error
from evolving_planner.records import decode_decision

P, D, M = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE, common_pb2.ROLE_MIXED
FOUR = ("a", "b", "c", "d")
KEEP = planner_pb2.KeepRoles()


@asynccontextmanager
async def planned(
    etcd: Etcd, load: Load, first: planner_pb2.ProposeSplitRequest | None = None, **settings: Any
) -> AsyncIterator[Client]:
    """A planner of four nodes, two of them prefilling, that measures a load. `first` is asked of it before."""
    async with open_store(etcd) as store, planner(etcd, initial_split="2P2D", **{**HURRIED, **settings}) as (_, client):
        await join(store, *FOUR)

        async def split_written() -> bool:
            return len(await client.roles()) == len(FOUR)

        await eventually(split_written)
        if first is not None:
            await client.public.ProposeSplit(first, timeout=10)
        async with reporting(load, "a", client):
            yield client


async def prefills(client: Client) -> int:
    return list((await client.roles()).values()).count(P)


async def stays_because(client: Client, reason: str) -> planner_pb2.Decision:
    """The first decision to stay that says so."""
    found: list[planner_pb2.Decision] = []

    async def decided() -> bool:
        found[:] = [stay for stay in await client.decisions("stay") if reason in stay.reason]
        return bool(found)

    await eventually(decided)
    return found[-1]


@pytest.mark.parametrize(("load", "wanted"), [(PREFILL_HEAVY, 3), (DECODE_HEAVY, 1)])
async def test_the_split_follows_the_work(etcd: Etcd, load: Load, wanted: int) -> None:
    async with planned(etcd, load) as client:

        async def followed() -> bool:
            return await prefills(client) == wanted

        await eventually(followed)
        (switch,) = await client.decisions("switch", with_evaluations=True)
        assert switch.epoch_after == switch.epoch_before + 1
        assert switch.author == "planner"
        assert dict(switch.roles_after) == await client.roles()
        evaluation = switch.evaluation
        assert dict(evaluation.roles) == dict(switch.roles_before)
        assert [(c.shape.prefill_nodes, c.shape.decode_nodes) for c in evaluation.candidates] == [
            (1, 3),
            (2, 2),
            (3, 1),
        ]
        best = evaluation.candidates[wanted - 1]
        assert best.passes
        assert best.mean_gain == max(candidate.mean_gain for candidate in evaluation.candidates)
        assert {node: switch.roles_after[node] for node in best.moves} == dict(best.moves)
        assert len(evaluation.slices) == evaluation.gate.slices == 4
        assert [model.node_id for model in evaluation.models] == list(FOUR)
        assert evaluation.HasField("missing")
        await stays_because(client, "no other split is surely better")
        assert len(await client.decisions("switch")) == 1
        assert not (await client.decisions("switch"))[0].HasField("evaluation"), "only where it is asked for"


async def test_a_recorded_decision_computes_to_the_same(etcd: Etcd) -> None:
    async with planned(etcd, PREFILL_HEAVY) as client, open_store(etcd) as store:

        async def switched() -> bool:
            return bool(await client.decisions("switch"))

        await eventually(switched)
        listing = await store.list(KEYS.decisions)
        assert [item.key for item in listing.items] == [KEYS.decision(n) for n in range(len(listing.items))]
        found = [decode_decision(item.value)[0] for item in listing.items]
        measured = [decision for decision in found if decision.kind in (DecisionKind.SWITCH, DecisionKind.STAY)]
        assert measured
        for decision in measured:
            kept = decision.evaluation
            assert kept is not None
            assert evaluate(kept.slices, kept.roles, kept.models, kept.config) == kept


@pytest.mark.parametrize(
    ("mode", "reason"),
    [("shadow", "in shadow nothing is changed"), ("manual", "changed by operators alone")],
)
async def test_in_other_modes_decisions_are_recorded_and_change_nothing(etcd: Etcd, mode: str, reason: str) -> None:
    async with planned(etcd, PREFILL_HEAVY, mode=mode) as client, open_store(etcd) as store:
        stay = await stays_because(client, reason)
        assert "3P1D gains" in stay.reason
        answer = await client.get_split()
        assert answer.mode == mode
        assert answer.split.epoch == 1
        assert await prefills(client) == 2
        await store.delete(KEYS.node("d"))  # nodes that go are followed all the same

        async def three_left() -> bool:
            return len(await client.roles()) == 3

        await eventually(three_left)


async def test_an_operators_split_holds_until_it_is_released(etcd: Etcd) -> None:
    async with planned(etcd, PREFILL_HEAVY) as client:
        request = planner_pb2.ProposeSplitRequest(
            shape=planner_pb2.SplitShape(prefill_nodes=1, decode_nodes=3), reason="a test"
        )
        await client.public.ProposeSplit(request, timeout=10)
        held = await stays_because(client, "operator:default holds the split until released")
        assert held.hold == planner_pb2.Hold(author="operator:default", reason="a test")
        assert (await client.get_split()).hold == held.hold
        assert await prefills(client) == 1
        await client.public.ReleaseSplit(planner_pb2.ReleaseSplitRequest(reason="it is over"), timeout=10)
        assert (await client.decisions("operator"))[0].reason == "it is over"
        assert not (await client.get_split()).HasField("hold")

        async def followed() -> bool:
            return await prefills(client) == 3

        await eventually(followed)
        released = await client.decisions("operator")
        await client.public.ReleaseSplit(planner_pb2.ReleaseSplitRequest(), timeout=10)
        assert await client.decisions("operator") == released, "nothing is decided where nothing holds"


async def test_a_hold_blocks_until_its_time_is_over(etcd: Etcd) -> None:
    request = planner_pb2.ProposeSplitRequest(keep=KEEP, hold_s=4.0, reason="for four seconds")
    async with planned(etcd, PREFILL_HEAVY, first=request) as client:

        async def followed() -> bool:
            return await prefills(client) == 3

        await eventually(followed)
        (hold_decision,) = await client.decisions("operator")
        (switch,) = await client.decisions("switch")
        assert hold_decision.epoch_after == hold_decision.epoch_before == switch.epoch_before
        assert hold_decision.hold.until_s == pytest.approx(hold_decision.decided_at_s + 4.0, abs=0.5)
        assert switch.decided_at_s >= hold_decision.hold.until_s
        assert not switch.HasField("hold")
        assert not (await client.get_split()).HasField("hold")
        held = [stay for stay in await client.decisions("stay") if "holds the split" in stay.reason]
        assert held
        assert all(stay.hold.until_s == hold_decision.hold.until_s for stay in held)


async def test_without_a_hold_the_planner_changes_it_again(etcd: Etcd) -> None:
    async with planned(etcd, PREFILL_HEAVY) as client:
        shape = planner_pb2.SplitShape(prefill_nodes=1, decode_nodes=3)
        answer = await client.public.ProposeSplit(
            planner_pb2.ProposeSplitRequest(shape=shape, no_hold=True), timeout=10
        )
        assert not (await client.get_split()).HasField("hold")

        async def followed() -> bool:
            split = (await client.get_split()).split
            return split.epoch > answer.split.epoch and list(split.roles.values()).count(P) == 3

        await eventually(followed)


async def test_what_if_answers_from_live_windows_and_records_nothing(etcd: Etcd) -> None:
    async with planned(etcd, PREFILL_HEAVY, window_s=2.0, mode="manual") as client:
        await stays_because(client, "changed by operators alone")
        shape = planner_pb2.SplitShape(prefill_nodes=3, decode_nodes=1)
        operators = await client.decisions("operator")
        answer = await client.public.EvaluateSplit(planner_pb2.EvaluateSplitRequest(shape=shape), timeout=10)
        assert answer.candidate.shape == shape
        assert answer.candidate in answer.evaluation.candidates
        present = next(candidate for candidate in answer.evaluation.candidates if not candidate.moves)
        assert answer.candidate.throughput_per_s > present.throughput_per_s
        assert answer.candidate.mean_gain > 0
        every = await client.public.EvaluateSplit(planner_pb2.EvaluateSplitRequest(), timeout=10)
        assert not every.HasField("candidate")
        assert every.evaluation.candidates
        assert await client.decisions("operator") == operators
        for wrong in ((3, 2), (0, 4), (4, 0)):
            request = planner_pb2.EvaluateSplitRequest(
                shape=planner_pb2.SplitShape(prefill_nodes=wrong[0], decode_nodes=wrong[1])
            )
            assert await refused(client.public.EvaluateSplit(request, timeout=10)) == "INVALID_ARGUMENT"


async def test_metrics_say_what_was_evaluated_and_held(etcd: Etcd) -> None:
    async with open_store(etcd) as store, planner(etcd, initial_split="2P2D", **HURRIED) as (service, client):
        await join(store, *FOUR)
        async with reporting(PREFILL_HEAVY, "a", client):

            async def switched() -> bool:
                return bool(await client.decisions("switch"))

            await eventually(switched)
            await client.public.ProposeSplit(planner_pb2.ProposeSplitRequest(keep=KEEP), timeout=10)
            await stays_because(client, "no other split is surely better")
        shown = metric_values(service.metrics.exposition())
        assert shown['evolving_planner_evaluations_total{outcome="better"}'] >= 1
        assert shown['evolving_planner_evaluations_total{outcome="none_better"}'] >= 1
        present = shown['evolving_planner_predicted_requests_per_s{split="present"}']
        assert shown['evolving_planner_predicted_requests_per_s{split="best"}'] == present > 0
        assert shown["evolving_planner_best_gain"] < 0
        assert shown["evolving_planner_hold"] == 1
        assert shown['evolving_planner_missing_measurements{what="lost_reports"}'] == 0
        await client.public.ReleaseSplit(planner_pb2.ReleaseSplitRequest(), timeout=10)
        assert metric_values(service.metrics.exposition())["evolving_planner_hold"] == 0


def metric_values(exposition: bytes) -> dict[str, float]:
    lines = (line for line in exposition.decode().splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


async def test_nothing_can_be_said_before_something_was_measured(etcd: Etcd) -> None:
    async with open_store(etcd) as store, planner(etcd, **HURRIED) as (_, client):
        await join(store, *FOUR)
        stay = await stays_because(client, "insufficient")
        assert stay.epoch_after == stay.epoch_before
        answer = await client.public.EvaluateSplit(planner_pb2.EvaluateSplitRequest(), timeout=10)
        assert answer.evaluation.problem
        assert not answer.evaluation.candidates


async def refused(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    detail = parse_error(error.value)
    return detail.status.name if detail.status is not grpc.StatusCode.FAILED_PRECONDITION else detail.reason


async def test_requests_that_make_no_sense_are_refused(etcd: Etcd) -> None:
    async with planned(etcd, DECODE_HEAVY, mode="shadow") as client:
        propose, keep = client.public.ProposeSplit, planner_pb2.KeepRoles()
        for fields in (
            {"hold_s": -1.0},
            {"hold_s": math.nan},
            {"hold_s": math.inf},
            {"hold_s": 1e300},
            {"hold_s": 5.0, "no_hold": True},
            {"no_hold": True},
            {"reason": "x" * 2000},
        ):
            request = planner_pb2.ProposeSplitRequest(keep=keep, **fields)
            assert await refused(propose(request, timeout=10)) == "INVALID_ARGUMENT", fields
        release = planner_pb2.ReleaseSplitRequest(reason="x" * 2000)
        assert await refused(client.public.ReleaseSplit(release, timeout=10)) == "INVALID_ARGUMENT"
        refit = planner_pb2.RefitModelRequest(node_ids=["a", "nobody"])
        assert await refused(client.public.RefitModel(refit, timeout=10)) == "INVALID_ARGUMENT"
        stale = planner_pb2.ProposeSplitRequest(keep=keep, expected_epoch=99)
        assert await refused(propose(stale, timeout=10)) == "ABORTED"
        assert not await client.decisions("operator")


async def test_the_first_split_waits_until_nodes_have_served_both_phases(etcd: Etcd) -> None:
    async with open_store(etcd) as store, planner(etcd, initial_split="1P1D", warm_up_s=2.0) as (_, client):
        joined_at_s = time.time()
        await join(store, "a", "b")

        async def split_written() -> bool:
            answer = await client.get_split()
            assert answer.split.epoch > 0 or {node.role for node in answer.nodes} <= {M}
            return answer.split.epoch > 0

        await eventually(split_written)
        split = (await client.get_split()).split
        assert sorted(split.roles.values()) == [P, D]
        assert split.written_at_s - joined_at_s > 1.9


async def test_reports_of_one_request_are_enough_to_be_listed(etcd: Etcd) -> None:
    async with open_store(etcd) as store, planner(etcd, **HURRIED) as (_, client):
        await join(store, *FOUR)
        await eventually(client.leads)

        async def known() -> bool:
            return len((await client.get_split()).nodes) == len(FOUR)

        await eventually(known)
        await client.internal.ReportWork(work_report(PREFILL_HEAVY, "a", 1), timeout=10)
        found: list[planner_pb2.Slice] = []

        async def listed() -> bool:
            stays = await client.decisions("stay", with_evaluations=True)
            found[:] = [s for stay in stays for s in stay.evaluation.slices if s.completions]
            return bool(found)

        await eventually(listed)
        assert [s.completions for s in found] == [1]
        assert found[0].work.uncached_tokens == PREFILL_HEAVY.uncached_tokens
        assert found[0].work.decode_iterations == PREFILL_HEAVY.iterations
