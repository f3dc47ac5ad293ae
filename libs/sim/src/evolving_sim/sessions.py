"""What an agent asks, turn by turn: drawn from a kind of agent and a seed, whatever the cluster does."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """A log-normal distribution by its median and mean, cut to [least, most]. ValueError unless 0 < median <= mean."""

    median: float
    mean: float
    least: float = 1.0
    most: float = math.inf

    def __post_init__(self) -> None:
        if not 0 < self.median <= self.mean < math.inf or not 0 <= self.least <= self.most:
            raise ValueError(f"not a spread: {self}")

    def draw(self, draw: random.Random) -> float:
        """One value. The cut makes the mean of many a little smaller."""
        deviation = math.sqrt(2.0 * math.log(self.mean / self.median))
        value = self.median * math.exp(deviation * draw.gauss(0.0, 1.0))
        return min(max(value, self.least), self.most)

    def draw_int(self, draw: random.Random) -> int:
        """One value, rounded."""
        return round(self.draw(draw))


@dataclass(frozen=True, slots=True)
class Mixed:
    """One spread, and another one now and then: tails that no log-normal has. ValueError for a share that is none."""

    usual: Spread
    rare: Spread
    rare_share: float

    def __post_init__(self) -> None:
        if not 0 <= self.rare_share <= 1:
            raise ValueError(f"rare_share must be from 0 to 1, got {self.rare_share}")

    @property
    def mean(self) -> float:
        """Of many values."""
        return (1.0 - self.rare_share) * self.usual.mean + self.rare_share * self.rare.mean

    def draw_int(self, draw: random.Random) -> int:
        """One value, rounded."""
        return (self.rare if draw.random() < self.rare_share else self.usual).draw_int(draw)


@dataclass(frozen=True, slots=True)
class SubAgents:
    """Agents that an agent starts, all at once, and waits for."""

    share: float  # of answers that start some
    count_max: int  # 1 to so many of them, evenly
    kind: AgentKind


@dataclass(frozen=True, slots=True)
class AgentKind:
    """One kind of agent. Its context is what its last request had and was answered, and grows until it is compacted."""

    name: str
    system_tokens: int  # leading tokens that all agents of the kind have in common
    opening_tokens: Spread  # of the first prompt, after the common ones
    new_tokens: Spread  # a turn appends: tool results, what the user says
    output_tokens: Spread | Mixed
    think_s: Spread  # between an answer and the next request: tools, users
    turns: Spread
    context_tokens_max: int  # a prompt that would be longer is compacted
    compacted_share: float  # of the context that a compaction keeps as it was, at its start
    compacted_tokens: int  # that it writes anew
    rewrite_share: float = 0.0  # of turns that change the end of the context
    rewritten_tokens: Spread = Spread(1.0, 1.0)  # how much of it
    sub_agents: SubAgents | None = None
    setup_s: float = 0.0  # before its first request: an environment that is made for it


@dataclass(frozen=True, slots=True)
class Turn:
    """One request, and what follows its answer."""

    think_s: float  # before the request
    kept_tokens: int  # of the last prompt and its answer, how many this prompt starts with; all: it extends them
    prompt_tokens: int
    output_tokens: int
    sub_agents: int = 0  # to be started once it is answered, and waited for


def play(kind: AgentKind, draw: random.Random) -> Iterator[Turn]:
    """The turns of one agent, at least one."""
    turns = max(1, kind.turns.draw_int(draw))
    context_tokens = 0
    for number in range(turns):
        think_s = kind.think_s.draw(draw) if number else kind.setup_s
        kept_tokens = context_tokens
        if number == 0:
            prompt_tokens = kind.system_tokens + kind.opening_tokens.draw_int(draw)
        else:
            prompt_tokens = context_tokens + kind.new_tokens.draw_int(draw)
            if draw.random() < kind.rewrite_share:
                kept_tokens = max(kind.system_tokens, context_tokens - kind.rewritten_tokens.draw_int(draw))
            if prompt_tokens > kind.context_tokens_max:
                kept_tokens = max(kind.system_tokens, int(kind.compacted_share * context_tokens))
                prompt_tokens = kept_tokens + kind.compacted_tokens
        output_tokens = kind.output_tokens.draw_int(draw)
        yield Turn(think_s, kept_tokens, prompt_tokens, output_tokens, _sub_agents(kind, draw))
        context_tokens = prompt_tokens + output_tokens


def _sub_agents(kind: AgentKind, draw: random.Random) -> int:
    if kind.sub_agents is None or draw.random() >= kind.sub_agents.share:
        return 0
    return draw.randint(1, kind.sub_agents.count_max)
