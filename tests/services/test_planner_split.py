"""The planner over the wire, on a real etcd: reads, operators' proposals, nodes that come and go, history."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest
from etcd_process import Etcd
from planner_harness import KEYS, Client, join, leave, open_store, planner
from waiting import eventually

from evolving.internal.v1 import planner_pb2 as internal_pb2
from evolving.runtime.etcd import EtcdStore
from evolving.v1 import common_pb2, planner_pb2
from evolving.wire.status import ErrorDetail, parse_error

P, D, M = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE, common_pb2.ROLE_MIXED


def shape(prefill: int, decode: int, **more: Any) -> planner_pb2.ProposeSplitRequest:
    counts = planner_pb2.SplitShape(prefill_nodes=prefill, decode_nodes=decode)
    return planner_pb2.ProposeSplitRequest(shape=counts, **more)


def changes(**roles: Any) -> planner_pb2.ProposeSplitRequest:
    return planner_pb2.ProposeSplitRequest(changes=planner_pb2.RoleChanges(roles=roles))


async def refused(client: Client, request: planner_pb2.ProposeSplitRequest) -> ErrorDetail:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await client.public.ProposeSplit(request, timeout=10)
    return parse_error(error.value)


async def with_split(store: EtcdStore, client: Client, *node_ids: str) -> planner_pb2.Split:
    """Register the nodes and wait for a split that lists them all."""
    await join(store, *node_ids)

    async def listed() -> bool:
        return set(await client.roles()) == set(node_ids)

    await eventually(listed)
    return (await client.get_split()).split


async def test_nodes_serve_both_phases_until_the_first_split_and_follow_it_then(etcd: Etcd) -> None:
    async with open_store(etcd) as store, planner(etcd, initial_split="2P1D") as (_, client):
        await join(store, "a", "b")

        async def both_seen() -> bool:
            return len((await client.get_split()).nodes) == 2

        await eventually(both_seen)
        before = await client.get_split()
        assert before.split.epoch == 0
        assert not before.split.roles
        assert [node.role for node in before.nodes] == [M, M]

        split = await with_split(store, client, "a", "b", "c")
        assert split.roles == {"a": P, "b": P, "c": D}
        assert split.epoch == 1
        assert split.author == "planner"
        assert split.written_at_s > 0
        nodes = (await client.get_split()).nodes
        assert [(n.node_id, n.role, n.incarnation) for n in nodes] == [
            ("a", P, "a-1"),
            ("b", P, "b-1"),
            ("c", D, "c-1"),
        ]


async def test_an_operator_sets_the_split_by_shape_and_by_node(etcd: Etcd) -> None:
    async with open_store(etcd) as store, planner(etcd) as (_, client):
        first = await with_split(store, client, "a", "b", "c")
        by_shape = await client.public.ProposeSplit(shape(1, 2, reason="long outputs"), timeout=10)
        assert by_shape.split.epoch == first.epoch + 1
        assert list(by_shape.split.roles.values()).count(P) == 1
        assert by_shape.split.reason == "long outputs"
        assert by_shape.split.author == "operator:default"
        by_node = await client.public.ProposeSplit(changes(a=D, c=P), timeout=10)
        assert by_node.split.epoch == first.epoch + 2
        assert by_node.split.roles["a"] == D
        assert by_node.split.roles["c"] == P
        assert (await client.get_split()).split == by_node.split


async def test_proposals_that_cannot_be_are_refused_and_change_nothing(etcd: Etcd) -> None:
    async with open_store(etcd) as store, planner(etcd) as (_, client):
        split = await with_split(store, client, "a", "b")
        for request in (
            changes(z=P),
            changes(a=D),
            changes(a=0),
            changes(a=99),
            changes(),
            shape(2, 1),
            shape(0, 2),
            shape(2, 0),
            planner_pb2.ProposeSplitRequest(),
            shape(1, 1, reason="x" * 5000),
        ):
            assert (await refused(client, request)).status is grpc.StatusCode.INVALID_ARGUMENT, request
        stale = await refused(client, shape(1, 1, expected_epoch=split.epoch + 1))
        assert (stale.status, stale.reason) == (grpc.StatusCode.ABORTED, "EPOCH_CHANGED")
        assert stale.metadata["current_epoch"] == str(split.epoch)
        assert (await client.get_split()).split == split


async def test_a_node_that_goes_or_comes_rewrites_the_split_at_once(etcd: Etcd) -> None:
    async with open_store(etcd) as store, planner(etcd, initial_split="1P2D") as (_, client):
        first = await with_split(store, client, "a", "b", "c")
        assert first.roles == {"a": P, "b": D, "c": D}
        await leave(store, "a")

        async def settled_on_two() -> bool:
            return set(await client.roles()) == {"b", "c"}

        await eventually(settled_on_two)
        assert sorted((await client.roles()).values()) == [P, D], "a phase that lost its last node gets another"
        again = await with_split(store, client, "a", "b", "c")
        assert sorted(again.roles.values()) == [P, D, D], "back to the shape aimed at"
        assert again.epoch == first.epoch + 2


async def test_decisions_are_kept_with_their_reasons_newest_first(etcd: Etcd) -> None:
    async with open_store(etcd) as store, planner(etcd, initial_split="2P1D", decisions_kept=3) as (_, client):
        first = await with_split(store, client, "a", "b", "c")
        for prefill in (1, 2, 1, 1):
            await client.public.ProposeSplit(shape(prefill, 3 - prefill, reason=f"to {prefill}"), timeout=10)
        newest = await client.public.ListDecisions(planner_pb2.ListDecisionsRequest(page_size=2), timeout=10)
        assert [d.reason for d in newest.decisions] == ["to 1", "to 1"]
        assert newest.decisions[0].epoch_before == newest.decisions[0].epoch_after, "nothing had to change"
        assert [(d.epoch_before, d.epoch_after) for d in newest.decisions] == [
            (first.epoch + 3, first.epoch + 3),
            (first.epoch + 2, first.epoch + 3),
        ]
        assert {d.kind for d in newest.decisions} == {"operator"}
        assert newest.decisions[1].roles_before != newest.decisions[1].roles_after
        rest = await client.public.ListDecisions(
            planner_pb2.ListDecisionsRequest(page_size=2, page_token=newest.next_page_token), timeout=10
        )
        assert [d.reason for d in rest.decisions] == ["to 2"], "three are kept"
        assert rest.next_page_token == ""
        for token in ("x", "-1", "9" * 30, "٣"):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await client.public.ListDecisions(planner_pb2.ListDecisionsRequest(page_token=token), timeout=10)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_decision_that_cannot_be_read_hides_no_other_and_stops_nothing(etcd: Etcd) -> None:
    async with open_store(etcd) as store:
        await store.put(KEYS.decision(0), b"\xff")
        await store.put(KEYS.decisions + "no number", b"{}")
        async with planner(etcd, initial_split="2P1D") as (_, client):
            first = await with_split(store, client, "a", "b", "c")
            await client.public.ProposeSplit(shape(1, 2, reason="one"), timeout=10)
            await store.put(KEYS.decision(1), b"{")  # the first split's
            await client.public.ProposeSplit(shape(2, 1, reason="two"), timeout=10)

            async def only_readable_ones() -> bool:
                return [d.reason for d in await client.decisions()] == ["two", "one"]

            await eventually(only_readable_ones)
            assert [d.epoch_after for d in await client.decisions()] == [first.epoch + 2, first.epoch + 1]


async def test_a_page_token_stays_right_while_decisions_are_added(etcd: Etcd) -> None:
    async with open_store(etcd) as store, planner(etcd) as (_, client):
        await with_split(store, client, "a", "b", "c")
        await client.public.ProposeSplit(shape(1, 2, reason="one"), timeout=10)
        await client.public.ProposeSplit(shape(2, 1, reason="two"), timeout=10)
        page = await client.public.ListDecisions(planner_pb2.ListDecisionsRequest(page_size=1), timeout=10)
        assert [d.reason for d in page.decisions] == ["two"]
        await client.public.ProposeSplit(shape(1, 2, reason="three"), timeout=10)
        following = await client.public.ListDecisions(
            planner_pb2.ListDecisionsRequest(page_size=1, page_token=page.next_page_token), timeout=10
        )
        assert [d.reason for d in following.decisions] == ["one"]


async def test_the_model_is_what_nodes_were_configured_with(etcd: Etcd) -> None:
    async with open_store(etcd) as store, planner(etcd) as (_, client):
        await with_split(store, client, "a", "b")
        model = await client.public.GetModel(planner_pb2.GetModelRequest(), timeout=10)
        assert [node.node_id for node in model.nodes] == ["a", "b"]
        assert list(model.nodes[0].prefill_coefficients_s) == [0.01, 0.001, 0.0, 0.0, 0.0]
        assert list(model.nodes[0].decode_coefficients_s) == [0.02, 0.0, 0.001, 0.0]
        assert model.nodes[0].source == "config"


async def test_epochs_never_fall_when_somebody_deletes_the_split(etcd: Etcd) -> None:
    async with open_store(etcd) as store, planner(etcd) as (_, client):
        first = await with_split(store, client, "a", "b")
        await store.delete(KEYS.split)

        async def written_anew() -> bool:
            return (await client.get_split()).split.epoch > first.epoch

        await eventually(written_anew)
        assert (await client.get_split()).split.roles == first.roles


def report(sequence: int, samples: int = 1, **more: Any) -> internal_pb2.ReportWorkRequest:
    sample = internal_pb2.WorkSample(
        request_id="r", phase=common_pb2.PHASE_PREFILL, uncached_tokens=10, query_key_pairs=55.0
    )
    fields: dict[str, Any] = {"partition_id": "p0", "node_id": "a", "incarnation": "a-1", **more}
    return internal_pb2.ReportWorkRequest(sequence=sequence, samples=[sample] * samples, **fields)


def metric(exposition: bytes, name: str) -> float:
    lines = [line for line in exposition.decode().splitlines() if line.startswith(name + " ")]
    assert len(lines) == 1, f"{name} occurs {len(lines)} times"
    return float(lines[0].rpartition(" ")[2])


async def test_work_is_taken_once_and_lost_reports_are_seen(etcd: Etcd) -> None:
    async with open_store(etcd) as store, planner(etcd) as (service, client):
        await with_split(store, client, "a", "b")
        for sequence in (7, 8, 8, 11):
            await client.internal.ReportWork(report(sequence, samples=2), timeout=10)
        await client.internal.ReportWork(report(1, incarnation="a-2"), timeout=10)
        shown = service.metrics.exposition()
        assert metric(shown, 'evolving_planner_work_samples_total{phase="prefill"}') == 7
        assert metric(shown, "evolving_planner_work_reports_repeated_total") == 1
        assert metric(shown, "evolving_planner_work_reports_lost_total") == 2
        for wrong, reason in (
            (report(9, partition_id="p1"), "WRONG_PARTITION"),
            (report(9, node_id="z"), "UNKNOWN_NODE"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await client.internal.ReportWork(wrong, timeout=10)
            detail = parse_error(error.value)
            assert (detail.status, detail.reason) == (grpc.StatusCode.FAILED_PRECONDITION, reason)


@pytest.mark.parametrize(
    ("field", "value"), [("phase", 0), ("phase", 7), ("context_tokens", float("nan")), ("age_s", -1.0)]
)
async def test_a_sample_that_cannot_be_is_refused(etcd: Etcd, field: str, value: float) -> None:
    async with open_store(etcd) as store, planner(etcd) as (_, client):
        await with_split(store, client, "a", "b")
        request = report(1)
        setattr(request.samples[0], field, value)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await client.internal.ReportWork(request, timeout=10)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
