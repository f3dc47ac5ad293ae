"""Plays agents: each request once what it waits for is there and was thought about.

An agent's next request waits for its last answer, and for the sub-agents started since that it waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from evolving_sim.events import EventHeap, Priority
from evolving_sim.legs import Request
from evolving_sim.ports import Served


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """One request of an agent: what `legs.Request` says of it, and when it is sent."""

    number: int  # of the agent's requests; in the request's id
    think_s: float  # from when what it waits for is there
    version: int
    names: Sequence[bytes]
    shared_blocks: int
    prompt_tokens: int
    output_tokens: int
    not_before_s: float = 0.0  # sent then at the soonest


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What an agent does: one branch, one request after the other, and sub-agents."""

    kind: str
    agent_id: str
    branch_id: str
    parent_branch_id: str
    asks: Iterator[Ask]
    # Those that start with the agent (None), and once the request of a number is answered.
    sub_agents: Callable[[int | None], Sequence[SubAgent]] = lambda _: ()
    # Its context before its first request, of which so many blocks were computed before the run; of an agent that is
    # in mid-session.
    recalled: Callable[[], tuple[Sequence[bytes], int]] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SubAgent:
    """An agent that another one starts."""

    plan: Plan
    awaited: bool  # the other one's next request waits for its end


@dataclass(slots=True, eq=False, repr=False)
class Playing:
    """An agent under way."""

    plan: Plan
    parent: Playing | None
    parent_waits: bool
    on_over: Callable[[], None]  # it and all its sub-agents are at their ends
    awaited: int = 0  # sub-agents it waits for
    running: int = 1  # it, until its end, and sub-agents that are not over
    retired: bool = False  # it stops after its present request
    asked: bool = False


@dataclass(slots=True, eq=False, repr=False)
class Player:
    """Sends what agents ask for to a cluster."""

    events: EventHeap
    cluster: Served

    def play(self, plan: Plan, on_over: Callable[[], None], delay_s: float = 0.0) -> Playing:
        """Play an agent and its sub-agents, from `delay_s` on. Setting `retired` ends it early."""
        playing = Playing(plan, None, False, on_over)
        if plan.recalled is not None:
            self.cluster.recall(*plan.recalled())
        self.events.after(delay_s, Priority.ARRIVAL, partial(self._start, playing))
        return playing

    def _start(self, agent: Playing) -> None:
        self._start_sub_agents(agent, None)
        self._go_on(agent)

    def _start_sub_agents(self, agent: Playing, number: int | None) -> None:
        for sub in () if agent.retired else agent.plan.sub_agents(number):
            agent.awaited += sub.awaited
            agent.running += 1
            child = Playing(sub.plan, agent, sub.awaited, partial(self._left, agent))
            # Once those beside it have been counted.
            self.events.after(0.0, Priority.ARRIVAL, partial(self._start, child))

    def _go_on(self, agent: Playing) -> None:
        """What it waited for is there."""
        if agent.awaited:
            return
        ask = None if agent.retired else next(agent.plan.asks, None)
        if ask is None:
            self._end(agent)
            return
        at_s = max(self.events.now_s + ask.think_s, ask.not_before_s)
        self.events.at(at_s, Priority.ARRIVAL, partial(self._send, agent, ask))

    def _send(self, agent: Playing, ask: Ask) -> None:
        if agent.retired:
            self._end(agent)
            return
        agent.asked = True
        plan = agent.plan
        self.cluster.submit(
            Request(
                request_id=f"{plan.branch_id}#{ask.number}",
                kind=plan.kind,
                agent_id=plan.agent_id,
                branch_id=plan.branch_id,
                parent_branch_id=plan.parent_branch_id,
                version=ask.version,
                names=ask.names,
                shared_blocks=ask.shared_blocks,
                prompt_tokens=ask.prompt_tokens,
                output_tokens=ask.output_tokens,
                sent_s=self.events.now_s,
                on_done=partial(self._answered, agent, ask.number),
            )
        )

    def _answered(self, agent: Playing, number: int) -> None:
        self._start_sub_agents(agent, number)
        self._go_on(agent)

    def _end(self, agent: Playing) -> None:
        if agent.asked:
            self.cluster.end_branch(agent.plan.branch_id)
        if agent.parent is not None and agent.parent_waits:
            agent.parent.awaited -= 1
            self._go_on(agent.parent)
        self._left(agent)

    def _left(self, agent: Playing) -> None:
        """It, or a sub-agent, is at its end."""
        agent.running -= 1
        if agent.running == 0:
            agent.on_over()
