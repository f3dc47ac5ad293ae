"""Random bytes to every method of the planner leave it alive, leading, and the split as it was."""

from __future__ import annotations

import grpc
from etcd_process import Etcd
from hostile import no_crash, send_random_bytes
from planner_harness import join, open_store, planner
from waiting import eventually

PUBLIC = ("GetSplit", "ProposeSplit", "ReleaseSplit", "EvaluateSplit", "ListDecisions", "GetModel", "RefitModel")
METHODS = [
    *(f"/evolving.v1.PlannerService/{name}" for name in PUBLIC),
    *(f"/evolving.internal.v1.PlannerService/{name}" for name in ("ReportWork", "ReportOpen")),
]


async def test_random_bytes_change_nothing(etcd: Etcd) -> None:
    # A busy machine renews leases late; that an office lasts is not the question here.
    async with open_store(etcd) as store, planner(etcd, leader_ttl_s=30.0) as (_, client):
        await join(store, "a", "b")

        async def split_written() -> bool:
            return (await client.get_split()).split.epoch > 0

        await eventually(split_written)
        before = await client.get_split()
        seen = await send_random_bytes(client.channel, METHODS, 10_000, seed=1)
        assert no_crash(seen), seen
        assert seen[grpc.StatusCode.INVALID_ARGUMENT] > 1_000, seen
        assert await client.get_split() == before
