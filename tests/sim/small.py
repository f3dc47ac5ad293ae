"""A small simulated cluster that tests share: agents whose requests are short, on nodes that are slow."""

from __future__ import annotations

from dataclasses import replace

from evolving.core.config import PlannerConfig
from evolving.core.planner import SplitShape
from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients
from evolving_sim.arms.named import ARMS, ours
from evolving_sim.driver import Scenario
from evolving_sim.node_config import NodeConfig
from evolving_sim.planner_loop import LoopConfig
from evolving_sim.population import Period, WorkloadConfig
from evolving_sim.sessions import AgentKind, Spread, SubAgents

# A prompt of 400 new tokens takes about a second, 60 decode iterations of a few requests about four.
MACHINE = NodeConfig(
    PrefillCoefficients(c0_s=0.04, c1_s=2.4e-3, c2_s=4e-7, c3_s=2e-6),
    DecodeCoefficients(d0_s=0.02, d1_s=0.04, d2_s=0.004, experts_per_token=2, experts=16),
    accepted_tokens=2.0,
    chunk_tokens=2048,
    decode_slots=16,
    l1_tokens=120_000,
    context_tokens_max=24_000,
    fetch_bytes_per_s=1e9,
    transfer_bytes_per_s=2e9,
)

HELPER = AgentKind(
    name="helper",
    system_tokens=200,
    opening_tokens=Spread(300, 400),
    new_tokens=Spread(200, 300),
    output_tokens=Spread(60, 90),
    think_s=Spread(1.0, 2.0),
    turns=Spread(3, 4),
    context_tokens_max=8_000,
    compacted_share=0.2,
    compacted_tokens=500,
)
WORKER = AgentKind(
    name="worker",
    system_tokens=500,
    opening_tokens=Spread(1_000, 1_500, most=5_000),
    new_tokens=Spread(250, 400, most=3_000),
    output_tokens=Spread(240, 360, most=3_000),
    think_s=Spread(1.5, 3.0, most=30.0),
    turns=Spread(8, 10, most=40),
    context_tokens_max=8_000,
    compacted_share=0.2,
    compacted_tokens=500,
    rewrite_share=0.05,
    rewritten_tokens=Spread(200, 600),
    sub_agents=SubAgents(share=0.05, count_max=3, kind=HELPER),
)
READER = replace(
    HELPER,
    name="reader",
    opening_tokens=Spread(600, 800),
    new_tokens=Spread(400, 500),
    output_tokens=Spread(10, 12),
    turns=Spread(9, 9),
    context_tokens_max=12_000,
)
WRITER = replace(
    HELPER,
    name="writer",
    opening_tokens=Spread(80, 100),
    new_tokens=Spread(20, 30),
    output_tokens=Spread(200, 300),
    turns=Spread(9, 9),
    context_tokens_max=20_000,
)


def scenario(shape: str, agents: dict[AgentKind, int] | None = None, planner: PlannerConfig | None = None) -> Scenario:
    """Twenty workers, unless told otherwise."""
    arm = ours(LoopConfig(planner)) if planner else ARMS["ours-static"]
    workload = WorkloadConfig((Period(0.0, agents or {WORKER: 20}),))
    return Scenario(MACHINE, SplitShape.parse(shape), workload, arm)
