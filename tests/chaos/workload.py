"""Agents that work, and check every token they get: turns, forks, sub-agents, compactions, and calls left early."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from chaos.oracle import output_of

from evolving_client import Branch, Client, DeadlineExceeded, Finished, Generation, RetryPolicy, Started, Tokens

_MOST_CONTEXT_TOKENS = 3_000
_DRAINED_S = 60.0


@dataclass(slots=True)
class Asked:
    """One request, as its client sees it."""

    prompt: Sequence[int]
    max_tokens: int
    prefill_node_id: str = ""  # where it was routed last; "": nowhere yet
    received: int = 0  # output tokens
    result: Finished | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # it has been routed


async def checked(
    generation: Generation, prompt: Sequence[int], max_tokens: int, asked: Asked | None = None
) -> Finished:
    """The result, after comparing each token with what an undisturbed run gives. `asked` is kept up to date."""
    expected = output_of(prompt, max_tokens)
    asked = asked or Asked(prompt, max_tokens)
    async for event in generation:
        at = asked.received
        if isinstance(event, Started):
            asked.prefill_node_id = event.prefill_node_id
            asked.begun.set()
        if isinstance(event, Tokens):
            assert event.index == at, f"token {event.index} came where {at} was due"
            assert event.token_ids == expected[at : at + len(event.token_ids)], f"wrong tokens from {at} on"
            asked.received += len(event.token_ids)
        if isinstance(event, Finished):
            assert at == max_tokens
            assert event.output_token_ids == expected
            asked.result = event
            return event
    raise AssertionError("a generation ends with its result or an error")


@dataclass(slots=True)
class Load:
    """What some agents did so far. `failures` must stay empty, and once it has ended `asked` have all their results."""

    client: Client
    seed: int
    max_tokens: int = 40
    left_early: int = 0
    late: int = 0
    asked: list[Asked] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    _stopping: bool = False
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def finished(self) -> int:
        """Requests that have their result."""
        return sum(each.result is not None for each in self.asked)

    @property
    def open(self) -> list[Asked]:
        """Requests without a result: running, or failed."""
        return [each for each in self.asked if each.result is None]

    async def agent(self, number: int) -> None:
        """Sessions, one after the other, until stopped."""
        rng = random.Random(f"{self.seed}/{number}")
        while not self._stopping:
            try:
                await self._session(rng)
            except Exception as error:  # noqa: BLE001  every one is a finding, with its type
                self.failures.append(f"agent {number}: {type(error).__name__}: {error}")

    async def _session(self, rng: random.Random) -> None:
        root = self.keep(self.client.branch())
        prompt = self.tokens(rng, rng.choice([5, 64, 130, 500]))
        for _ in range(rng.randrange(1, 5)):
            if self._stopping:
                break
            prompt = await self._turn(rng, root, prompt)
            kind = rng.randrange(6)
            if kind == 0:
                await self._turn(rng, self.keep(root.fork()), [*prompt, *self.tokens(rng, 10)])
            elif kind == 1:
                helpers = [self.keep(root.subagent()) for _ in range(2)]
                await asyncio.gather(*(self._turn(rng, each, self.tokens(rng, 80)) for each in helpers))
            elif kind == 2 or len(prompt) > _MOST_CONTEXT_TOKENS:
                prompt = [*prompt[:64], *self.tokens(rng, 70)]
                root.compact(prompt)
            elif kind == 3:
                await self._leave_early(rng, root, [*prompt, *self.tokens(rng, 5)])
            elif kind == 4:
                await self._too_late(root, [*prompt, *self.tokens(rng, 5)])
            prompt = [*prompt, *self.tokens(rng, rng.choice([1, 30, 200]))]
        if rng.randrange(2):
            await root.end(subtree=True)

    async def _turn(self, rng: random.Random, branch: Branch, prompt: list[int]) -> list[int]:
        asked = Asked(prompt, rng.randrange(1, self.max_tokens + 1))
        finished = await self.ask(branch, asked, priority=rng.choice([-100, 0, 0, 100]))
        return [*prompt, *finished.output_token_ids]

    async def ask(self, branch: Branch, asked: Asked, priority: int = 0) -> Finished:
        """One request, counted and checked."""
        self.asked.append(asked)
        generation = branch.generate(
            token_ids=asked.prompt, max_tokens=asked.max_tokens, ignore_eos=True, priority=priority
        )
        return await checked(generation, asked.prompt, asked.max_tokens, asked)

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

    def keep(self, branch: Branch) -> Branch:
        """Note a branch that has to be ended."""
        self.branches.append(branch)
        return branch

    def tokens(self, rng: random.Random, count: int) -> list[int]:
        """Tokens no other call had, unless they are few."""
        return [next(self._numbers) % 31_000, *(rng.randrange(1, 31_000) for _ in range(count - 1))]

    async def stop(self, agents: Sequence[asyncio.Task[None]]) -> None:
        """Let the agents end their sessions, then end every branch. What has not ended by then has failed."""
        self._stopping = True
        _, hanging = await asyncio.wait(agents, timeout=_DRAINED_S)
        self.failures += [f"{len(self.open)} requests are still open"] * bool(hanging)
        for task in hanging:
            task.cancel()
        await asyncio.gather(*agents, return_exceptions=True)
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
