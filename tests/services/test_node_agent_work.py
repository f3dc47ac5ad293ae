"""What the planner hears of a node's work (paper, section 4.2): all of it, once, whatever breaks meanwhile."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import defaultdict
from typing import Any

import grpc
import grpc.aio
import pytest
from etcd_process import Etcd, free_ports
from node_agent_harness import (
    Agent,
    ScriptedPlanner,
    agent,
    decode_request,
    ids,
    prefill_request,
    scripted_planner,
)
from planner_harness import KEYS, open_store
from waiting import WAIT_S, eventually

from evolving.core.iterations import IterationSums, IterationWindow
from evolving.core.work import query_key_pairs
from evolving.internal.v1 import node_agent_pb2, node_agent_pb2_grpc, planner_pb2
from evolving.runtime.channel import open_channel
from evolving.runtime.clock import SystemClock
from evolving.runtime.following import FollowingChannel
from evolving.runtime.keys import NodeRegistration, decode
from evolving.runtime.metrics import Metrics
from evolving.v1 import common_pb2, gateway_pb2
from evolving_node_agent.samples import decode_sample, window_message
from evolving_node_agent.work import WorkReporter

NEVER_S = 3600.0
_SUMS = [field.name for field in planner_pb2.IterationSums.DESCRIPTOR.fields]


def tokens(count: int) -> gateway_pb2.Sampling:
    """Sampling of that many tokens."""
    return gateway_pb2.Sampling(max_tokens=count, ignore_eos=True)


def summed(windows: list[planner_pb2.IterationWindow]) -> dict[str, float]:
    """Every sum of every kind, over windows."""
    total: dict[str, float] = defaultdict(float)
    for window in windows:
        total["cold"] += window.cold_iterations
        for kind in ("prefill", "decode", "mixed"):
            for name in _SUMS:
                assert getattr(getattr(window, kind), name) >= 0
                total[f"{kind}.{name}"] += getattr(getattr(window, kind), name)
    return total


def of_phase(planner: ScriptedPlanner, phase: common_pb2.Phase.ValueType) -> dict[str, planner_pb2.WorkSample]:
    """The samples of a phase by request; each request has one."""
    samples = [sample for sample in planner.samples if sample.phase == phase]
    found = {sample.request_id: sample for sample in samples}
    assert len(found) == len(samples)
    return found


def mean_context(prompt: int, iterations: int) -> float:
    """The i-th iteration of a leg feeds the i-th token after the prompt."""
    return sum(prompt + each for each in range(1, iterations + 1)) / iterations


async def test_windows_are_all_that_ran_and_samples_all_that_was_served(etcd: Etcd) -> None:
    sizes = {f"r{place}": (40 + 60 * place, 2 + 7 * place) for place in range(8)}
    async with scripted_planner(etcd) as planner:
        async with agent(etcd, iteration_window_s=0.05) as node:
            registration = await node.ready()
            requests = [
                prefill_request(ids(place, size), request_id=name, sampling=tokens(count))
                for place, (name, (size, count)) in enumerate(sizes.items())
            ]
            await asyncio.gather(*(node.serve(request) for request in requests))
            await node.serve(prefill_request(ids(3, sizes["r3"][0]), request_id="again", sampling=tokens(1)))
            await node.idle()
            ran = node.engine.status().ran
        assert summed(planner.windows) == pytest.approx(summed([window_message("", ran)]))
    assert {window.incarnation for window in planner.windows} == {registration.incarnation}
    assert len(planner.windows) > 2
    assert all(window != planner_pb2.IterationWindow(incarnation=window.incarnation) for window in planner.windows)
    assert all(window.age_s >= 0 for window in planner.windows)
    assert [report.dropped for report in planner.reports] == [0] * len(planner.reports)
    prefills, decodes = of_phase(planner, common_pb2.PHASE_PREFILL), of_phase(planner, common_pb2.PHASE_DECODE)
    assert set(prefills) == set(decodes) == {*sizes, "again"}
    assert {sample.tenant for sample in planner.samples} == {requests[0].tenant}
    for name, (size, count) in sizes.items():
        assert (prefills[name].uncached_tokens, prefills[name].cached_tokens) == (size, 0)
        assert prefills[name].query_key_pairs == query_key_pairs(size, 0)
        assert decodes[name].output_tokens == decodes[name].iterations == count - 1
        assert decodes[name].context_tokens == pytest.approx(mean_context(size, count - 1))
    again = prefills["again"]
    assert again.uncached_tokens + again.cached_tokens == sizes["r3"][0]
    assert again.cached_tokens > 0
    assert (decodes["again"].output_tokens, decodes["again"].iterations) == (0, 0), "its first token was its last"


async def decoding(
    node: Agent, request: node_agent_pb2.PrefillRequest, got: list[int], enough: int
) -> tuple[Any, list[asyncio.Task[None]]]:
    """Serve until the decode leg brought `enough` tokens: its call, still running, and who reads from both legs.
    `got`: how many came in all."""
    registration = await node.registration()
    assert registration is not None
    prefilling = node.stub.Prefill(request)
    call = node.stub.Decode(decode_request(request, registration.transfer_address))
    reached = asyncio.Event()

    async def read() -> None:
        async for response in call:
            got[0] += len(response.tokens.token_ids) // 4
            if got[0] >= enough:
                reached.set()

    async def first() -> None:
        async for _ in prefilling:
            pass

    tasks = [asyncio.create_task(first()), asyncio.create_task(read())]
    async with asyncio.timeout(WAIT_S):
        await reached.wait()
    return call, tasks


@pytest.mark.parametrize("how", ["cancelled", "aborted", "crashed"])
async def test_a_leg_that_breaks_off_is_reported_as_far_as_it_came(etcd: Etcd, how: str) -> None:
    async with scripted_planner(etcd) as planner, agent(etcd, mock={"speed_up": 2.0}) as node:
        await node.ready()
        got = [0]
        request = prefill_request(ids(1, 50), request_id="broken", sampling=tokens(1500))
        call, tasks = await decoding(node, request, got, enough=12)
        if how == "cancelled":
            call.cancel()
        elif how == "aborted":
            await node.stub.Abort(node_agent_pb2.AbortRequest(partition_id="p0", leg_id=f"{request.request_id}-d"))
        else:
            node.engine.faults.crash()
        await asyncio.gather(*tasks, return_exceptions=True)
        await eventually(lambda: len(planner.samples) >= 2)
        sample = of_phase(planner, common_pb2.PHASE_DECODE)["broken"]
        assert sample.iterations == sample.output_tokens
        assert 12 <= got[0] <= sample.iterations
        assert how == "cancelled" or got[0] == sample.iterations
        assert sample.context_tokens == pytest.approx(mean_context(50, sample.iterations))
        assert of_phase(planner, common_pb2.PHASE_PREFILL)["broken"].uncached_tokens == 50


async def test_a_leg_that_ends_before_its_first_iteration_is_reported_where_it_had_begun(etcd: Etcd) -> None:
    """So that a request whose first token was enough is whole. One that waits for room may be decoded elsewhere."""
    async with scripted_planner(etcd) as planner, agent(etcd, mock={"decode_slots": 1}) as node:
        registration = await node.ready()
        requests = [prefill_request(ids(at, 50), request_id=name) for at, name in enumerate(["begun", "waits"])]
        prefills = [node.stub.Prefill(request) for request in requests]
        for prefill in prefills:
            async for response in prefill:
                if response.HasField("prefilled"):
                    break
        node.engine.faults.stall()
        begun = node.stub.Decode(decode_request(requests[0], registration.transfer_address))
        async for said in begun:
            if said.HasField("started"):
                break
        waits = node.stub.Decode(decode_request(requests[1], registration.transfer_address))
        life = node.engine._life
        assert life is not None
        await eventually(lambda: "waits-d" in life.legs)
        calls: list[Any] = [waits, begun, *prefills]
        for call in calls:
            call.cancel()
        await eventually(lambda: not life.legs)
        node.engine.faults.resume()
    decodes = of_phase(planner, common_pb2.PHASE_DECODE)
    assert set(decodes) == {"begun"}
    assert (decodes["begun"].output_tokens, decodes["begun"].iterations) == (0, 0)


async def test_a_prompt_that_nobody_decodes_was_computed_all_the_same(etcd: Etcd) -> None:
    async with scripted_planner(etcd) as planner, agent(etcd, keep_s=0.05) as node:
        await node.ready()
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in node.stub.Prefill(prefill_request(ids(1, 90), request_id="lost")):
                pass
        await eventually(lambda: len(planner.samples) > 0)
        assert of_phase(planner, common_pb2.PHASE_PREFILL)["lost"].uncached_tokens == 90
        assert not of_phase(planner, common_pb2.PHASE_DECODE)


async def test_a_crash_amid_a_window(etcd: Etcd) -> None:
    """What the engine said before is reported; the next life counts from nothing."""
    async with scripted_planner(etcd) as planner:
        async with agent(etcd, mock={"speed_up": 2.0}, iteration_window_s=NEVER_S) as node:
            first = await node.ready()
            request = prefill_request(ids(1, 50), sampling=tokens(1500))
            _, tasks = await decoding(node, request, [0], enough=20)
            before = node.engine.status().ran
            node.engine.faults.crash()
            await asyncio.gather(*tasks, return_exceptions=True)
            await node.status(lambda status: status.ready and status.incarnation != first.incarnation)
            second = await node.ready()
            await node.serve(prefill_request(ids(2, 300), sampling=tokens(30)))
            await node.idle()
            after = node.engine.status().ran
        assert not node.service.failed
    by_life = {window.incarnation: window for window in planner.windows}
    assert len(by_life) == len(planner.windows) == 2
    assert summed([by_life[second.incarnation]]) == pytest.approx(summed([window_message("", after)]))
    crashed = by_life[first.incarnation]
    assert 0 < crashed.decode.iterations <= before.decode.iterations + 1
    assert crashed.decode.requests == crashed.decode.iterations


async def test_an_engine_that_says_nothing_more(etcd: Etcd) -> None:
    """Its iterations hang, and so does its leg, when the agent is told to go."""
    async with scripted_planner(etcd) as planner:
        async with agent(etcd, mock={"speed_up": 2.0}, iteration_window_s=NEVER_S, grace_s=3.0) as node:
            await node.ready()
            request = prefill_request(ids(1, 50), request_id="hangs", sampling=tokens(1500))
            _, tasks = await decoding(node, request, [0], enough=20)
            node.engine.faults.stall()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert planner.windows[-1].decode.iterations > 0
    assert of_phase(planner, common_pb2.PHASE_DECODE)["hangs"].iterations >= 20


async def test_a_planner_away_and_back(etcd: Etcd) -> None:
    """What it may have taken comes again under its number; what found no room is counted."""
    async with agent(etcd, unsent_reports=4, iteration_window_s=NEVER_S) as node:
        await node.ready()
        async with scripted_planner(etcd, mute=2) as planner:
            await node.serve(prefill_request(ids(0, 80), request_id="before"))
            await eventually(lambda: len(planner.samples) == 2)
            await eventually(lambda: len(planner.reports) >= 3)
        for place in range(5):
            await node.serve(prefill_request(ids(1 + place, 80), request_id=f"away{place}"))
        async with scripted_planner(etcd) as back:
            await node.serve(prefill_request(ids(9, 80), request_id="after"))
            await eventually(lambda: "after" in of_phase(back, common_pb2.PHASE_DECODE))
    numbered = {(report.incarnation, report.sequence): report for report in (*planner.reports, *back.reports)}
    assert sorted(number for _, number in numbered) == list(range(1, len(numbered) + 1))
    samples = [(sample.request_id, sample.phase) for report in numbered.values() for sample in report.samples]
    assert len(set(samples)) == len(samples), "by number nothing is doubled"
    assert {"before", "after"} <= {request_id for request_id, _ in samples}
    assert back.taken[-1].dropped == 2 * 7 - len(samples) > 0


async def test_another_planner_leads(etcd: Etcd) -> None:
    """The report whose fate is unknown goes to it, and what comes after."""
    async with agent(etcd) as node:
        await node.ready()
        async with scripted_planner(etcd, mute=10**6) as old:
            await node.serve(prefill_request(ids(1, 80), request_id="one"))
            await eventually(lambda: len(old.reports) > 1)
            async with scripted_planner(etcd) as new:
                await node.serve(prefill_request(ids(2, 80), request_id="two"))
                await eventually(lambda: "two" in of_phase(new, common_pb2.PHASE_DECODE))
                asked_before = len(old.reports)
                await node.serve(prefill_request(ids(3, 80), request_id="three"))
                await eventually(lambda: "three" in of_phase(new, common_pb2.PHASE_DECODE))
        assert len(old.reports) == asked_before
    assert new.taken[0].sequence == old.taken[-1].sequence
    assert of_phase(new, common_pb2.PHASE_PREFILL).keys() >= {"two", "three"}


async def test_what_a_planner_calls_wrong_is_given_up(etcd: Etcd) -> None:
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    async with agent(etcd) as node:
        await node.ready()
        await node.serve(prefill_request(ids(1, 80), request_id="one"))
        async with scripted_planner(etcd, refuse=1, refusal=invalid) as planner:
            await eventually(lambda: len(planner.reports) > 0)
            await node.serve(prefill_request(ids(2, 80), request_id="two"))
            await eventually(lambda: "two" in of_phase(planner, common_pb2.PHASE_DECODE))
    refused = planner.reports[0]
    assert planner.taken[-1].dropped == len(refused.samples) + len(refused.windows) > 0
    assert [report.sequence for report in planner.taken] == list(range(2, 2 + len(planner.taken)))


def reporter_to(planner: FollowingChannel, metrics: Metrics, limit: int = 10) -> WorkReporter:
    """A reporter that only reports when it leaves."""
    return WorkReporter(
        "p0",
        "n",
        limit=limit,
        period_s=NEVER_S,
        window_s=NEVER_S,
        planner=planner,
        answered=lambda answer: None,
        clock=SystemClock(),
        metrics=metrics,
    )


def unsent(metrics: Metrics) -> float | None:
    """What waits for a planner."""
    return metrics.registry.get_sample_value("evolving_node_work_unsent")


async def test_where_nothing_ran_there_is_no_window() -> None:
    metrics = Metrics()
    reporter = reporter_to(FollowingChannel(), metrics)
    ran = IterationWindow(decode=IterationSums(1, 0.01, requests=1, context_tokens=9))
    reporter.begin_life("one")
    reporter.end_life(IterationWindow())
    assert unsent(metrics) == 0
    reporter.end_life(ran)
    assert unsent(metrics) == 1
    reporter.end_life(ran)
    reporter.end_life(IterationWindow())  # an engine that crashed has nothing to say
    assert unsent(metrics) == 1


async def test_reports_are_bounded(etcd: Etcd) -> None:
    metrics, channel = Metrics(), FollowingChannel()
    async with scripted_planner(etcd) as planner, open_store(etcd) as store:
        found = await store.get(KEYS.leader("planner"))
        assert found is not None
        reporter = reporter_to(channel, metrics, limit=2300)
        for number in range(2500):
            reporter.begin_life(str(number))
            reporter.add(decode_sample("t", str(number), 1, 1, 5.0))
            if number % 2:
                reporter.end_life(IterationWindow(cold_iterations=number))
        await reporter.farewell()  # nobody leads: it doesn't wait for anybody
        assert unsent(metrics) == 2300 + 1250
        channel.go_to(found.value.decode())
        async with asyncio.timeout(WAIT_S):
            await reporter.farewell()
        await channel.close()
    assert unsent(metrics) == 0
    assert [(len(report.samples), len(report.windows)) for report in planner.reports] == [
        (1000, 1000),
        (1000, 250),
        (300, 0),
    ]
    assert {report.dropped for report in planner.reports} == {200}
    assert [int(sample.request_id) for sample in planner.samples] == list(range(200, 2500)), "the newest stay"
    assert [window.cold_iterations for window in planner.windows] == list(range(1, 2500, 2))
    assert all(window.incarnation == str(window.cold_iterations) for window in planner.windows)


async def test_a_process_that_is_told_to_go_tells_what_it_did(etcd: Etcd) -> None:
    """Nothing was reported before SIGTERM; a leg that outlasts the grace is reported as far as it came."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    async with scripted_planner(etcd) as planner, open_store(etcd) as store, open_channel(address) as channel:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "evolving_node_agent",
            f"--listen={address}",
            "--metrics-listen=",
            f"--etcd-endpoints={','.join(etcd.endpoints)}",
            "--node-id=n0",
            "--engine=mock",
            "--grace-s=3",
            f"--work-period-s={NEVER_S}",
            f"--iteration-window-s={NEVER_S}",
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            registered = await eventually_registered(store)
            stub = node_agent_pb2_grpc.NodeAgentServiceStub(channel)
            request = prefill_request(ids(1, 500), sampling=tokens(50_000), request_id="long")
            prefilling = stub.Prefill(request)
            decoding = stub.Decode(decode_request(request, registered.transfer_address))
            got = 0
            async with asyncio.timeout(WAIT_S):
                async for response in decoding:
                    got += response.HasField("tokens")
                    if got == 20:
                        assert not planner.reports
                        process.send_signal(signal.SIGTERM)
        except grpc.aio.AioRpcError:
            assert got > 20, "the leg went on after SIGTERM"
        finally:
            prefilling.cancel()
            if got < 20:
                process.kill()
            async with asyncio.timeout(WAIT_S):
                status = await process.wait()
    assert status == 0
    prefill = of_phase(planner, common_pb2.PHASE_PREFILL)["long"]
    assert prefill.uncached_tokens == 500
    assert of_phase(planner, common_pb2.PHASE_DECODE)["long"].iterations >= got
    (window,) = planner.windows
    assert window.decode.iterations + window.cold_iterations >= got


async def eventually_registered(store: Any) -> NodeRegistration:
    """The node's registration, once it is there."""
    found: list[Any] = []

    async def there() -> bool:
        item = await store.get(KEYS.node("n0"))
        found.extend([item] if item is not None else [])
        return item is not None

    await eventually(there)
    return decode(NodeRegistration, found[0].value)
