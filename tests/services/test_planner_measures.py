"""What the leading planner takes of reports, beside a naive model that keeps every report it was ever given."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evolving.core.config import PlannerConfig
from evolving.core.errors import UnknownNode
from evolving.core.slices import DecodeDone, PrefillDone, Slice, WorkWindow
from evolving.core.timemodel import PrefillSums
from evolving_planner.measures import Measures, OpenLevel, ReportOutcome, WorkSample

CONFIG = PlannerConfig(window_s=40.0, slices=4, slices_valid_least=2)


def prefill(request_id: str, done_s: float, tokens: int = 10) -> WorkSample:
    return WorkSample(done_s, PrefillDone(request_id, PrefillSums(tokens, tokens**2)))


def decode(request_id: str, done_s: float, iterations: int = 5) -> WorkSample:
    return WorkSample(done_s, DecodeDone(request_id, iterations, 100.0))


def measures(*nodes: str, requests_max: int = 100) -> Measures:
    found = Measures(CONFIG, requests_max=requests_max)
    found.keep_only(nodes or ("a", "b"))
    return found


@dataclass(frozen=True)
class Report:
    node: str
    incarnation: str
    sequence: int
    samples: tuple[WorkSample, ...] = ()
    dropped: int = 0

    def give_to(self, to: Measures, now_s: float = 40.0) -> ReportOutcome:
        return to.report_work(self.node, self.incarnation, self.sequence, self.samples, self.dropped, now_s)


@dataclass
class Naive:
    """Reports of each life of each node, all of them for ever."""

    taken: dict[tuple[str, str], list[Report]] = field(default_factory=dict)

    def take(self, report: Report) -> ReportOutcome:
        before = self.taken.setdefault((report.node, report.incarnation), [])
        newest = max((other.sequence for other in before), default=report.sequence - 1)
        if report.sequence <= newest:
            return ReportOutcome(repeated=True, lost_reports=0)
        before.append(report)
        return ReportOutcome(repeated=False, lost_reports=report.sequence - newest - 1)

    @property
    def lost_reports(self) -> int:
        return sum(
            later.sequence - earlier.sequence - 1
            for reports in self.taken.values()
            for earlier, later in itertools.pairwise(reports)
        )

    def slices(self, end_s: float) -> tuple[Slice, ...]:
        window = WorkWindow()
        for report in itertools.chain.from_iterable(self.taken.values()):
            for sample in report.samples:
                if isinstance(sample.done, PrefillDone):
                    window.add_prefill(sample.done_s, sample.done)
                else:
                    window.add_decode(sample.done_s, sample.done)
        return window.slices(end_s, CONFIG.slices, CONFIG.slice_s)


SAMPLES = st.one_of(
    st.builds(prefill, st.sampled_from("uvwxyz"), st.integers(0, 39), st.integers(1, 9)),
    st.builds(decode, st.sampled_from("uvwxyz"), st.integers(0, 39), st.integers(1, 9)),
)
REPORTS = st.lists(
    st.builds(
        Report,
        st.sampled_from("ab"),
        st.sampled_from(["life 1", "life 2"]),
        st.integers(0, 8),
        st.lists(SAMPLES, max_size=4).map(tuple),
    ),
    max_size=12,
)


@given(reports=REPORTS)
def test_whatever_repeats_overtakes_or_misses_each_report_counts_once(reports: list[Report]) -> None:
    real, naive = measures(), Naive()
    for report in reports:
        assert report.give_to(real) == naive.take(report)
        real.check_invariants()
    assert real.read(40.0, 0.0).slices == naive.slices(40.0)
    assert real.missing().lost_reports == naive.lost_reports


@given(reports=REPORTS, requests_max=st.integers(1, 4))
def test_a_full_log_keeps_what_was_heard_of_last_and_says_how_much_is_lost(
    reports: list[Report], requests_max: int
) -> None:
    """Naively: a list of ids, the one heard of last at its end. A request that is held always gets its other half."""
    real, naive = measures(requests_max=requests_max), Naive()
    held: list[str] = []
    parts: dict[str, Counter[type]] = {}
    lost = 0
    for report in reports:
        report.give_to(real)
        real.check_invariants()
        for sample in () if naive.take(report).repeated else report.samples:
            request_id = sample.done.request_id
            if request_id in held:
                held.remove(request_id)
            else:
                parts[request_id] = Counter()
                if len(held) == requests_max:
                    del held[0]
                    lost += 1
            held.append(request_id)
            parts[request_id][type(sample.done)] += 1
    found = real.read(40.0, 0.0).slices
    completed = [request_id for request_id in held if parts[request_id][DecodeDone]]
    assert sum(part.completions for part in found) == len(completed)
    assert sum(part.without_prefill for part in found) == sum(not parts[i][PrefillDone] for i in completed)
    assert real.missing().lost_requests == lost


@given(count=st.integers(1, 400), requests_max=st.integers(1, 20))
def test_what_is_held_is_bounded_however_much_comes(count: int, requests_max: int) -> None:
    real = measures("a", requests_max=requests_max)
    for number in range(count):
        Report("a", "1", number, (decode(f"r{number}", 1.0),)).give_to(real)
    assert sum(part.completions for part in real.read(40.0, 0.0).slices) == min(count, requests_max)
    assert real.missing().lost_requests == max(0, count - requests_max)


@given(gaps_s=st.lists(st.floats(0.1, 30), min_size=1, max_size=40))
def test_what_no_window_will_read_is_forgotten_and_nothing_else(gaps_s: list[float]) -> None:
    """One request a report, each completed as it is reported: the window shows those of its own time, all of them."""
    real, times_s = measures("a"), list(itertools.accumulate(gaps_s))
    for number, now_s in enumerate(times_s):
        Report("a", "1", number, (prefill(str(number), now_s), decode(str(number), now_s))).give_to(real, now_s)
        real.check_invariants()
        start_s = real.read(now_s, 0.0, peek=True).slices[0].started_s
        assert sum(part.completions for part in real.read(now_s, 0.0, peek=True).slices) == sum(
            start_s <= at_s < now_s for at_s in times_s
        )
    assert real.missing().lost_requests == 0


def test_a_node_that_left_may_still_report_and_one_that_never_was_may_not() -> None:
    real = measures("a", "b")
    real.keep_only(["b"])
    Report("a", "1", 1, (decode("r", 1.0),)).give_to(real)
    assert sum(part.completions for part in real.read(40.0, 0.0).slices) == 1
    with pytest.raises(UnknownNode):
        Report("z", "1", 1, (decode("s", 1.0),)).give_to(real)
    assert sum(part.completions for part in real.read(40.0, 0.0).slices) == 1


def test_nodes_that_come_and_go_for_ever_are_not_remembered_for_ever() -> None:
    real = measures("first")
    for number in range(1500):
        real.keep_only([f"n{number}"])
        real.check_invariants()
    Report("n900", "1", 1).give_to(real)
    with pytest.raises(UnknownNode):
        Report("first", "1", 1).give_to(real)


def test_what_a_node_gave_up_counts_from_its_first_report_in_this_term_and_over_its_restart() -> None:
    real = measures()
    for sequence, dropped in ((5, 100), (6, 103), (6, 103), (7, 103)):
        Report("a", "1", sequence, dropped=dropped).give_to(real)
    Report("b", "1", 1, dropped=7).give_to(real)
    assert real.missing().dropped_samples == 3
    Report("a", "2", 1, dropped=2).give_to(real)  # another process, which counts from 0
    assert real.missing().dropped_samples == 5


def test_looking_at_the_window_makes_nothing_late() -> None:
    real = measures()
    real.read(40.0, 0.0, peek=True)
    Report("a", "1", 1, (decode("r", 39.0),)).give_to(real)
    assert real.missing().late_samples == 0
    assert real.read(40.0, 0.0, peek=True) == real.read(40.0, 0.0)
    Report("a", "1", 2, (decode("s", 39.0),)).give_to(real)
    assert real.missing().late_samples == 1


def test_open_requests_are_the_mean_over_the_slice_and_a_silent_gateway_is_seen() -> None:
    real = measures()
    for _ in range(2):  # a repeat says nothing new
        real.report_open("g", [OpenLevel(0.0, 10.0, 4.0), OpenLevel(15.0, 20.0, 6.0)], 20.0)
    real.report_open("h", [OpenLevel(10.0, 20.0, 1.0)], 20.0)
    assert [part.open_requests for part in real.read(40.0, 0.0).slices] == [4.0, 6.0 * 5 / 10 + 1.0, 0.0, 0.0]
    assert real.missing().unreported_s == 5.0


def test_a_term_begins_with_nothing() -> None:
    real = measures()
    Report("a", "1", 1, (decode("r", 1.0),)).give_to(real)
    Report("a", "1", 9, (prefill("r", 1.0),), dropped=3).give_to(real)
    real.report_open("g", [OpenLevel(0.0, 10.0, 4.0)], 20.0)
    real.clear()
    real.check_invariants()
    new = measures("a")
    real.keep_only(["a"])
    assert real.missing() == new.missing()
    assert real.read(40.0, 0.0).slices == new.read(40.0, 0.0).slices
    assert Report("a", "1", 1).give_to(real) == ReportOutcome(repeated=False, lost_reports=0)
