"""What bench-fidelity plays, live and simulated: sessions, nodes, pace. Chosen by simulated runs, before any live one.

Model time must dominate: the control plane's own milliseconds, on a machine with fewer cores than the cluster has
processes, are in no equation. Hence nodes so slow that a prompt takes a second and an answer a few. Reads from peers
are hardly faster than computing, so that much of what is lost is lost in small choices, a few of each request; where
only evictions of whole contexts lose reuse, they are so few, and bring so many others with them, that two runs of one
and the same system part by more than the bars. So it says little of how well evictions are simulated. Agents think
`compression` times as fast as recorded; coefficients are those of the wall clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.kv_plan import cut_session

from evolving.core.planner import SplitShape
from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients
from evolving_sim.node_config import NodeConfig
from evolving_sim.traces import TraceSession

PROMPT_TOKENS = 100_000  # sessions with longer ones are left out: device memory has to take two contexts at least
CONTEXT_TOKENS = PROMPT_TOKENS + 16_384

MACHINE = NodeConfig(
    # On average 0.6 s for the recorded 2,400 new tokens after 49,000 cached ones, shared about evenly by c1 and c2.
    prefill=PrefillCoefficients(c0_s=0.02, c1_s=1.2e-4, c2_s=2.5e-9, c3_s=1e-6),
    # On average 22 iterations for the recorded 350 tokens.
    decode=DecodeCoefficients(d0_s=0.06, d1_s=0.0, d2_s=0.01),
    accepted_tokens=16.0,
    chunk_tokens=4096,
    decode_slots=32,
    l1_tokens=327_680,
    l2_tokens=393_216,
    context_tokens_max=CONTEXT_TOKENS,
    # The mock's KV is names; only how long its bytes take matters.
    kv_bytes_per_token=4,
    # One read at a time, and a peer that is read from by several is no slower for it.
    fetch_bytes_per_s=4 * 3_500.0,
    serve_bytes_per_s=1e12,
    fetch_fixed_s=0.002,
    # Prefill to decode, the mock sends names alone.
    transfer_bytes_per_s=1e12,
    transfer_fixed_s=0.0,
)

SHAPE = SplitShape(5, 3)


@dataclass(frozen=True, slots=True)
class Plan:
    """One comparison. Times of the trace are before compression."""

    machine: NodeConfig = MACHINE
    shape: SplitShape = SHAPE
    sessions: int = 70
    session_requests: int = 40  # of its main agent, at most
    concurrency: int = 24
    compression: float = 10.0
    stagger_s: float = 600.0  # the first sessions start spread over so much
    idle_s: float = 1800.0  # sessions whose main agent thought longer in all are left out
    prompt_tokens: int = PROMPT_TOKENS
    fetch_readers: int = 1  # reads of one node at once

    def as_json(self) -> dict[str, Any]:
        """The fields by name."""
        return {**asdict(self), "shape": str(self.shape)}


QUICK = replace(Plan(), sessions=12, session_requests=10, concurrency=12, stagger_s=100.0)
"""Two minutes: that everything runs, not how far it agrees."""


def choose(trace: Sequence[TraceSession], plan: Plan) -> list[TraceSession]:
    """The first sessions of the trace that keep the limits, cut to their first requests."""
    cut = [cut_session(session, plan.session_requests) for session in trace]
    return [session for session in cut if _fits(session, plan)][: plan.sessions]


def _fits(session: TraceSession, plan: Plan) -> bool:
    idle_s = sum(request.think_s for request in session.agents[0].requests)
    return session.longest_prompt_tokens <= plan.prompt_tokens and idle_s <= plan.idle_s
