"""The book of time models: what is fitted when, what stays, what is lent, and what etcd gives back (section 4.2)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, replace
from functools import cache
from typing import Any

import pytest
from core.test_fit import decode_of, prefill_of, windows_of
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_harness import node_registration

from evolving.core.fit import FitConfig, prefill_error
from evolving.core.iterations import IterationSums, IterationWindow
from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients, PrefillSums
from evolving.core.work import PrefillWork
from evolving.runtime.keys import BadRecord, NodeRegistration
from evolving_planner.mix_rows import MixRows
from evolving_planner.models import EndedWindow, ModelBook, Outcome
from evolving_planner.phase_rows import compute

CONFIG = FitConfig(rows_least=20, drift_rows_least=20)
PREFILL, DECODE = prefill_of([0.5] * 5), decode_of([0.5] * 4, moe=False)


def times(prefill: PrefillCoefficients, factor: float) -> PrefillCoefficients:
    return PrefillCoefficients(*(factor * value for value in astuple(prefill)))


def windows(count: int, seed: int = 1, factor: float = 1.0) -> list[IterationWindow]:
    """In which both phases ran; prefill `factor` times as slow."""
    return windows_of(seed, times(PREFILL, factor), DECODE, count=count)


def only(phase: str, of: Sequence[IterationWindow]) -> list[IterationWindow]:
    return [IterationWindow(**{phase: getattr(window, phase)}) for window in of]


def nodes(*node_ids: str, **facts: Any) -> dict[str, NodeRegistration]:
    return {node_id: replace(node_registration(node_id), **facts) for node_id in node_ids}


def prefill_in_force(book: ModelBook, registered: dict[str, NodeRegistration], node: str = "a") -> tuple[float, ...]:
    return astuple(book.in_force(registered)[node].prefill)


def give(book: ModelBook, node: str, of: Sequence[IterationWindow], ended_s: float = 0.0) -> None:
    book.take(node, [EndedWindow(ended_s, window) for window in of])


CONFIGURED = node_registration("a").prefill_coefficients


def test_alike_nodes_have_the_memory_of_the_least_so_that_they_stay_alike() -> None:
    registered = (
        nodes("a", l1_tokens=10_000) | nodes("b", l1_tokens=9_900) | nodes("c", model="other", l1_tokens=20_000)
    )
    registered |= nodes("d", model="tiny", l1_tokens=0)
    found = ModelBook(CONFIG).in_force(registered)
    assert {node_id: model.decode_tokens for node_id, model in found.items()} == {
        "a": 7_900,
        "b": 7_900,
        "c": 18_000,
        "d": 1,
    }
    assert found["a"] == found["b"]


def test_a_phase_is_fitted_as_soon_as_it_has_rows_enough_whatever_the_other_has() -> None:
    book, registered = ModelBook(CONFIG), nodes("a")
    rows = windows(20)
    for phase in ("prefill", "decode"):
        give(book, "a", only(phase, rows)[:19])
        assert not book.refit(registered, 1.0)
    assert prefill_in_force(book, registered) == CONFIGURED
    give(book, "a", only("prefill", rows)[19:])
    assert book.refit(registered, 2.0)
    assert prefill_in_force(book, registered) == pytest.approx(astuple(PREFILL), rel=1e-6)
    assert book.in_force(registered)["a"].decode.d0_s == node_registration("a").decode_coefficients[0]
    before = prefill_in_force(book, registered)
    give(book, "a", only("decode", rows)[19:])
    assert book.refit(registered, 3.0)
    assert astuple(book.in_force(registered)["a"].decode) == pytest.approx(astuple(DECODE), rel=1e-6)
    assert prefill_in_force(book, registered) == before


@settings(max_examples=10, deadline=None)
@given(reports=st.lists(st.integers(1, 60), max_size=20), settled=st.sampled_from([20, 80, 100]))
def test_a_fit_grows_with_its_rows_until_it_has_enough_and_is_frozen_then(reports: list[int], settled: int) -> None:
    """Naively: the rows a fit has are those there were when it was possible, and then whenever they had doubled."""
    book, registered = ModelBook(CONFIG, rows_settled=settled), nodes("a")
    there = fitted = 0
    for number, count in enumerate(reports):
        give(book, "a", windows(count, seed=number, factor=1.0 + 0.01 * (number % 3)))  # drifts less than the bound
        there += count
        due = there >= 20 if not fitted else there - fitted >= 20 and 2 * fitted <= min(there, settled)
        before = book.encode()
        assert book.refit(registered, float(number)) == due
        assert due or book.encode() == before
        fitted = there if due else fitted
        assert [view.prefill_fit.rows for view in book.views(registered)] == [fitted]


@settings(max_examples=20, deadline=None)
@given(since=st.integers(0, 30), factor=st.sampled_from([0.5, 1.0, 2.0]))
def test_a_fit_is_made_anew_when_enough_rows_since_say_that_the_node_is_another(since: int, factor: float) -> None:
    book, registered = ModelBook(CONFIG), nodes("a")
    give(book, "a", windows(40))
    book.refit(registered, 1.0)
    give(book, "a", windows(since, seed=3, factor=factor))
    drifted = since >= CONFIG.drift_rows_least and factor != 1.0
    assert book.refit(registered, 2.0) == drifted
    expected = times(PREFILL, factor if drifted else 1.0)
    assert prefill_in_force(book, registered) == pytest.approx(astuple(expected), rel=1e-6)
    (view,) = book.views(registered)
    assert view.prefill_fit.fitted_at_s == (2.0 if drifted else 1.0)
    assert view.prefill_fit.recent_rows == (0 if drifted else since)
    assert not book.refit(registered, 3.0), "what it does now is what it is known for"
    if drifted:
        book.refit(registered, 4.0, wanted=["a"])
        assert prefill_in_force(book, registered) == pytest.approx(astuple(expected), rel=1e-6), "old rows are gone"


def test_a_fit_that_saw_too_little_is_made_anew_of_old_and_new_rows_where_one_fit_tells_both() -> None:
    """Prompts of one length don't tell the fixed part from the rest: longer ones are told badly, the node is as it
    was. A fit of the newest alone would not tell the old ones."""
    book, registered = ModelBook(CONFIG), nodes("a")
    short = windows_of(1, PREFILL, DECODE, count=30, prompts=lambda _: [PrefillWork(20)])
    long = windows_of(2, PREFILL, DECODE, count=30, prompts=lambda _: [PrefillWork(4000, 900)])
    give(book, "a", short)
    book.refit(registered, 1.0)
    assert "c0" in book.views(registered)[0].prefill_fit.unidentified
    give(book, "a", long)
    assert book.refit(registered, 2.0)
    known = book.in_force(registered)["a"].prefill
    for rows in (short, long):
        assert prefill_error(known, rows).mean_relative < 1e-6


def test_who_asks_for_a_fit_gets_one_of_all_there_is_or_is_told_that_it_is_too_little() -> None:
    book, registered = ModelBook(CONFIG), nodes("a", "b")
    give(book, "a", windows(30))
    give(book, "b", windows(5))
    book.refit(registered, 1.0)
    give(book, "a", windows(10, seed=5))
    assert book.refit(registered, 2.0, wanted=["a", "b"])
    assert set(book.outcomes) == {
        Outcome(node, phase, rows, fitted)
        for node, rows, fitted in (("a", 40, True), ("b", 5, False))
        for phase in ("prefill", "decode")
    }
    fitted, lent = book.views(registered)
    assert (fitted.prefill_fit.rows, fitted.prefill_fit.fitted_at_s) == (40, 2.0)
    assert (lent.prefill_fit.node_id, lent.prefill_fit.recent_rows) == ("a", 5)


@pytest.mark.parametrize("kept", [40, 57])
def test_of_a_node_the_newest_windows_are_kept_and_no_more(kept: int) -> None:
    """40: the fewest that may be set."""
    book, registered = ModelBook(CONFIG, windows_kept=kept), nodes("a")
    give(book, "a", windows(kept + 30, factor=2.0))
    give(book, "a", windows(kept, seed=2))
    book.refit(registered, 1.0, wanted=["a"])
    (view,) = book.views(registered)
    assert (view.prefill_fit.rows, view.decode_fit.rows) == (kept, kept)
    assert prefill_in_force(book, registered) == pytest.approx(astuple(PREFILL), rel=1e-6), "the old ones are gone"


def test_a_node_that_was_never_seen_in_a_phase_takes_the_fit_of_one_that_is_alike() -> None:
    book = ModelBook(CONFIG)
    registered = nodes("a", "b", "c") | nodes("unlike", chunk_tokens=64)
    give(book, "a", only("prefill", windows(30, seed=1)))
    give(book, "b", only("prefill", windows(40, seed=2, factor=2.0)))
    give(book, "c", only("decode", windows(30, seed=3)))
    book.refit(registered, 1.0)
    found = book.in_force(registered)
    assert found["c"].prefill == found["b"].prefill != found["a"].prefill, "b has more rows"
    assert found["a"].decode == found["b"].decode == found["c"].decode
    assert astuple(found["unlike"].prefill) == CONFIGURED
    views = {view.node_id: view for view in book.views(registered)}
    assert [views[node].prefill_fit.node_id for node in ("a", "b", "c", "unlike")] == ["a", "b", "b", ""]
    assert (views["c"].source, views["unlike"].source) == ("fit", "config")
    assert views["unlike"].prefill_fit.rows == 0


def prefills(iterations: int, new_tokens: int, cached: int = 0, restored: int = 0) -> IterationWindow:
    return IterationWindow(prefill=IterationSums(iterations, 1.0, PrefillSums(new_tokens, 1.0, restored, cached)))


def test_the_mix_of_work_is_measured_anew_all_the_time_and_over_nodes_alike_where_one_did_not_prefill() -> None:
    book = ModelBook(CONFIG, mix_s=10.0)
    registered = nodes("a", "b", "c") | nodes("unlike", chunk_tokens=64)

    def sizes() -> list[float]:
        found = book.in_force(registered)
        return [found[node].new_tokens_per_iteration for node in ("a", "b", "c", "unlike")]

    assert sizes() == [512, 512, 512, 64]
    give(book, "a", [prefills(30, 3000, cached=800, restored=200)])
    give(book, "b", [prefills(10, 5000, cached=200, restored=50)])  # too few iterations to say by themselves
    assert sizes() == [100, 200, 200, 64]
    assert [view.restored_share for view in book.views(registered)] == [0.25, 0.25, 0.25, 0.0]
    give(book, "a", [prefills(30, 30)], ended_s=5.0)
    assert sizes()[0] == (3000 + 30) / 60
    give(book, "unlike", [IterationWindow()], ended_s=12.0)
    assert sizes() == [1, 1, 1, 64], "what they did long ago is no longer so"
    give(book, "unlike", [IterationWindow()], ended_s=16.0)
    assert sizes() == [512, 512, 512, 64]


@given(
    ends_s=st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=40),
    span_s=st.floats(1, 1000),
)
def test_the_mix_is_that_of_the_last_while_give_or_take_a_twentieth(ends_s: list[float], span_s: float) -> None:
    rows, newest_s = MixRows(span_s), max(ends_s)
    for number, ended_s in enumerate(ends_s):
        rows.take(ended_s, prefills(2**number, 0))
    found = rows.up_to(newest_s).prefill.iterations
    for number, ended_s in enumerate(ends_s):
        if ended_s > newest_s - 0.95 * span_s + 1e-6:
            assert found & 2**number
        elif ended_s < newest_s - span_s - 1e-6:
            assert not found & 2**number


def test_windows_of_an_engine_s_life_before_a_restart_are_still_of_this_node() -> None:
    book, registered = ModelBook(CONFIG), nodes("a")
    give(book, "a", windows(15))
    book.refit(registered, 1.0)
    registered = nodes("a", incarnation="another", address="elsewhere:1", l1_tokens=9_999)
    give(book, "a", windows(15, seed=2))
    assert book.refit(registered, 2.0)
    assert prefill_in_force(book, registered) == pytest.approx(astuple(PREFILL), rel=1e-6)


@pytest.mark.parametrize("facts", [{"model": "n"}, {"chunk_tokens": 256}, {"experts": 8, "experts_per_token": 2}])
def test_a_node_that_comes_back_as_another_is_known_by_nothing(facts: dict[str, Any]) -> None:
    book, changed = ModelBook(CONFIG), nodes("a", **facts)
    give(book, "a", windows(30))
    book.refit(nodes("a"), 1.0)
    successor = ModelBook(CONFIG)
    successor.adopt(book.encode())
    for one in (book, successor):
        assert prefill_in_force(one, changed) == CONFIGURED
    assert prefill_in_force(successor, nodes("a")) == pytest.approx(astuple(PREFILL), rel=1e-6)
    assert book.refit(changed, 2.0), "the record is to go"
    assert json.loads(book.encode()) == []


def test_a_fit_outlives_its_node_for_those_alike_but_not_for_ever() -> None:
    book = ModelBook(CONFIG)
    give(book, "a", windows(30))
    book.refit(nodes("a"), 1.0)
    later = nodes("b")
    book.refit(later, 2.0)
    assert prefill_in_force(book, later, "b") == pytest.approx(astuple(PREFILL), rel=1e-6)
    for number in range(200):
        book.refit(nodes(f"passing{number}"), 3.0)
    assert json.loads(book.encode()) == []


def test_what_comes_while_a_fit_is_computed_is_since_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    book, registered = ModelBook(CONFIG), nodes("a")
    give(book, "a", only("prefill", windows(30)))

    def slowly(*given: Any) -> Any:
        give(book, "a", only("prefill", windows(7, seed=2)))
        return compute(*given)

    monkeypatch.setattr("evolving_planner.models.compute", slowly)
    assert book.refit(registered, 1.0)
    (view,) = book.views(registered)
    assert (view.prefill_fit.rows, view.prefill_fit.recent_rows) == (30, 7)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 1000),
    counts=st.dictionaries(st.sampled_from("abcd"), st.integers(0, 40), min_size=1),
    noise=st.floats(0, 0.2),
)
def test_a_successor_reads_what_its_predecessor_knew(seed: int, counts: dict[str, int], noise: float) -> None:
    book, successor, registered = ModelBook(CONFIG), ModelBook(CONFIG), nodes(*counts)
    for node, count in counts.items():
        give(book, node, windows_of(seed, PREFILL, DECODE, count=count, noise=noise))
    book.refit(registered, 12.5)
    successor.adopt(book.encode())
    assert successor.encode() == book.encode()
    for node, known in book.in_force(registered).items():
        read = successor.in_force(registered)[node]
        assert (read.prefill, read.decode) == (known.prefill, known.decode)
    for mine, theirs in zip(book.views(registered), successor.views(registered), strict=True):
        for fit in (mine.prefill_fit, mine.decode_fit, theirs.prefill_fit, theirs.decode_fit):
            fit.ClearField("recent_rows")
            fit.ClearField("recent_error")
        assert (theirs.prefill_fit, theirs.decode_fit) == (mine.prefill_fit, mine.decode_fit)


@cache
def a_record() -> bytes:
    book = ModelBook(CONFIG)
    give(book, "a", windows(30))
    book.refit(nodes("a"), 1.0)
    return book.encode()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


def places(value: object, at: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Where in nested JSON something could be another thing."""
    keys = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, inner in keys for place in places(inner, (*at, key)))]


@settings(deadline=None)
@given(data=st.data())
def test_a_record_that_is_none_changes_nothing_and_whatever_is_adopted_can_be_used(data: st.DataObject) -> None:
    wrong: object = json.loads(a_record())
    place = data.draw(st.sampled_from(places(wrong)))
    if place:
        inside = wrong
        for key in place[:-1]:
            inside = inside[key]  # type: ignore[index]
        inside[place[-1]] = data.draw(JSON)  # type: ignore[index]
    else:
        wrong = data.draw(JSON)
    book, registered = ModelBook(CONFIG), nodes("a")
    book.adopt(a_record())
    before = book.encode()
    try:
        book.adopt(json.dumps(wrong).encode())
    except BadRecord:
        assert book.encode() == before
    assert book.in_force(registered)["a"].decode_slots == registered["a"].decode_slots
    assert len(book.views(registered)) == 1
    ModelBook(CONFIG).adopt(book.encode())


@given(value=st.binary(max_size=60))
def test_bytes_that_are_no_record_are_refused(value: bytes) -> None:
    with pytest.raises(BadRecord):
        ModelBook().adopt(b"\xff" + value)


SUMS = st.builds(
    IterationSums,
    iterations=st.integers(0, 10**18),
    busy_s=st.just(0.0) | st.floats(1e-9, 1e9),
    prefill=st.builds(PrefillSums, *[st.floats(0, 1e18)] * 4),
    requests=st.integers(0, 10**18),
    expert_share=st.floats(0, 1e18),
    context_tokens=st.integers(0, 10**18),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.builds(IterationWindow, SUMS, SUMS, SUMS), min_size=20, max_size=30), st.booleans())
def test_whatever_a_node_reports_nothing_breaks_and_work_takes_time(rows: list[IterationWindow], moe: bool) -> None:
    book = ModelBook(CONFIG)
    registered = nodes("a", experts=64, experts_per_token=4) if moe else nodes("a")
    give(book, "a", rows)
    book.refit(registered, 1.0)
    (known,) = book.in_force(registered).values()
    assert known.prefill.prefill_iteration_s(PrefillSums(1.0, 1.0)) > 0
    assert known.decode.decode_iteration_s(1.0) > 0
    assert isinstance(known.decode, DecodeCoefficients)
    book.views(registered)
    ModelBook().adopt(book.encode())


def test_a_node_whose_work_would_take_no_time_is_left_out() -> None:
    assert set(ModelBook().in_force(nodes("a") | nodes("b", prefill_coefficients=(0.0,) * 5))) == {"a"}
