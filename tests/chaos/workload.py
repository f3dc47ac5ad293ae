"""Agents that work, and check every token they get: turns, forks, sub-agents, compactions, and calls left early."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from chaos.oracle import output_of

from evolving_client import Branch, Client, DeadlineExceeded, Finished, Generation, RetryPolicy, Tokens

_MOST_CONTEXT_TOKENS = 3_000


async def checked(generation: Generation, prompt: Sequence[int], max_tokens: int) -> Finished:
    """The result, after comparing each token with what an undisturbed run gives."""
    expected = output_of(prompt, max_tokens)
    at = 0
    async for event in generation:
        if isinstance(event, Tokens):
            assert event.index == at, f"token {event.index} came where {at} was due"
            assert event.token_ids == expected[at : at + len(event.token_ids)], f"wrong tokens from {at} on"
            at += len(event.token_ids)
        if isinstance(event, Finished):
            assert at == max_tokens
            assert event.output_token_ids == expected
            return event
    raise AssertionError("a generation ends with its result or an error")


@dataclass(slots=True)
class Load:
    """What some agents did so far. `failures` must stay empty."""

    client: Client
    seed: int
    max_tokens: int = 40
    finished: int = 0
    left_early: int = 0
    late: int = 0
    reconnects: int = 0
    moves: int = 0
    failures: list[str] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    _stopping: bool = False
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def agent(self, number: int) -> None:
        """Sessions, one after the other, until stopped."""
        rng = random.Random(f"{self.seed}/{number}")
        while not self._stopping:
            try:
                await self._session(rng)
            except Exception as error:  # noqa: BLE001  every one is a finding, with its type
                self.failures.append(f"agent {number}: {type(error).__name__}: {error}")

    async def _session(self, rng: random.Random) -> None:
        root = self._keep(self.client.branch())
        prompt = self._tokens(rng, rng.choice([5, 64, 130, 500]))
        for _ in range(rng.randrange(1, 5)):
            if self._stopping:
                break
            prompt = await self._turn(rng, root, prompt)
            kind = rng.randrange(6)
            if kind == 0:
                await self._turn(rng, self._keep(root.fork()), [*prompt, *self._tokens(rng, 10)])
            elif kind == 1:
                helpers = [self._keep(root.subagent()) for _ in range(2)]
                await asyncio.gather(*(self._turn(rng, each, self._tokens(rng, 80)) for each in helpers))
            elif kind == 2 or len(prompt) > _MOST_CONTEXT_TOKENS:
                prompt = [*prompt[:64], *self._tokens(rng, 70)]
                root.compact(prompt)
            elif kind == 3:
                await self._leave_early(rng, root, [*prompt, *self._tokens(rng, 5)])
            elif kind == 4:
                await self._too_late(root, [*prompt, *self._tokens(rng, 5)])
            prompt = [*prompt, *self._tokens(rng, rng.choice([1, 30, 200]))]
        if rng.randrange(2):
            await root.end(subtree=True)

    async def _turn(self, rng: random.Random, branch: Branch, prompt: list[int]) -> list[int]:
        tokens = rng.randrange(1, self.max_tokens + 1)
        generation = branch.generate(
            token_ids=prompt, max_tokens=tokens, ignore_eos=True, priority=rng.choice([-100, 0, 0, 100])
        )
        finished = await checked(generation, prompt, tokens)
        self.finished += 1
        self.reconnects += finished.reconnects
        self.moves += finished.attempts
        return [*prompt, *finished.output_token_ids]

    async def _leave_early(self, rng: random.Random, branch: Branch, prompt: list[int]) -> None:
        reads = rng.randrange(4)
        async with aclosing(branch.generate(token_ids=prompt, max_tokens=500, ignore_eos=True)) as generation:
            for _ in range(reads):
                await anext(generation)
        self.left_early += 1

    async def _too_late(self, branch: Branch, prompt: list[int]) -> None:
        generation = branch.generate(token_ids=prompt, max_tokens=500, ignore_eos=True, timeout_s=0.001)
        try:
            await generation.finish()
        except DeadlineExceeded:
            self.late += 1

    def _keep(self, branch: Branch) -> Branch:
        self.branches.append(branch)
        return branch

    def _tokens(self, rng: random.Random, count: int) -> list[int]:
        """Tokens no other call had, unless they are few."""
        return [next(self._numbers) % 31_000, *(rng.randrange(1, 31_000) for _ in range(count - 1))]

    async def stop(self, agents: Sequence[asyncio.Task[None]]) -> None:
        """Let the agents end their sessions, then end every branch."""
        self._stopping = True
        await asyncio.gather(*agents)
        ids = [branch.id for branch in self.branches]
        for at in range(0, len(ids), 1000):
            await self.client.end(ids[at : at + 1000])


@asynccontextmanager
async def working(addresses: Sequence[str], agents: int, seed: int, max_tokens: int = 40) -> AsyncIterator[Load]:
    """Agents at work while the block runs; after it, every branch is ended."""
    async with Client(*addresses, timeout_s=60, retry=RetryPolicy(max_failures=12, initial_backoff_s=0.05)) as client:
        load = Load(client, seed, max_tokens)
        tasks = [asyncio.create_task(load.agent(number)) for number in range(agents)]
        try:
            yield load
        finally:
            await load.stop(tasks)
