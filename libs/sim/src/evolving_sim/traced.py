"""Agents that replay recorded sessions: the very requests that `evolving_replay` sends, in virtual time.

Each session is a main agent and its sub-agents, each a branch; contexts are rewritten and times thought about as they
were recorded. Ids tell which recorded request one is (`request_id`).
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path

from evolving_sim.agents import Ask, Plan, SubAgent
from evolving_sim.trace_files import read_sessions
from evolving_sim.trace_names import BlockContents, NamedRequest, name_session, recorded_output
from evolving_sim.traces import TraceRequest, TraceSession

CLAUDE_CODE_TRACE = "claude_code.jsonl.xz"
"""A trace that comes with the package: 426 real sessions of Claude Code (data/README.md)."""


@dataclass(frozen=True, slots=True)
class TraceKind:
    """Agents whose sessions are those of a trace, one after the other. Out-of-range values raise ValueError."""

    name: str  # of its requests' kind; those of sub-agents end with " sub-agent"
    # A file of either form that `trace_files` reads, a trace of the package by its name, or the sessions themselves.
    trace: Path | str | tuple[TraceSession, ...]
    # Times in which agents think, or requests come, are divided by it; the cluster's own are what they are.
    compression: float = 1.0
    # Longer thoughts are cut to so many seconds of the trace: people leave for the night.
    think_s_max: float = math.inf
    # Answers are so many times as long as recorded. Later prompts hold no more of them than the recorded ones.
    output_scale: float = 1.0
    # Sessions in an order drawn from the run's seed instead of the trace's, which those with own times keep.
    shuffled: bool = True
    # Begin anew with other names when all sessions were played; otherwise no agent comes after the last.
    repeated: bool = True

    def __post_init__(self) -> None:
        for name in ("compression", "output_scale"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and above 0, got {getattr(self, name)}")
        if not self.think_s_max >= 0:
            raise ValueError(f"think_s_max must be at least 0, got {self.think_s_max}")

    def sessions(self) -> tuple[TraceSession, ...]:
        """Of the trace. Raises what `read_sessions` does, and ValueError where there is none."""
        sessions = self.trace if isinstance(self.trace, tuple) else _read(self.trace)
        if not sessions:
            raise ValueError(f"{self.trace}: a trace without sessions")
        return sessions

    def begins_s(self) -> list[float]:
        """When sessions that keep their own times begin, in that order, seconds of the run."""
        return sorted(_begins_s(session) / self.compression for session in self.sessions())

    def as_played(self, session: TraceSession) -> TraceSession:
        """A session in the run's times."""
        agents = tuple(replace(agent, requests=tuple(map(self._as_played, agent.requests))) for agent in session.agents)
        return replace(session, agents=agents)

    def _as_played(self, request: TraceRequest) -> TraceRequest:
        return replace(
            request,
            at_s=request.at_s / self.compression,
            think_s=min(request.think_s, self.think_s_max) / self.compression,
        )

    def output_tokens(self, request: TraceRequest) -> int:
        """Of an answer."""
        return max(1, round(self.output_scale * recorded_output(request)))

    def branch_id(self, session: int, agent: int) -> str:
        """Of an agent's branch, by numbers from 0: of the session by its turn in the run, of the agent in it."""
        return f"{self.name} {session}.{agent}"

    def request_id(self, session: int, agent: int, request: int) -> str:
        """Of an agent's request, by its number from 0."""
        return f"{self.branch_id(session, agent)}#{request}"


def _begins_s(session: TraceSession) -> float:
    """0 where it has no time of its own."""
    return session.agents[0].requests[0].at_s if session.open_loop else 0.0


@functools.lru_cache(maxsize=4)
def _read(trace: Path | str) -> tuple[TraceSession, ...]:
    path = Path(trace)
    if not path.exists() and path.name == str(trace):
        packaged = resources.files("evolving_sim").joinpath("data", path.name)
        with resources.as_file(packaged) as file:
            return tuple(read_sessions(file if file.exists() else path))
    return tuple(read_sessions(path))


@dataclass(slots=True, eq=False, repr=False)
class TracedAgents:
    """The agents of one trace in a run."""

    kind: TraceKind
    seed: int
    block_tokens: int
    at_times: bool = False  # requests come when they did, not after what they wait for was thought about
    _sessions: Sequence[TraceSession] = field(init=False)
    _order: Iterator[TraceSession] = field(init=False)
    _draw: random.Random = field(init=False)  # where agents are that have begun
    _until: Sequence[int] = field(init=False)  # requests of main agents, summed up to and with each session
    _made: int = field(init=False, default=0)
    _shared: dict[tuple[int, int], BlockContents] = field(init=False, default_factory=dict)  # of ids that all share

    def __post_init__(self) -> None:
        self._sessions = self.kind.sessions()
        self._order = self._ordered()
        self._draw = random.Random(f"{self.seed} {self.kind.name} begun")
        self._until = list(itertools.accumulate(len(session.agents[0].requests) for session in self._sessions))

    def next(self, *, begun: bool) -> Plan | None:
        """Another agent; None: there are no more.

        `begun`: it goes on from a request drawn from all that main agents make, as agents would be met at any moment;
        what it did before is done, its sub-agents too.
        """
        if begun:
            drawn = self._draw.randrange(self._until[-1])
            at = bisect.bisect_right(self._until, drawn)
            return self._plan(self._sessions[at], self._until[at] - 1 - drawn)
        recorded = next(self._order, None)
        return None if recorded is None else self._plan(recorded, 0)

    def _plan(self, recorded: TraceSession, first: int) -> Plan:
        session = self.kind.as_played(recorded)
        number, self._made = self._made, self._made + 1
        named = name_session(session, self._contents(session, number), self.kind.output_tokens)
        return _Session(self.kind, session, number, named, self.at_times).plan(0, first)

    def _ordered(self) -> Iterator[TraceSession]:
        draw = random.Random(f"{self.seed} {self.kind.name}")
        while True:
            order = sorted(self._sessions, key=_begins_s)
            if self.kind.shuffled and not order[0].open_loop:
                draw.shuffle(order)
            yield from order
            if not self.kind.repeated:
                return

    def _contents(self, session: TraceSession, number: int) -> BlockContents:
        """What the session's block ids stand for; those of a session that is played again, something else."""
        size = session.block_tokens
        if not session.ids_shared:
            return BlockContents(f"{self.kind.name} {number}", size, self.block_tokens)
        key = number // len(self._sessions), size
        if key not in self._shared:
            self._shared[key] = BlockContents(f"{self.kind.name} {key[0]}", size, self.block_tokens)
        return self._shared[key]


@dataclass(frozen=True, slots=True, eq=False)
class _Session:
    """One session in a run."""

    kind: TraceKind
    session: TraceSession
    number: int
    named: Sequence[Sequence[NamedRequest]]  # by agent
    at_times: bool

    def plan(self, number: int, first: int = 0) -> Plan:
        """Of an agent, from its `first` request on; its sub-agents that started sooner are over."""
        agent = self.session.agents[number]
        main = self.kind.branch_id(self.number, 0)
        parent = "" if number == 0 else self.kind.branch_id(self.number, self._number(agent.parent_agent_id))
        return Plan(
            kind=self.kind.name if number == 0 else f"{self.kind.name} sub-agent",
            agent_id=main,
            branch_id=self.kind.branch_id(self.number, number),
            parent_branch_id=parent,
            asks=self._asks(number, first),
            sub_agents=functools.partial(self._sub_agents, agent.agent_id, first),
            recalled=functools.partial(self._recalled, number, first) if first else None,
        )

    def _asks(self, number: int, first: int) -> Iterator[Ask]:
        requests, named = self.session.agents[number].requests, self.named[number]
        for index in range(first, len(requests)):
            request, name = requests[index], named[index]
            fresh = index == first
            yield Ask(
                number=index,
                # Where it is in mid-session, it has thought already.
                think_s=0.0 if self.at_times or (fresh and first) else request.think_s,
                version=name.version,
                names=name.names,
                shared_blocks=0 if fresh else name.shared_blocks,
                prompt_tokens=request.input_tokens,
                output_tokens=self.kind.output_tokens(request),
                not_before_s=request.at_s if self.at_times else 0.0,
            )

    def _recalled(self, number: int, first: int) -> tuple[Sequence[bytes], int]:
        last, following = self.named[number][first - 1], self.named[number][first]
        return last.names, min(last.blocks, following.shared_blocks)

    def _sub_agents(self, parent_id: str, first: int, after: int | None) -> Sequence[SubAgent]:
        if after is None and first:
            return ()
        starts_after = -1 if after is None else after
        return [
            SubAgent(self.plan(number), awaited=agent.parent_waits)
            for number, agent in enumerate(self.session.agents)
            if number and (agent.parent_agent_id, agent.starts_after) == (parent_id, starts_after)
        ]

    def _number(self, agent_id: str) -> int:
        return next(number for number, agent in enumerate(self.session.agents) if agent.agent_id == agent_id)
