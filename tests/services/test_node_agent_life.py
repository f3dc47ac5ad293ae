"""A node agent's life: ready only with an engine and a registration, crashes survived, roles followed, a clean end."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Any

import grpc.aio
import pytest
from etcd_process import Etcd, free_ports
from grpc_health.v1 import health_pb2, health_pb2_grpc
from node_agent_harness import Agent, agent, ids, prefill_request, scripted_planner
from planner_harness import KEYS, open_store
from waiting import WAIT_S, eventually

from evolving.internal.v1 import node_agent_pb2
from evolving.runtime.channel import open_channel
from evolving.v1 import common_pb2, gateway_pb2
from evolving.wire.status import parse_error

LONG = gateway_pb2.Sampling(max_tokens=400, ignore_eos=True)


async def health(address: str) -> int:
    """What grpc.health says."""
    async with open_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        return int((await stub.Check(health_pb2.HealthCheckRequest())).status)


async def until_decoding(node: Agent, request: node_agent_pb2.PrefillRequest) -> asyncio.Task[Any]:
    """A request that is being decoded, still running."""
    serving = asyncio.create_task(node.serve(request))
    await node.status(lambda status: status.decoding == 1)
    return serving


async def test_ready_with_an_engine_and_a_registration(etcd: Etcd) -> None:
    async with agent(etcd, fail_starts=2, restart_first_s=0.5) as node:
        assert await health(node.service.address) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await node.registration() is None
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in node.stub.Prefill(prefill_request(ids(1, 50))):
                pass
        detail = parse_error(caught.value)
        assert (detail.status, detail.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_DOWN")
        registration = await node.ready()
        await eventually(lambda: _is(health(node.service.address), health_pb2.HealthCheckResponse.SERVING))
        assert registration.address == node.service.address
        assert registration.kv_format == node.engine.config.kv_format
        assert registration.block_tokens == 16
        assert (registration.l1_tokens, registration.reserve_tokens) == (4096, 2048)
        status = await node.status(lambda status: status.ready)
        assert status.incarnation == registration.incarnation
        assert (status.l1_total_tokens, status.decode_slots_free) == (registration.l1_tokens, registration.decode_slots)


async def _is(answer: Any, wanted: object) -> bool:
    return bool(await answer == wanted)


async def test_a_crash_ends_streams_and_begins_a_new_incarnation(etcd: Etcd) -> None:
    async with agent(etcd) as node:
        before = await node.ready()
        serving = await until_decoding(node, prefill_request(ids(1, 100), sampling=LONG))
        node.engine.faults.crash()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await serving
        detail = parse_error(caught.value)
        assert (detail.status, detail.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_DOWN")
        status = await node.status(lambda s: s.ready and s.incarnation != before.incarnation)
        after = await node.registration()
        assert after is not None
        assert after.incarnation == status.incarnation
        assert after.transfer_address != before.transfer_address
        assert status.engine_starts == 2
        assert len((await node.serve(prefill_request(ids(2, 50))))[2]) == 32


async def test_an_engine_that_keeps_failing_ends_the_agent(etcd: Etcd) -> None:
    async with agent(etcd, fail_starts=100, restart_attempts=3) as node:
        async with asyncio.timeout(WAIT_S):
            await node.body
        assert node.service.failed
        assert node.engine.faults.fail_starts == 97


async def test_the_role_follows_the_split(etcd: Etcd) -> None:
    async with agent(etcd) as node:
        await node.ready()
        await node.status(lambda s: (s.role, s.epoch) == (common_pb2.ROLE_MIXED, 0))
        pid = (await node.status(lambda s: s.ready)).engine_pid
        await node.set_split(1, "prefill")
        await node.status(lambda s: (s.role, s.epoch) == (common_pb2.ROLE_PREFILL, 1))
        await node.set_split(3, "decode")
        await node.status(lambda s: (s.role, s.epoch) == (common_pb2.ROLE_DECODE, 3))
        await node.set_split(2, "prefill")  # older than what it knows
        await node.set_split(4, "decode")
        status = await node.status(lambda s: s.epoch == 4)
        assert status.role == common_pb2.ROLE_DECODE
        assert (status.engine_pid, status.engine_starts) == (pid, 1), "a role never reaches the engine"
        await node.store.put(KEYS.split, b"no split")
        await node.store.delete(KEYS.split)
        assert len((await node.serve(prefill_request(ids(1, 50))))[2]) == 32, "either phase, whatever the role"


async def test_answers_carry_the_newest_epoch_heard_of(etcd: Etcd) -> None:
    async with agent(etcd) as node:
        await node.ready()
        prefilled, decoded, _ = await node.serve(prefill_request(ids(1, 50), epoch=9))
        assert {each.epoch for each in (*prefilled, *decoded)} == {9}
        status = await node.status(lambda s: s.ready)
        assert status.epoch == 0, "the epoch of the role, which only the split can change"


async def test_drain_deregisters_first_and_lets_running_legs_finish(etcd: Etcd) -> None:
    async with agent(etcd, mock={"speed_up": 2.0}, grace_s=30.0) as node:
        await node.ready()
        request = prefill_request(ids(1, 100), sampling=gateway_pb2.Sampling(max_tokens=150, ignore_eos=True))
        serving = await until_decoding(node, request)
        statuses: list[Any] = []

        async def follow() -> None:
            call = node.stub.WatchStatus(node_agent_pb2.WatchStatusRequest(partition_id="p0"))
            statuses.extend([status async for status in call])

        following = asyncio.create_task(follow())
        await eventually(lambda: _is(node.registration(), None) if node.service.stopping else _stop(node))
        assert not serving.done(), "the registration goes first"
        await following
        assert statuses[-1].role == common_pb2.ROLE_DRAINING
        assert not statuses[-1].ready
        *_, output = await serving
        assert len(output) == 150 * 4
        async with asyncio.timeout(WAIT_S):
            await node.body
        assert not node.service.failed


async def _stop(node: Agent) -> bool:
    node.service.stop()
    return False


async def test_status_is_pushed_without_a_change_and_on_change(etcd: Etcd) -> None:
    async with agent(etcd, mock={"speed_up": 0.2}) as node:
        await node.ready()
        call: Any = node.stub.WatchStatus(node_agent_pb2.WatchStatusRequest(partition_id="p0"))
        first, second = await call.read(), await call.read()
        assert (first.queued_legs, second.queued_legs) == (0, 0), "a sign of life without a change"
        call.cancel()
        running = node.stub.Prefill(prefill_request(ids(1, 1000)))
        status = await node.status(lambda s: s.wait_s > 0)
        assert status.queued_legs + status.prefilling_legs == 1
        running.cancel()
        await node.status(lambda s: s.wait_s == 0)


async def test_work_is_reported_once_a_planner_leads(etcd: Etcd) -> None:
    async with agent(etcd) as node:
        registration = await node.ready()
        await node.serve(prefill_request(ids(1, 100), request_id="one"))
        await node.serve(prefill_request(ids(1, 100), request_id="two"))
        one_token = gateway_pb2.Sampling(max_tokens=1, ignore_eos=True)
        await node.serve(prefill_request(ids(2, 50), request_id="short", sampling=one_token))
        async with scripted_planner(etcd, refuse=1) as planner:

            async def all_there() -> bool:
                taken = planner.reports[1:]
                return sum(len(report.samples) for report in taken) >= 6

            await eventually(all_there)
            refused, *taken = planner.reports
            assert refused.sequence == taken[0].sequence, "a report of unknown fate comes again under its number"
            assert [report.sequence for report in taken] == list(range(1, len(taken) + 1))
            assert {report.incarnation for report in taken} == {registration.incarnation}
            samples = [sample for report in taken for sample in report.samples]
            prefills = [sample for sample in samples if sample.phase == common_pb2.PHASE_PREFILL]
            decodes = [sample for sample in samples if sample.phase == common_pb2.PHASE_DECODE]
            assert [(s.request_id, s.uncached_tokens, s.cached_tokens) for s in prefills] == [
                ("one", 100, 0),
                ("two", 4, 96),
                ("short", 50, 0),
            ]
            assert [(s.request_id, s.output_tokens, s.iterations) for s in decodes] == [
                ("one", 7, 7),
                ("two", 7, 7),
                ("short", 0, 0),  # its first token was its last; it completed all the same
            ]
            assert all(sample.age_s >= 0 for sample in samples)


async def test_as_a_process(etcd: Etcd) -> None:
    """The command: it serves, answers the container's health check, and ends on SIGTERM with nothing left in etcd."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "evolving_node_agent",
        f"--listen={address}",
        "--metrics-listen=",
        f"--etcd-endpoints={','.join(etcd.endpoints)}",
        "--node-id=n0",
        "--engine=mock",
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await eventually(lambda: _healthy(address))
        async with open_store(etcd) as store:
            assert await store.get(KEYS.node("n0")) is not None
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(WAIT_S):
                assert await process.wait() == 0
            assert await store.get(KEYS.node("n0")) is None
        assert not await _healthy(address)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _healthy(address: str) -> bool:
    check = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "evolving.runtime.healthcheck",
        address,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    return await check.wait() == 0


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--engine=mock"], "--node-id"),
        (["--node-id=n0", "--engine=sglang"], "--model-path"),
        (["--node-id=a/b", "--engine=mock"], "--node-id"),
        (["--node-id=n0", "--engine=mock", "--prefill-coefficients=1,2"], "--prefill-coefficients"),
        (["--node-id=n0", "--engine=mock", "--decode-coefficients=1,2,3,-4"], "--decode-coefficients"),
        (["--node-id=n0", "--engine=mock", "--l1-tokens=100"], "l1_tokens"),
    ],
)
async def test_settings_that_cannot_work(flags: list[str], complaint: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "evolving_node_agent", *flags, stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    assert process.returncode == 2
    assert complaint in said.decode()
