"""Typed failures on the wire: error → gRPC status with google.rpc.ErrorInfo and RetryInfo, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from evolving.core.errors import CoreError
from evolving.runtime.errors import ServiceError
from evolving.runtime.store import Conflict, Fenced

DOMAIN = "evolving"
_DETAILS_KEY = "grpc-status-details-bin"

# The gRPC status of each code of the core; a subclass without an entry takes its base's.
CORE_STATUS: Mapping[str, grpc.StatusCode] = {
    "INVALID_ARGUMENT": grpc.StatusCode.INVALID_ARGUMENT,
    "BRANCH_ENDED": grpc.StatusCode.FAILED_PRECONDITION,
    "STALE_VERSION": grpc.StatusCode.FAILED_PRECONDITION,
    "NEED_FULL": grpc.StatusCode.FAILED_PRECONDITION,
    "STALE_INCARNATION": grpc.StatusCode.FAILED_PRECONDITION,
    "EPOCH_CHANGED": grpc.StatusCode.ABORTED,
    "UNKNOWN_NODE": grpc.StatusCode.FAILED_PRECONDITION,
}

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"  # what a handler is given; generic in the type stubs only
Expected = ServiceError | CoreError | Conflict | Fenced
EXPECTED: tuple[type[Exception], ...] = (ServiceError, CoreError, Conflict, Fenced)


@dataclass(frozen=True, slots=True)
class ErrorDetail:
    """What a caller learns from a failed call."""

    status: grpc.StatusCode
    reason: str  # stable name to branch on; the status's own name when the server sent none
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    retry_after_s: float | None = None  # set when a retry may succeed


def describe(error: Expected) -> ErrorDetail:
    """The status, reason and facts an expected failure is sent with."""
    if isinstance(error, ServiceError):
        return ErrorDetail(error.status, error.reason, str(error), error.metadata, error.retry_after_s)
    if isinstance(error, CoreError):
        return ErrorDetail(_core_status(error), error.code, str(error), error.metadata)
    if isinstance(error, Conflict):
        current = error.current.mod_revision if error.current else 0
        return ErrorDetail(grpc.StatusCode.ABORTED, "CONFLICT", str(error), {"current_revision": str(current)})
    return ErrorDetail(grpc.StatusCode.FAILED_PRECONDITION, "NOT_LEADER", str(error))


def _core_status(error: CoreError) -> grpc.StatusCode:
    for kind in type(error).__mro__:
        code = getattr(kind, "code", None)
        if isinstance(code, str) and code in CORE_STATUS:
            return CORE_STATUS[code]
    raise AssertionError(f"{type(error).__name__} ({error.code}) has no gRPC status in CORE_STATUS")


def to_proto(detail: ErrorDetail) -> status_pb2.Status:
    """The google.rpc.Status that travels in the trailing metadata."""
    number, _ = detail.status.value
    details = [_packed(error_details_pb2.ErrorInfo(reason=detail.reason, domain=DOMAIN, metadata=detail.metadata))]
    if detail.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(round(detail.retry_after_s * 1e9))
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status_pb2.Status(code=number, message=detail.message, details=details)


async def abort(context: Context, error: Expected) -> NoReturn:
    """End the call with the error's status. Handlers need not call it: an expected failure they raise ends the call
    the same way."""
    await abort_with(context, describe(error))


async def abort_with(context: Context, detail: ErrorDetail) -> NoReturn:
    """End the call with this detail."""
    status = rpc_status.to_status(to_proto(detail))
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort returned")


def parse_error(error: grpc.aio.AioRpcError) -> ErrorDetail:
    """What a server said about a failed call; statuses of any other server or of grpc itself are understood too."""
    reason, metadata, retry_after_s = error.code().name, dict[str, str](), None
    for packed in _details(error):
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if packed.Is(info.DESCRIPTOR) and packed.Unpack(info):
            reason, metadata = info.reason or reason, dict(info.metadata)
        elif packed.Is(retry.DESCRIPTOR) and packed.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    return ErrorDetail(error.code(), reason, error.details() or "", metadata, retry_after_s)


def _details(error: grpc.aio.AioRpcError) -> list[AnyMessage]:
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                return list(status_pb2.Status.FromString(value).details)
            except DecodeError:
                return []  # some other server's idea of details: the status itself still says what happened
    return []


def _packed(message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed
