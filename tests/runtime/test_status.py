"""Every expected failure has one gRPC status, and what a server says is what a client reads."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest
from grpc_status import rpc_status

from evolving.core import errors as core
from evolving.runtime import errors as runtime
from evolving.runtime.store import Conflict, Fenced, Guard, Versioned
from evolving.wire.status import ErrorDetail, describe, parse_error, to_proto


def subclasses(base: type[Exception]) -> list[type[Exception]]:
    return [base, *(deeper for kind in base.__subclasses__() for deeper in subclasses(kind))]


@pytest.mark.parametrize("kind", [kind for kind in subclasses(core.CoreError) if kind is not core.CoreError])
def test_every_failure_of_the_core_has_a_status(kind: type[core.CoreError]) -> None:
    error = kind.__new__(kind)  # whatever its constructor takes
    core.CoreError.__init__(error, "why", {"fact": "1"})
    detail = describe(error)
    assert detail.status not in (grpc.StatusCode.OK, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
    assert (detail.reason, detail.message, detail.metadata) == (kind.code, "why", {"fact": "1"})


def test_reasons_of_the_core_are_its_own() -> None:
    codes = [kind.code for kind in subclasses(core.CoreError) if issubclass(kind, core.CoreError)]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize("kind", [kind for kind in subclasses(runtime.ServiceError) if "evolving" in kind.__module__])
def test_every_failure_of_the_shell_carries_its_own(kind: type[runtime.ServiceError]) -> None:
    assert kind.reason.isupper()
    assert kind.status is not grpc.StatusCode.OK


def test_store_failures_are_told_apart() -> None:
    conflict = describe(Conflict("/split", Versioned("/split", b"", 7, 1, 3)))
    assert (conflict.status, conflict.metadata) == (grpc.StatusCode.ABORTED, {"current_revision": "7"})
    assert describe(Conflict("/split", None)).metadata == {"current_revision": "0"}
    assert describe(Fenced(Guard("/leader", 1))).reason == "NOT_LEADER"


@pytest.mark.parametrize("retry_after_s", [None, 0.0, 0.25, 90.5])
def test_what_is_sent_is_what_is_read(retry_after_s: float | None) -> None:
    sent = ErrorDetail(grpc.StatusCode.ABORTED, "REASON", "why, and «how»", {"a": "1", "b": ""}, retry_after_s)
    status = rpc_status.to_status(to_proto(sent))
    trailing = grpc.aio.Metadata(*status.trailing_metadata)
    received = grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailing, details=status.details)
    assert parse_error(received) == sent


def test_a_service_adds_its_own_failures_by_subclassing() -> None:
    class NoSuchModel(runtime.InvalidRequest):
        reason = "NO_SUCH_MODEL"
        status = grpc.StatusCode.NOT_FOUND

    detail = describe(NoSuchModel("no such model", metadata={"model": "m"}))
    assert (detail.status, detail.reason, detail.metadata) == (
        grpc.StatusCode.NOT_FOUND,
        "NO_SUCH_MODEL",
        {"model": "m"},
    )
