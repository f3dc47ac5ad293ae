"""The time model that the planner fits is what nodes and gateways reckon with (the paper, sections 4.2 and 4.4)."""

from __future__ import annotations

import asyncio
import itertools
import math
from dataclasses import astuple
from statistics import median

import pytest
from etcd_process import Etcd
from gateway_harness import Bench, Stream, all_ready, bench
from hypothesis import given
from hypothesis import strategies as st
from node_agent_harness import agent, scripted_planner
from planner_harness import KEYS, open_store, planner
from running import running
from scripted_nodes import ids_bytes
from services.test_node_agent_pool import INFO, ScriptedEngine, node_of
from waiting import WAIT_S, eventually

from evolving.core.errors import InvalidArgument
from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients
from evolving.internal.v1 import planner_pb2
from evolving.runtime.channel import open_channel
from evolving.runtime.clock import ManualClock, SystemClock
from evolving.runtime.following import FollowingChannel
from evolving.runtime.metrics import Metrics
from evolving.runtime.service import Service
from evolving.runtime.tasks import end_tasks
from evolving.v1 import gateway_pb2, gateway_pb2_grpc
from evolving.wire.timemodel import decode_from_proto, prefill_from_proto
from evolving_gateway.__main__ import serve
from evolving_gateway.settings import GatewaySettings
from evolving_node_agent.waits import LegSize
from evolving_node_agent.work import WorkReporter

Answer = planner_pb2.ReportWorkResponse
ONE_TOKEN, SOME_TOKENS = gateway_pb2.Sampling(max_tokens=1), gateway_pb2.Sampling(max_tokens=60)

# -- what travels

WRONG = st.sampled_from([-1.0, math.nan, math.inf, -math.inf, 1e7])


def bad(count: int) -> st.SearchStrategy[list[float]]:
    """Too few, too many, one that can't be, or no time at all."""
    fine = st.floats(1e-6, 1.0)
    of_other_count = st.lists(fine, max_size=8).filter(lambda values: len(values) != count)
    one_wrong = st.lists(fine, min_size=count, max_size=count).flatmap(
        lambda values: st.tuples(st.integers(0, count - 1), WRONG).map(
            lambda at: [*values[: at[0]], at[1], *values[at[0] + 1 :]]
        )
    )
    return of_other_count | one_wrong | st.just([0.0] * count)


@given(prefill_s=bad(5), decode_s=bad(4))
def test_what_can_be_no_time_model_is_refused(prefill_s: list[float], decode_s: list[float]) -> None:
    with pytest.raises(InvalidArgument):
        prefill_from_proto(prefill_s)
    with pytest.raises(InvalidArgument):
        decode_from_proto(decode_s, 2, 8)


# -- the node


@given(prefill_s=bad(5).filter(bool), decode_s=bad(4).filter(bool))
def test_w_n_goes_by_what_was_fitted_and_by_that_alone(prefill_s: list[float], decode_s: list[float]) -> None:
    """Ten times as slow, ten times the wait; then nothing that can't be, and nothing at all, changes it."""
    node = node_of(ScriptedEngine())
    model = node.time_model
    slower_s = [10 * value for value in astuple(model.configured_prefill)]
    with node.prefill_leg("leg", LegSize(500, 100)):
        before_s = node.wait_s()
        assert not node.status().prefill_coefficients_s
        node.adopt_model(Answer(prefill_coefficients_s=slower_s))
        assert node.wait_s() == pytest.approx(10 * before_s)
        for answer in (Answer(prefill_coefficients_s=prefill_s, decode_coefficients_s=decode_s), Answer()):
            node.adopt_model(answer)
            assert node.wait_s() == pytest.approx(10 * before_s)
            assert list(node.status().prefill_coefficients_s) == slower_s
            assert not node.status().decode_coefficients_s
    node.adopt_model(Answer(prefill_coefficients_s=prefill_s, decode_coefficients_s=[0.1, 0.2, 0.3, 0.4]))
    assert model.decode == DecodeCoefficients(0.1, 0.2, 0.3, 0.4, INFO.experts_per_token, INFO.experts)


async def test_an_idle_node_hears_of_it_and_says_it_on_while_nobody_leads(etcd: Etcd) -> None:
    told = Answer(prefill_coefficients_s=[0.5, 0.1, 0, 0, 0], decode_coefficients_s=[0.2, 0, 0.01, 0])
    async with agent(etcd) as node:
        registered = await node.ready()
        async with scripted_planner(etcd, answer=told) as fitted:
            await node.status(lambda status: len(status.prefill_coefficients_s) > 0)
        assert not fitted.samples
        assert not fitted.windows
        node.engine.faults.crash()
        status = await node.status(lambda status: status.ready and status.engine_starts == 2)
        assert list(status.prefill_coefficients_s) == list(told.prefill_coefficients_s)
        assert list(status.decode_coefficients_s) == list(told.decode_coefficients_s)
        again = await node.registration()
        assert again is not None
        assert again.prefill_coefficients == registered.prefill_coefficients, "what is configured is what is registered"


async def test_a_node_with_nothing_to_say_asks_every_ten_seconds(etcd: Etcd) -> None:
    clock, planner_channel, answers = ManualClock(), FollowingChannel(), list[Answer]()
    reporter = WorkReporter(
        "p0",
        "n",
        limit=10,
        period_s=1.0,
        window_s=1.0,
        planner=planner_channel,
        answered=answers.append,
        clock=clock,
        metrics=Metrics(),
    )
    async with scripted_planner(etcd) as leading, open_store(etcd) as store:
        found = await store.get(KEYS.leader("planner"))
        assert found is not None
        reports = asyncio.create_task(reporter.run())
        try:
            for _ in range(12):
                await clock.advance(1.0)  # nobody leads, and the engine was never up
            planner_channel.go_to(found.value.decode())
            await clock.advance(1.0)
            assert not leading.reports
            reporter.begin_life("one")
            for at in range(1, 4):
                await clock.advance(1.0)
                await eventually(lambda at=at: len(answers) == at)  # type: ignore[misc]
                await clock.advance(9.0)
                assert len(leading.reports) == at
        finally:
            await end_tasks(reports)
            await planner_channel.close()
    assert [(report.sequence, len(report.samples)) for report in leading.reports] == [(1, 0), (2, 0), (3, 0)]


# -- the gateway


async def pushed(it: Bench, node_id: str, wait_s: float, **fitted_s: list[float]) -> None:
    """Let a node say what was fitted, and wait until the gateway has it."""
    node = it.nodes[node_id]
    for name in ("prefill_coefficients_s", "decode_coefficients_s"):
        del getattr(node.status, name)[:]
        getattr(node.status, name).extend(fitted_s.get(name, []))
    await it.wait(node_id, wait_s)


async def test_a_node_that_was_measured_slow_gets_no_prompt() -> None:
    """Two nodes alike by what they registered; a computes 1,000 tokens in about 1 s, then in 10 s."""
    prompt = range(1, 1000)
    async with bench("a", "b") as it:
        registered_s = list(it.nodes["a"].registration().prefill_coefficients)
        slow_s = [10 * value for value in registered_s]
        rounds = [("a", []), ("b", slow_s), ("a", registered_s), ("a", [math.nan] * 5), ("b", slow_s), ("a", [])]
        for number, (chosen, said_s) in enumerate(rounds, 1):
            await pushed(it, "a", number / 1000, prefill_coefficients_s=said_s)
            await pushed(it, "b", 0.5 + number / 1000)
            stream = it.generate(prompt, sampling=ONE_TOKEN)
            assert (await stream.all()).prefill_node_id == chosen
            service_s = stream.started[0].predicted_ttft_s - (0.5 if chosen == "b" else 0.0)
            assert service_s == pytest.approx(1.0, rel=0.1)


async def test_a_node_that_was_measured_slow_gets_no_decode() -> None:
    async with bench("p", "d1", "d2") as it:
        await it.split(1, p="prefill", d1="decode", d2="decode")
        slow_s = [10 * value for value in it.nodes["d1"].registration().decode_coefficients]
        for number, (slow, quick) in enumerate([("d1", "d2"), ("d2", "d1")], 1):
            await pushed(it, slow, number / 10, decode_coefficients_s=slow_s)
            await pushed(it, quick, number / 10)
            assert (await it.generate(range(1, 100), sampling=SOME_TOKENS).all()).decode_node_id == quick


# -- all together


async def test_predictions_come_right_once_it_is_fitted(etcd: Etcd) -> None:
    """The node's coefficients are configured ten times too large; nobody tells it but by what was measured."""
    true = PrefillCoefficients(0.01, 2e-4, 0.0)
    configured = ",".join(str(10 * value) for value in astuple(true))
    mock = {"speed_up": 1.0, "prefill": true, "l1_tokens": 16_384, "l2_tokens": 32_768, "max_prompt_tokens": 1024}
    numbers = itertools.count(1)

    async def off_by(stub: gateway_pb2_grpc.GatewayServiceAsyncStub, tokens: int) -> float:
        """Serve a new prompt alone; its measured over its predicted time to first token."""
        request = gateway_pb2.GenerateRequest(token_ids=ids_bytes([next(numbers), *range(1, tokens)]))
        request.sampling.max_tokens = 1
        stream = Stream(stub.Generate(request, timeout=WAIT_S))
        finished = await stream.all()
        return finished.timings.ttft_s / stream.started[0].predicted_ttft_s

    async def off_by_usually(stub: gateway_pb2_grpc.GatewayServiceAsyncStub) -> float:
        return median([await off_by(stub, 1000) for _ in range(3)])

    service = Service(GatewaySettings(etcd_endpoints=etcd.endpoints, metrics_listen="", grace_s=2.0), SystemClock())
    async with (
        planner(etcd),
        agent(etcd, mock=mock, prefill_coefficients=configured, iteration_window_s=0.05) as node,
        running(service, serve(service)),
        open_channel(service.address) as channel,
    ):
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        await node.ready()
        await all_ready(stub, 1)
        assert await off_by_usually(stub) < 1 / 5
        fitted = asyncio.create_task(node.status(lambda status: len(status.prefill_coefficients_s) > 0))
        while not fitted.done():
            await off_by(stub, 100 + 90 * (next(numbers) % 10))
        await fitted
        async with asyncio.timeout(WAIT_S):
            while not 1 / 3 < await off_by_usually(stub) < 3:
                pass  # the gateway may not have heard yet
