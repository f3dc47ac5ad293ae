"""Recorded sessions of agents: what was asked, when, and which blocks of KV each prompt is made of.

A trace carries no text. A block id stands for the tokens of one full block: within a session, and across sessions where
`ids_shared` says so, the same id means the same tokens.

Times of a session whose agents wait for their answers (`open_loop` False) are given twice. `at_s` is when a request was
recorded. `think_s` is how long the agent took once what it waited for was there, which is what a replay keeps when the
cluster it plays against answers sooner or later than the recorded one did. What a request waits for:

- the agent's previous request, and every sub-agent with `parent_waits` that started after that one. In the recorded
  sessions a request of the main agent comes after the end of the sub-agents before it, except those launched in the
  background;
- the first request of a sub-agent: the parent's request it starts after;
- the first request of a main agent: nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BlockIds = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request of an agent."""

    at_s: float  # when it was sent, seconds from the session's start; of an open-loop trace from the trace's start
    input_tokens: int
    output_tokens: int
    # Ids of the prompt's full blocks, read-only; input_tokens // block_tokens of them. Shape: (blocks,). Consecutive
    # prompts that extend each other share the memory of the longest.
    block_ids: BlockIds
    think_s: float  # between the end of what it waits for and this request, seconds
    service_s: float  # how long its answer took when it was recorded, seconds; 0 where the trace doesn't tell


@dataclass(frozen=True, slots=True, eq=False)
class TraceAgent:
    """One context and its requests, in order."""

    agent_id: str  # "" is the session's main agent
    parent_agent_id: str  # "" also for the main agent, which has none
    starts_after: int  # index of the parent's request whose answer started it; -1: at the session's start
    parent_waits: bool  # whether the parent's next request waits for its end
    requests: tuple[TraceRequest, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TraceSession:
    """What one user's agents did, main agent first, then sub-agents in the order they start."""

    session_id: str
    block_tokens: int
    ids_shared: bool  # block ids mean the same in every session of the trace; otherwise in this one only
    open_loop: bool  # requests come at `at_s` whatever the cluster does; otherwise agents wait for answers
    agents: tuple[TraceAgent, ...]

    @property
    def duration_s(self) -> float:
        """From the session's start to the end of its last answer, as recorded, seconds."""
        return max(request.at_s + request.service_s for agent in self.agents for request in agent.requests)

    @property
    def longest_prompt_tokens(self) -> int:
        """Of any of its agents."""
        return max(request.input_tokens for agent in self.agents for request in agent.requests)

    @property
    def request_count(self) -> int:
        """Requests of all its agents."""
        return sum(len(agent.requests) for agent in self.agents)


class Step(enum.Enum):
    """What a request does to its agent's context."""

    OPENS = "opens"  # the agent's first: a new branch
    EXTENDS = "extends"  # starts with every full block of the last prompt
    REWRITES = "rewrites"  # anything else, as a compaction does: the branch's version goes up


@dataclass(frozen=True, slots=True)
class BranchStep:
    """A request as its agent's branch sees it."""

    step: Step
    version: int  # of the branch, from 1
    shared_blocks: int  # leading blocks in common with the agent's last prompt


def branch_steps(requests: Sequence[TraceRequest]) -> Iterator[BranchStep]:
    """What each request of one agent does to its branch. Traces have no markers: the block ids tell.

    Every agent is a branch of its own, a sub-agent's context is a fresh one, and a session's end ends all of them.
    """
    version, last = 1, None
    for request in requests:
        if last is None:
            yield BranchStep(Step.OPENS, version, 0)
        else:
            shared = shared_blocks(last, request.block_ids)
            extends = shared == len(last)
            version += not extends
            yield BranchStep(Step.EXTENDS if extends else Step.REWRITES, version, shared)
        last = request.block_ids


def shared_blocks(one: BlockIds, other: BlockIds) -> int:
    """Leading blocks two prompts have in common."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


def sharing_memory(prompts: Sequence[BlockIds]) -> list[BlockIds]:
    """The same arrays, those that the next one starts with as views of it: sessions of many long prompts stay small."""
    shared = list(prompts)
    for index in range(len(shared) - 2, -1, -1):
        own, following = shared[index], shared[index + 1]
        if len(own) <= len(following) and np.array_equal(own, following[: len(own)]):
            shared[index] = following[: len(own)]
    return shared
