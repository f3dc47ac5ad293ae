"""What a gateway tells the planner: how many of its requests were open, whenever it can be told."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from gateway_harness import KEYS, Bench, bench, failure
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from waiting import eventually

from evolving.internal.v1 import planner_pb2, planner_pb2_grpc
from evolving.runtime.clock import ManualClock
from evolving.runtime.following import FollowingChannel
from evolving.runtime.metrics import Metrics
from evolving.v1 import gateway_pb2
from evolving.wire.status import ErrorDetail, abort_with
from evolving_gateway.open_levels import KEPT_LEVELS, LEVEL_S, Level, OpenReporter, OpenRequests

PROMPT = list(range(1, 101))


class Planner(planner_pb2_grpc.PlannerServiceServicer):
    """Keeps the reports it accepts; refuses those for which an error is due."""

    def __init__(self) -> None:
        self.errors: deque[ErrorDetail] = deque()
        self.lose_answers = 0  # accept, and fail nonetheless
        self.reports: list[planner_pb2.ReportOpenRequest] = []
        self.address = ""

    async def ReportOpen(self, request, context):  # type: ignore[no-untyped-def]
        if self.errors:
            await abort_with(context, self.errors.popleft())
        self.reports.append(request)
        if self.lose_answers:
            self.lose_answers -= 1
            await abort_with(context, ErrorDetail(grpc.StatusCode.UNAVAILABLE, "", "the answer was lost"))
        return planner_pb2.ReportOpenResponse()

    async def ReportWork(self, request, context):  # type: ignore[no-untyped-def]
        raise NotImplementedError


@asynccontextmanager
async def planning(planner: Planner) -> AsyncIterator[Planner]:
    server = grpc.aio.server()
    planner_pb2_grpc.add_PlannerServiceServicer_to_server(planner, server)
    planner.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield planner
    finally:
        await server.stop(None)


class Reporting:
    """A reporter in virtual time."""

    def __init__(self) -> None:
        self.clock = ManualClock(now_s=50.0)
        self.metrics = Metrics()
        self.channel = FollowingChannel()
        self.open = OpenRequests(self.clock.now_s())
        self.reporter = OpenReporter(self.open, self.channel, "p0", "gateway-a", self.clock, self.metrics)

    def outcomes(self, outcome: str) -> float:
        return (
            self.metrics.registry.get_sample_value("evolving_gateway_open_reports_total", {"outcome": outcome}) or 0.0
        )

    async def second(self, count: int = 1) -> None:
        """Let seconds pass, each with a report."""
        for _ in range(count):
            await self.clock.advance(LEVEL_S)
            await self.reporter.report()


@pytest.fixture
async def it() -> AsyncIterator[Reporting]:
    reporting = Reporting()
    yield reporting
    await reporting.channel.close()


@pytest.fixture
async def planner() -> AsyncIterator[Planner]:
    async with planning(Planner()) as planner:
        yield planner


def ages(report: planner_pb2.ReportOpenRequest) -> list[tuple[float, float, float]]:
    return [(level.from_age_s, level.to_age_s, level.requests) for level in report.levels]


@given(
    lives=st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), max_size=8),
    looks=st.lists(st.floats(0, 12), max_size=4),
    last_s=st.floats(10, 12),
)
def test_levels_are_the_exact_mean_of_the_count_without_a_gap(
    lives: list[tuple[float, float]], looks: list[float], last_s: float
) -> None:
    """q̄ (section 4.3) by the area under each request's life, whenever somebody looks."""
    spans = [(begin_s, begin_s + length_s) for begin_s, length_s in lives]
    open_requests = OpenRequests(0.0)
    moments = [(begin_s, "opened") for begin_s, _ in spans] + [(end_s, "ended") for _, end_s in spans]
    order = {"opened": 0, "ended": 1, "levels": 2}
    for moment_s, what in sorted([*moments, *((look_s, "levels") for look_s in looks)],
                                 key=lambda moment: (moment[0], order[moment[1]])):  # fmt: skip
        if moment_s <= last_s:
            getattr(open_requests, what)(moment_s)
    open_requests.cut(last_s)
    levels = open_requests.levels(last_s)
    assert (levels[0].from_s, levels[-1].to_s) == (0.0, last_s)
    for level, following in itertools.pairwise(levels):
        assert level.to_s == following.from_s
        assert level.to_s - level.from_s == LEVEL_S
    for level in levels:
        area_s = sum(max(0.0, min(end_s, level.to_s) - max(begin_s, level.from_s)) for begin_s, end_s in spans)
        assert level.requests * (level.to_s - level.from_s) == pytest.approx(area_s, abs=1e-9)


def test_what_nobody_takes_is_kept_for_a_window_and_its_oldest_dropped() -> None:
    open_requests = OpenRequests(0.0)
    open_requests.opened(0.0)
    sent = open_requests.levels(10.0)
    levels = open_requests.levels(KEPT_LEVELS + 5.0)
    assert (levels[0], levels[-1].to_s, len(levels)) == (Level(5.0, 6.0, 1.0), KEPT_LEVELS + 5.0, KEPT_LEVELS)
    open_requests.forget(sent)
    assert open_requests.levels(KEPT_LEVELS + 5.0)[0].from_s == 10.0


async def test_levels_go_to_the_leader_by_their_age(it: Reporting, planner: Planner) -> None:
    it.channel.address = planner.address
    await it.clock.advance(0.5)
    it.open.opened(it.clock.now_s())
    await it.clock.advance(0.75)
    await it.reporter.report()
    await it.second()
    first, second = planner.reports
    assert (first.partition_id, first.gateway_id) == ("p0", "gateway-a")
    assert ages(first) == [(1.25, 0.25, 0.5)]
    assert ages(second) == [(1.25, 0.25, 1.0)], "what was taken is not told again"
    assert it.outcomes("answered") == 2


async def test_levels_wait_for_a_leader_and_for_its_answer(it: Reporting, planner: Planner) -> None:
    it.open.opened(it.clock.now_s())
    await it.second(3)
    assert it.outcomes("away") == 3
    it.channel.address = planner.address
    planner.errors.append(ErrorDetail(grpc.StatusCode.FAILED_PRECONDITION, "NOT_LEADER", "another one leads"))
    await it.second()
    planner.lose_answers = 1
    await it.second(2)
    once, again = (ages(report) for report in planner.reports)
    assert once == [(5.0 - n, 4.0 - n, 1.0) for n in range(5)]
    assert again == [(6.0 - n, 5.0 - n, 1.0) for n in range(6)], "it may not have come"
    await it.second()
    assert len(planner.reports[-1].levels) == 1
    assert (it.outcomes("away"), it.outcomes("answered")) == (5, 2)


async def test_what_a_planner_refuses_as_such_is_not_told_for_ever(it: Reporting, planner: Planner) -> None:
    """It is logged, also where nobody could be told before."""
    invalid = ErrorDetail(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", "no")
    with capture_logs() as lines:
        await it.second(2)
        it.channel.address = planner.address
        planner.errors.extend([invalid, invalid])
        await it.second(3)
    assert [len(report.levels) for report in planner.reports] == [1]
    assert it.outcomes("refused") == 2
    assert [line["outcome"] for line in lines] == ["away", "refused"]


async def test_a_gateway_that_leaves_tells_its_last_level(it: Reporting, planner: Planner) -> None:
    it.channel.address = planner.address
    it.open.opened(it.clock.now_s())
    await it.clock.advance(1.25)
    await it.reporter.farewell(5.0)
    assert ages(planner.reports[0]) == [(1.25, 0.25, 1.0), (0.25, 0.0, 1.0)]


async def test_a_failover_is_followed() -> None:
    """Over etcd's place for leaders; the gateway names itself as it is registered."""
    async with planning(Planner()) as one, planning(Planner()) as other:
        async with bench("n") as it:
            await lead(it, one)
            await eventually(lambda: bool(one.reports))
            await lead(it, other)
            await eventually(lambda: bool(other.reports))
            registered = await it.store.get(KEYS.service("gateway", other.reports[0].gateway_id))
            assert registered is not None
        last = other.reports[-1].levels[-1]
        assert last.from_age_s - last.to_age_s < LEVEL_S, "the drain ended it"


async def lead(it: Bench, planner: Planner) -> None:
    await it.store.put(KEYS.leader("planner"), planner.address.encode())


async def test_only_what_is_not_refused_at_once_counts() -> None:
    """A request counts from its way to a queue until it is over: queued, decoding, gone."""
    async with planning(Planner()) as planner, bench("n", max_wait_s=2.0) as it:
        await lead(it, planner)
        node = it.nodes["n"]
        node.script.take.clear()
        node.script.pause_at = 2
        streams = [it.generate(PROMPT, sampling=gateway_pb2.Sampling(max_tokens=5)) for _ in range(3)]
        for stream in streams:
            await stream.until(lambda stream=stream: bool(stream.started))  # type: ignore[misc]
        await it.wait("n", 5.0)
        error = await failure(it.generate(PROMPT).all())
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = await failure(it.generate(PROMPT, model="none").all())
        assert error.code() is grpc.StatusCode.NOT_FOUND
        await told(planner, 3)
        node.script.take.set()
        await asyncio.gather(*(stream.until(lambda stream=stream: len(stream.ids) == 2) for stream in streams))  # type: ignore[misc]
        await told(planner, 3)
        streams[0].call.cancel()
        node.script.resume.set()
        await asyncio.gather(*(stream.all() for stream in streams[1:]))
        await told(planner, 0)


async def told(planner: Planner, requests: int) -> None:
    """Wait for a level of now with as many; never were there more than three."""
    planner.reports.clear()

    def levels() -> list[float]:
        return [level.requests for report in planner.reports for level in report.levels]

    await eventually(lambda: any(level == pytest.approx(requests) for level in levels()))
    assert max(levels()) < 3 + 1e-9
