"""Planners for tests: inside the test's own loop, or as processes that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio
from etcd_process import Etcd, free_ports
from running import running
from waiting import WAIT_S, answered

from evolving.core.work import query_key_pairs
from evolving.internal.v1 import planner_pb2 as internal_pb2
from evolving.internal.v1 import planner_pb2_grpc as internal_grpc
from evolving.runtime.channel import open_channel
from evolving.runtime.clock import SystemClock
from evolving.runtime.etcd import EtcdStore
from evolving.runtime.keys import Keys, NodeRegistration, encode
from evolving.runtime.service import Service
from evolving.runtime.store import Store
from evolving.v1 import common_pb2, planner_pb2, planner_pb2_grpc
from evolving_planner.__main__ import run_planner
from evolving_planner.settings import PlannerSettings

KEYS = Keys()
# A planner that decides every second by the second before. The machine may be slow: half of the slices are enough.
HURRIED = {"window_s": 1.0, "slices": 4, "slices_valid_least": 2, "slice_completions_least": 1, "cooldown_s": 0.0}


def node_registration(node_id: str) -> NodeRegistration:
    """A node whose facts no planner looks at, but for its time model."""
    return NodeRegistration(
        node_id=node_id,
        incarnation=f"{node_id}-1",
        address="127.0.0.1:1",
        model="m",
        kv_format="f",
        block_tokens=64,
        vocab_size=1000,
        max_prompt_tokens=1000,
        max_context_tokens=2000,
        l1_tokens=10_000,
        reserve_tokens=2000,
        l2_tokens=10_000,
        decode_slots=8,
        chunk_tokens=512,
        kv_bytes_per_token=4,
        transfer_address="127.0.0.1:2",
        pool_address="127.0.0.1:3",
        prefill_coefficients=(0.01, 0.001, 0.0, 0.0, 0.0),
        decode_coefficients=(0.02, 0.0, 0.001, 0.0),
    )


@asynccontextmanager
async def open_store(etcd: Etcd) -> AsyncIterator[EtcdStore]:
    """A store of the test's own."""
    store = EtcdStore(etcd.endpoints, clock=SystemClock(), timeout_s=5.0)
    try:
        yield store
    finally:
        await store.close()


async def join(store: Store, *node_ids: str) -> None:
    """Register nodes, without a lease."""
    for node_id in node_ids:
        await store.put(KEYS.node(node_id), encode(node_registration(node_id)))


async def leave(store: EtcdStore, node_id: str) -> None:
    """A node is gone."""
    await store.delete(KEYS.node(node_id))


@dataclass(frozen=True)
class Client:
    """Stubs of one planner."""

    address: str
    channel: grpc.aio.Channel
    public: planner_pb2_grpc.PlannerServiceAsyncStub
    internal: internal_grpc.PlannerServiceAsyncStub

    async def get_split(self) -> planner_pb2.GetSplitResponse:
        """Waits until the planner answers."""
        request = planner_pb2.GetSplitRequest()
        return await answered(lambda: self.public.GetSplit(request, timeout=WAIT_S, wait_for_ready=True))

    async def roles(self) -> dict[str, int]:
        """Roles of the split in force."""
        return dict((await self.get_split()).split.roles)

    async def leads(self) -> bool:
        """Whether this planner says that it leads."""
        return (await self.get_split()).leader_address == self.address

    async def decisions(self, kind: str = "", *, with_evaluations: bool = False) -> list[planner_pb2.Decision]:
        """All that are kept of a kind, newest first. Waits until the planner answers."""
        request = planner_pb2.ListDecisionsRequest(page_size=1000, with_evaluations=with_evaluations)
        answer = await answered(lambda: self.public.ListDecisions(request, timeout=WAIT_S, wait_for_ready=True))
        return [decision for decision in answer.decisions if not kind or decision.kind == kind]


@dataclass(frozen=True)
class Load:
    """What every request asks, and how many are open."""

    uncached_tokens: int
    iterations: int
    open_requests: float = 16.0


# With the time model that nodes here register: a prompt takes 1 s and little decoding, or 0.1 s and much.
PREFILL_HEAVY, DECODE_HEAVY = Load(1000, 20), Load(100, 800)


@asynccontextmanager
async def reporting(load: Load, node_id: str, *planners: Client) -> AsyncIterator[None]:
    """Reports to the planners, as a node that did all the work and a gateway would send them, until the end."""
    reports = [asyncio.create_task(_report(load, node_id, one)) for one in planners]
    try:
        yield
    finally:
        for report in reports:
            report.cancel()
        await asyncio.gather(*reports, return_exceptions=True)


async def _report(load: Load, node_id: str, to: Client) -> None:
    said_s = time.monotonic()
    for sequence in itertools.count(1):
        await asyncio.sleep(0.05)
        now_s = time.monotonic()
        level = internal_pb2.OpenLevel(from_age_s=now_s - said_s, requests=load.open_requests)
        open_report = internal_pb2.ReportOpenRequest(partition_id="p0", gateway_id="g", levels=[level])
        with contextlib.suppress(grpc.aio.AioRpcError):  # it doesn't lead, or not yet, or is gone
            await to.internal.ReportWork(work_report(load, node_id, sequence), timeout=WAIT_S)
            await to.internal.ReportOpen(open_report, timeout=WAIT_S)
        said_s = now_s


def work_report(load: Load, node_id: str, sequence: int) -> internal_pb2.ReportWorkRequest:
    """Of one request that a node prefilled and decoded."""
    request_id = f"r{sequence}"
    prefill = internal_pb2.WorkSample(
        request_id=request_id,
        phase=common_pb2.PHASE_PREFILL,
        uncached_tokens=load.uncached_tokens,
        query_key_pairs=query_key_pairs(load.uncached_tokens, 0),
    )
    decode = internal_pb2.WorkSample(
        request_id=request_id,
        phase=common_pb2.PHASE_DECODE,
        output_tokens=load.iterations + 1,
        iterations=load.iterations,
        context_tokens=load.uncached_tokens + load.iterations / 2,
    )
    return internal_pb2.ReportWorkRequest(
        partition_id="p0",
        node_id=node_id,
        incarnation=f"{node_id}-1",
        sequence=sequence,
        samples=[prefill, decode],
    )


@asynccontextmanager
async def client(address: str) -> AsyncIterator[Client]:
    """Stubs on a channel of their own."""
    async with open_channel(address) as channel:
        public = planner_pb2_grpc.PlannerServiceStub(channel)
        internal = internal_grpc.PlannerServiceStub(channel)
        yield Client(address, channel, public, internal)


@asynccontextmanager
async def planner(etcd: Etcd, **settings: object) -> AsyncIterator[tuple[Service[PlannerSettings], Client]]:
    """A planner in this loop, serving."""
    values = {"etcd_endpoints": etcd.endpoints, "etcd_timeout_s": 2.0, "leader_ttl_s": 2.0, "grace_s": 2.0, **settings}
    service = Service(PlannerSettings(**values), SystemClock())
    async with running(service, run_planner(service)), client(service.address) as stubs:
        yield service, stubs


@dataclass
class PlannerProcess:
    """A planner as a process of this machine."""

    process: asyncio.subprocess.Process
    client: Client

    async def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


@asynccontextmanager
async def planner_process(endpoint: str, *flags: str) -> AsyncIterator[PlannerProcess]:
    """Started, perhaps not serving yet; killed at the end when it still runs."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "evolving_planner",
        f"--listen={address}",
        "--metrics-listen=",
        f"--etcd-endpoints={endpoint}",
        "--etcd-timeout-s=2",
        "--leader-ttl-s=2",
        *flags,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with client(address) as stubs:
            yield PlannerProcess(process, stubs)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
