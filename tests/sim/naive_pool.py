"""One pool as its rules say, block by block and with everything recounted; and random sessions to play."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from evolving_sim.interleaving import Kind, interleave
from evolving_sim.oracle import Policy
from evolving_sim.traces import TraceAgent, TraceRequest, TraceSession

Block = tuple[int, ...]  # whose ids they are, then the ids up to this block: KV depends on all that comes before it
BLOCK_TOKENS = 4


@dataclass(frozen=True)
class NaiveOutcome:
    hit_tokens: int
    ideal_tokens: int
    prompt_tokens: int
    peak_counted_blocks: int


def play(sessions: Sequence[TraceSession], concurrency: int, capacity: int, policy: Policy) -> NaiveOutcome:
    moments = interleave(sessions, concurrency)
    accesses = [
        (moment.kind, _context(sessions, moment.session, moment.agent, moment.request, moment.kind))
        for moment in moments
    ]
    contexts: dict[tuple[int, int], list[Block]] = {}
    resident: set[Block] = set()
    produced: set[Block] = set()
    last: dict[Block, int] = {}
    hits = ideal = prompts = peak = 0

    def place(block: Block, now: int) -> tuple[float, ...]:
        """Smallest goes first."""
        if policy is Policy.LRU:
            return (last[block], -len(block))
        if policy is Policy.AGENT:
            return (sum(block in context for context in contexts.values()), last[block], -len(block))
        following = (
            number
            for number in range(now + 1, len(accesses))
            if accesses[number][0] is Kind.REQUEST_BEGINS and block in accesses[number][1]
        )
        return (-next(following, 1 << 60), -len(block))

    for now, (moment, (kind, context)) in enumerate(zip(moments, accesses, strict=True)):
        if kind is Kind.SESSION_ENDS:
            contexts = {key: value for key, value in contexts.items() if key[0] != moment.session}
            continue
        request = sessions[moment.session].agents[moment.agent].requests[moment.request]
        if kind is Kind.REQUEST_BEGINS:
            limit = max(0, request.input_tokens - 1) // BLOCK_TOKENS
            hits += min(limit, _leading(context, resident)) * BLOCK_TOKENS
            ideal += min(limit, _leading(context, produced)) * BLOCK_TOKENS
            prompts += request.input_tokens
        elif not context:
            continue  # nothing of the answer comes back
        contexts[moment.session, moment.agent] = context
        peak = max(peak, len({block for each in contexts.values() for block in each}))
        produced |= set(context)
        resident |= set(context)
        last |= dict.fromkeys(context, now)
        while len(resident) > capacity:
            resident.remove(min(resident, key=lambda block: place(block, now)))
        assert all(block[:-1] in resident for block in resident if len(block) > 2), "closed under prefixes"
    return NaiveOutcome(hits, ideal, prompts, peak)


def _context(sessions: Sequence[TraceSession], session: int, agent: int, number: int, kind: Kind) -> list[Block]:
    requests = sessions[session].agents[agent].requests
    request = requests[number]
    prompt = request.block_ids.tolist()
    if kind is Kind.REQUEST_ENDS:
        following = requests[number + 1].block_ids.tolist() if number + 1 < len(requests) else []
        blocks = min(len(following), (request.input_tokens + request.output_tokens - 1) // BLOCK_TOKENS)
        if following[: len(prompt)] != prompt or blocks <= len(prompt):
            return []
        prompt = following[:blocks]
    scope = -1 if sessions[session].ids_shared else session
    return [(scope, *prompt[: index + 1]) for index in range(len(prompt))]


def _leading(context: Sequence[Block], there: set[Block]) -> int:
    return next((index for index, block in enumerate(context) if block not in there), len(context))


# -- random sessions


def request(ids: Sequence[int], tail: int = 0, output: int = 1, think_s: float = 1.0) -> TraceRequest:
    """A prompt of full blocks and a tail; its answer takes a second."""
    return TraceRequest(0.0, len(ids) * BLOCK_TOKENS + tail, output, np.array(ids, np.uint32), think_s, 1.0)


def session(*agents: TraceAgent, ids_shared: bool = False) -> TraceSession:
    return TraceSession("s", BLOCK_TOKENS, ids_shared, open_loop=False, agents=agents)


def main_agent(*requests: TraceRequest) -> TraceAgent:
    return TraceAgent("", "", -1, False, requests)


@st.composite
def _agent_requests(draw: st.DrawFn, rewrites: bool) -> tuple[TraceRequest, ...]:
    """Prompts that mostly extend the last one and sometimes fall back to a part of it."""
    ids: list[int] = []
    requests = []
    for _ in range(draw(st.integers(1, 5))):
        kept = len(ids) // draw(st.sampled_from((1, 1, 2))) if rewrites else len(ids)
        ids = ids[:kept] + draw(st.lists(st.integers(0, 3), max_size=4))
        tail, output = draw(st.integers(0, BLOCK_TOKENS - 1)), draw(st.integers(0, 9))
        requests.append(request(ids, tail, output, think_s=draw(st.sampled_from((0.0, 0.5, 1.0, 4.0)))))
    return tuple(requests)


@st.composite
def sessions(draw: st.DrawFn, rewrites: bool = True, ids_shared: bool | None = None) -> list[TraceSession]:
    """A few sessions with sub-agents, of which all share their ids, or none; None: either."""
    shared = draw(st.booleans()) if ids_shared is None else ids_shared
    drawn = []
    for _ in range(draw(st.integers(1, 5))):
        main = main_agent(*draw(_agent_requests(rewrites)))
        agents = [main]
        for number in range(draw(st.integers(0, 2))):
            after = draw(st.integers(-1, len(main.requests) - 1))
            agents.append(TraceAgent(f"sub-{number}", "", after, draw(st.booleans()), draw(_agent_requests(rewrites))))
        drawn.append(session(*agents, ids_shared=shared))
    return drawn
