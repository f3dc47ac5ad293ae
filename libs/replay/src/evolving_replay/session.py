"""Plays one session: each agent a branch, each request once what it waits for is there and was thought about."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from evolving.v1 import common_pb2, gateway_pb2
from evolving_client import Client, EvolvingError, Finished, Generation, Tokens
from evolving_client.events import encode_token_ids
from evolving_client.options import GenerateOptions
from evolving_replay.ideal import AgentKv, ProducedKv
from evolving_replay.prompts import SessionPrompts
from evolving_replay.tally import Answered, Tally
from evolving_sim.traces import BranchStep, TraceAgent, TraceSession, branch_steps


@dataclass(frozen=True, slots=True)
class Pace:
    """The trace's time on the wall's clock. started_s: the replay's start, monotonic."""

    started_s: float
    compression: float

    async def until(self, trace_s: float) -> None:
        """Wait for a moment of the trace."""
        await asyncio.sleep(self.started_s + trace_s / self.compression - time.monotonic())

    async def think(self, trace_s: float) -> None:
        """Wait so long."""
        await asyncio.sleep(trace_s / self.compression)


@dataclass(frozen=True, slots=True)
class SessionPlayer:
    """number: of the session. branch_id: of the main agent.

    first_request: number of the session's first among requests that share blocks.
    open_loop: send requests when the trace says, instead of keeping the times in which agents think.
    """

    client: Client
    pace: Pace
    tally: Tally
    session: TraceSession
    number: int
    branch_id: str
    prompts: SessionPrompts
    produced: ProducedKv
    first_request: int
    open_loop: bool
    _agents: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)

    async def play(self) -> None:
        """To the end of its last agent. Called once."""
        async with self._agents:
            await self._play_agent(0)

    async def _play_agent(self, number: int) -> None:
        agent = self.session.agents[number]
        before = sum(len(each.requests) for each in self.session.agents[:number])
        kv = AgentKv(self.produced)
        awaited = self._start_children(agent, -1)
        for index, step in enumerate(branch_steps(agent.requests)):
            request = agent.requests[index]
            if awaited:
                await asyncio.wait(awaited)
            await (self.pace.until(request.at_s) if self.open_loop else self.pace.think(request.think_s))
            prompt = self.prompts.prompt(request, self.first_request + before + index)
            finished = await self._ask(number, index, prompt, self._branch(number, step), kv.reusable_tokens(prompt))
            if finished is not None:
                output = encode_token_ids(finished.output_token_ids)
                self.prompts.answered(request, prompt, output)
                kv.finished(prompt, output)
            awaited = self._start_children(agent, index)

    def _start_children(self, parent: TraceAgent, after: int) -> Sequence[asyncio.Task[None]]:
        """Start the sub-agents that follow a request of their parent's. Returns those that the parent waits for."""
        awaited = []
        for number, agent in enumerate(self.session.agents):
            if number and (agent.parent_agent_id, agent.starts_after) == (parent.agent_id, after):
                task = self._agents.create_task(self._play_agent(number))
                if agent.parent_waits:
                    awaited.append(task)
        return awaited

    def _branch(self, number: int, step: BranchStep) -> common_pb2.BranchMetadata:
        if number == 0:
            return common_pb2.BranchMetadata(branch_id=self.branch_id, version=step.version)
        ids = [agent.agent_id for agent in self.session.agents]
        return common_pb2.BranchMetadata(
            branch_id=self._branch_id(number),
            version=step.version,
            parent_branch_id=self._branch_id(ids.index(self.session.agents[number].parent_agent_id)),
        )

    def _branch_id(self, number: int) -> str:
        return f"{self.branch_id}.{number}" if number else self.branch_id

    async def _ask(
        self, agent: int, index: int, prompt: bytes, branch: common_pb2.BranchMetadata, ideal_tokens: int
    ) -> Finished | None:
        """The answer to an agent's request; None when the client gave up."""
        request = self.session.agents[agent].requests[index]
        options: GenerateOptions = {"max_tokens": max(1, request.output_tokens), "ignore_eos": True}
        generation = self.client.start_generation(_Encoded(prompt), options, branch)
        sent_s = time.monotonic()
        self.tally.request_sent()
        try:
            finished, first_s = await _answer(generation)
        except EvolvingError as error:
            self.tally.request_failed(error)
            return None
        except asyncio.CancelledError:
            self.tally.request_left()
            raise
        begun_s, e2e_s = sent_s - self.pace.started_s, time.monotonic() - sent_s
        self.tally.request_answered(
            Answered(self.number, agent, index, begun_s, first_s - sent_s, e2e_s, ideal_tokens, finished)
        )
        return finished


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A prompt of token ids, u32 little-endian, as it travels."""

    token_ids: bytes

    def write_to(self, request: gateway_pb2.GenerateRequest) -> None:
        request.token_ids = self.token_ids


async def _answer(generation: Generation) -> tuple[Finished, float]:
    """The result, and when the first token came, monotonic seconds."""
    first_s = None
    async for event in generation:
        if isinstance(event, Tokens):
            first_s = first_s or time.monotonic()
        elif isinstance(event, Finished):
            return event, first_s or time.monotonic()
    raise AssertionError("a generation ends with its result or an error")
