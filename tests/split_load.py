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
from evolving.core.work import PrefillWork, sum_work
from evolving_client import Client, Finished, RetryPolicy
from evolving_sim.sessions import AgentKind, play

_DRAINED_S = 30.0


@dataclass(slots=True)
class Record:
    """What the agents saw, by a monotonic clock. Samples are those that nodes should report, and levels gateways'."""

    window: WorkWindow = field(default_factory=WorkWindow)
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
    """Agents at work, each of the `kind` there is now. Their pauses are left out."""

    client: Client
    kind: AgentKind
    record: Record = field(default_factory=Record)
    stopping: bool = False

    async def work(self, number: int) -> None:
        """Sessions, one after the other, until told to stop."""
        draw = random.Random(number)
        while not self.stopping:
            try:
                await self._session(self.kind, draw)
            except Exception as error:  # noqa: BLE001  every one is a finding, with its type
                self.record.failures.append(f"agent {number}: {type(error).__name__}: {error}")

    async def _session(self, kind: AgentKind, draw: random.Random) -> None:
        async with self.client.branch() as branch:
            context = list[int]()
            for turn in play(kind, draw):
                if self.stopping or self.kind is not kind:
                    break
                new = turn.prompt_tokens - turn.kept_tokens
                prompt = [*context[: turn.kept_tokens], *(draw.randrange(1, 31_000) for _ in range(new))]
                self.record.change_open(1)
                try:
                    call = branch.generate(token_ids=prompt, max_tokens=turn.output_tokens, ignore_eos=True)
                    result = await call.finish()
                finally:
                    self.record.change_open(-1)
                self.record.add(result, turn.output_tokens)
                context = [*prompt, *result.output_token_ids]


@asynccontextmanager
async def working(addresses: Sequence[str], count: int, kind: AgentKind) -> AsyncIterator[Agents]:
    """Agents at work while the block runs. Nothing is sent twice: what fails is seen."""
    async with Client(*addresses, timeout_s=60, retry=RetryPolicy(max_failures=1, max_overload_wait_s=0)) as client:
        agents = Agents(client, kind)
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
