"""A gRPC server with health, reflection, limits and the guard around every call."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from evolving.runtime.clock import Clock
from evolving.runtime.credentials import Credentials
from evolving.runtime.guard import Guard, Limits
from evolving.runtime.metrics import Metrics
from evolving.runtime.readiness import Readiness
from evolving.runtime.settings import SettingsError, join_address, split_address

Servicer = TypeVar("Servicer")
Options = list[tuple[str, int]]


def _is_news(record: logging.LogRecord) -> bool:
    """grpc logs an error with a trace for each client that was gone when the last status was sent: no news."""
    return not (record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError))


logging.getLogger("grpc._cython.cygrpc").addFilter(_is_news)


def server_options(max_message_bytes: int) -> Options:
    """Message limits both ways; pings are accepted every 10 s, also between calls."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.ping_timeout_ms", 10_000),  # see channel.py
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),  # a port that is taken is an error, not a second server on it
    ]


class GrpcServer:
    """grpc.aio server of one process. `add` every servicer, then `start`.

    Handlers are `async def` for unary and async generators for streamed responses. They raise ServiceError or
    CoreError subclasses for expected failures; `guard.current_caller()` says who calls.
    """

    def __init__(
        self,
        credentials: Credentials,
        limits: Limits,
        metrics: Metrics,
        readiness: Readiness,
        clock: Clock,
        max_message_bytes: int,
    ) -> None:
        self.guard = Guard(credentials, limits, metrics, clock)
        self._readiness = readiness
        self._health = health.aio.HealthServicer()
        self._names: list[str] = []
        self._server = grpc.aio.server(interceptors=(self.guard,), options=server_options(max_message_bytes))

    def add(self, register: Callable[[Servicer, grpc.aio.Server], None], servicer: Servicer, service_name: str) -> None:
        """Register a servicer: `add(gateway_pb2_grpc.add_GatewayServicer_to_server, it, "evolving.v1.Gateway")`."""
        register(servicer, self._server)
        self._names.append(service_name)

    async def start(self, listen: str) -> str:
        """Bind `listen` and serve; the address bound, with its real port. Raises SettingsError when it can't bind."""
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflected = (*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(reflected, self._server)
        host, _ = split_address(listen)
        try:
            port = self._server.add_insecure_port(listen)
        except RuntimeError as error:
            raise SettingsError(f"--listen: {listen} can't be bound ({error}); give a free port") from error
        await self.update_health()
        await self._server.start()
        return join_address(host, port)

    async def update_health(self) -> None:
        """Make grpc.health.v1 say what readiness says, for "" and every service."""
        answers = health_pb2.HealthCheckResponse
        for name in ("", *self._names):
            # Readiness is asked anew each time: it may flip while `set` waits, and this call must not undo a later one.
            await self._health.set(name, answers.SERVING if self._readiness.ready else answers.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Stop accepting calls, give running ones `grace_s`, then cancel them. Health says NOT_SERVING first."""
        await self.update_health()
        await self._server.stop(grace_s)
