"""The leader's rounds in virtual time: when it decides, and that a store that fails or is written by others stops
neither the rounds nor the record of them."""

from __future__ import annotations

import pytest
from planner_harness import KEYS, PREFILL_HEAVY
from planner_in_time import CONFIG, SWAPPED, cluster, leads_again, lose_office, to_shape

from evolving.core.modes import Mode
from evolving.core.planner import DecisionKind, Split, SplitShape
from evolving_planner.records import encode_split


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


async def test_windows_since_the_split_was_written_are_looked_at_together() -> None:
    async with cluster() as planned:
        await planned.pass_time(4.98)
        decisions = [await planned.decided(number) for number in (1, 2, 3, 4)]
        assert [decision.kind for decision in decisions] == [DecisionKind.SWITCH, *[DecisionKind.STAY] * 3]
        earlier = [decision.evaluation.earlier for decision in decisions if decision.evaluation is not None]
        # The slice in which the split was written is of both.
        assert [len(slices) for slices in earlier] == [0, 0, CONFIG.slices - 1, 2 * CONFIG.slices - 1]
        assert all(each.started_s >= planned.began_s + CONFIG.window_s for slices in earlier for each in slices)
        what_if = await planned.replanner.what_if()
        assert what_if.earlier[-1].ended_s <= what_if.slices[0].started_s


async def test_what_was_measured_before_an_operator_changed_the_split_counts_with_nothing_after() -> None:
    async with cluster(Mode.SHADOW) as planned:
        await planned.pass_time(2.55)
        best = (await planned.decided(1)).evaluation
        assert best is not None
        assert best.best is not None
        split = await planned.office.decide(to_shape(best.best.shape))
        await planned.pass_time(4.98)
        found = (await planned.decided(4)).evaluation
        assert found is not None
        written_s = planned.clock.now_s() - (planned.clock.wall_s() - split.written_at_s)
        assert 0 < len(found.earlier) < CONFIG.slices
        assert all(each.started_s >= written_s for each in found.earlier)


async def test_a_new_leader_has_no_earlier_windows() -> None:
    async with cluster() as planned:
        await planned.pass_time(2.98)
        await planned.decided(2)
        await lose_office(planned)
        term = await leads_again(planned)
        planned.began_s = planned.said_s = term.began_s
        await planned.pass_time(1.98)
        decision = await planned.decided(3)
        assert decision.evaluation is not None
        assert decision.evaluation.earlier == ()
