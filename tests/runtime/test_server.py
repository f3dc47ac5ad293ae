"""Every call through a real server on a socket: status, authentication, limits, deadlines, hostile bytes."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs
from waiting import answered, eventually

from evolving.core.errors import BranchEnded, StaleVersion
from evolving.runtime.channel import open_channel
from evolving.runtime.clock import SystemClock
from evolving.runtime.credentials import Credentials, hash_token
from evolving.runtime.errors import NotReady
from evolving.runtime.guard import Limits, current_caller
from evolving.runtime.log import current_ids, log_context
from evolving.runtime.metrics import Metrics
from evolving.runtime.readiness import Readiness
from evolving.runtime.server import GrpcServer
from evolving.wire.status import parse_error

CALLS, SAY = "grpc_server_calls_total", "/test.Internal/Say"
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
