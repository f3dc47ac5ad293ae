"""A gateway in the test's own loop, with the nodes and the directory of scripted_nodes.py around it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import grpc.aio
from scripted_nodes import ScriptedDirectory, ScriptedNode, bytes_ids, ids_bytes
from waiting import WAIT_S, eventually

from evolving.runtime.channel import open_channel
from evolving.runtime.clock import SystemClock
from evolving.runtime.keys import Keys, Role, ServiceRegistration, Split, encode
from evolving.runtime.memory_store import MemoryStore
from evolving.runtime.service import Service
from evolving.v1 import gateway_pb2, gateway_pb2_grpc
from evolving_gateway.__main__ import run_gateway
from evolving_gateway.settings import GatewaySettings

KEYS = Keys()


@dataclass
class Bench:
    """A running gateway and everything around it."""

    store: MemoryStore
    nodes: dict[str, ScriptedNode]
    directory: ScriptedDirectory
    service: Service[GatewaySettings]
    stub: gateway_pb2_grpc.GatewayServiceAsyncStub
    channel: grpc.aio.Channel

    async def register(self, node: ScriptedNode, **changes: object) -> None:
        """Put a node's registration into the store."""
        await self.store.put(KEYS.node(node.node_id), encode(node.registration(**changes)))

    async def split(self, epoch: int, **roles: Role) -> None:
        """Set the split, and wait until the gateway goes by it."""
        await self.store.put(KEYS.split, encode(Split(epoch, dict(roles), "test", "test", 0.0)))
        await eventually(lambda: self.metric("gateway_split_epoch") == epoch)

    async def wait(self, node_id: str, wait_s: float) -> None:
        """Let a node push a wait, and wait until the gateway knows."""
        self.nodes[node_id].push(wait_s=wait_s)
        await eventually(lambda: self.metric("gateway_node_wait_seconds", node_id=node_id) == wait_s)

    def metric(self, name: str, **labels: str) -> float:
        """A metric of the gateway; 0 when it has no such sample yet."""
        return self.service.metrics.registry.get_sample_value(f"evolving_{name}", labels) or 0.0

    def generate(
        self,
        prompt: Sequence[int] = (),
        *,
        timeout: float | None = WAIT_S,
        request: gateway_pb2.GenerateRequest | None = None,
        **fields: object,
    ) -> Stream:
        """Call Generate with token ids; other fields as in the request."""
        request = request or gateway_pb2.GenerateRequest(**fields)  # type: ignore[arg-type]
        if prompt:
            request.token_ids = ids_bytes(prompt)
        return Stream(self.stub.Generate(request, timeout=timeout))


class Stream:
    """One call of Generate, its messages sorted."""

    def __init__(self, call: grpc.aio.UnaryStreamCall) -> None:  # type: ignore[type-arg]
        self.call = call
        self.started: list[gateway_pb2.GenerateStarted] = []
        self.ids: list[int] = []
        self.text = ""
        self.finished: gateway_pb2.GenerateFinished | None = None

    async def read(self) -> str | None:
        """The next message's kind, checking that no index comes twice and none is left out; None at the end."""
        message = await self.call.read()
        if not isinstance(message, gateway_pb2.GenerateResponse):
            return None
        kind = message.WhichOneof("event")
        assert self.finished is None, f"{kind} after finished"
        if kind == "started":
            self.started.append(message.started)
        elif kind == "tokens":
            new = bytes_ids(message.tokens.token_ids)
            if not self.ids and self.first_index is None:
                self.first_index = message.tokens.index
            assert self.first_index is not None
            assert message.tokens.index == self.first_index + len(self.ids)
            self.ids += new
            self.text += message.tokens.text
        else:
            self.finished = message.finished
        return str(kind)

    first_index: int | None = None

    async def until(self, check: Callable[[], bool]) -> None:
        """Read until `check` holds."""
        while not check():
            assert await self.read() is not None, "the stream ended before"

    async def all(self) -> gateway_pb2.GenerateFinished:
        """Read to the end."""
        while await self.read() is not None:
            pass
        assert self.finished is not None
        return self.finished


@asynccontextmanager
async def bench(*node_ids: str, directory: bool = True, **settings: object) -> AsyncIterator[Bench]:
    """A gateway that sees these nodes, ready to serve."""
    store = MemoryStore(SystemClock())
    nodes = {node_id: ScriptedNode(node_id) for node_id in node_ids}
    scripted = ScriptedDirectory()
    service = Service(GatewaySettings(**{"metrics_listen": "", "grace_s": 5.0, **settings}), SystemClock())
    async with contextlib.AsyncExitStack() as stack:  # a server that outlives its loop spoils every later test
        await scripted.start()
        stack.push_async_callback(scripted.stop)
        if directory:
            record = ServiceRegistration("directory", "d", scripted.address, "0", 0.0)
            await store.put(KEYS.service("directory", "d"), encode(record))
        stack.push_async_callback(_stop_all, nodes)
        for node in nodes.values():
            await node.start()
            await store.put(KEYS.node(node.node_id), encode(node.registration()))
        main = asyncio.create_task(run_gateway(service, store))
        try:
            await eventually(lambda: main.done() or bool(service.address))
            if main.done():
                main.result()
            async with open_channel(service.address) as channel:
                stub = gateway_pb2_grpc.GatewayServiceStub(channel)
                if node_ids:
                    await all_ready(stub, len(node_ids))
                yield Bench(store, nodes, scripted, service, stub, channel)
        finally:
            for node in nodes.values():
                node.script.hear.set()
                node.script.take.set()
                node.script.send.set()
                node.script.reserve.set()
                node.script.resume.set()
            service.stop()
            await main
            await service.close()
            await store.close()


async def _stop_all(nodes: Mapping[str, ScriptedNode]) -> None:
    """Those there are at the end: a test may have replaced one."""
    for node in nodes.values():
        if node.started:
            await node.die()


async def all_ready(stub: gateway_pb2_grpc.GatewayServiceAsyncStub, count: int) -> None:
    """Wait until the gateway has so many nodes that serve."""
    async with asyncio.timeout(WAIT_S):
        while True:
            models = (await stub.ListModels(gateway_pb2.ListModelsRequest())).models
            if sum(model.nodes for model in models) == count:
                return
            await asyncio.sleep(0.01)


async def failure(call: Awaitable[object]) -> grpc.aio.AioRpcError:
    """The error a call ends with."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call succeeded")
