"""A closed loop of agents: so many of each kind at a time, each replaced when it is done."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from evolving_sim.events import EventHeap, Priority
from evolving_sim.legs import Request
from evolving_sim.node_kv import Branch
from evolving_sim.sessions import AgentKind, SubAgents, Turn, play
from evolving_sim.sim_cluster import SimCluster


@dataclass(frozen=True, slots=True)
class Period:
    """From some time on, so many agents of each kind run. Those too many stop after their present request."""

    from_s: float
    agents: Mapping[AgentKind, int]


@dataclass(frozen=True, slots=True)
class Burst:
    """So many agents of a kind that start at once, once, beside the others; as sub-agents of one answer do."""

    at_s: float
    count: int
    kind: AgentKind


@dataclass(slots=True, eq=False)
class _Agent:
    kind: AgentKind
    branch: Branch
    turns: Iterator[Turn]
    parent: _Agent | None = None  # waits for it
    replaced: bool = False  # once it is done, by another of its kind
    awaited: int = 0  # sub-agents it waits for
    retired: bool = False
    requests: int = 0


@dataclass(slots=True, eq=False, repr=False)
class Population:
    """The agents of a run. What each asks depends on its number and the seed only, not on what the cluster does."""

    events: EventHeap
    cluster: SimCluster
    periods: Sequence[Period]
    seed: int
    bursts: Sequence[Burst] = ()
    start_s: float = 60.0  # agents of a period start spread over so long
    _agents: dict[str, list[_Agent]] = field(init=False, default_factory=dict)  # those replaced, by kind, oldest first
    _made: dict[str, int] = field(init=False, default_factory=dict)  # by kind

    def begin(self) -> None:
        """Put the periods and bursts into the events."""
        for number, period in enumerate(self.periods):
            self.events.at(period.from_s, Priority.ARRIVAL, partial(self._enter, period, number == 0))
        for burst in self.bursts:
            self.events.at(burst.at_s, Priority.ARRIVAL, partial(self._burst, burst))

    def _enter(self, period: Period, first: bool) -> None:
        wanted = {kind.name: (kind, count) for kind, count in period.agents.items()}
        for name in self._agents:
            count = wanted[name][1] if name in wanted else 0
            for agent in self._agents[name][: max(0, len(self._agents[name]) - count)]:
                agent.retired = True
        for name, (kind, count) in wanted.items():
            living = [agent for agent in self._agents.setdefault(name, []) if not agent.retired]
            missing = count - len(living)
            for place in range(missing):
                # Those there are at the start of a run are somewhere in their sessions, as later ones will be, and what
                # they did so far is in the pool.
                agent = self._make(kind, begun=first, replaced=True)
                self.events.after(self.start_s * place / missing, Priority.ARRIVAL, partial(self._next, agent))
        for name, agents in self._agents.items():
            self._agents[name] = [agent for agent in agents if not agent.retired]

    def _burst(self, burst: Burst) -> None:
        for _ in range(burst.count):
            self._next(self._make(burst.kind))

    def _make(
        self, kind: AgentKind, *, parent: _Agent | None = None, begun: bool = False, replaced: bool = False
    ) -> _Agent:
        if parent is None:
            number = self._made[kind.name] = self._made.get(kind.name, 0) + 1
            name = f"{kind.name} {number}"
        else:
            name = f"{parent.branch.branch_id}/{parent.requests}.{parent.awaited}"
        draw = random.Random(f"{self.seed} {name}")
        turns = play(kind, draw)
        block_tokens = next(iter(self.cluster.configs.values())).block_tokens
        branch = Branch(name, f"common to {kind.name}", kind.system_tokens // block_tokens)
        if begun:
            whole = list(turns)
            left = whole[draw.randrange(len(whole)) :]
            self.cluster.recall(branch, left[0].kept_tokens)
            turns = iter(left)
        agent = _Agent(kind, branch, turns, parent, replaced)
        if replaced:
            self._agents.setdefault(kind.name, []).append(agent)
        return agent

    def _next(self, agent: _Agent) -> None:
        turn = None if agent.retired else next(agent.turns, None)
        if turn is None:
            self._end(agent)
        else:
            think_s = turn.think_s if agent.requests else 0.0
            self.events.after(think_s, Priority.ARRIVAL, partial(self._send, agent, turn))

    def _send(self, agent: _Agent, turn: Turn) -> None:
        agent.requests += 1
        self.cluster.rewrite(agent.branch, turn.kept_tokens)
        self.cluster.submit(
            Request(
                request_id=f"{agent.branch.branch_id}#{agent.requests}",
                kind=agent.kind.name,
                branch=agent.branch,
                prompt_tokens=turn.prompt_tokens,
                output_tokens=turn.output_tokens,
                sent_s=self.events.now_s,
                on_done=partial(self._answered, agent, turn),
            )
        )

    def _answered(self, agent: _Agent, turn: Turn) -> None:
        subs: SubAgents | None = agent.kind.sub_agents
        if subs is None or turn.sub_agents == 0 or agent.retired:
            self._next(agent)
            return
        children = []
        for _ in range(turn.sub_agents):
            agent.awaited += 1
            children.append(self._make(subs.kind, parent=agent))
        for child in children:
            self._next(child)

    def _end(self, agent: _Agent) -> None:
        self.cluster.end_branch(agent.branch)
        if agent.parent is not None:
            agent.parent.awaited -= 1
            if agent.parent.awaited == 0:
                self._next(agent.parent)
        elif agent.replaced and not agent.retired:
            self._agents[agent.kind.name].remove(agent)
            self._next(self._make(agent.kind, replaced=True))

    def check_invariants(self) -> None:
        """Assert that as many agents run as should."""
        period = max((p for p in self.periods if p.from_s <= self.events.now_s), key=lambda p: p.from_s, default=None)
        wanted = {kind.name: count for kind, count in period.agents.items()} if period else {}
        assert {name: len(agents) for name, agents in self._agents.items() if agents} == wanted
        assert not any(agent.retired for agents in self._agents.values() for agent in agents)
