"""The load under which roles are switched: agents that each continue their own context, over and over.

A context grows turn by turn: what the agent says, what the model answered, what a tool returned. When the next prompt
would be longer than 128 tokens the context is ended and a new one begins. Everything an agent says is drawn from its
own seed, so two arms get the same prompts up to the model's answers.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from bench.switch_figures import Answer, Phase

from evolving_client.events import encode_token_ids
from evolving_replay.ideal import AgentKv, ProducedKv

BLOCK_TOKENS = 16
PROMPT_MOST = 128
CHUNK_TOKENS = 128
OUTPUT_TOKENS = 12
_FIRST_TOKENS = (32, 49)  # of a context's first prompt
_MORE_TOKENS = (8, 25)  # added to it each turn
_TOOL_S = (0.5, 1.5)  # between an answer and the next turn; longer than a block takes from L1 to L2
_IDS = (300, 30_000)  # ordinary ids of both engines' vocabularies
POLL_S = 0.02
_WAITING_LEAST = 3


class TurnFailed(Exception):
    """A request was not answered, whatever was tried."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request and its answer; see Answer."""

    output: tuple[int, ...]
    first_s: float
    second_s: float
    prefill_s: float
    prefill_node: str
    decode_node: str
    lost_by: Mapping[str, int]
    moved: bool = False


class Target(Protocol):
    """What is asked: our cluster, or another."""

    async def turn(self, branch: str, prompt: tuple[int, ...], ideal_tokens: int, came: Callable[[int], None]) -> Turn:
        """One request of a context, OUTPUT_TOKENS long. ideal_tokens: leading ones that were produced before.
        `came` is told how many tokens there are whenever some came. Raises TurnFailed."""
        ...

    async def end(self, branch: str) -> None:
        """The context will not be continued. Raises TurnFailed."""
        ...


@dataclass(slots=True)
class Load:
    """Agents in a closed loop, and what became of their requests."""

    target: Target
    agents: int
    answers: list[Answer] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    waiting: dict[Phase, int] = field(
        default_factory=lambda: {"prefill": 0, "decode": 0}
    )  # requests, for its first token
    _over: bool = False
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def run(self) -> None:
        """Until `stop`; requests that run then are answered first."""
        async with asyncio.TaskGroup() as group:
            for number in range(self.agents):
                group.create_task(self._agent(random.Random(number)))

    def stop(self) -> None:
        """No more requests."""
        self._over = True

    async def until_answered(self, count: int) -> None:
        """So many more answers."""
        wanted = len(self.answers) + count
        while len(self.answers) < wanted:
            await asyncio.sleep(POLL_S)

    async def until_waiting(self, phase: Phase) -> None:
        """Requests wait for the first token that a phase gives them: so many that not all are being worked on."""
        while self.waiting[phase] < _WAITING_LEAST:
            await asyncio.sleep(POLL_S / 10)

    async def _agent(self, draw: random.Random) -> None:
        while not self._over:
            branch, agent = f"context-{next(self._numbers)}", AgentKv(ProducedKv(BLOCK_TOKENS))
            prompt = _text(draw, _FIRST_TOKENS)
            while len(prompt) <= PROMPT_MOST and not self._over:
                output = await self._turn(branch, agent, prompt)
                if output is None:
                    break
                await asyncio.sleep(draw.uniform(*_TOOL_S))
                prompt = (*prompt, *output, *_text(draw, _MORE_TOKENS))
            try:
                await self.target.end(branch)
            except TurnFailed as failure:
                self.failures[str(failure)] += 1

    async def _turn(self, branch: str, agent: AgentKv, prompt: tuple[int, ...]) -> tuple[int, ...] | None:
        """The answer; None: there was none."""
        written = encode_token_ids(prompt)
        ideal_tokens = agent.reusable_tokens(written)
        waits = _Waits(self)
        sent_s = time.monotonic()
        try:
            turn = await self.target.turn(branch, prompt, ideal_tokens, waits.came)
        except TurnFailed as failure:
            self.failures[str(failure)] += 1
            return None
        finally:
            waits.over()
        agent.finished(written, encode_token_ids(turn.output))
        self.answers.append(
            Answer(
                sent_s,
                turn.first_s,
                turn.second_s,
                turn.prefill_s,
                turn.prefill_node,
                turn.decode_node,
                len(prompt),
                ideal_tokens,
                turn.lost_by,
                turn.moved,
            )
        )
        return turn.output


class _Waits:
    """One request among those that wait: for the first token, which prefill gives, then for the second."""

    def __init__(self, load: Load) -> None:
        self._waiting = load.waiting
        self._phase: Phase | None = None
        self._wait("prefill")

    def came(self, tokens: int) -> None:
        """It has so many."""
        self._wait("decode" if tokens == 1 else None)

    def over(self) -> None:
        """No more will come."""
        self._wait(None)

    def _wait(self, phase: Phase | None) -> None:
        if self._phase is not None:
            self._waiting[self._phase] -= 1
        self._phase = phase
        if phase is not None:
            self._waiting[phase] += 1


def _text(draw: random.Random, length: tuple[int, int]) -> tuple[int, ...]:
    return tuple(draw.randrange(*_IDS) for _ in range(draw.randrange(*length)))
