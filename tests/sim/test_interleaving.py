"""When requests of recorded sessions begin and end."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim.naive_pool import sessions

from evolving_sim.interleaving import Kind, interleave
from evolving_sim.traces import TraceAgent, TraceRequest, TraceSession


def asked(think_s: float, service_s: float, at_s: float = 0.0) -> TraceRequest:
    return TraceRequest(at_s, 1, 1, np.zeros(0, np.uint32), think_s, service_s)


def session(*agents: TraceAgent, open_loop: bool = False) -> TraceSession:
    return TraceSession("s", 64, False, open_loop, agents)


def main(*requests: TraceRequest) -> TraceAgent:
    return TraceAgent("", "", -1, False, requests)


def begins(played: list[TraceSession], concurrency: int) -> dict[tuple[int, int, int], float]:
    return {
        (moment.session, moment.agent, moment.request): moment.at_s
        for moment in interleave(played, concurrency)
        if moment.kind is Kind.REQUEST_BEGINS
    }


def test_an_agent_goes_on_after_its_answer_and_the_sub_agents_it_waits_for() -> None:
    awaited = TraceAgent("awaited", "", 0, True, (asked(1, 10), asked(1, 10)))  # from 4 to 25
    background = TraceAgent("background", "", 0, False, (asked(2, 100),))  # from 5 to 105
    nested = TraceAgent("nested", "awaited", 0, True, (asked(0, 30),))  # from 14, so that its parent goes on at 44
    played = [session(main(asked(0, 3), asked(5, 1), asked(7, 1)), awaited, background, nested)]
    assert begins(played, 1) == {
        (0, 0, 0): 0,
        (0, 1, 0): 4,
        (0, 3, 0): 14,
        (0, 1, 1): 45,
        (0, 2, 0): 5,
        (0, 0, 1): 60,  # 55, then 5 of thinking
        (0, 0, 2): 68,
    }
    (end,) = [moment.at_s for moment in interleave(played, 1) if moment.kind is Kind.SESSION_ENDS]
    assert end == 105


def test_a_session_begins_when_one_before_it_has_ended() -> None:
    played = [session(main(asked(0, length))) for length in (10, 4, 3, 20)]
    assert begins(played, 2) == {(0, 0, 0): 0, (1, 0, 0): 0, (2, 0, 0): 4, (3, 0, 0): 7}


def test_the_first_sessions_begin_spread_out() -> None:
    played = [session(main(asked(0, 10))) for _ in range(4)]
    stagger_s = {
        moment.session: moment.at_s for moment in interleave(played, 3, 6.0) if moment.kind is Kind.REQUEST_BEGINS
    }
    assert stagger_s == {0: 0, 1: 2, 2: 4, 3: 10}


def test_open_loop_sessions_keep_their_times() -> None:
    played = [session(main(asked(0, 9, at_s=at_s)), open_loop=True) for at_s in (3, 1, 1)]
    assert begins(played, 1) == {(0, 0, 0): 3, (1, 0, 0): 1, (2, 0, 0): 1}


@given(sessions(), st.integers(1, 4))
def test_what_led_to_another_comes_before_it(played: list[TraceSession], concurrency: int) -> None:
    seen: set[tuple[Kind, int, int, int]] = set()
    running: set[int] = set()
    at_s = 0.0
    for moment in interleave(played, concurrency):
        assert moment.at_s >= at_s
        at_s = moment.at_s
        place = (moment.session, moment.agent, moment.request)
        if moment.kind is Kind.REQUEST_BEGINS:
            running.add(moment.session)
            assert moment.request == 0 or (Kind.REQUEST_ENDS, *place[:2], place[2] - 1) in seen
        elif moment.kind is Kind.REQUEST_ENDS:
            assert (Kind.REQUEST_BEGINS, *place) in seen
        else:
            running.remove(moment.session)
        assert len(running) <= concurrency
        seen.add((moment.kind, *place))
    requests = sum(each.request_count for each in played)
    assert len(seen) == 2 * requests + len(played)
    assert not running


def test_nobody_can_run_where_none_may() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        interleave([session(main(asked(0, 1)))], 0)
