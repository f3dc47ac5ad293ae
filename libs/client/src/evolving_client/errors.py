"""What can go wrong, by type. Every call raises `EvolvingError` or a subclass, and nothing else that is expected.

A service says what went wrong in three ways: the gRPC status, `google.rpc.ErrorInfo` with a reason in the domain
"evolving" and facts, and `google.rpc.RetryInfo` with the time after which a retry may succeed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

_DETAILS_KEY = "grpc-status-details-bin"
_DOMAIN = "evolving"


class EvolvingError(Exception):
    """Base of all errors of this package, and the error of a server that failed in an unexpected way.

    code: the gRPC status, or None where no server was involved.
    reason: the stable UPPER_SNAKE name the server gave; "" where it gave none.
    facts: what the server added to the reason.
    retry_after_s: seconds after which a retry may succeed; None where the server didn't say.
    """

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode | None = None,
        reason: str = "",
        facts: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.facts: Mapping[str, str] = dict(facts or {})
        self.retry_after_s = retry_after_s


class InvalidRequest(EvolvingError):
    """The request can't be served as it is; sending it again won't help."""


class RequestConflict(InvalidRequest):
    """This request id was used for a request with another body."""


class BranchEnded(EvolvingError):
    """The branch was ended and can't be used again."""


class UnknownBranch(EvolvingError):
    """No branch of this tenant has this id."""


class UnknownModel(EvolvingError):
    """No live node serves this model."""


class StaleVersion(EvolvingError):
    """The branch has a newer version, so its context was rewritten by another user of it; nothing was changed."""

    @property
    def current_version(self) -> int:
        """The branch's version now; 0 where the server didn't say."""
        given = self.facts.get("current_version", "")
        return int(given) if given.isdecimal() else 0


class Overloaded(EvolvingError):
    """Too much is queued, for longer than the retry policy waits."""


class Unavailable(EvolvingError):
    """No gateway could be reached, or none had a node to serve with, for as long as the retry policy tries."""


class DeadlineExceeded(EvolvingError):
    """The request's time was over before it finished."""


class Unauthenticated(EvolvingError):
    """No token, an unknown one, or one that may not do this."""


class Refused(EvolvingError):
    """The state of the cluster forbids it: see `reason`."""


class ProtocolError(EvolvingError):
    """The server broke its contract: an output index came twice or was left out, or a stream ended early."""


_BY_REASON: dict[str, type[EvolvingError]] = {
    "REQUEST_CONFLICT": RequestConflict,
    "BRANCH_ENDED": BranchEnded,
    "STALE_VERSION": StaleVersion,
    "UNKNOWN_MODEL": UnknownModel,
    "NOT_FOUND": UnknownBranch,  # the directory's; branches are all this client asks it for
}

_BY_CODE: dict[grpc.StatusCode, type[EvolvingError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    # Sent by a gateway that is stopping. A call cancelled on this side raises asyncio.CancelledError instead.
    grpc.StatusCode.CANCELLED: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: Unauthenticated,
    grpc.StatusCode.FAILED_PRECONDITION: Refused,
    grpc.StatusCode.ABORTED: Refused,
    grpc.StatusCode.NOT_FOUND: Refused,
    grpc.StatusCode.UNIMPLEMENTED: ProtocolError,
}


@dataclass(frozen=True, slots=True)
class _Details:
    """What a status carried beside its code and message."""

    reason: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    retry_after_s: float | None = None


def from_rpc(error: grpc.aio.AioRpcError) -> EvolvingError:
    """The typed form of a failed call."""
    code = error.code()
    message = error.details() or code.name.lower().replace("_", " ")
    details = _read_details(error)
    kind = _BY_REASON.get(details.reason) or _BY_CODE.get(code, EvolvingError)
    reason = details.reason
    # gRPC itself answers a message over the size limit with RESOURCE_EXHAUSTED too, without details.
    if kind is Overloaded and not reason and "larger than max" in message:
        kind, reason = InvalidRequest, "MESSAGE_TOO_LARGE"
    return kind(message, code=code, reason=reason, facts=details.facts, retry_after_s=details.retry_after_s)


def _read_details(error: grpc.aio.AioRpcError) -> _Details:
    packed = next((value for key, value in error.trailing_metadata() or () if key == _DETAILS_KEY), None)
    if not isinstance(packed, bytes):
        return _Details()
    status = status_pb2.Status()
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    reason, facts, retry_after_s = "", {}, None
    try:
        status.ParseFromString(packed)
        for detail in status.details:
            if detail.Unpack(info) and info.domain == _DOMAIN:
                reason, facts = info.reason, dict(info.metadata)
            elif detail.Unpack(retry):
                retry_after_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    except DecodeError:
        return _Details()  # the code and message still say what happened
    return _Details(reason, facts, retry_after_s)
