"""A server on a socket whose handlers do what a request's text asks, and how tests call it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from evolving.core.errors import BranchEnded, StaleVersion
from evolving.runtime.clock import SystemClock
from evolving.runtime.credentials import Credentials
from evolving.runtime.errors import NotReady
from evolving.runtime.guard import Limits, current_caller
from evolving.runtime.log import current_ids
from evolving.runtime.metrics import Metrics
from evolving.runtime.readiness import Readiness
from evolving.runtime.server import GrpcServer

METHODS = {
    "Say": ("unary_unary", grpc.unary_unary_rpc_method_handler),
    "Count": ("unary_stream", grpc.unary_stream_rpc_method_handler),
    "Join": ("stream_unary", grpc.stream_unary_rpc_method_handler),
    "Echo": ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


class Servicer:
    """Does what its request's text asks."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def Say(self, request: StringValue, context: Any) -> StringValue:
        return StringValue(value=await self._do(request.value, context))

    async def Count(self, request: StringValue, context: Any) -> AsyncIterator[StringValue]:
        for n in range(3):
            yield StringValue(value=str(n))
        yield StringValue(value=await self._do(request.value, context))

    async def Join(self, requests: AsyncIterator[StringValue], context: Any) -> StringValue:
        return StringValue(value=",".join([request.value async for request in requests]))

    async def Echo(self, requests: AsyncIterator[StringValue], context: Any) -> AsyncIterator[StringValue]:
        async for request in requests:
            yield StringValue(value=await self._do(request.value, context))

    async def _do(self, what: str, context: Any) -> str:
        match what:
            case "ended":
                raise BranchEnded("the branch was ended")
            case "stale":
                raise StaleVersion(7)
            case "later":
                raise NotReady("no nodes yet", retry_after_s=0.25)
            case "bug":
                raise ValueError("for our eyes only")
            case "abort":
                await context.abort(grpc.StatusCode.DATA_LOSS, "by hand")
            case "tenant":
                return current_caller().tenant
            case "ids":
                return ",".join(f"{name}={value}" for name, value in current_ids().items())
            case "wait":
                self.entered.set()
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    self.cancelled.set()
                    raise
            case "fail late":
                self.entered.set()
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    self.cancelled.set()
                    raise NotReady("nobody hears this") from None
        return what


class Running:
    """A server on a free port, with its servicer."""

    def __init__(self, *, credentials: Path | None = None, calls: int = 100, deadline_s: float = 30.0) -> None:
        clock = SystemClock()
        self.servicer = Servicer()
        self.metrics = Metrics()
        self.ready = Readiness()
        limits = Limits(max_concurrent_calls=calls, default_deadline_s=deadline_s)
        self.server = GrpcServer(
            Credentials(credentials, clock), limits, self.metrics, self.ready, clock, max_message_bytes=1 << 20
        )
        for service in ("test.Internal", "evolving.v1.Gateway"):
            self.server.add(functools.partial(register, service), self.servicer, service)
        self.address = ""

    async def __aenter__(self) -> Running:
        self.address = await self.server.start("127.0.0.1:0")
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.server.stop(0)

    def sample(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"evolving_{name}", labels)


def register(service: str, servicer: Servicer, server: grpc.aio.Server) -> None:
    handlers = {
        name: make(
            getattr(servicer, name),
            request_deserializer=StringValue.FromString,
            response_serializer=StringValue.SerializeToString,
        )
        for name, (_, make) in METHODS.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))


def method(channel: grpc.aio.Channel, name: str, service: str = "test.Internal") -> Any:
    kind, _ = METHODS[name]
    return getattr(channel, kind)(
        f"/{service}/{name}",
        request_serializer=lambda message: message if isinstance(message, bytes) else message.SerializeToString(),
        response_deserializer=StringValue.FromString,
    )


def text(value: str) -> StringValue:
    return StringValue(value=value)


async def failure(channel: grpc.aio.Channel, name: str, what: str) -> grpc.aio.AioRpcError:
    """The error of a call that must fail."""
    call = method(channel, name)(iter([text(what)]) if name in ("Join", "Echo") else text(what))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await drain(call)
    return error.value


async def drain(call: Any) -> None:
    if hasattr(call, "__aiter__"):
        async for _ in call:
            pass
    else:
        await call


async def health(channel: grpc.aio.Channel, service: str) -> int:
    answer = await health_stub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return int(answer.status)


async def reflected(channel: grpc.aio.Channel) -> set[str]:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(cast("Any", channel))
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async for answer in stub.ServerReflectionInfo(iter([request])):
        return {service.name for service in answer.list_services_response.service}
    raise AssertionError("no answer")


def health_stub(channel: grpc.aio.Channel) -> Any:
    """Untyped: the generated stub's methods are unknown to mypy."""
    return health_pb2_grpc.HealthStub(channel)
