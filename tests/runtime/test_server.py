"""Every call through a real server on a socket: status, authentication, limits, deadlines, hostile bytes."""

from __future__ import annotations

import asyncio
import logging
import random
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2
from runtime.obedient_server import Running, drain, failure, health, health_stub, method, reflected, text
from structlog.testing import capture_logs
from waiting import answered, eventually

from evolving.runtime.channel import open_channel
from evolving.runtime.credentials import hash_token
from evolving.runtime.log import log_context
from evolving.wire.status import parse_error

CALLS, SAY = "grpc_server_calls_total", "/test.Internal/Say"


async def test_all_four_kinds_of_call_pass() -> None:
    async with Running() as running, open_channel(running.address) as channel:
        assert (await method(channel, "Say")(text("hello"))).value == "hello"
        assert [m.value async for m in method(channel, "Count")(text("end"))] == ["0", "1", "2", "end"]
        assert (await method(channel, "Join")(iter([text("a"), text("b")]))).value == "a,b"
        assert [m.value async for m in method(channel, "Echo")(iter([text("a"), text("b")]))] == ["a", "b"]
        assert running.sample("grpc_server_calls_total", method="/test.Internal/Echo", code="OK") == 1
        assert running.sample("grpc_server_in_flight", method="/test.Internal/Echo") == 0
        assert running.sample("grpc_server_latency_seconds_count", method="/test.Internal/Count") == 1


@pytest.mark.parametrize("name", ["Say", "Count", "Echo"])
@pytest.mark.parametrize(
    ("what", "status", "reason", "metadata", "retry_after_s"),
    [
        ("ended", grpc.StatusCode.FAILED_PRECONDITION, "BRANCH_ENDED", {}, None),
        ("stale", grpc.StatusCode.FAILED_PRECONDITION, "STALE_VERSION", {"current_version": "7"}, None),
        ("later", grpc.StatusCode.UNAVAILABLE, "NOT_READY", {}, 0.25),
    ],
)
async def test_expected_failures_have_a_status_a_reason_and_facts(
    name: str, what: str, status: grpc.StatusCode, reason: str, metadata: dict[str, str], retry_after_s: float | None
) -> None:
    async with Running() as running, open_channel(running.address) as channel:
        detail = parse_error(await failure(channel, name, what))
        assert (detail.status, detail.reason, detail.metadata) == (status, reason, metadata)
        assert detail.retry_after_s == retry_after_s
        calls = running.sample("grpc_server_calls_total", method=f"/test.Internal/{name}", code=status.name)
        assert calls == 1


@pytest.mark.parametrize("name", ["Say", "Count", "Echo"])
async def test_a_bug_is_internal_with_an_id_and_the_trace_stays_in_the_log(name: str) -> None:
    async with Running() as running, open_channel(running.address) as channel:
        with capture_logs() as lines:
            detail = parse_error(await failure(channel, name, "bug"))
        assert detail.status is grpc.StatusCode.INTERNAL
        assert "our eyes" not in detail.message
        (line,) = [line for line in lines if line["event"] == "call_failed"]
        assert line["error_id"] == detail.metadata["error_id"]
        assert isinstance(line["exc_info"], ValueError)
        assert (await method(channel, "Say")(text("alive"))).value == "alive"


async def test_a_status_set_by_hand_passes_through() -> None:
    async with Running() as running, open_channel(running.address) as channel:
        error = await failure(channel, "Say", "abort")
        assert error.code() is grpc.StatusCode.DATA_LOSS
        # The client may hear of it a moment before it is counted.
        await eventually(
            lambda: running.sample("grpc_server_calls_total", method="/test.Internal/Say", code="DATA_LOSS") == 1
        )


@pytest.mark.parametrize("name", ["Say", "Count", "Join", "Echo"])
async def test_bytes_that_are_no_message_are_an_invalid_argument(name: str) -> None:
    async with Running() as running, open_channel(running.address) as channel:
        garbage = b"\x0a\xff\xff\xff\xff\x0f"
        call = method(channel, name)(iter([garbage]) if name in ("Join", "Echo") else garbage)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await drain(call)
        assert parse_error(error.value).reason == "MALFORMED_MESSAGE"
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_ten_thousand_random_byte_strings_leave_the_server_alive() -> None:
    rng = random.Random(20261129)
    fitting = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}
    async with Running() as running, open_channel(running.address) as channel:
        say, count = method(channel, "Say"), method(channel, "Count")

        async def send(data: bytes) -> grpc.StatusCode:
            call = (say if rng.random() < 0.5 else count)(data)
            try:
                await drain(call)
            except grpc.aio.AioRpcError as error:
                return error.code()
            return grpc.StatusCode.OK

        statuses: set[grpc.StatusCode] = set()
        for _ in range(100):
            batch = [rng.randbytes(rng.randrange(64)) for _ in range(100)]
            statuses.update(await asyncio.gather(*map(send, batch)))
        assert grpc.StatusCode.INVALID_ARGUMENT in statuses
        assert statuses <= fitting
        assert (await say(text("alive"))).value == "alive"
        assert running.server.guard.in_flight == 0


async def test_raw_garbage_on_the_socket_leaves_the_server_alive() -> None:
    rng = random.Random(7)
    async with Running() as running:
        host, port = running.address.rsplit(":", 1)
        for _ in range(50):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(rng.randbytes(256))
            writer.write_eof()
            async with asyncio.timeout(30):
                await asyncio.gather(reader.read(), return_exceptions=True)
            writer.close()
        async with open_channel(running.address) as channel:
            assert (await method(channel, "Say")(text("alive"))).value == "alive"


async def test_a_message_over_the_limit_is_resource_exhausted() -> None:
    async with Running() as running, open_channel(running.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await method(channel, "Say")(text("x" * (1 << 21)))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_an_unknown_method_is_unimplemented() -> None:
    async with Running() as running, open_channel(running.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await method(channel, "Say", "test.Nowhere")(text("x"))
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_calls_over_the_limit_are_refused_with_a_hint_and_pass_later() -> None:
    async with Running(calls=2) as running, open_channel(running.address) as channel:
        say = method(channel, "Say")
        waiting = [say(text("wait")) for _ in range(2)]
        async with asyncio.timeout(30):
            while running.server.guard.in_flight < 2:
                await asyncio.sleep(0.01)
        detail = parse_error(await failure(channel, "Say", "x"))
        assert (detail.status, detail.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        assert detail.retry_after_s is not None
        assert detail.retry_after_s > 0
        assert (await health(channel, "")) == health_pb2.HealthCheckResponse.SERVING  # probes count against no limit
        waiting[0].cancel()
        answer = await answered(lambda: say(text("now")))
        assert answer.value == "now"
        waiting[1].cancel()


async def test_a_unary_call_without_a_deadline_gets_the_default_one() -> None:
    async with Running(deadline_s=0.05) as running, open_channel(running.address) as channel:
        detail = parse_error(await failure(channel, "Say", "wait"))
        assert detail.status is grpc.StatusCode.DEADLINE_EXCEEDED
        await running.servicer.cancelled.wait()


async def test_the_clients_own_deadline_ends_the_handler() -> None:
    async with Running() as running, open_channel(running.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await method(channel, "Say")(text("wait"), timeout=0.2)
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(30):
            await running.servicer.cancelled.wait()


async def test_a_deadline_of_zero_leaves_nothing_running() -> None:
    async with Running() as running, open_channel(running.address) as channel:
        for _ in range(20):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await method(channel, "Say")(text("wait"), timeout=0)
            assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(30):
            while running.server.guard.in_flight:
                await asyncio.sleep(0.01)


async def test_a_deadline_that_passed_on_the_way_never_reaches_the_handler() -> None:
    class Late:
        """A context whose call arrived too late."""

        aborted: grpc.StatusCode | None = None

        def invocation_metadata(self) -> tuple[()]:
            return ()

        def time_remaining(self) -> float:
            return -0.001

        async def abort(self, code: grpc.StatusCode, *_details: object) -> None:
            self.aborted = code
            raise grpc.aio.AbortError

    running = Running()
    late = Late()
    with pytest.raises(grpc.aio.AbortError):
        await running.server.guard._unary("/test.Internal/Say", running.servicer.Say)(text("wait"), cast("Any", late))
    assert late.aborted is grpc.StatusCode.DEADLINE_EXCEEDED
    assert not running.servicer.entered.is_set()


@pytest.mark.parametrize("name", ["Say", "Count", "Echo"])
async def test_a_cancelled_call_unwinds_its_handler(name: str) -> None:
    async with Running() as running, open_channel(running.address) as channel:
        reading = asyncio.ensure_future(failure(channel, name, "wait"))
        async with asyncio.timeout(30):
            await running.servicer.entered.wait()
            reading.cancel()
            await running.servicer.cancelled.wait()
            while running.server.guard.in_flight:
                await asyncio.sleep(0.01)
        assert running.sample("grpc_server_calls_total", method=f"/test.Internal/{name}", code="CANCELLED") == 1


@pytest.mark.parametrize("name", ["Say", "Count"])
async def test_a_failure_nobody_waits_for_any_more_is_no_error_in_the_log(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Running() as running, open_channel(running.address) as channel:
        reading = asyncio.ensure_future(failure(channel, name, "fail late"))
        async with asyncio.timeout(30):
            await running.servicer.entered.wait()
            reading.cancel()
            while running.server.guard.in_flight:
                await asyncio.sleep(0.01)
        assert running.servicer.cancelled.is_set()
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_client_gone_before_the_status_was_sent_is_no_news_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("grpc._cython.cygrpc")  # the name grpc.aio logs under
    log.error("raised in core", exc_info=grpc.aio.InternalError("execute_batch"))
    log.error("raised in a servicer", exc_info=ValueError("a bug"))
    assert [record.getMessage() for record in caplog.records] == ["raised in a servicer"]


async def test_ids_travel_from_the_callers_context_to_the_handlers() -> None:
    async with Running() as running, open_channel(running.address) as channel:
        with log_context(request_id="r1", branch_id="b1"):
            answer = await method(channel, "Say")(text("ids"))
        assert answer.value == "request_id=r1,branch_id=b1"
        assert (await method(channel, "Say")(text("ids"))).value == ""


async def test_tokens_decide_tenant_and_scope(tmp_path: Path) -> None:
    path = tmp_path / "credentials.toml"
    path.write_text(
        f'[[credential]]\ntenant = "team-a"\nsha256 = "{hash_token("client-token")}"\n'
        f'[[credential]]\ntenant = "ops"\nsha256 = "{hash_token("cluster-token")}"\nscope = "cluster"\n'
    )
    async with Running(credentials=path) as running:

        async def ask(token: str | None, service: str) -> str:
            async with open_channel(running.address, token=token) as channel:
                try:
                    answer: StringValue = await method(channel, "Say", service)(text("tenant"))
                    return answer.value
                except grpc.aio.AioRpcError as error:
                    return error.code().name

        assert await ask("client-token", "evolving.v1.Gateway") == "team-a"
        assert await ask("client-token", "test.Internal") == "PERMISSION_DENIED"
        assert await ask("cluster-token", "test.Internal") == "ops"
        assert await ask("cluster-token", "evolving.v1.Gateway") == "ops"
        assert await ask("wrong", "evolving.v1.Gateway") == "UNAUTHENTICATED"
        assert await ask(None, "evolving.v1.Gateway") == "UNAUTHENTICATED"
        async with open_channel(running.address) as channel:  # probes and reflection need no token
            assert await health(channel, "") == health_pb2.HealthCheckResponse.SERVING
            assert "evolving.v1.Gateway" in await reflected(channel)


async def test_health_follows_readiness_for_the_server_and_each_service() -> None:
    states = health_pb2.HealthCheckResponse
    async with Running() as running, open_channel(running.address) as channel:
        running.ready.require("etcd")
        await running.server.update_health()
        for name in ("", "test.Internal", "evolving.v1.Gateway"):
            assert await health(channel, name) == states.NOT_SERVING
        watch = health_stub(channel).Watch(health_pb2.HealthCheckRequest(service=""))
        assert (await watch.read()).status == states.NOT_SERVING
        running.ready.set("etcd", True)
        await running.server.update_health()
        assert (await watch.read()).status == states.SERVING
        for name in ("", "test.Internal", "evolving.v1.Gateway"):
            assert await health(channel, name) == states.SERVING
        watch.cancel()


async def test_a_channel_to_replicas_goes_on_with_those_that_live() -> None:
    async with Running() as one:
        two = Running()
        await two.__aenter__()
        async with open_channel([one.address, two.address]) as channel:
            say = method(channel, "Say")
            async with asyncio.timeout(30):
                while not all(running.sample(CALLS, method=SAY, code="OK") for running in (one, two)):
                    await say(text("hello"))
            await two.server.stop(0)
            for _ in range(10):
                assert (await answered(lambda: say(text("hello")))).value == "hello"


async def test_errors_of_other_servers_are_understood() -> None:
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details="connection refused"
    )
    detail = parse_error(error)
    assert (detail.reason, detail.message, detail.retry_after_s) == ("UNAVAILABLE", "connection refused", None)
    odd = grpc.aio.Metadata(("grpc-status-details-bin", Duration(seconds=1).SerializeToString() + b"\xff"))
    assert parse_error(grpc.aio.AioRpcError(grpc.StatusCode.ABORTED, grpc.aio.Metadata(), odd)).reason == "ABORTED"
