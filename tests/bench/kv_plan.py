"""What `bench_kv.py` plays: sessions, pools, nodes, and how fast the nodes pretend to be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from evolving_sim.traces import TraceAgent, TraceSession

BLOCK_TOKENS = 64
BYTES_PER_TOKEN = 4  # of the mock's KV; rates are scaled to it, since only the time a fetch takes matters
NEVER_EVICTS_TOKENS = 32_000_000  # host memory of a node: more than all sessions produce


@dataclass(frozen=True, slots=True)
class Plan:
    """One run. Durations are of the trace, before compression, unless said otherwise."""

    nodes: int = 6
    split: str = "3P3D"
    # Policy arms.
    sessions: int = 100
    concurrency: int = 30
    # Two cores serve some 30 requests a second, which the first sessions come near to for a few seconds.
    compression: float = 100.0
    session_hours: float = 6.0
    stagger_s: float = 1800.0  # the first sessions start spread over so much
    # Longer prompts need more device memory on every node (twice the longest context each), which would be a second
    # pool beside the one measured.
    prompt_tokens: int = 160_000
    pool_shares: tuple[float, ...] = (1.2, 1.0, 0.86, 0.5)
    # Fetch arms: the first requests of sessions that begin small and have little idle time. The model is slow enough to
    # keep the prefill nodes busy, since without a wait there is nothing to hide a fetch under; and their memory holds
    # only part of what they need, while that of the more decode nodes holds all of it. Sessions follow each other, so
    # that first prompts, which nobody has, come all the time and not all at the start.
    fetch_modes: tuple[str, ...] = ("async", "at_start", "recompute")
    fetch_split: str = "2P4D"
    fetch_l2_tokens: int = 1_310_720  # of each node
    fetch_sessions: int = 80
    fetch_requests: int = 20  # of each session's main agent, at most
    fetch_concurrency: int = 50
    fetch_compression: float = 10.0
    fetch_stagger_s: float = 1200.0
    fetch_span_s: float = 700.0  # sessions whose first requests were recorded within so long
    fetch_first_tokens: int = 50_000  # sessions whose first prompt is no longer
    # Equation 1 in the fetch arms: 830 tokens a second, half of that for one that attends to 40,000. So that two
    # prefill nodes are busy with what these sessions add: without a queue there is nothing to hide a fetch under.
    prefill_coefficients: tuple[float, ...] = (0.004, 1.2e-3, 3e-8, 4e-7, 0.0)
    # One read, assumed: 70 KB of KV a token at 1.4 GB/s.
    fetch_tokens_per_s: float = 20_000.0

    @property
    def context_tokens(self) -> int:
        """Longest prompt with its output."""
        return self.prompt_tokens + 16_384

    @property
    def l1_tokens(self) -> int:
        """Device memory of a node: the least the engine takes, one prefill and one decode of the longest context."""
        return 2 * self.context_tokens

    def as_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


QUICK = replace(
    Plan(),
    sessions=40,
    stagger_s=600.0,
    session_hours=2.0,
    pool_shares=(0.86,),
    fetch_modes=("async", "at_start"),
    fetch_sessions=40,
    fetch_requests=8,
    fetch_concurrency=30,
    fetch_span_s=300.0,
    fetch_stagger_s=300.0,
)
"""Within ten minutes: that everything runs, not what it measures."""


def policy_sessions(trace: Sequence[TraceSession], plan: Plan) -> list[TraceSession]:
    """The first sessions of the trace that keep the limits."""
    fitting = [session for session in trace if _fits(session, plan)]
    return fitting[: plan.sessions]


def fetch_sessions(trace: Sequence[TraceSession], plan: Plan) -> list[TraceSession]:
    """The first sessions that begin small and have little idle time, cut to their first requests."""
    small = (each for each in trace if each.agents[0].requests[0].input_tokens <= plan.fetch_first_tokens)
    cut = [cut_session(session, plan.fetch_requests) for session in small if _fits(session, plan)]
    return [session for session in cut if session.duration_s <= plan.fetch_span_s][: plan.fetch_sessions]


def _fits(session: TraceSession, plan: Plan) -> bool:
    return session.duration_s <= plan.session_hours * 3600 and session.longest_prompt_tokens <= plan.prompt_tokens


def cut_session(session: TraceSession, requests: int) -> TraceSession:
    """Its main agent's first requests, and the sub-agents that these start."""
    main = replace(session.agents[0], requests=session.agents[0].requests[:requests])
    agents: list[TraceAgent] = [main]
    agents += [agent for agent in session.agents[1:] if agent.starts_after < len(main.requests)]
    return replace(session, agents=tuple(agents))
