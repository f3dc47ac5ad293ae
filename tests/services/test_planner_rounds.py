"""The leader's rounds in virtual time: when it decides, and that a store that fails or is written by others stops
neither the rounds nor the record of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from planner_harness import KEYS, PREFILL_HEAVY, Load, join
from waiting import eventually

from evolving.core.config import PlannerConfig
from evolving.core.iterations import IterationSums, IterationWindow
from evolving.core.modes import Mode
from evolving.core.planner import Decision, DecisionKind, Split, SplitShape, propose_shape, release
from evolving.core.slices import DecodeDone, PrefillDone
from evolving.core.terms import Role
from evolving.core.timemodel import PrefillSums
from evolving.core.work import query_key_pairs
from evolving.runtime.clock import ManualClock
from evolving.runtime.election import Election
from evolving.runtime.errors import StoreUnavailable
from evolving.runtime.memory_store import MemoryStore
from evolving.runtime.metrics import Metrics
from evolving.runtime.store import Fenced, Guard, Listing, Versioned
from evolving.runtime.tasks import end_tasks
from evolving_planner.learning import Learning
from evolving_planner.measures import Measures, OpenLevel, WorkSample
from evolving_planner.metrics import PlannerMetrics
from evolving_planner.models import EndedWindow, ModelBook
from evolving_planner.office import FirstSplit, Office, Situation, Term
from evolving_planner.records import encode_split
from evolving_planner.replanner import Replanner
from evolving_planner.view import LEADER_ROLE, View

FOUR = ("a", "b", "c", "d")
CONFIG = PlannerConfig(window_s=60.0, cooldown_s=12.0)
REPORT_S = CONFIG.window_s / 100
SWAPPED = {"a": Role.DECODE, "b": Role.DECODE, "c": Role.PREFILL, "d": Role.PREFILL}


class MeddledStore(MemoryStore):
    """A store whose next write to the split or to a decision meets with something."""

    before: Callable[[str], Awaitable[None]] | None = None
    lose_answer_of: str = ""
    lists = 0
    may_list: asyncio.Event | None = None

    async def list(self, prefix: str) -> Listing:
        self.lists += 1
        if self.may_list is not None:
            await self.may_list.wait()
        return await super().list(prefix)

    async def compare_and_swap(
        self,
        key: str,
        expected_mod_revision: int,
        value: bytes,
        *,
        guards: Sequence[Guard] = (),
        lease: int | None = None,
    ) -> Versioned:
        if self.before is not None and key == KEYS.split:
            before, self.before = self.before, None
            await before(key)
        written = await super().compare_and_swap(key, expected_mod_revision, value, guards=guards, lease=lease)
        if self.lose_answer_of and key.startswith(self.lose_answer_of):
            self.lose_answer_of = ""
            raise StoreUnavailable("the answer got lost")
        return written


@dataclass
class Cluster:
    """A planner of four nodes, and time in the test's hands."""

    clock: ManualClock
    store: MeddledStore
    view: View
    office: Office
    measures: Measures
    learning: Learning
    began_s: float = 0.0
    reports: int = 0
    said_s: float = 0.0  # until when it is known how many requests were open

    async def pass_time(self, windows: float, load: Load = PREFILL_HEAVY) -> None:
        """Until so many windows after the term began, with a hundred requests and reports in each."""
        while (left_s := self.began_s + windows * CONFIG.window_s - self.clock.now_s()) > REPORT_S / 2:
            await self.clock.advance(min(REPORT_S, left_s))
            await asyncio.sleep(0.002)  # an evaluation's thread is not of virtual time
            now_s = self.clock.now_s()
            done_s = now_s - REPORT_S / 2
            self.reports += 1
            prefill = PrefillSums(load.uncached_tokens, query_key_pairs(load.uncached_tokens, 0))
            request_id = f"r{self.reports}"
            samples = [
                WorkSample(done_s, PrefillDone(request_id, prefill)),
                WorkSample(done_s, DecodeDone(request_id, load.iterations)),
            ]
            self.measures.keep_only(FOUR)
            self.measures.report_work("a", "a-1", self.reports, samples, 0, now_s)
            self.measures.report_open("g", [OpenLevel(self.said_s or self.began_s, now_s, load.open_requests)], now_s)
            self.said_s = now_s

    def measured(self) -> list[Decision]:
        """The decisions by measurement, oldest first."""
        decisions = [kept.decision for kept in reversed(self.view.history.before(None))]
        return [decision for decision in decisions if decision.evaluation is not None]

    async def decided(self, count: int) -> Decision:
        """The `count`-th decision by measurement, once it is recorded."""

        async def recorded() -> bool:
            await self.clock.advance(0.25)
            return len(self.measured()) >= count

        await eventually(recorded)
        return self.measured()[count - 1]


@asynccontextmanager
async def cluster(mode: Mode = Mode.AUTO, ttl_s: float = 60.0) -> AsyncIterator[Cluster]:
    """Two of the four nodes prefill, and the term has just begun."""
    clock, metrics = ManualClock(), PlannerMetrics(Metrics())
    store = MeddledStore(clock)
    view = View(store, KEYS, clock)
    first = FirstSplit(SplitShape(2, 2))
    office = Office(store, KEYS, view, first=first, decisions_kept=200, clock=clock, metrics=metrics)
    measures = Measures(CONFIG)
    learning = Learning(view, office, ModelBook(), clock, metrics)
    replanner = Replanner(view, office, measures, learning, config=CONFIG, mode=mode, clock=clock, metrics=metrics)
    await join(store, *FOUR)
    async with Election(store, KEYS.leader(LEADER_ROLE), b"here", ttl_s, clock) as election:
        loops = [asyncio.create_task(loop) for loop in (view.run(), office.run(election, "here"), replanner.run())]
        try:
            await eventually(lambda: view.split.epoch == 1)
            assert office.term is not None
            yield Cluster(clock, store, view, office, measures, learning, office.term.began_s)
            assert not any(loop.done() for loop in loops), "the loops live on"
        finally:
            await end_tasks(*loops)
            await store.close()


def to_shape(shape: SplitShape) -> Callable[[Situation], Decision]:
    return lambda now: propose_shape(
        now.split, now.live, shape, expected_epoch=0, reason="", author="operator:x", now_s=now.now_s
    )


async def test_it_decides_at_each_windows_end_by_the_window() -> None:
    async with cluster() as planned:
        await planned.pass_time(0.99)
        assert not planned.measured()
        await planned.pass_time(2.98)
        first, second = await planned.decided(1), await planned.decided(2)
        assert len(planned.measured()) == 2
        assert [first.kind, second.kind] == [DecisionKind.SWITCH, DecisionKind.STAY]
        for number, decision in enumerate((first, second), start=1):
            assert decision.evaluation is not None
            slices = decision.evaluation.slices
            assert [s.started_s for s in slices[1:]] == [s.ended_s for s in slices[:-1]]
            assert slices[0].started_s == pytest.approx(planned.began_s + (number - 1) * CONFIG.window_s)
            assert slices[-1].ended_s == pytest.approx(planned.began_s + number * CONFIG.window_s)
            assert [s.completions for s in slices] == [10] * CONFIG.slices
            assert [s.open_requests for s in slices] == pytest.approx([PREFILL_HEAVY.open_requests] * CONFIG.slices)


async def test_a_switch_that_the_cooldown_stopped_is_decided_again_when_it_ends() -> None:
    async with cluster() as planned:
        await planned.pass_time(0.92)
        split = await planned.office.decide(to_shape(SplitShape(1, 3)))
        stopped = await planned.decided(1)
        assert stopped.kind is DecisionKind.STAY
        assert "cools down" in stopped.reason
        await planned.pass_time(1.1)
        switch = await planned.decided(2)
        assert switch.kind is DecisionKind.SWITCH
        assert CONFIG.cooldown_s <= switch.decided_at_s - split.written_at_s < CONFIG.cooldown_s + 2
        await planned.pass_time(1.98)
        assert len(planned.measured()) == 2, "and once only; then with the next window"
        await planned.decided(3)


async def test_of_windows_that_were_missed_the_newest_is_decided_by() -> None:
    async with cluster(ttl_s=1000.0) as planned:
        await planned.pass_time(0.99)
        planned.clock.jump(3 * CONFIG.window_s)
        decision = await planned.decided(1)
        assert decision.evaluation is not None
        assert decision.evaluation.slices[-1].ended_s == pytest.approx(planned.began_s + 3 * CONFIG.window_s)
        await planned.pass_time(4.98)
        second = await planned.decided(2)
        assert second.evaluation is not None
        assert second.evaluation.slices[-1].ended_s == pytest.approx(planned.began_s + 4 * CONFIG.window_s)
        assert len(planned.measured()) == 2


async def test_in_shadow_a_cooldown_calls_for_no_second_decision() -> None:
    async with cluster(Mode.SHADOW) as planned:
        await planned.pass_time(0.92)
        await planned.office.decide(to_shape(SplitShape(1, 3)))
        await planned.pass_time(1.98)
        assert len(planned.measured()) == 1


async def test_a_decision_waits_for_a_store_that_is_away_and_is_recorded_once() -> None:
    async with cluster() as planned:
        await planned.pass_time(0.99)
        planned.store.set_available(False)
        await planned.pass_time(1.04)
        assert not planned.measured()
        planned.store.set_available(True)
        switch = await planned.decided(1)
        assert switch.kind is DecisionKind.SWITCH
        await planned.pass_time(1.98)
        assert len(planned.measured()) == 1
        assert planned.view.split.epoch == 2


async def test_a_write_whose_answer_is_lost_is_made_and_recorded_once() -> None:
    for lost in (KEYS.split, KEYS.decisions):
        async with cluster() as planned:
            await planned.pass_time(0.99)
            planned.store.lose_answer_of = lost
            switch = await planned.decided(1)
            assert switch.kind is DecisionKind.SWITCH
            assert switch.split() == planned.view.split
            await planned.pass_time(1.98)
            assert planned.measured() == [switch]
            history = [kept.decision for kept in planned.view.history.before(None)]
            assert [decision.epoch_after for decision in history] == [2, 1]


async def test_a_decision_to_stay_whose_answer_is_lost_is_recorded_once() -> None:
    async with cluster(Mode.SHADOW) as planned:
        await planned.pass_time(0.99)
        planned.store.lose_answer_of = KEYS.decisions
        stay = await planned.decided(1)
        await planned.pass_time(1.98)
        assert planned.measured() == [stay]


async def test_somebody_elses_split_is_taken_and_decided_from() -> None:
    async with cluster() as planned:
        await planned.pass_time(0.99)
        theirs = Split(2, SWAPPED, "by hand", "somebody", planned.clock.wall_s())

        async def write(key: str) -> None:
            await planned.store.put(key, encode_split(theirs))

        planned.store.before = write
        stay = await planned.decided(1)
        assert stay.kind is DecisionKind.STAY
        assert "changed meanwhile" in stay.reason
        assert stay.roles_before == SWAPPED
        assert planned.view.split == theirs
        history = [kept.decision for kept in planned.view.history.before(None)]
        assert [(d.author, d.epoch_before, d.epoch_after) for d in history[1:]] == [
            ("somebody", 1, 2),
            ("planner", 0, 1),
        ]


async def lose_office(planned: Cluster) -> None:
    planned.store.set_available(False)  # until the lease is over
    await planned.clock.advance(100.0)
    await eventually(lambda: planned.office.term is None)
    planned.store.set_available(True)


async def leads_again(planned: Cluster) -> Term:
    async def leads() -> bool:
        await planned.clock.advance(0.25)
        return planned.office.term is not None

    await eventually(leads)
    assert planned.office.term is not None
    return planned.office.term


async def test_measurements_of_an_earlier_term_do_not_count() -> None:
    async with cluster() as planned:
        await planned.pass_time(0.5)
        await lose_office(planned)
        term = await leads_again(planned)
        planned.began_s = planned.said_s = term.began_s
        await planned.pass_time(0.99)
        assert not planned.measured()
        decision = await planned.decided(1)
        assert decision.evaluation is not None
        assert decision.evaluation.slices[0].started_s == pytest.approx(term.began_s)
        assert decision.evaluation.counted == CONFIG.slices


# -- what an office may write


async def test_a_former_leader_writes_nothing() -> None:
    async with cluster() as planned:
        key = KEYS.leader(LEADER_ROLE)
        await planned.store.delete(key)
        await planned.store.put(key, b"another")
        with pytest.raises(Fenced):
            await planned.office.store_model(lambda: b"[]")
        with pytest.raises(Fenced):
            await planned.office.decide(to_shape(SplitShape(1, 3)))
        with pytest.raises(Fenced):
            await planned.office.decide(
                lambda now: release(now.split, reason="", author="x", prefill_share=0.5, now_s=0.0)
            )
        assert await planned.store.get(KEYS.model) is None
        assert len((await planned.store.list(KEYS.decisions)).items) == 1
        assert planned.view.split.epoch == 1


def windows(count: int, c1_s: float) -> list[EndedWindow]:
    """Of a node that needs 0.02 s an iteration and `c1_s` a token more."""
    found = []
    for number in range(count):
        tokens = 100.0 + 37 * number % 400
        prefill = PrefillSums(tokens, tokens * (10 + number % 7))
        found.append(EndedWindow(float(number), IterationWindow(IterationSums(2, 0.04 + c1_s * tokens, prefill))))
    return found


async def test_fits_are_stored_once_and_what_somebody_else_stores_is_taken() -> None:
    async with cluster() as planned:
        learning, nodes = planned.learning, planned.view.nodes
        learning.models.take("a", windows(40, c1_s=0.002))
        await learning.refit()
        stored = await planned.store.get(KEYS.model)
        assert stored is not None
        assert stored.value == learning.models.encode()
        await learning.refit()
        assert await planned.store.get(KEYS.model) == stored, "nothing changed"

        other = ModelBook()
        other.take("a", windows(40, c1_s=0.005))
        assert other.refit(nodes, now_s=1.0)
        theirs = await planned.store.put(KEYS.model, other.encode())
        await eventually(lambda: planned.view.model_revision == theirs.mod_revision)
        await learning.refit()
        assert learning.models.encode() == other.encode()

        spoiled = await planned.store.put(KEYS.model, b"{")
        await eventually(lambda: planned.view.model_revision == spoiled.mod_revision)
        await learning.refit({"a"})
        mended = await planned.store.get(KEYS.model)
        assert mended is not None
        assert mended.value == learning.models.encode()


async def test_fits_that_could_not_be_stored_are_stored_later() -> None:
    async with cluster() as planned:
        planned.learning.models.take("a", windows(40, c1_s=0.002))
        planned.store.set_available(False)
        with pytest.raises(StoreUnavailable):
            await planned.learning.refit()
        planned.store.set_available(True)
        await planned.learning.refit()
        stored = await planned.store.get(KEYS.model)
        assert stored is not None
        assert stored.value == planned.learning.models.encode() != ModelBook().encode()


async def test_fits_that_another_leader_stored_meanwhile_are_not_written_over() -> None:
    """What is fitted when a term begins waits until it has begun, and is of that term then."""
    async with cluster() as planned:
        learning, store = planned.learning, planned.store
        await lose_office(planned)
        store.lists, store.may_list = 0, asyncio.Event()

        async def begins() -> bool:
            await planned.clock.advance(0.25)
            return store.lists > 0

        await eventually(begins)
        learning.models.take("a", windows(40, c1_s=0.002))
        storing = asyncio.create_task(learning.refit())
        await eventually(lambda: bool(learning.models.outcomes))
        other = ModelBook()
        other.take("a", windows(40, c1_s=0.005))
        other.refit(planned.view.nodes, now_s=1.0)
        await store.put(KEYS.model, other.encode())
        store.may_list.set()
        await storing
        stored = await store.get(KEYS.model)
        assert stored is not None
        assert stored.value == other.encode() == learning.models.encode()


async def test_a_fit_whose_caller_went_away_is_stored_with_the_next() -> None:
    async with cluster() as planned:
        learning = planned.learning
        learning.models.take("a", windows(40, c1_s=0.002))
        asked = asyncio.create_task(learning.refit({"a"}))
        await asyncio.sleep(0)  # it is under way
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert learning.models.outcomes
        assert await planned.store.get(KEYS.model) is None
        await learning.refit()
        stored = await planned.store.get(KEYS.model)
        assert stored is not None
        assert stored.value == learning.models.encode() != ModelBook().encode()
