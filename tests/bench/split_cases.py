"""What bench-split plays: nine nodes under the work of the paper's sections 5.2, 5.4 and 5.5, as far as it is told.

Fixed before any split was searched, like the machines and the kinds of agents (evolving_sim/machines.py, mixes.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from evolving.core.config import Gate, PlannerConfig
from evolving.core.planner import SplitShape
from evolving_sim.arms.arm import Arm
from evolving_sim.arms.named import ours
from evolving_sim.driver import Scenario
from evolving_sim.machines import GLM_5_2, KIMI_K2_6
from evolving_sim.mixes import CODING, COMPUTER_USE, MATH, MATH_LONG
from evolving_sim.node_config import NodeConfig
from evolving_sim.planner_loop import LoopConfig
from evolving_sim.population import Burst, Period, WorkloadConfig
from evolving_sim.sessions import AgentKind

WINDOW_S = 600.0
WARM_S, END_S = 1200.0, 3600.0
"""A fixed split is measured between these, and a planner decides until the second."""

STEADY_END_S = END_S + 1.0
"""A second more: the decision at the last window's end is among those looked at."""

_GLM, _KIMI = (replace(machine, block_tokens=512) for machine in (GLM_5_2, KIMI_K2_6))
"""Blocks larger than a cluster's make a faster simulation; what was tried served within 0.3 % as much as with 64."""


@dataclass(frozen=True, slots=True)
class Case:
    """Work that stays as it is, from one or more first splits."""

    name: str
    machine: NodeConfig
    agents: Mapping[AgentKind, int]
    starts: tuple[str, ...]
    bests: tuple[str, ...] = ()  # splits of which one must be the best; none: whichever is

    def scenario(self, shape: SplitShape) -> Scenario:
        """From a first split, without a planner."""
        return Scenario(self.machine, shape, WorkloadConfig((Period(0.0, self.agents),)))


CASES = (
    # §5.5: 126 agents of the coding mix, four first splits.
    Case("coding", _GLM, {CODING: 126}, ("3P6D", "4P5D", "5P4D", "6P3D")),
    # §5.2: 8P1D.
    Case("computer use", _KIMI, {COMPUTER_USE: 144}, ("5P4D",), ("8P1D",)),
    # §5.2: 1P8D or 2P7D.
    Case("math", _GLM, {MATH: 256}, ("5P4D",), ("1P8D", "2P7D")),
)

BURST_AT_S, BURST_AGENTS = 2.5 * WINDOW_S, 20
"""Between two decisions, after those that could have found the best split."""

SHIFT_PERIOD_S = 3600.0
SHIFT = (
    Case("math, long", _KIMI, {MATH_LONG: 288}, ("5P4D",)),
    Case("mixed", _KIMI, {MATH_LONG: 144, COMPUTER_USE: 72}, ("5P4D",)),
    Case("computer use", _KIMI, {COMPUTER_USE: 144}, ("5P4D",)),
)
"""§5.4: an hour each."""
SHIFT_END_S = len(SHIFT) * SHIFT_PERIOD_S
SHIFT_FOLLOWED_WINDOWS = 2

SHIFT_WINDOWS = [(WINDOW_S * at, WINDOW_S * (at + 1)) for at in range(round(SHIFT_END_S / WINDOW_S))]
SHIFT_PERIODS = [(SHIFT_PERIOD_S * at + WARM_S, SHIFT_PERIOD_S * (at + 1)) for at in range(len(SHIFT))]
"""Stretches of time in which splits are compared; a period without its first windows, as elsewhere."""


def planner(gate: Gate) -> Arm:
    """Ours, with the defaults: a window of 600 s, 10 slices, 120 s of cooldown."""
    return ours(LoopConfig(PlannerConfig(gate=gate)))


def burst_scenario(shape: SplitShape, gate: Gate) -> Scenario:
    """The coding mix from a split, and 20 of its sub-agents that start at once."""
    coding = CASES[0]
    (kind,) = coding.agents
    assert kind.sub_agents is not None
    burst = Burst(BURST_AT_S, BURST_AGENTS, kind.sub_agents.kind)
    scenario = coding.scenario(shape)
    return replace(scenario, arm=planner(gate), workload=replace(scenario.workload, bursts=(burst,)))


def shift_scenario(arm: Arm) -> Scenario:
    """Math, then mixed, then computer use."""
    periods = tuple(Period(SHIFT_PERIOD_S * number, case.agents) for number, case in enumerate(SHIFT))
    return Scenario(_KIMI, SplitShape.parse(SHIFT[0].starts[0]), WorkloadConfig(periods), arm)
