"""Every failure a gateway may answer with has its type in evolving_client."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from scripted_gateway import Play, ScriptedGateway, refusal, serve

import evolving_client
from evolving_client import Client, EvolvingError, RetryPolicy, StaleVersion
from evolving_client.errors import from_rpc

Code = grpc.StatusCode
ONCE = RetryPolicy(max_failures=1)


@pytest.fixture
async def gateway() -> ScriptedGateway:
    return ScriptedGateway()


@pytest.fixture
async def client(gateway: ScriptedGateway) -> AsyncIterator[Client]:
    server, address = await serve(gateway)
    async with Client(address, retry=ONCE) as client:
        yield client
    await server.stop(None)


@pytest.mark.parametrize(
    ("status", "reason", "expected"),
    [
        (Code.INVALID_ARGUMENT, "INVALID_REQUEST", evolving_client.InvalidRequest),
        (Code.INVALID_ARGUMENT, "REQUEST_CONFLICT", evolving_client.RequestConflict),
        (Code.FAILED_PRECONDITION, "BRANCH_ENDED", evolving_client.BranchEnded),
        (Code.FAILED_PRECONDITION, "STALE_VERSION", evolving_client.StaleVersion),
        (Code.FAILED_PRECONDITION, "NOT_LEADER", evolving_client.Refused),
        (Code.NOT_FOUND, "UNKNOWN_MODEL", evolving_client.UnknownModel),
        (Code.RESOURCE_EXHAUSTED, "OVERLOADED", evolving_client.Overloaded),
        (Code.UNAVAILABLE, "NOT_READY", evolving_client.Unavailable),
        (Code.CANCELLED, "", evolving_client.Unavailable),
        (Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", evolving_client.DeadlineExceeded),
        (Code.UNAUTHENTICATED, "UNAUTHENTICATED", evolving_client.Unauthenticated),
        (Code.PERMISSION_DENIED, "FORBIDDEN", evolving_client.Unauthenticated),
        (Code.UNIMPLEMENTED, "", evolving_client.ProtocolError),
        (Code.INTERNAL, "", EvolvingError),
    ],
)
async def test_a_status_and_reason_become_a_type(
    client: Client, gateway: ScriptedGateway, status: Code, reason: str, expected: type[EvolvingError]
) -> None:
    detail = refusal(status, reason, hint="something")
    gateway.plays.append(Play(fail_at=2, error=detail))
    with pytest.raises(EvolvingError) as caught:
        await client.generate(text="x").finish()
    error = caught.value
    assert type(error) is expected
    assert (error.code, error.reason, error.facts) == (status, reason, {"hint": "something"})
    assert str(error) == detail.message
    assert len(gateway.requests) == 1


async def test_a_stale_version_carries_the_current_one(client: Client, gateway: ScriptedGateway) -> None:
    error = refusal(Code.FAILED_PRECONDITION, "STALE_VERSION", current_version="7")
    gateway.plays.append(Play(fail_at=0, error=error))
    with pytest.raises(StaleVersion) as caught:
        await client.generate(text="x").finish()
    assert caught.value.current_version == 7


async def test_a_request_id_with_another_body_is_an_invalid_request() -> None:
    assert issubclass(evolving_client.RequestConflict, evolving_client.InvalidRequest)


def error_with(trailing: bytes, message: str = "oh", code: Code = Code.NOT_FOUND) -> aio.AioRpcError:
    """A failed call with these status details."""
    metadata = aio.Metadata(("grpc-status-details-bin", trailing))
    return aio.AioRpcError(code, aio.Metadata(), metadata, message)


@pytest.mark.parametrize(
    "trailing",
    [b"", b"\xff\xff\xff", status_pb2.Status(code=5).SerializeToString()],
    ids=["empty", "garbage", "no details"],
)
def test_details_of_any_other_server_leave_code_and_message(trailing: bytes) -> None:
    error = from_rpc(error_with(trailing))
    assert (error.code, error.reason, str(error)) == (Code.NOT_FOUND, "", "oh")


def test_a_reason_of_another_domain_is_not_ours() -> None:
    status = status_pb2.Status(code=5)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="BRANCH_ENDED", domain="example.com"))
    error = from_rpc(error_with(status.SerializeToString()))
    assert type(error) is evolving_client.Refused
    assert error.reason == ""


def test_a_message_over_the_limit_is_an_invalid_request() -> None:
    error = aio.AioRpcError(
        Code.RESOURCE_EXHAUSTED, aio.Metadata(), aio.Metadata(), "SERVER: Received message larger than max (9 vs. 4)"
    )
    assert isinstance(from_rpc(error), evolving_client.InvalidRequest)


async def test_a_prompt_over_the_servers_message_limit_is_an_invalid_request(client: Client) -> None:
    with pytest.raises(evolving_client.InvalidRequest) as caught:
        await client.generate(text="x" * (5 * 1024 * 1024)).finish()
    assert caught.value.reason == "MESSAGE_TOO_LARGE"


def test_the_client_brings_neither_the_core_nor_the_runtime() -> None:
    loaded = "import sys, evolving_client; print(*sorted(m for m in sys.modules if m.startswith('evolving.')))"
    result = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    names = result.stdout.split()
    assert "evolving.v1.gateway_pb2" in names
    assert not [name for name in names if name.startswith(("evolving.core", "evolving.runtime", "evolving.wire"))]
