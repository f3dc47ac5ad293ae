"""A node agent over a mock engine in the test's own loop, and a directory and a planner that do as they are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import grpc.aio
import numpy as np
from etcd_process import Etcd
from planner_harness import KEYS, open_store
from running import running
from waiting import WAIT_S

from evolving.core.blocks import chain_names, root_digest, split_names
from evolving.internal.v1 import (
    directory_pb2,
    directory_pb2_grpc,
    node_agent_pb2,
    node_agent_pb2_grpc,
    planner_pb2,
    planner_pb2_grpc,
)
from evolving.runtime.channel import open_channel
from evolving.runtime.clock import SystemClock
from evolving.runtime.etcd import EtcdStore
from evolving.runtime.keys import NodeRegistration, ServiceRegistration, Split, decode, encode
from evolving.runtime.service import Service
from evolving.v1 import gateway_pb2
from evolving_node_agent.__main__ import run_node_agent
from evolving_node_agent.engines.mock import MockConfig, MockEngine
from evolving_node_agent.settings import NodeAgentSettings

BLOCK = 16
ROOT = root_digest("f", "", "default")
_numbers = count(1)


def ids(seed: int, length: int) -> bytes:
    """Random token ids as they travel."""
    return np.random.default_rng(seed).integers(1, 1000, length).astype("<u4").tobytes()


def names_of(tokens: bytes) -> list[bytes]:
    """Names of the full blocks of a context."""
    return split_names(chain_names(ROOT, tokens, BLOCK))


def prefill_request(tokens: bytes, **fields: Any) -> node_agent_pb2.PrefillRequest:
    """A prefill leg with a transfer id of its own."""
    number = next(_numbers)
    values: dict[str, Any] = {
        "partition_id": "p0",
        "tenant": "default",
        "request_id": f"r{number}",
        "leg_id": f"r{number}-p",
        "transfer_id": number,
        "token_ids": tokens,
        "root": ROOT,
        "sampling": gateway_pb2.Sampling(max_tokens=8, ignore_eos=True),
    }
    return node_agent_pb2.PrefillRequest(**(values | fields))


def decode_request(
    prefill: node_agent_pb2.PrefillRequest, transfer_address: str, **fields: Any
) -> node_agent_pb2.DecodeRequest:
    """The decode leg of the same request."""
    values: dict[str, Any] = {
        name: getattr(prefill, name)
        for name in (
            "partition_id",
            "tenant",
            "request_id",
            "transfer_id",
            "token_ids",
            "generated_tokens",
            "root",
            "sampling",
            "branch_id",
            "version",
        )
    }
    values |= {"leg_id": f"{prefill.request_id}-d", "source_node_id": "source", "source_address": transfer_address}
    return node_agent_pb2.DecodeRequest(**(values | fields))


@dataclass
class Agent:
    """One running node agent."""

    service: Service[NodeAgentSettings]
    engine: MockEngine
    stub: node_agent_pb2_grpc.NodeAgentServiceAsyncStub
    store: EtcdStore
    body: asyncio.Task[None]

    @property
    def node_id(self) -> str:
        """Its name."""
        return self.service.settings.node_id

    async def registration(self) -> NodeRegistration | None:
        """What etcd says of it."""
        found = await self.store.get(KEYS.node(self.node_id))
        return None if found is None else decode(NodeRegistration, found.value)

    async def status(self, holds: Callable[[node_agent_pb2.WatchStatusResponse], bool]) -> Any:
        """The first pushed status for which `holds`."""
        call = self.stub.WatchStatus(node_agent_pb2.WatchStatusRequest(partition_id="p0"))
        try:
            async with asyncio.timeout(WAIT_S):
                async for status in call:
                    if holds(status):
                        return status
        finally:
            call.cancel()
        raise AssertionError("the status stream ended")

    async def ready(self) -> NodeRegistration:
        """Wait until it serves."""
        await self.status(lambda status: status.ready)
        registration = await self.registration()
        assert registration is not None
        return registration

    async def idle(self) -> None:
        """Wait until no leg is left."""
        await self.status(
            lambda s: not (s.queued_legs or s.prefilling_legs or s.holding_legs or s.decoding or s.reserved)
        )

    async def serve(
        self, request: node_agent_pb2.PrefillRequest, target: Agent | None = None
    ) -> tuple[list[Any], list[Any], bytes]:
        """Both legs of a request. Returns what each stream said, and all output ids."""
        registration = await self.registration()
        assert registration is not None
        decode_leg = decode_request(request, registration.transfer_address)
        decoded: list[Any] = []

        async def run_decode() -> None:
            decoded.extend([response async for response in (target or self).stub.Decode(decode_leg)])

        prefilled, decoding, first = [], None, b""
        async for response in self.stub.Prefill(request):
            prefilled.append(response)
            if response.HasField("taken") and request.sampling.max_tokens > request.generated_tokens + 1:
                decoding = asyncio.create_task(run_decode())
            if response.HasField("prefilled"):
                first = response.prefilled.first_token.to_bytes(4, "little")
        if decoding is not None:
            await decoding
        return prefilled, decoded, first + b"".join(each.tokens.token_ids for each in decoded)

    async def set_split(self, epoch: int, role: str) -> None:
        """Write a split that gives this node a role."""
        split = Split(epoch=epoch, roles={self.node_id: role}, reason="test", author="test", written_at_s=0.0)  # type: ignore[dict-item]
        await self.store.put(KEYS.split, encode(split))


@asynccontextmanager
async def agent(
    etcd: Etcd, node_id: str = "n0", mock: dict[str, Any] | None = None, fail_starts: int = 0, **settings: Any
) -> AsyncIterator[Agent]:
    """A node agent in this loop, its gRPC server up and its engine perhaps not yet."""
    values = {
        "node_id": node_id,
        "engine": "mock",
        "block_tokens": BLOCK,
        "etcd_endpoints": etcd.endpoints,
        "etcd_timeout_s": 2.0,
        "grace_s": 5.0,
        "restart_first_s": 0.05,
        "work_period_s": 0.05,
        **settings,
    }
    sizes = {
        "vocab_size": 1000,
        "block_tokens": BLOCK,
        "l1_tokens": 4096,
        "l2_tokens": 8192,
        "max_prompt_tokens": 1024,
        "max_context_tokens": 2048,
        "chunk_tokens": 128,
        "speed_up": 10.0,
    }
    engine = MockEngine(MockConfig(node_id, **(sizes | (mock or {}))))
    engine.faults.fail_starts = fail_starts
    service = Service(NodeAgentSettings(**values), SystemClock())
    async with (
        running(service, run_node_agent(service, engine)) as body,
        open_channel(service.address) as channel,
        open_store(etcd) as store,
    ):
        yield Agent(service, engine, node_agent_pb2_grpc.NodeAgentServiceStub(channel), store, body)


@dataclass
class ScriptedDirectory:
    """Keeps what nodes say and says what tests tell it to."""

    term: int = 1
    hellos: list[directory_pb2.NodeHello] = field(default_factory=list)
    events: list[directory_pb2.ConnectNodeRequest] = field(default_factory=list)  # all streams, in order, no hellos
    acknowledges: bool = True
    hangs_up: bool = True  # once the node has no more to say
    _outgoing: asyncio.Queue[directory_pb2.ConnectNodeResponse | None] = field(default_factory=asyncio.Queue)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def ConnectNode(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        """One stream."""
        outgoing: asyncio.Queue[directory_pb2.ConnectNodeResponse | None] = asyncio.Queue()
        self._outgoing = outgoing
        reader = asyncio.create_task(self._read(request_iterator, outgoing))
        try:
            while (response := await outgoing.get()) is not None:
                yield response
        finally:
            reader.cancel()

    async def _read(self, requests: Any, outgoing: asyncio.Queue[directory_pb2.ConnectNodeResponse | None]) -> None:
        ack = directory_pb2.Ack()
        async for request in requests:
            if request.HasField("hello"):
                self.hellos.append(request.hello)
            else:
                self.events.append(request)
            ack.sequence = request.kv.sequence or ack.sequence
            ack.reports += request.WhichOneof("event") in ("landed", "output", "done")
            if self.acknowledges:
                outgoing.put_nowait(directory_pb2.ConnectNodeResponse(term=self.term, ack=ack))
            self._changed.set()
        if self.hangs_up:
            outgoing.put_nowait(None)

    def say(self, **event: Any) -> None:
        """Send one message on the newest stream."""
        self._outgoing.put_nowait(directory_pb2.ConnectNodeResponse(**({"term": self.term} | event)))

    def hang_up(self) -> None:
        """End the newest stream."""
        self._outgoing.put_nowait(None)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until what nodes said makes `holds` true."""
        async with asyncio.timeout(WAIT_S):
            while not holds():
                self._changed.clear()
                if not holds():
                    await self._changed.wait()

    def said(self, kind: str) -> list[Any]:
        """All events of a kind, in order."""
        return [getattr(event, kind) for event in self.events if event.WhichOneof("event") == kind]


class _StreamOnly(directory_pb2_grpc.DirectoryServiceServicer):
    """The method nodes call; the others no node calls."""

    def __init__(self, directory: ScriptedDirectory) -> None:
        self._directory = directory

    async def ConnectNode(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        """One stream."""
        async for response in self._directory.ConnectNode(request_iterator, context):
            yield response

    Begin = Finish = End = ReadBranch = None  # type: ignore[assignment]


@asynccontextmanager
async def scripted_directory(etcd: Etcd, **fields: Any) -> AsyncIterator[ScriptedDirectory]:
    """A scripted directory that etcd names."""
    directory = ScriptedDirectory(**fields)
    server = grpc.aio.server()
    directory_pb2_grpc.add_DirectoryServiceServicer_to_server(_StreamOnly(directory), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with open_store(etcd) as store:
        record = ServiceRegistration("directory", "scripted", address, "0", 0.0)
        await store.put(KEYS.service("directory", "scripted"), encode(record))
        try:
            yield directory
        finally:
            await server.stop(None)
            await store.delete(KEYS.service("directory", "scripted"))


@dataclass
class ScriptedPlanner(planner_pb2_grpc.PlannerServiceServicer):
    """Keeps work reports; the first of them it refuses, or takes without an answer that comes through."""

    refuse: int = 0
    mute: int = 0
    refusal: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    reports: list[planner_pb2.ReportWorkRequest] = field(default_factory=list)  # all that came
    taken: list[planner_pb2.ReportWorkRequest] = field(default_factory=list)  # each number of an incarnation once
    answer: planner_pb2.ReportWorkResponse = field(default_factory=planner_pb2.ReportWorkResponse)

    async def ReportWork(self, request: planner_pb2.ReportWorkRequest, context: Any) -> Any:
        """One report."""
        self.reports.append(request)
        if self.refuse > 0:
            self.refuse -= 1
            await context.abort(self.refusal, "not now")
        number = (request.incarnation, request.sequence)
        if number not in [(report.incarnation, report.sequence) for report in self.taken]:
            self.taken.append(request)
        if self.mute > 0:
            self.mute -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "taken, and nobody hears of it")
        return self.answer

    async def ReportOpen(self, request: planner_pb2.ReportOpenRequest, context: Any) -> planner_pb2.ReportOpenResponse:
        """What gateways say; nobody looks at it."""
        return planner_pb2.ReportOpenResponse()

    @property
    def samples(self) -> list[planner_pb2.WorkSample]:
        """All samples taken."""
        return [sample for report in self.taken for sample in report.samples]

    @property
    def windows(self) -> list[planner_pb2.IterationWindow]:
        """All windows taken."""
        return [window for report in self.taken for window in report.windows]


@asynccontextmanager
async def scripted_planner(etcd: Etcd, **fields: Any) -> AsyncIterator[ScriptedPlanner]:
    """A scripted planner that leads."""
    planner = ScriptedPlanner(**fields)
    server = grpc.aio.server()
    planner_pb2_grpc.add_PlannerServiceServicer_to_server(planner, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with open_store(etcd) as store:
        await store.put(KEYS.leader("planner"), address.encode())
        try:
            yield planner
        finally:
            await server.stop(None)
            await store.delete(KEYS.leader("planner"))
