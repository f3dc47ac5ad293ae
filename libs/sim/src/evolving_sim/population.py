"""Who asks, and when they come: agents in a closed loop, arrivals, requests at recorded times, bursts."""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from evolving_sim.agents import Plan, Player, Playing
from evolving_sim.drawn import DrawnAgents
from evolving_sim.events import EventHeap, Priority
from evolving_sim.kinds import Agents, Kind, source_of
from evolving_sim.ports import Served
from evolving_sim.traced import TracedAgents, TraceKind


@dataclass(frozen=True, slots=True)
class Period:
    """From some time on, so many agents of each kind run, each replaced when it is done. Those too many stop after
    their present request."""

    from_s: float
    agents: Agents


class Spacing(enum.StrEnum):
    """How arrivals of a rate follow each other."""

    EVEN = "even"  # one by one, always as far apart
    POISSON = "poisson"  # each whenever, whatever the others do


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Agents that come at a rate, run to their ends and are not replaced. Out-of-range values raise ValueError."""

    kind: Kind
    per_min: float
    spacing: Spacing = Spacing.POISSON
    from_s: float = 0.0
    until_s: float = math.inf

    def __post_init__(self) -> None:
        if not 0 < self.per_min < math.inf:
            raise ValueError(f"per_min must be finite and above 0, got {self.per_min}")
        if not 0 <= self.from_s <= self.until_s:
            raise ValueError(f"from_s must be from 0 to until_s, got {self.from_s} and {self.until_s}")

    def next_s(self, now_s: float, draw: random.Random) -> float:
        """When the next one comes after one that came at `now_s`."""
        mean_s = 60.0 / self.per_min
        return now_s + (mean_s if self.spacing is Spacing.EVEN else draw.expovariate(1.0 / mean_s))


@dataclass(frozen=True, slots=True)
class Burst:
    """So many agents of a kind that start at once, once, beside the others; as sub-agents of one answer do."""

    at_s: float
    count: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class WorkloadConfig:
    """What is asked of a cluster. The names of its kinds tell them apart."""

    periods: Sequence[Period] = ()
    arrivals: Sequence[Arrivals] = ()
    # Traces whose requests come when they did, however busy the cluster is.
    recorded: Sequence[TraceKind] = ()
    bursts: Sequence[Burst] = ()
    # Agents of the first period are somewhere in their sessions, as later ones will be; the pool has their contexts.
    begun: bool = True
    # Seconds over which the agents that a period adds start.
    spread_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.spread_s < math.inf:
            raise ValueError(f"spread_s must be finite and at least 0, got {self.spread_s}")
        kinds: dict[str, Kind] = {}
        for kind in self.kinds():
            if kinds.setdefault(kind.name, kind) != kind:
                raise ValueError(f"two kinds of agents are called {kind.name!r}")
        for trace in self.recorded:
            if sum(kind.name == trace.name for kind in self.kinds()) > 1:
                raise ValueError(f"{trace.name}: a trace whose requests come when they did is nobody else's")
            if not all(session.open_loop for session in trace.sessions()):
                raise ValueError(f"{trace.name}: this trace doesn't tell when its requests come; let its agents arrive")

    def kinds(self) -> list[Kind]:
        """All kinds of agents, as often as they are named."""
        several: list[Kind] = [kind for period in self.periods for kind in period.agents]
        several += [arrivals.kind for arrivals in self.arrivals]
        several += [burst.kind for burst in self.bursts]
        return [*several, *self.recorded]

    def workload(self, seed: int) -> Population:
        """Those agents."""
        return Population(self, seed)


@dataclass(slots=True, eq=False, repr=False)
class Population:
    """The agents of a run (`ports.Workload`). What each asks follows from its name and the seed, not from what the
    cluster does."""

    config: WorkloadConfig
    seed: int
    _player: Player = field(init=False)
    _events: EventHeap = field(init=False)
    _sources: dict[str, DrawnAgents | TracedAgents] = field(init=False, default_factory=dict)  # by kind
    _agents: dict[str, list[Playing]] = field(init=False, default_factory=dict)  # those replaced, by kind, oldest first
    _spent: set[str] = field(init=False, default_factory=set)  # kinds without further agents

    def begin(self, events: EventHeap, cluster: Served) -> None:
        """See `ports.Workload`."""
        self._events, self._player = events, Player(events, cluster)
        for kind in self.config.kinds():
            if kind.name not in self._sources:
                self._sources[kind.name] = source_of(kind, self.seed, cluster.block_tokens)
        for number, period in enumerate(self.config.periods):
            begun = self.config.begun and number == 0
            events.at(period.from_s, Priority.ARRIVAL, partial(self._enter, period, begun))
        for burst in self.config.bursts:
            events.at(burst.at_s, Priority.ARRIVAL, partial(self._burst, burst))
        for number, arrivals in enumerate(self.config.arrivals):
            draw = random.Random(f"{self.seed} arrivals {number} {arrivals.kind.name}")
            self._expect(arrivals, draw, arrivals.from_s)
        for trace in self.config.recorded:
            self._sources[trace.name] = TracedAgents(
                replace(trace, repeated=False), self.seed, cluster.block_tokens, at_times=True
            )
            self._expect_recorded(trace.name, iter(trace.begins_s()))

    # -- a closed loop

    def _enter(self, period: Period, begun: bool) -> None:
        wanted = {kind.name: count for kind, count in period.agents.items()}
        for name, agents in self._agents.items():
            for agent in agents[: max(0, len(agents) - wanted.get(name, 0))]:
                agent.retired = True
        self._agents = {name: [each for each in all_ if not each.retired] for name, all_ in self._agents.items()}
        for name, count in wanted.items():
            missing = count - len(self._agents.setdefault(name, []))
            for place in range(missing):
                self._add(name, begun=begun, delay_s=self.config.spread_s * place / missing)

    def _add(self, name: str, *, begun: bool = False, delay_s: float = 0.0) -> None:
        """One more agent that is replaced when it is done."""
        plan = self._next(name, begun=begun)
        if plan is None:
            self._spent.add(name)
            return
        # What is told at its end is the agent, which is known only once it plays.
        agent = self._player.play(plan, lambda: self._replace(name, agent), delay_s)
        self._agents[name].append(agent)

    def _replace(self, name: str, agent: Playing) -> None:
        if not agent.retired:
            self._agents[name].remove(agent)
            self._add(name)

    # -- others, which are not replaced

    def _expect(self, arrivals: Arrivals, draw: random.Random, now_s: float) -> None:
        """The next one comes, and then the one after it."""
        at_s = arrivals.next_s(now_s, draw)

        def comes() -> None:
            self._play(arrivals.kind.name)
            if arrivals.kind.name not in self._spent:
                self._expect(arrivals, draw, at_s)

        if at_s < arrivals.until_s:
            self._events.at(at_s, Priority.ARRIVAL, comes)

    def _expect_recorded(self, name: str, begins_s: Iterator[float]) -> None:
        at_s = next(begins_s, None)

        def comes() -> None:
            self._play(name)
            self._expect_recorded(name, begins_s)

        if at_s is not None:
            self._events.at(at_s, Priority.ARRIVAL, comes)

    def _burst(self, burst: Burst) -> None:
        for _ in range(burst.count):
            self._play(burst.kind.name)

    def _play(self, name: str) -> None:
        plan = self._next(name)
        if plan is None:
            self._spent.add(name)
        else:
            self._player.play(plan, lambda: None)

    def _next(self, name: str, *, begun: bool = False) -> Plan | None:
        return self._sources[name].next(begun=begun)

    def check_invariants(self) -> None:
        """See `ports.Workload`: as many agents run as should."""
        now_s = self._events.now_s
        begun = [period for period in self.config.periods if period.from_s <= now_s]
        agents = max(begun, key=lambda period: period.from_s).agents if begun else {}
        wanted = {kind.name: count for kind, count in agents.items()}
        for name in wanted.keys() | self._agents.keys():
            there = len(self._agents.get(name, ()))
            assert there == wanted.get(name, 0) or (name in self._spent and there < wanted.get(name, 0))
        assert not any(agent.retired for agents in self._agents.values() for agent in agents)
