"""Virtual time: what happens in which order."""

from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from evolving_sim.events import EventHeap, Priority


@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0, 1.5, 7.0]), st.sampled_from(Priority), st.booleans())))
def test_by_time_then_priority_then_order_without_what_was_cancelled(
    wanted: list[tuple[float, Priority, bool]],
) -> None:
    events, happened = EventHeap(), list[tuple[float, Priority, int]]()
    for number, (at_s, priority, cancelled) in enumerate(wanted):
        event = events.at(at_s, priority, partial(happened.append, (at_s, priority, number)))
        if cancelled:
            event.cancel()
    events.check_invariants()
    count = events.run_until(1.5)
    assert events.now_s == 1.5
    assert all(at_s <= 1.5 for at_s, _, _ in happened)
    assert count + events.run_until(7.0) == len(happened)
    assert happened == sorted((at_s, p, i) for i, (at_s, p, cancelled) in enumerate(wanted) if not cancelled)


def test_what_events_bring_about_happens_too_at_the_time_it_is_for() -> None:
    events, times_s = EventHeap(), list[float]()

    def again() -> None:
        times_s.append(events.now_s)
        events.after(0.5, Priority.ARRIVAL, again)

    events.at(1.0, Priority.ARRIVAL, again)
    events.run_until(2.0)
    assert times_s == [1.0, 1.5, 2.0]
