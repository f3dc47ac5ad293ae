"""Expected failures of the directory service, beyond the core's."""

from __future__ import annotations

import grpc

from evolving.runtime.errors import ServiceError


class NotFound(ServiceError):
    """There is no such block or branch."""

    reason = "NOT_FOUND"
    status = grpc.StatusCode.NOT_FOUND


class Superseded(ServiceError):
    """A directory of a higher term serves this partition; metadata["term"] is that term."""

    reason = "STALE_TERM"
    status = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, own_term: int, newer_term: int) -> None:
        super().__init__(
            f"this directory has term {own_term}, a newer one has {newer_term}", metadata={"term": str(newer_term)}
        )


class StreamReplaced(ServiceError):
    """The node opened another stream."""

    reason = "STREAM_REPLACED"
    status = grpc.StatusCode.ABORTED


class NodeTooSlow(ServiceError):
    """The node did not read what was sent to it; it should connect anew."""

    reason = "NODE_TOO_SLOW"
    status = grpc.StatusCode.RESOURCE_EXHAUSTED


class JournalFailed(ServiceError):
    """What the call changed can't be made durable now: the disk fails. Try again; the same ids change nothing twice."""

    reason = "JOURNAL_FAILED"
    status = grpc.StatusCode.UNAVAILABLE

    def __init__(self, why: str) -> None:
        super().__init__(why, retry_after_s=1.0)
