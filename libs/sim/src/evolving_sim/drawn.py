"""Agents that are drawn: what each does depends on its name and the seed alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from evolving_sim.agents import Ask, Plan, SubAgent
from evolving_sim.contexts import BlockNames
from evolving_sim.sessions import AgentKind, Turn, play


@dataclass(slots=True, eq=False, repr=False)
class DrawnAgents:
    """The agents of one kind in a run, and their sub-agents."""

    kind: AgentKind
    seed: int
    block_tokens: int
    _made: int = field(init=False, default=0)
    _common: dict[str, BlockNames] = field(init=False, default_factory=dict)  # by kind: its system prompt

    def next(self, *, begun: bool) -> Plan:
        """Another agent; `begun`: it is somewhere in its session, all that it did before was done before the run."""
        self._made += 1
        name = f"{self.kind.name} {self._made}"
        return self._plan(self.kind, name, name, "", begun=begun)

    def _plan(self, kind: AgentKind, name: str, agent_id: str, parent_id: str, *, begun: bool = False) -> Plan:
        draw = random.Random(f"{self.seed} {name}")
        agent = _Context(self._system(kind).fork(name, kind.system_tokens))
        turns: Iterator[Turn] = play(kind, draw)
        started: dict[int, int] = {}  # sub-agents, by the request after whose answer
        if begun:
            whole = list(turns)
            at = draw.randrange(len(whole))
            agent.skip(whole[:at], whole[at].kept_tokens)
            turns = iter(whole[at:])

        def asks() -> Iterator[Ask]:
            for number, turn in enumerate(turns, 1):
                think_s = 0.0 if begun and number == 1 else turn.think_s
                started[number] = turn.sub_agents
                yield agent.ask(number, think_s, turn)

        def sub_agents(number: int | None) -> Sequence[SubAgent]:
            if number is None or kind.sub_agents is None:
                return ()
            names = [f"{name}/{number}.{one}" for one in range(1, started.pop(number) + 1)]
            return [SubAgent(self._plan(kind.sub_agents.kind, each, agent_id, name), awaited=True) for each in names]

        return Plan(kind.name, agent_id, name, parent_id, asks(), sub_agents, agent.recalled if begun else None)

    def _system(self, kind: AgentKind) -> BlockNames:
        """What all agents of a kind begin with."""
        common = self._common.get(kind.name)
        if common is None:
            common = self._common[kind.name] = BlockNames(f"common to {kind.name}", self.block_tokens)
            common.grow(kind.system_tokens)
        return common


@dataclass(slots=True, eq=False, repr=False)
class _Context:
    """A branch's context as its requests make it."""

    names: BlockNames
    version: int = 1
    begun: bool = False  # something was asked, in the run or before
    asked: bool = False  # in the run
    prompt_blocks: int = 0  # full ones of the last prompt
    kv_blocks: int = 0  # that the last request leaves once it is answered
    kept_blocks: int = 0  # of those, in what there is now

    def skip(self, turns: Sequence[Turn], kept_tokens: int) -> None:
        """These were asked before the run, and of the last context `kept_tokens` are kept by the next request."""
        for turn in turns:
            self._turn(turn)
        if turns:
            self._keep(kept_tokens)

    def recalled(self) -> tuple[Sequence[bytes], int]:
        """What `agents.Plan` says of it."""
        return self.names.names, self.kept_blocks

    def ask(self, number: int, think_s: float, turn: Turn) -> Ask:
        """The next request."""
        self._turn(turn)
        # Nobody was told of what was before the run.
        shared, self.asked = (self.kept_blocks if self.asked else 0), True
        names = self.names.names
        return Ask(number, think_s, self.version, names, shared, turn.prompt_tokens, turn.output_tokens)

    def _turn(self, turn: Turn) -> None:
        size, context_tokens = self.names.block_tokens, turn.prompt_tokens + turn.output_tokens
        if self.begun:
            self._keep(turn.kept_tokens)
            self.version += self.asked and turn.kept_tokens // size < self.prompt_blocks
        self.begun = True
        self.names.grow(context_tokens)
        self.prompt_blocks, self.kv_blocks = turn.prompt_tokens // size, (context_tokens - 1) // size

    def _keep(self, tokens: int) -> None:
        self.names.keep(tokens)
        self.kept_blocks = min(tokens // self.names.block_tokens, self.kv_blocks)
