"""What agents of a kind ask, on average: to hold beside the figures that the paper publishes."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from evolving_sim.agents import Ask, Plan
from evolving_sim.kinds import Kind, source_of


@dataclass(frozen=True, slots=True)
class Figures:
    """Of all requests of some agents and their sub-agents; tokens and seconds are means of requests."""

    agents: int
    requests: int
    requests_per_agent: float
    sub_agent_share: float  # of requests that sub-agents make
    prompt_tokens: float
    new_tokens: float  # of the prompt, whose KV no earlier request produced
    output_tokens: float
    output_tokens_p95: float
    think_s: float  # of requests that are not the first of their branch
    ideal_hit_rate: float  # share of prompt tokens whose KV some earlier request produced


def figures(kind: Kind, agents: int, seed: int = 1, block_tokens: int = 64) -> Figures:
    """Play agents of a kind one after the other, from beginning to end, with a pool that keeps everything."""
    source, told = source_of(kind, seed, block_tokens), _Told(block_tokens)
    for _ in range(agents):
        plan = source.next(begun=False)
        if plan is None:
            break
        told.play(plan)
    return told.figures()


@dataclass(slots=True)
class _Told:
    block_tokens: int
    agents: int = 0
    of_sub_agents: int = 0
    prompts: list[int] = field(default_factory=list)
    ideals: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    thoughts_s: list[float] = field(default_factory=list)
    # What branches begin with, of all agents: others may begin alike. The rest is their own.
    beginnings: set[bytes] = field(default_factory=set)
    session: set[bytes] = field(default_factory=set)

    def play(self, plan: Plan) -> None:
        """One agent with its sub-agents."""
        self.agents += 1
        self.session = set()
        for ask, first, sub_agent in _asks(plan):
            self._asked(ask, first=first)
            self.of_sub_agents += sub_agent

    def _asked(self, ask: Ask, *, first: bool) -> None:
        usable = max(0, ask.prompt_tokens - 1) // self.block_tokens
        there = self._leading(ask.names, usable)
        self.prompts.append(ask.prompt_tokens)
        self.ideals.append(there * self.block_tokens)
        self.outputs.append(ask.output_tokens)
        if not first:
            self.thoughts_s.append(ask.think_s)
        left = ask.names[there : (ask.prompt_tokens + ask.output_tokens - 1) // self.block_tokens]
        self.session.update(left)
        if first:
            self.beginnings.update(left)

    def _leading(self, names: Sequence[bytes], most: int) -> int:
        """Leading blocks that were produced; of names none is known behind one that isn't."""
        return bisect.bisect_left(
            range(most), True, key=lambda at: names[at] not in self.session and names[at] not in self.beginnings
        )

    def figures(self) -> Figures:
        """Of all that was played."""
        prompts, ideals = np.array(self.prompts), np.array(self.ideals)
        return Figures(
            agents=self.agents,
            requests=len(prompts),
            requests_per_agent=len(prompts) / self.agents,
            sub_agent_share=self.of_sub_agents / len(prompts),
            prompt_tokens=float(prompts.mean()),
            new_tokens=float((prompts - ideals).mean()),
            output_tokens=float(np.mean(self.outputs)),
            output_tokens_p95=float(np.percentile(self.outputs, 95)),
            think_s=float(np.mean(self.thoughts_s)) if self.thoughts_s else 0.0,
            ideal_hit_rate=float(ideals.sum() / prompts.sum()),
        )


def _asks(plan: Plan, *, sub_agent: bool = False) -> Iterator[tuple[Ask, bool, bool]]:
    """Requests; whether each is its branch's first, and whether a sub-agent makes it."""
    for sub in plan.sub_agents(None):
        yield from _asks(sub.plan, sub_agent=True)
    first = True
    for ask in plan.asks:
        yield ask, first, sub_agent
        first = False
        for sub in plan.sub_agents(ask.number):
            yield from _asks(sub.plan, sub_agent=True)
