"""The cluster as evolvectl reaches it: addresses given or discovered, channels, calls with a deadline."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from google.protobuf.message import Message
from grpc import aio

from evolving.v1 import directory_pb2_grpc, gateway_pb2_grpc, planner_pb2_grpc
from evolving_client.ctl.failure import Failure, from_error, unreachable, usage
from evolving_client.ctl.registry import Registry, read_registry
from evolving_client.errors import EvolvingError, Unavailable, from_rpc

Answer = TypeVar("Answer", bound=Message)

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 256 * 1024 * 1024),
    ("grpc.use_local_subchannel_pool", 1),
)
_STUBS: dict[str, Any] = {
    "gateway": gateway_pb2_grpc.GatewayServiceStub,
    "planner": planner_pb2_grpc.PlannerServiceStub,
    "directory": directory_pb2_grpc.DirectoryServiceStub,
}


@dataclass(frozen=True, slots=True)
class Options:
    """The global options. An empty address is discovered."""

    gateway: str = ""
    planner: str = ""
    directory: str = ""
    etcd: str = "127.0.0.1:2379"
    prefix: str = "/evolving"
    partition: str = "p0"
    token: str | None = None
    timeout_s: float = 10.0
    json: bool = False

    def address(self, kind: str) -> str:
        """The address given for a kind of service."""
        given = {"gateway": self.gateway, "planner": self.planner, "directory": self.directory}
        return given[kind]


class Cluster:
    """Made once a command, `async with`."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._registry: Registry | None = None
        self._channels: dict[str, aio.Channel] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def registry(self) -> Registry:
        """Who is there. Read from etcd once."""
        if self._registry is None:
            options = self.options
            endpoints = [endpoint.strip() for endpoint in options.etcd.split(",") if endpoint.strip()]
            if not endpoints:
                raise usage("--etcd names no address")
            self._registry = await read_registry(endpoints, options.prefix, options.partition, options.timeout_s)
        return self._registry

    async def addresses(self, kind: str) -> tuple[str, ...]:
        """Where a kind of service is: as given, or every registered instance, the leader first."""
        given = self.options.address(kind)
        if given:
            return tuple(address.strip() for address in given.split(","))
        found = (await self.registry()).addresses(kind)
        if not found:
            raise unreachable(
                f"no {kind} is registered in partition {self.options.partition}; start one, or give --{kind} host:port"
            )
        return found

    async def call(self, kind: str, method: str, request: Message, answer: type[Answer]) -> Answer:
        """A call to a service: of the leader, or of the next instance when it is unreachable.

        A planner that doesn't lead names the leader, which is then asked. Raises Failure.
        """
        failure: Failure | None = None
        addresses = list(await self.addresses(kind))
        asked: set[str] = set()
        while addresses:
            address = addresses.pop(0)
            asked.add(address)
            try:
                return await self._ask(kind, address, method, request, answer)
            except EvolvingError as error:
                failure = from_error(error, f"the {kind} at {address}", self.options.timeout_s)
                leader = error.facts.get("leader", "")
                if error.reason == "NOT_LEADER" and leader and leader not in asked:
                    addresses.insert(0, leader)
                elif not isinstance(error, Unavailable):
                    break
        assert failure is not None
        raise failure

    def channel(self, address: str) -> aio.Channel:
        """A channel to an address, closed with the cluster."""
        if address not in self._channels:
            self._channels[address] = aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        return self._channels[address]

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Of every call."""
        return (("authorization", f"Bearer {self.options.token}"),) if self.options.token else ()

    async def _ask(self, kind: str, address: str, method: str, request: Message, answer: type[Answer]) -> Answer:
        stub = _STUBS[kind](self.channel(address))
        try:
            response = await getattr(stub, method)(request, timeout=self.options.timeout_s, metadata=self.metadata)
        except aio.AioRpcError as error:
            raise from_rpc(error) from error
        assert isinstance(response, answer)
        return response
