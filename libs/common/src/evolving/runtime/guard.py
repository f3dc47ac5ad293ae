"""What every call passes through before it reaches a servicer, and every failure on its way out.

In order: bytes that do not parse, the caller's token and scope, the limit of calls at once, ids into the log context,
a deadline where the client sent none; afterwards typed errors → status, bugs → INTERNAL with an id, and metrics.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from evolving.runtime.clock import Clock
from evolving.runtime.credentials import Caller, Credentials
from evolving.runtime.errors import DeadlineExceeded, Forbidden, MalformedMessage, Overloaded
from evolving.runtime.log import get_logger, log_context
from evolving.runtime.metrics import Metrics
from evolving.wire.status import EXPECTED, Context, ErrorDetail, Expected, abort_with, describe

REQUEST_ID_KEY = "evolving-request-id"
BRANCH_ID_KEY = "evolving-branch-id"
RETRY_AFTER_S = 0.5
_ID_CHARACTERS = 128  # of an id in a log line
# Probes and reflection need no token, count against no limit and have no default deadline.
_UNGUARDED = ("/grpc.health.v1.", "/grpc.reflection.")
_CLIENT_SCOPE = ("/evolving.v1.Gateway",)

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_log = get_logger(__name__)
_caller: contextvars.ContextVar[Caller] = contextvars.ContextVar("caller")


def current_caller() -> Caller:
    """Who sent the call this task serves. Only inside a handler."""
    return _caller.get()


@dataclass(frozen=True, slots=True)
class Limits:
    """What one server takes on."""

    max_concurrent_calls: int
    default_deadline_s: float


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Stands in for a request whose bytes did not parse, until there is a context to end the call with."""

    error: str


class Guard(grpc.aio.ServerInterceptor):
    """The one interceptor of `GrpcServer`."""

    def __init__(self, credentials: Credentials, limits: Limits, metrics: Metrics, clock: Clock) -> None:
        self._credentials = credentials
        self._limits = limits
        self._clock = clock
        self._in_flight = 0
        labels = ("method",)
        self._calls = metrics.counter("grpc_server_calls", "Calls ended, by method and status.", ("method", "code"))
        self._latency = metrics.histogram("grpc_server_latency_seconds", "From a call's arrival to its end.", labels)
        self._gauge = metrics.gauge("grpc_server_in_flight", "Calls being served now.", labels)

    @property
    def in_flight(self) -> int:
        """Guarded calls being served now."""
        return self._in_flight

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        """Wrap the method's handler; None (unknown method) passes through, and grpc answers UNIMPLEMENTED."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return cast("_Handler", None)
        method = str(handler_call_details.method)
        wrap: dict[tuple[bool, bool], tuple[str, Any]] = {
            (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
            (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
            (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
            (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
        }
        name, make = wrap[(handler.request_streaming, handler.response_streaming)]
        behaviour = getattr(handler, name)
        guarded = self._streaming(method, behaviour) if handler.response_streaming else self._unary(method, behaviour)
        wrapped: _Handler = make(
            guarded,
            request_deserializer=_tolerant(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )
        return wrapped

    def _unary(self, method: str, behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        default_s = self._limits.default_deadline_s

        async def body(request: Any, context: Context) -> Any:
            left_s: float | None = context.time_remaining()
            if left_s is not None and left_s <= 0:
                raise DeadlineExceeded("the call's deadline had passed when it arrived")
            if left_s is not None or method.startswith(_UNGUARDED):
                return await behaviour(request, context)
            try:
                async with asyncio.timeout(default_s) as limit:
                    return await behaviour(request, context)
            except TimeoutError:
                if not limit.expired():
                    raise
                raise DeadlineExceeded(f"the call set no deadline and the default of {default_s:g} s passed") from None

        async def call(request: Any, context: Context) -> Any:
            return await self._guarded(method, body, request, context)

        return call

    def _streaming(self, method: str, behaviour: Callable[..., Any]) -> Callable[..., Awaitable[None]]:
        async def body(request: Any, context: Context) -> None:
            responses = behaviour(request, context)
            if inspect.isawaitable(responses):  # a handler that calls context.write itself
                await responses
                return
            try:
                # Written here rather than yielded on, so that a cancelled call unwinds the handler at once.
                async for response in responses:
                    with _client_gone_is_cancelled():
                        await context.write(response)
            finally:
                await responses.aclose()

        async def call(request: Any, context: Context) -> None:
            await self._guarded(method, body, request, context)

        return call

    async def _guarded(
        self,
        method: str,
        body: Callable[[Any, Context], Awaitable[Any]],
        request: Any,
        context: Context,
    ) -> Any:
        """Checks before the body, status and metrics after it."""
        started_s = self._clock.now_s()
        guarded = not method.startswith(_UNGUARDED)
        code = grpc.StatusCode.OK.name
        self._gauge.labels(method).inc()
        self._in_flight += guarded
        try:
            metadata = {str(key): value for key, value in context.invocation_metadata() or ()}
            tenant = self._admit(method, metadata) if guarded else ""
            with log_context(tenant=tenant, **_ids(request, metadata)):
                try:
                    return await body(_checked(request), context)
                except Exception as error:
                    if isinstance(error, (grpc.aio.AbortError, *EXPECTED)):
                        raise
                    detail = _bug(method, error)
                    code = detail.status.name
                    with _client_gone_is_cancelled():
                        await abort_with(context, detail)
        except EXPECTED as error:
            expected = describe(cast("Expected", error))
            code = expected.status.name
            with _client_gone_is_cancelled():
                await abort_with(context, expected)
        except grpc.aio.AbortError:
            code = _status_name(context)
            raise
        except asyncio.CancelledError:
            over = context.time_remaining() is not None and context.time_remaining() <= 0
            code = (grpc.StatusCode.DEADLINE_EXCEEDED if over else grpc.StatusCode.CANCELLED).name
            raise
        finally:
            self._in_flight -= guarded
            self._gauge.labels(method).dec()
            self._calls.labels(method, code).inc()
            self._latency.labels(method).observe(self._clock.now_s() - started_s)

    def _admit(self, method: str, metadata: dict[str, Any]) -> str:
        """The caller's tenant. Raises Unauthenticated, Forbidden or Overloaded."""
        caller = self._credentials.caller(metadata.get("authorization"))
        if caller.scope != "cluster" and not method.startswith(_CLIENT_SCOPE):
            raise Forbidden(f"{method} needs a token with scope cluster")
        if self._in_flight > self._limits.max_concurrent_calls:
            raise Overloaded(
                f"{self._limits.max_concurrent_calls} calls are being served already", retry_after_s=RETRY_AFTER_S
            )
        _caller.set(caller)
        return caller.tenant


@contextmanager
def _client_gone_is_cancelled() -> Iterator[None]:
    """grpc raises InternalError where nobody listens any more. It is no bug: the call ends as a cancelled one does."""
    try:
        yield
    except grpc.aio.InternalError:
        raise asyncio.CancelledError("the client is gone") from None


def _tolerant(parse: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Parse, or hand on why not. grpc.aio itself would answer bytes that don't parse with INTERNAL."""
    if parse is None:
        return None

    def deserialize(data: bytes) -> Any:
        try:
            return parse(data)
        except Exception as error:  # noqa: BLE001 - whatever a parser may raise on hostile bytes
            return _Malformed(str(error))

    return deserialize


def _checked(request: Any) -> Any:
    """The request, or the stream of requests, with MalformedMessage raised in place of what did not parse."""
    if isinstance(request, _Malformed):
        raise MalformedMessage(f"the request is not a valid message ({request.error})")
    return _checked_stream(request) if hasattr(request, "__aiter__") else request


async def _checked_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request)


def _ids(request: Any, metadata: dict[str, Any]) -> dict[str, str]:
    """Request and branch id, from the message (or its `branch`) where it has such fields, else from the metadata."""
    found = {"request_id": metadata.get(REQUEST_ID_KEY, ""), "branch_id": metadata.get(BRANCH_ID_KEY, "")}
    for message in (request, getattr(request, "branch", None)):
        for name in found if isinstance(message, Message) else ():
            value = getattr(message, name, "")
            if isinstance(value, str) and value:
                found[name] = value
    return {name: str(value)[:_ID_CHARACTERS] for name, value in found.items()}


def _bug(method: str, error: Exception) -> ErrorDetail:
    """Log an unexpected failure with its trace under an id, and tell the caller only the id."""
    error_id = secrets.token_hex(6)
    _log.error("call_failed", method=method, error_id=error_id, exc_info=error)
    message = f"internal error {error_id}; the server's log has the details under this id"
    return ErrorDetail(grpc.StatusCode.INTERNAL, "INTERNAL", message, {"error_id": error_id})


def _status_name(context: Context) -> str:
    """The status a handler aborted with; grpc.aio gives it as a number or a StatusCode."""
    code: Any = context.code()
    return next((status.name for status in grpc.StatusCode if code in (status, status.value[0])), str(code))
