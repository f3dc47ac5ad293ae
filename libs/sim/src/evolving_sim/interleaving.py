"""When the requests of many sessions begin and end, were each answered as fast as it was when it was recorded."""

from __future__ import annotations

import enum
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from evolving_sim.traces import TraceAgent, TraceSession


class Kind(enum.Enum):
    """What happens."""

    REQUEST_BEGINS = "request begins"
    REQUEST_ENDS = "request ends"
    SESSION_ENDS = "session ends"


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happens to a session. Agent and request are indexes; 0 for the end of a session."""

    at_s: float
    kind: Kind
    session: int
    agent: int = 0
    request: int = 0


def interleave(sessions: Sequence[TraceSession], concurrency: int, stagger_s: float = 0.0) -> list[Moment]:
    """All moments of the sessions, in order.

    `concurrency` sessions run at a time; the next one in order begins when one ends. The first of them begin spread
    over `stagger_s`. Open-loop sessions keep their own times and take nobody's place.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, got {concurrency}")
    moments: list[Moment] = []
    places = min(concurrency, len(sessions))
    free_at_s = [stagger_s * place / places for place in range(places)]
    for index, session in enumerate(sessions):
        begin_s = 0.0 if session.open_loop else heapq.heappop(free_at_s)
        own = list(_moments(session, index, begin_s))
        end_s = max(moment.at_s for moment in own)
        moments += [*own, Moment(end_s, Kind.SESSION_ENDS, index)]
        if not session.open_loop:
            heapq.heappush(free_at_s, end_s)
    return sorted(moments, key=lambda each: (each.at_s, each.session))  # stable: what led to another comes before it


def _moments(session: TraceSession, index: int, begin_s: float) -> Iterator[Moment]:
    numbers = {agent.agent_id: number for number, agent in enumerate(session.agents)}
    children: dict[tuple[str, int], list[TraceAgent]] = {}
    for agent in session.agents[1:]:
        children.setdefault((agent.parent_agent_id, agent.starts_after), []).append(agent)

    def play(agent: TraceAgent, ready_s: float) -> Iterator[Moment]:
        """The moments of an agent and its sub-agents; what its first request waits for is there at `ready_s`."""
        number = numbers[agent.agent_id]
        for request_number in range(-1, len(agent.requests)):
            if request_number >= 0:
                request = agent.requests[request_number]
                start_s = begin_s + request.at_s if session.open_loop else ready_s + request.think_s
                ready_s = start_s + request.service_s
                yield Moment(start_s, Kind.REQUEST_BEGINS, index, number, request_number)
                yield Moment(ready_s, Kind.REQUEST_ENDS, index, number, request_number)
            answered_s = ready_s
            for child in children.get((agent.agent_id, request_number), ()):
                for moment in play(child, answered_s):
                    yield moment
                    if child.parent_waits:
                        ready_s = max(ready_s, moment.at_s)

    return play(session.agents[0], begin_s)
