"""A service as a real process: its start, its signs of life, and every way it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from etcd_process import Etcd
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2, health_pb2_grpc

from evolving.runtime.channel import open_channel
from evolving.runtime.clock import SystemClock
from evolving.runtime.etcd import EtcdStore

SCRIPT = Path(__file__).with_name("tiny_service.py")
STATES = health_pb2.HealthCheckResponse
PATIENCE_S = 60


class Process:
    """The tiny service, started with flags."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []

    async def event(self, name: str) -> dict[str, Any]:
        """The next log line of that name."""
        assert self.process.stderr is not None
        async with asyncio.timeout(PATIENCE_S):
            while line := await self.process.stderr.readline():
                self.lines.append(json.loads(line))
                if self.lines[-1]["event"] == name:
                    return self.lines[-1]
        pytest.fail(f"no {name} among {[entry['event'] for entry in self.lines]}")

    async def end(self) -> tuple[int, str]:
        """Its exit status and what it printed on stdout."""
        async with asyncio.timeout(PATIENCE_S):
            out, err = await self.process.communicate()
        self.lines += [json.loads(line) for line in err.splitlines() if line.startswith(b"{")]
        assert self.process.returncode is not None
        return self.process.returncode, out.decode()


@contextlib.asynccontextmanager
async def tiny(*flags: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(SCRIPT), *flags, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield Process(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


def wait_call(channel: grpc.aio.Channel, path: Path) -> Any:
    method = channel.unary_stream(
        "/test.Tiny/Wait",
        request_serializer=StringValue.SerializeToString,
        response_deserializer=StringValue.FromString,
    )
    return method(StringValue(value=str(path)))


async def test_sigterm_lets_running_calls_finish_and_exits_0(tmp_path: Path) -> None:
    async with tiny("--grace-s=60") as running:
        address = (await running.event("listening"))["grpc"]
        async with open_channel(address) as channel:
            call = wait_call(channel, tmp_path / "go")
            assert (await call.read()).value == "started"
            health = health_stub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await health.read()).status == STATES.SERVING
            running.process.send_signal(signal.SIGTERM)
            assert (await health.read()).status == STATES.NOT_SERVING
            health.cancel()
            await running.event("draining")
            (tmp_path / "go").touch()
            assert (await call.read()).value == "finished"
            assert await call.read() is grpc.aio.EOF
        assert await running.end() == (0, "cleaned up\n")


async def test_calls_still_running_after_the_grace_period_are_cancelled(tmp_path: Path) -> None:
    async with tiny("--grace-s=1") as running:
        address = (await running.event("listening"))["grpc"]
        async with open_channel(address) as channel:
            call = wait_call(channel, tmp_path / "never")
            assert (await call.read()).value == "started"
            running.process.send_signal(signal.SIGINT)
            with pytest.raises(grpc.aio.AioRpcError):
                await call.read()
        assert await running.end() == (0, "cleaned up\n")


async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    async with tiny("--grace-s=3000", f"--killed-file={killed}") as running:
        address = (await running.event("listening"))["grpc"]
        async with open_channel(address) as channel:
            call = wait_call(channel, tmp_path / "never")
            await call.read()
            running.process.send_signal(signal.SIGTERM)
            await running.event("draining")
            assert not killed.exists()
            running.process.send_signal(signal.SIGTERM)
            status, out = await running.end()
        assert (status, out) == (128 + signal.SIGTERM, "")
        assert killed.exists()


async def test_a_clean_up_that_hangs_is_cut_off_at_the_grace_period(tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    async with tiny("--grace-s=1", "--stubborn", f"--killed-file={killed}") as running:
        await running.event("listening")
        running.process.send_signal(signal.SIGTERM)
        assert (await running.end())[0] == 1
        assert killed.exists()
        assert "drain_overran" in [line["event"] for line in running.lines]


async def test_a_signal_during_the_start_ends_it_at_once() -> None:
    async with tiny("--grace-s=3000", "--stuck") as running:
        await running.event("listening")
        running.process.send_signal(signal.SIGTERM)
        assert await running.end() == (0, "cleaned up\n")


async def test_a_loop_that_fails_ends_the_service_with_status_1() -> None:
    async with tiny("--fail-loop") as running:
        failed = await running.event("loop_failed")
        assert failed["exception"][0]["exc_value"] == "the loop broke"
        assert await running.end() == (1, "cleaned up\n")


async def test_a_port_that_is_taken_is_a_settings_error() -> None:
    async with tiny() as first:
        listening = await first.event("listening")
        for flag, address in (("--listen", listening["grpc"]), ("--metrics-listen", listening["http"])):
            async with tiny(f"{flag}={address}") as second:
                refused = await second.event("settings_refused")
                assert flag in refused["problems"][0]
                assert (await second.end())[0] == 2


async def test_it_becomes_ready_with_etcd_and_stays_so_without(etcd: Etcd) -> None:
    etcd.kill()
    async with tiny("--needs-etcd", f"--etcd-endpoints={etcd.endpoints[0]}", "--etcd-timeout-s=0.5") as running:
        listening = await running.event("listening")
        async with open_channel(listening["grpc"]) as channel:
            stub = health_stub(channel)
            assert (await stub.Check(health_pb2.HealthCheckRequest())).status == STATES.NOT_SERVING
            assert (await http(listening["http"], "/healthz"))[0] == 200
            status, body = await http(listening["http"], "/readyz")
            assert status == 503
            assert json.loads(body)["conditions"]["etcd"]["ok"] is False
            await etcd.start()
            watch = stub.Watch(health_pb2.HealthCheckRequest(service="test.Tiny"))
            async with asyncio.timeout(PATIENCE_S):
                while (await watch.read()).status != STATES.SERVING:
                    pass
            assert (await http(listening["http"], "/readyz"))[0] == 200
            watch.cancel()
            etcd.kill()
            await running.event("etcd_away")
            assert (await stub.Check(health_pb2.HealthCheckRequest())).status == STATES.SERVING
            status, body = await http(listening["http"], "/readyz")
            assert (status, json.loads(body)["degraded"]) == (200, ["etcd"])
            assert 'evolving_condition{condition="etcd"} 0.0' in (await http(listening["http"], "/metrics"))[1]
            await etcd.start()
            await running.event("etcd_ready")
        async with EtcdStore(etcd.endpoints, clock=SystemClock()) as store:
            async with asyncio.timeout(PATIENCE_S), contextlib.aclosing(store.watch("/tiny")) as batches:
                while not (await anext(batches)).puts:
                    pass
            running.process.send_signal(signal.SIGTERM)
            assert await running.end() == (0, "cleaned up\n")
            assert await store.get("/tiny") is None  # withdrawn at once, not left to expire


async def test_metrics_are_served_and_odd_requests_do_no_harm() -> None:
    async with tiny() as running:
        listening = await running.event("listening")
        async with open_channel(listening["grpc"]) as channel:
            await health_stub(channel).Check(health_pb2.HealthCheckRequest())
        status, body = await http(listening["http"], "/metrics")
        assert status == 200
        assert 'evolving_grpc_server_calls_total{code="OK",method="/grpc.health.v1.Health/Check"} 1.0' in body
        assert (await http(listening["http"], "/nothing"))[0] == 404
        assert (await http(listening["http"], "/metrics", method="POST"))[0] == 405
        host, port = listening["http"].rsplit(":", 1)
        for garbage in (b"", b"\x00\xff" * 10, b"GET", b"A" * 20_000):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(garbage)
            writer.write_eof()
            await asyncio.gather(reader.read(), return_exceptions=True)
            writer.close()
        assert (await http(listening["http"], "/healthz"))[0] == 200


async def test_help_and_version_need_nothing_running() -> None:
    for flag, expected in (("--help", "--listen HOST:PORT"), ("--version", "tiny ")):
        async with tiny(flag, "--etcd-endpoints=nowhere.invalid:1") as running:
            status, out = await running.end()
            assert status == 0
            assert expected in out


async def http(address: str, path: str, method: str = "GET") -> tuple[int, str]:
    """Status and body of a request."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    async with asyncio.timeout(PATIENCE_S):
        head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body


def health_stub(channel: grpc.aio.Channel) -> Any:
    """Untyped: the generated stub's methods are unknown to mypy."""
    return health_pb2_grpc.HealthStub(channel)
