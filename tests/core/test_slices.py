"""Slices of measured work: what counts where, whatever the order reports come in (paper, section 4.3)."""

from __future__ import annotations

import random
from dataclasses import astuple, dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evolving.core.slices import DecodeDone, PrefillDone, WorkWindow
from evolving.core.throughput import MeanWork
from evolving.core.timemodel import PrefillSums


@dataclass(frozen=True)
class Leg:
    """A sample as a node reports it."""

    done_s: float
    done: PrefillDone | DecodeDone

    def add_to(self, window: WorkWindow) -> None:
        if isinstance(self.done, PrefillDone):
            window.add_prefill(self.done_s, self.done)
        else:
            window.add_decode(self.done_s, self.done)


def prefill(request_id: str, done_s: float, tokens: int = 10, cached: int = 4) -> Leg:
    return Leg(done_s, PrefillDone(request_id, PrefillSums(tokens, tokens**2, cached // 2, cached)))


def decode(request_id: str, done_s: float, iterations: int = 5, context: float = 100.0) -> Leg:
    return Leg(done_s, DecodeDone(request_id, iterations, context))


def window_of(*legs: Leg) -> WorkWindow:
    window = WorkWindow()
    for leg in legs:
        leg.add_to(window)
    return window


LEGS = st.lists(
    st.one_of(
        st.builds(prefill, st.sampled_from("abcdef"), st.integers(0, 50), st.integers(1, 9), st.integers(0, 9)),
        st.builds(decode, st.sampled_from("abcdef"), st.integers(0, 50), st.integers(0, 9), st.integers(0, 99)),
    ),
    max_size=30,
)


def naive_work(legs: list[Leg], from_s: float, to_s: float) -> tuple[int, MeanWork | None]:
    """Completions and means of one slice, by the definition: all legs of each request that completed in it."""
    ids = {leg.done.request_id for leg in legs}
    decodes = {i: [g for g in legs if isinstance(g.done, DecodeDone) and g.done.request_id == i] for i in ids}
    prefills = {i: [g.done for g in legs if isinstance(g.done, PrefillDone) and g.done.request_id == i] for i in ids}
    here = [i for i in ids if decodes[i] and from_s <= max(leg.done_s for leg in decodes[i]) < to_s]
    known = [i for i in here if prefills[i]]
    if not known:
        return len(here), None
    ended = [leg.done for i in here for leg in decodes[i] if isinstance(leg.done, DecodeDone)]
    iterations = sum(done.iterations for done in ended)

    def mean(name: str) -> float:
        return sum(float(getattr(done.work, name)) for i in known for done in prefills[i]) / len(known)

    return len(here), MeanWork(
        uncached_tokens=mean("uncached_tokens"),
        query_key_pairs=mean("query_key_pairs"),
        cached_tokens=mean("cached_tokens"),
        restored_tokens=mean("restored_tokens"),
        decode_iterations=iterations / len(here),
        context_tokens=sum(done.context_tokens * done.iterations for done in ended) / iterations if iterations else 0,
    )


@given(legs=LEGS, seed=st.integers(0, 5))
def test_in_whatever_order_samples_come_slices_are_the_means_of_their_requests(legs: list[Leg], seed: int) -> None:
    shuffled = list(legs)
    random.Random(seed).shuffle(shuffled)
    for found in window_of(*shuffled).slices(end_s=45, count=4, slice_s=10):
        completions, work = naive_work(legs, found.started_s, found.ended_s)
        assert found.completions == completions
        assert (found.work is None) == (work is None)
        if found.work is not None and work is not None:
            assert astuple(found.work) == pytest.approx(astuple(work))


@given(legs=LEGS, forget_s=st.lists(st.integers(0, 60), max_size=3))
def test_invariants_hold_whatever_comes_and_is_forgotten(legs: list[Leg], forget_s: list[int]) -> None:
    window = WorkWindow(unfinished_s=20)
    for i, leg in enumerate(legs):
        leg.add_to(window)
        window.add_open(f"g{i % 2}", leg.done_s - i % 5, leg.done_s, i)
        if i % 7 == 6 and forget_s:
            window.forget(forget_s.pop())
        window.check_invariants()


def test_slices_follow_each_other_up_to_the_end() -> None:
    slices = WorkWindow().slices(end_s=700, count=10, slice_s=60)
    assert [s.started_s for s in slices] == [100 + 60 * i for i in range(10)]
    assert [s.ended_s for s in slices] == [160 + 60 * i for i in range(10)]
    assert {(s.completions, s.open_requests, s.work) for s in slices} == {(0, 0.0, None)}


@given(end_s=st.floats(0, 1e6), slice_s=st.floats(0.1, 100), count=st.integers(1, 12), at=st.floats(0, 1))
def test_a_request_is_counted_in_exactly_one_slice(end_s: float, slice_s: float, count: int, at: float) -> None:
    slices = WorkWindow().slices(end_s, count, slice_s)
    edges_s = [s.started_s for s in slices]
    for done_s in (*edges_s, edges_s[0] + at * (end_s - edges_s[0]) * 0.999):
        if not edges_s[0] <= done_s < end_s:
            continue
        found = window_of(decode("a", done_s)).slices(end_s, count, slice_s)
        assert [s.completions for s in found] == [int(s.started_s <= done_s < s.ended_s) for s in found]
        assert sum(s.completions for s in found) == 1


def test_a_request_belongs_to_the_slice_it_completed_in_and_takes_its_prefill_along() -> None:
    window = window_of(prefill("a", 5, tokens=7), decode("a", 25))
    early, middle, late = window.slices(end_s=30, count=3, slice_s=10)
    assert (early.completions, middle.completions, late.completions) == (0, 0, 1)
    assert late.work is not None
    assert late.work.uncached_tokens == 7


def test_a_request_that_lost_its_node_asked_for_all_its_legs() -> None:
    window = window_of(prefill("a", 1, 10, 0), decode("a", 2, 5), prefill("a", 3, 2, 8), decode("a", 4, 7))
    (found,) = window.slices(end_s=10, count=1, slice_s=10)
    assert found.completions == 1
    assert found.work is not None
    assert found.work.uncached_tokens == 12
    assert found.work.query_key_pairs == 104, "A is summed over legs, never computed from sums"
    assert found.work.decode_iterations == 12


def test_the_context_is_weighed_by_iterations() -> None:
    window = window_of(prefill("a", 1), decode("a", 2, 1, 1000), prefill("b", 1), decode("b", 2, 9, 100))
    (found,) = window.slices(end_s=10, count=1, slice_s=10)
    assert found.work is not None
    assert found.work.context_tokens == pytest.approx((1000 + 9 * 100) / 10)


def test_a_prefill_sample_that_is_missing_is_seen_and_left_out_of_the_means() -> None:
    window = window_of(prefill("a", 1, tokens=6), decode("a", 2, 3), decode("b", 2, 5))
    (found,) = window.slices(end_s=10, count=1, slice_s=10)
    assert (found.completions, found.without_prefill) == (2, 1)
    assert found.work is not None
    assert (found.work.uncached_tokens, found.work.decode_iterations) == (6, 4)


def test_late_samples_are_seen_and_still_counted_by_the_next_reading() -> None:
    window = window_of(decode("a", 2))
    window.slices(end_s=10, count=1, slice_s=10)
    prefill("a", 1).add_to(window)
    decode("b", 9).add_to(window)
    assert window.late_samples == 2
    decode("c", 10).add_to(window)
    prefill("d", 1).add_to(window)
    assert window.late_samples == 2, "c completed after the reading, d did not complete yet"
    (found,) = window.slices(end_s=10, count=1, slice_s=10)
    assert (found.completions, found.without_prefill) == (2, 1)


def test_what_is_forgotten_counts_no_more_and_halves_are_lost() -> None:
    window = window_of(prefill("whole", 1), decode("whole", 2), decode("half", 3), prefill("running", 4))
    window.forget(before_s=10)
    assert window.lost_requests == 1
    assert window.slices(end_s=10, count=1, slice_s=10)[0].completions == 0
    decode("running", 12).add_to(window)
    (found,) = window.slices(end_s=20, count=1, slice_s=10)
    assert (found.completions, found.without_prefill) == (1, 0), "a long decode keeps its prefill"


def test_a_decode_that_comes_after_its_slice_was_forgotten_is_lost() -> None:
    window = WorkWindow()
    window.slices(end_s=10, count=1, slice_s=10)
    window.forget(before_s=10)
    decode("a", 9).add_to(window)
    assert (window.late_samples, window.lost_requests) == (1, 1)
    assert window.slices(end_s=10, count=1, slice_s=10)[0].completions == 0


def test_a_leg_that_comes_late_leaves_its_request_where_another_leg_completed_it() -> None:
    window = WorkWindow(unfinished_s=100)
    decode("a", 15, 7).add_to(window)
    window.slices(end_s=10, count=1, slice_s=10)
    window.forget(before_s=10)
    for leg in (decode("a", 9, 5), prefill("a", 8)):
        leg.add_to(window)
    (found,) = window.slices(end_s=20, count=1, slice_s=10)
    assert (found.completions, found.without_prefill) == (1, 0)
    assert found.work is not None
    assert found.work.decode_iterations == 12
    window.forget(before_s=1000)
    assert (window.late_samples, window.lost_requests) == (0, 0)


def test_a_leg_that_comes_late_and_first_is_taken_for_its_request_s_last() -> None:
    window = WorkWindow(unfinished_s=100)
    prefill("a", 8).add_to(window)
    window.forget(before_s=10)
    decode("a", 9, 5).add_to(window)
    assert window.lost_requests == 1
    for leg in (prefill("a", 12), decode("a", 15, 7)):
        leg.add_to(window)
    (found,) = window.slices(end_s=20, count=1, slice_s=10)
    assert (found.completions, found.without_prefill) == (1, 0)
    assert found.work is not None
    assert found.work.decode_iterations == 7
    window.forget(before_s=1000)
    assert window.lost_requests == 1


@pytest.mark.parametrize("forgotten", ["before both", "between", "after both"])
@pytest.mark.parametrize("order", ["prefill first", "decode first"])
def test_a_request_of_which_a_half_comes_too_late_is_lost_once(order: str, forgotten: str) -> None:
    window = WorkWindow(unfinished_s=100)
    legs = [prefill("a", 5), decode("a", 9)]
    if order == "decode first":
        legs.reverse()
    for before, leg in zip(("before both", "between"), legs, strict=True):
        if forgotten == before:
            window.forget(before_s=10)
        leg.add_to(window)
    window.forget(before_s=1000)
    assert window.lost_requests == (forgotten != "after both")


def test_a_request_whose_end_is_never_heard_of_is_lost_in_time() -> None:
    window = WorkWindow(unfinished_s=100)
    prefill("a", 5).add_to(window)
    window.forget(before_s=105)
    assert window.lost_requests == 0
    window.forget(before_s=106)
    assert window.lost_requests == 1


@pytest.mark.parametrize(("read_until_s", "lost"), [(0, 3), (7, 2), (9, 1)])
def test_what_had_no_room_is_lost_unless_it_was_read_whole(read_until_s: float, lost: int) -> None:
    window = WorkWindow(requests_max=3)
    prefill("without decode", 2).add_to(window)
    for request_id, done_s in (("early", 5), ("later", 8)):
        prefill(request_id, done_s).add_to(window)
        decode(request_id, done_s).add_to(window)
    window.slices(end_s=read_until_s, count=1, slice_s=10)
    for place in range(3):
        prefill(f"new{place}", 10).add_to(window)
    assert window.lost_requests == lost


LEVELS = st.lists(
    st.tuples(st.sampled_from(["g1", "g2"]), st.integers(0, 20), st.integers(0, 9), st.integers(0, 7)), max_size=12
)


@given(reports=LEVELS)
def test_open_requests_are_the_time_mean_over_all_gateways(reports: list[tuple[str, int, int, int]]) -> None:
    """Naively: second by second, what each gateway said first of that second, as long as it went forward in time."""
    window = WorkWindow()
    said: dict[str, dict[int, int]] = {"g1": {}, "g2": {}}
    heard_until: dict[str, int] = {}
    for gateway, from_s, length_s, level in reports:
        window.add_open(gateway, from_s, from_s + length_s, level)
        for second in range(max(from_s, heard_until.get(gateway, from_s)), from_s + length_s):
            said[gateway][second] = level
        if length_s:  # a report of no time says nothing
            heard_until[gateway] = max(heard_until.get(gateway, from_s), from_s + length_s)
    for found in window.slices(end_s=30, count=3, slice_s=10):
        seconds = range(int(found.started_s), int(found.ended_s))
        expected = sum(levels.get(second, 0) for levels in said.values() for second in seconds) / 10
        assert found.open_requests == pytest.approx(expected)


def test_a_level_that_comes_twice_counts_once_and_a_gap_is_seen() -> None:
    window = WorkWindow()
    for from_s, to_s in ((0, 4), (0, 4), (2, 6), (8, 10)):
        window.add_open("g", from_s, to_s, 5)
    (found,) = window.slices(end_s=10, count=1, slice_s=10)
    assert found.open_requests == pytest.approx(5 * 8 / 10)
    assert window.unreported_s == 2


def test_levels_are_forgotten_too() -> None:
    window = WorkWindow()
    window.add_open("g", 0, 10, 3)
    window.add_open("g", 10, 20, 5)
    window.forget(before_s=10)
    early, late = window.slices(end_s=20, count=2, slice_s=10)
    assert (early.open_requests, late.open_requests) == (0.0, 5.0)


@given(delays_s=st.lists(st.floats(0, 0.5), min_size=20, max_size=20))
def test_reports_that_take_unlike_times_to_come_leave_no_gaps(delays_s: list[float]) -> None:
    """A gateway says each second how many it had; by the planner's clock that was when it came, less its age."""
    window = WorkWindow()
    for second, delay_s in enumerate(delays_s):
        window.add_open("g", second + delay_s, second + 1 + delay_s, 8)
    (found,) = window.slices(end_s=19, count=1, slice_s=18)
    assert found.open_requests == pytest.approx(8)
    assert window.unreported_s == 0


@given(reports=LEVELS, levels_max=st.integers(1, 3), gateways_max=st.integers(1, 2))
def test_levels_are_bounded_and_what_had_no_room_is_as_if_nobody_had_said_it(
    reports: list[tuple[str, int, int, int]], levels_max: int, gateways_max: int
) -> None:
    bounded, free = WorkWindow(levels_max=levels_max, gateways_max=gateways_max), WorkWindow()
    for gateway, from_s, length_s, _ in reports:  # one request open each: what is not said is seen in the mean
        for window in (bounded, free):
            window.add_open(gateway, from_s, from_s + length_s, 1)
            window.check_invariants()
    (held,), (all_of_it,) = (window.slices(end_s=50, count=1, slice_s=50) for window in (bounded, free))
    if len({gateway for gateway, _, length_s, _ in reports if length_s}) <= gateways_max:
        missing_s = bounded.unreported_s - free.unreported_s
        assert held.open_requests == pytest.approx(all_of_it.open_requests - missing_s / 50)
    else:
        assert bounded.unreported_s > 0


def test_where_there_is_no_room_the_gateway_that_is_silent_longest_goes() -> None:
    window = WorkWindow(gateways_max=2)
    for gateway, to_s in (("a", 3), ("b", 2), ("a", 5), ("c", 4)):
        window.add_open(gateway, to_s - 2, to_s, 10)
    (found,) = window.slices(end_s=10, count=1, slice_s=10)
    assert found.open_requests == pytest.approx(10 * (4 + 2) / 10)
    assert window.unreported_s == 2
