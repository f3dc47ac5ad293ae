"""Expected failures of the shell. Each carries a reason and a gRPC status; `wire.status` puts them on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import grpc


class ServiceError(Exception):
    """An expected failure that a caller may see. Services subclass it for their own failures.

    reason: a stable UPPER_SNAKE name clients may branch on (google.rpc.ErrorInfo.reason).
    status: the gRPC status it is sent with.
    metadata: facts a client can act on, for example {"current_version": "3"}.
    retry_after_s: seconds after which a retry may succeed; None: a retry won't help.
    """

    reason: ClassVar[str] = "SERVICE_ERROR"
    status: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL

    def __init__(
        self, message: str, *, metadata: Mapping[str, str] | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.metadata: Mapping[str, str] = dict(metadata or {})
        self.retry_after_s = retry_after_s


class InvalidRequest(ServiceError):
    """The request can't be served as it is, whatever the state of the cluster."""

    reason = "INVALID_REQUEST"
    status = grpc.StatusCode.INVALID_ARGUMENT


class MalformedMessage(InvalidRequest):
    """Bytes that are not the method's request message."""

    reason = "MALFORMED_MESSAGE"


class Unauthenticated(ServiceError):
    """No bearer token, or one nobody was given."""

    reason = "UNAUTHENTICATED"
    status = grpc.StatusCode.UNAUTHENTICATED


class Forbidden(ServiceError):
    """A valid token whose scope does not cover the method."""

    reason = "FORBIDDEN"
    status = grpc.StatusCode.PERMISSION_DENIED


class NameTaken(ServiceError):
    """Another process registered under this one's name, and takes over."""

    reason = "NAME_TAKEN"
    status = grpc.StatusCode.UNAVAILABLE


class Overloaded(ServiceError):
    """Too many calls at once; come back after `retry_after_s`."""

    reason = "OVERLOADED"
    status = grpc.StatusCode.RESOURCE_EXHAUSTED


class DeadlineExceeded(ServiceError):
    """The call's deadline, or the server's default one, passed."""

    reason = "DEADLINE_EXCEEDED"
    status = grpc.StatusCode.DEADLINE_EXCEEDED


class NotReady(ServiceError):
    """Something this call needs (etcd, a peer, a snapshot) is not there yet."""

    reason = "NOT_READY"
    status = grpc.StatusCode.UNAVAILABLE


class NotLeader(ServiceError):
    """Another instance leads; metadata["leader"] names it where known."""

    reason = "NOT_LEADER"
    status = grpc.StatusCode.FAILED_PRECONDITION


class WrongPartition(ServiceError):
    """The request is meant for another partition; metadata["partition_id"] is this service's."""

    reason = "WRONG_PARTITION"
    status = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, asked: str, own: str) -> None:
        super().__init__(f"this is partition {own!r}, not {asked!r}", metadata={"partition_id": own})


class StoreUnavailable(ServiceError):
    """etcd did not answer in time. A write may or may not have been applied: read before trying again."""

    reason = "STORE_UNAVAILABLE"
    status = grpc.StatusCode.UNAVAILABLE
