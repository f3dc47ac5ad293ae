"""What nodes and gateways report: taken whole or refused whole, whatever it holds."""

from __future__ import annotations

import asyncio
import math
from dataclasses import astuple, dataclass, field, replace
from typing import Any, TypeVar, cast

import pytest
from core.test_fit import decode_of, prefill_of, windows_of
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_harness import node_registration

from evolving.core.config import PlannerConfig
from evolving.core.errors import UnknownNode
from evolving.core.iterations import IterationWindow as Window
from evolving.core.replan import evaluate
from evolving.core.terms import Role
from evolving.internal.v1.planner_pb2 import (
    IterationSums,
    IterationWindow,
    OpenLevel,
    ReportOpenRequest,
    ReportWorkRequest,
    ReportWorkResponse,
    WorkSample,
)
from evolving.runtime.clock import ManualClock
from evolving.runtime.errors import InvalidRequest, NotLeader, WrongPartition
from evolving.runtime.keys import NodeRegistration
from evolving.v1 import planner_pb2
from evolving.v1.common_pb2 import PHASE_DECODE, PHASE_PREFILL
from evolving_planner.intake import IntakeService
from evolving_planner.measures import Measures, Missing
from evolving_planner.models import EndedWindow, ModelBook

NOW_S = 1000.0
CONFIG = PlannerConfig()
Message = TypeVar("Message", ReportWorkRequest, ReportOpenRequest)


@dataclass
class Planner:
    """The intake with nothing around it: what it asks of view, office and metrics is this."""

    leads: bool = True
    leader_address: str = "10.0.0.1:1"
    own_address: str = ""
    nodes: dict[str, NodeRegistration] = field(default_factory=lambda: {"a": node_registration("a")})
    measures: Measures = field(default_factory=lambda: Measures(CONFIG))
    models: ModelBook = field(default_factory=ModelBook)
    taken: int = 0

    def is_leader(self) -> bool:
        return self.leads

    def work_report(self, repeated: bool, lost_reports: int) -> None: ...

    def work_taken(self, phase: object) -> None:
        self.taken += 1

    def give(self, *requests: ReportWorkRequest | ReportOpenRequest) -> list[ReportWorkResponse]:
        """What the reports of work were answered."""
        me = cast("Any", self)
        service = IntakeService("p0", me, me, self.measures, self.models, ManualClock(NOW_S), me)
        answers = []
        for request in requests:
            if isinstance(request, ReportWorkRequest):
                answers.append(asyncio.run(service.ReportWork(request, me)))
            else:
                asyncio.run(service.ReportOpen(request, me))
        return answers

    @property
    def windows(self) -> int:
        (view,) = self.models.views(self.nodes)
        return view.prefill_fit.recent_rows


def work(**more: Any) -> ReportWorkRequest:
    """A report of one request, and of the iterations it took."""
    prefill = WorkSample(request_id="r", phase=PHASE_PREFILL, uncached_tokens=10, query_key_pairs=55, age_s=2.0)
    decode = WorkSample(request_id="r", phase=PHASE_DECODE, output_tokens=5, iterations=4, context_tokens=12, age_s=1.0)
    sums = IterationSums(iterations=1, busy_s=0.1, uncached_tokens=10, query_key_pairs=55)
    fields = {"partition_id": "p0", "node_id": "a", "incarnation": "1", "sequence": 1, **more}
    return ReportWorkRequest(**{"samples": [prefill, decode], "windows": [IterationWindow(prefill=sums)], **fields})


def opened(*levels: tuple[float, float, float], **more: Any) -> ReportOpenRequest:
    found = [OpenLevel(from_age_s=start, to_age_s=end, requests=requests) for start, end, requests in levels]
    return ReportOpenRequest(**{"partition_id": "p0", "gateway_id": "g", "levels": found, **more})


def test_a_report_is_taken_with_all_that_is_in_it() -> None:
    planner = Planner()
    planner.give(work(), work(), opened((60, 30, 4), (30, 0, 8)))
    last = planner.measures.read(NOW_S, 0.0).slices[-1]
    assert (last.completions, last.without_prefill, last.open_requests) == (1, 0, 6)
    assert (planner.taken, planner.windows) == (2, 1), "once"


def test_requests_of_two_tenants_with_one_id_are_two() -> None:
    """Ids are unique within a tenant: each harness makes its own."""
    planner = Planner()
    samples = []
    for tenant, tokens in (("t", 10), ("u", 30)):
        for sample in work().samples:
            sample.tenant = tenant
            if sample.phase == PHASE_PREFILL:
                sample.uncached_tokens, sample.query_key_pairs = tokens, tokens * (tokens + 1) / 2
            samples.append(sample)
    planner.give(work(samples=samples))
    last = planner.measures.read(NOW_S, 0.0).slices[-1]
    assert last.completions == 2
    assert last.work is not None
    assert (last.work.uncached_tokens, last.work.decode_iterations) == (20, 4)


def test_a_report_is_answered_with_what_is_fitted_of_the_node() -> None:
    """Also one with nothing in it, one that comes twice, and that of a node which is alike. Before the first fit, to
    another life than the one registered and to a node that is not what was fitted, nothing is said."""
    planner = Planner(nodes={node: node_registration(node) for node in ("a", "alike")})
    planner.nodes["other"] = replace(node_registration("other"), chunk_tokens=7)
    prefill, decode = prefill_of([0.5] * 5), decode_of([0.5] * 4, moe=False)
    windows = [EndedWindow(NOW_S, window) for window in windows_of(1, prefill, decode, count=40)]

    def idle(node: str, sequence: int, incarnation: str = "") -> ReportWorkRequest:
        life = incarnation or f"{node}-1"
        return work(node_id=node, incarnation=life, sequence=sequence, samples=[], windows=[])

    planner.models.take("a", [EndedWindow(NOW_S, Window(prefill=each.window.prefill)) for each in windows])
    assert planner.give(idle("a", 1)) == [ReportWorkResponse()]
    planner.models.refit(planner.nodes, 1.0)
    told, again, to_alike, to_other, to_earlier = planner.give(
        idle("a", 2), idle("a", 2), idle("alike", 1), idle("other", 1), idle("a", 1, "a-0")
    )
    assert list(told.prefill_coefficients_s) == pytest.approx(astuple(prefill), rel=1e-6)
    assert not told.decode_coefficients_s, "nobody has decoded"
    assert told == again == to_alike
    assert to_other == to_earlier == ReportWorkResponse()
    planner.models.take("a", [EndedWindow(NOW_S, Window(decode=each.window.decode)) for each in windows])
    planner.models.refit(planner.nodes, 2.0)
    (told,) = planner.give(idle("a", 3))
    assert list(told.decode_coefficients_s) == pytest.approx(astuple(decode)[:4], rel=1e-6)
    planner.nodes["a"] = replace(planner.nodes["a"], model="another", incarnation="a-2")
    assert planner.give(idle("a", 1, "a-2")) == [ReportWorkResponse()], "though it was not followed yet"


def test_who_does_not_lead_takes_nothing_and_names_who_does() -> None:
    for request in (work(), opened((1, 0, 1)), work(samples=[WorkSample()])):
        with pytest.raises(NotLeader) as error:
            Planner(leads=False).give(request)
        assert error.value.metadata == {"leader": "10.0.0.1:1"}


def test_another_partition_s_reports_and_those_of_a_node_nobody_knows_are_refused() -> None:
    with pytest.raises(WrongPartition):
        Planner().give(work(partition_id="p1"))
    with pytest.raises(WrongPartition):
        Planner().give(opened(partition_id=""))
    planner = Planner()
    with pytest.raises(UnknownNode):
        planner.give(work(node_id="z"))
    assert planner.windows == 0


def test_a_node_that_just_left_is_listened_to() -> None:
    planner = Planner()
    planner.give(work(samples=[]))
    planner.nodes = {"b": node_registration("b")}
    planner.give(work(sequence=2))
    assert planner.measures.read(NOW_S, 0.0).slices[-1].completions == 1


def sample_with(name: str, value: object) -> ReportWorkRequest:
    request = work()
    setattr(request.samples[1], name, value)
    return request


def window_with(name: str, value: object, kind: str = "") -> ReportWorkRequest:
    request = work()
    window = request.windows[0]
    setattr(getattr(window, kind) if kind else window, name, value)
    return request


NUMBERS = (math.nan, math.inf, -math.inf, -1.0, 1e300)
BAD_WORK = [
    work(node_id=""),
    work(incarnation=""),
    work(node_id="n" * 300),
    work(samples=[*work().samples] * 6000),
    work(windows=[*work().windows] * 11_000),
    *(sample_with("phase", phase) for phase in (0, 3, -1, 99)),
    *(sample_with("request_id", request_id) for request_id in ("", "i" * 300)),
    sample_with("tenant", "t" * 300),
    *(sample_with(name, value) for name in ("query_key_pairs", "context_tokens", "age_s") for value in NUMBERS),
    *(
        window_with(name, value, "mixed")
        for name in ("busy_s", "uncached_tokens", "query_key_pairs", "restored_tokens", "cached_tokens", "expert_share")
        for value in NUMBERS
    ),
    *(window_with(name, 2**64 - 1, "decode") for name in ("iterations", "requests", "context_tokens")),
    work(samples=[WorkSample(request_id="r", phase=PHASE_PREFILL, uncached_tokens=10, query_key_pairs=9)]),
    window_with("busy_s", 1e-300, "prefill"),
    window_with("cold_iterations", 2**64 - 1),
    *(window_with("age_s", value) for value in NUMBERS),
]
BAD_LEVELS = [
    opened((1, 0, 1), gateway_id=""),
    opened((1, 0, 1), gateway_id="g" * 300),
    opened(*[(1, 0, 1)] * 10_001),
    opened((10, 5, 1), (6, 0, 1)),  # overlap
    opened((5, 0, 1), (10, 5, 1)),  # the newest first
    opened((1, 2, 1)),  # ends before it begins
    opened((1, -1, 1)),  # ends after the report
    *(opened((9, 5, 1), (5, 0, value)) for value in NUMBERS),
    *(opened((value, 0, 1)) for value in NUMBERS),
    *(opened((9, value, 1)) for value in NUMBERS),
]


@pytest.mark.parametrize(("bad", "good"), [(BAD_WORK, work()), (BAD_LEVELS, opened((30, 0, 6)))], ids=["work", "open"])
def test_of_a_report_that_no_honest_sender_sends_nothing_is_taken(bad: list[Message], good: Message) -> None:
    planner, untouched = Planner(), Planner()
    for request in bad:
        with pytest.raises(InvalidRequest):
            planner.give(request)
    assert planner.measures.missing() == Missing()
    assert (planner.taken, planner.windows) == (0, 0)
    for one in (planner, untouched):
        one.give(good)  # of the same number: that one is still to come
    assert planner.measures.read(NOW_S, 0.0).slices == untouched.measures.read(NOW_S, 0.0).slices
    assert (planner.taken, planner.windows) == (untouched.taken, untouched.windows)


SIZES = st.sampled_from([0, 1, 7, 2**31, 2**32 - 1])
COUNTS = st.sampled_from([0, 1, 7, 10**9, 10**18, 2**64 - 1])
FLOATS = st.floats() | st.floats(0, 1e18)
SUMS = st.builds(
    IterationSums,
    iterations=COUNTS,
    busy_s=FLOATS,
    uncached_tokens=FLOATS,
    query_key_pairs=FLOATS,
    restored_tokens=FLOATS,
    cached_tokens=FLOATS,
    requests=COUNTS,
    expert_share=FLOATS,
    context_tokens=COUNTS,
)
WORK = st.builds(
    ReportWorkRequest,
    partition_id=st.just("p0"),
    node_id=st.just("a"),
    incarnation=st.sampled_from("12"),
    sequence=COUNTS,
    samples=st.lists(
        st.builds(
            WorkSample,
            request_id=st.sampled_from(["r", "s", "t"]),
            phase=st.integers(1, 2) | st.integers(-2, 9),
            uncached_tokens=SIZES,
            cached_tokens=SIZES,
            restored_tokens=SIZES,
            query_key_pairs=FLOATS,
            iterations=SIZES,
            age_s=FLOATS | st.floats(0, 600),
            context_tokens=FLOATS,
        ),
        max_size=4,
    ),
    windows=st.lists(st.builds(IterationWindow, age_s=FLOATS, prefill=SUMS, decode=SUMS, mixed=SUMS), max_size=2),
    dropped=COUNTS,
)
OPEN = st.builds(
    ReportOpenRequest,
    partition_id=st.just("p0"),
    gateway_id=st.sampled_from(["", "g", "h"]),
    levels=st.lists(st.builds(OpenLevel, from_age_s=FLOATS, to_age_s=FLOATS, requests=FLOATS), max_size=3),
)


@settings(max_examples=60, deadline=None)
@given(requests=st.lists(WORK | OPEN, max_size=8))
def test_whatever_is_reported_what_is_measured_stays_finite(
    requests: list[ReportWorkRequest | ReportOpenRequest],
) -> None:
    planner = Planner()
    for request in requests:
        try:
            planner.give(request)
        except InvalidRequest:
            continue
    planner.measures.check_invariants()
    for part in planner.measures.read(NOW_S, 0.0).slices:
        assert math.isfinite(part.open_requests)
        assert part.work is None or all(math.isfinite(value) for value in vars_of(part.work))
    planner.models.refit(planner.nodes, 1.0)
    assert set(planner.models.in_force(planner.nodes)) == {"a"}
    assert len(planner.models.views(planner.nodes)) == 1
    missing = planner.measures.missing()
    planner_pb2.Missing(lost_reports=missing.lost_reports, dropped_samples=missing.dropped_samples)  # has room for them


def vars_of(work: object) -> list[float]:
    return [float(getattr(work, name)) for name in cast("Any", type(work)).__slots__]


TINY = [5e-324, 1e-300, 1e-9, 0.3]


@settings(max_examples=60, deadline=None)
@given(
    levels=st.lists(st.sampled_from([*TINY, 1e18]), min_size=1, max_size=2),
    tokens=st.sampled_from([1, 2**32 - 1]),
    pairs=st.sampled_from([*TINY, 1e9, 1e18]),
    iterations=SIZES,
    context_tokens=st.sampled_from([0.0, *TINY, 1e18]),
    coefficients=st.sampled_from([(0.01, 0.001, 0.0, 0.0, 0.0), (0.0, 0.0, 1e-9, 0.0, 0.0)]),
)
def test_whatever_is_reported_what_is_decided_from_it_is_finite(
    levels: list[float],
    tokens: int,
    pairs: float,
    iterations: int,
    context_tokens: float,
    coefficients: tuple[float, float, float, float, float],
) -> None:
    planner = Planner()
    planner.nodes = {node: replace(node_registration(node), prefill_coefficients=coefficients) for node in "abc"}
    prefill = {"phase": PHASE_PREFILL, "uncached_tokens": tokens, "query_key_pairs": pairs}
    decode = {"phase": PHASE_DECODE, "iterations": iterations, "context_tokens": context_tokens}
    samples = [
        WorkSample(request_id=f"r{age_s}", age_s=age_s, **leg)  # type: ignore[arg-type]
        for age_s in range(1, 600, 10)
        for leg in (prefill, decode)
    ]
    try:
        planner.give(work(samples=samples))
    except InvalidRequest:
        assert pairs < tokens
    planner.give(*(opened((600, 0, level), gateway_id=f"g{place}") for place, level in enumerate(levels)))
    found = evaluate(
        planner.measures.read(NOW_S, 0.0).slices,
        {"a": Role.PREFILL, "b": Role.DECODE, "c": Role.DECODE},
        planner.models.in_force(planner.nodes),
        CONFIG,
    )
    for candidate in found.candidates:
        assert all(math.isfinite(value) for value in (candidate.throughput, candidate.mean_gain, candidate.error))
