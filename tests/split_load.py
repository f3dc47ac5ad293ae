"""Agents whose work changes on command, and a record of it made by the agents themselves: what planners should see."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from evolving.core.slices import DecodeDone, PrefillDone, Slice, WorkWindow
from evolving.core.throughput import MeanWork
from evolving.core.work import PrefillWork, query_key_pairs, sum_work
from evolving_client import Client, Finished, RetryPolicy

_TURNS = 3  # of a session; each extends the one before
_DRAINED_S = 30.0


@dataclass(frozen=True, slots=True)
class Asks:
    """What a request asks: new tokens of its prompt, and tokens to generate. Each from, to."""

    new_tokens: tuple[int, int]
    output_tokens: tuple[int, int]

    def mean(self) -> MeanWork:
        """By the numbers alone, were every request the first of its session."""
        new = sum(self.new_tokens) / 2
        iterations = sum(self.output_tokens) / 2 - 1
        return MeanWork(new, query_key_pairs(int(new), 0), 0.0, 0.0, iterations, new + iterations / 2)


@dataclass(slots=True)
class Record:
    """What the agents saw, by a monotonic clock. Samples are those that nodes should report, and levels gateways'."""

    window: WorkWindow = field(default_factory=WorkWindow)
    finished: int = 0
    failures: list[str] = field(default_factory=list)
    _open: int = 0
    _since_s: float = field(default_factory=time.monotonic)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def change_open(self, by: int) -> None:
        """Requests were sent, or ended."""
        now_s = time.monotonic()
        self.window.add_open("agents", self._since_s, now_s, self._open)
        self._open, self._since_s = self._open + by, max(self._since_s, now_s)

    def add(self, result: Finished, output_tokens: int) -> None:
        """A request has its result."""
        self.finished += 1
        now_s, name, usage = time.monotonic(), str(next(self._numbers)), result.usage
        work = PrefillWork(usage.computed_tokens, usage.cached_tokens)
        self.window.add_prefill(now_s, PrefillDone(name, sum_work((work,))))
        context = usage.prompt_tokens + output_tokens / 2
        self.window.add_decode(now_s, DecodeDone(name, output_tokens - 1, context))

    def slices(self, end_s: float, count: int, slice_s: float) -> tuple[Slice, ...]:
        """As a planner cuts them."""
        self.change_open(0)
        return self.window.slices(end_s, count, slice_s)


@dataclass(slots=True)
class Agents:
    """Agents at work. Each has one request open, whatever it asks."""

    client: Client
    asks: Asks
    record: Record = field(default_factory=Record)
    stopping: bool = False

    async def work(self, number: int) -> None:
        """Sessions, one after the other, until told to stop."""
        draw = random.Random(number)
        while not self.stopping:
            try:
                await self._session(draw)
            except Exception as error:  # noqa: BLE001  every one is a finding, with its type
                self.record.failures.append(f"agent {number}: {type(error).__name__}: {error}")

    async def _session(self, draw: random.Random) -> None:
        branch, prompt = self.client.branch(), list[int]()
        for turn in range(_TURNS):
            if self.stopping:
                break
            prompt = [*prompt, *(draw.randrange(1, 31_000) for _ in range(draw.randint(*self.asks.new_tokens)))]
            output_tokens = draw.randint(*self.asks.output_tokens)
            self.record.change_open(1)
            try:
                last = turn == _TURNS - 1
                call = branch.generate(token_ids=prompt, max_tokens=output_tokens, ignore_eos=True, end_after=last)
                result = await call.finish()
            finally:
                self.record.change_open(-1)
            self.record.add(result, output_tokens)
            prompt += result.output_token_ids


@asynccontextmanager
async def working(addresses: Sequence[str], count: int, asks: Asks) -> AsyncIterator[Agents]:
    """Agents at work while the block runs. Nothing is sent twice: what fails is seen."""
    async with Client(*addresses, timeout_s=60, retry=RetryPolicy(max_failures=1, max_overload_wait_s=0)) as client:
        agents = Agents(client, asks)
        tasks = [asyncio.create_task(agents.work(number)) for number in range(count)]
        try:
            yield agents
        finally:
            agents.stopping = True
            _, hanging = await asyncio.wait(tasks, timeout=_DRAINED_S)
            agents.record.failures += [f"{len(hanging)} agents do not end"] * bool(hanging)
            for task in hanging:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
