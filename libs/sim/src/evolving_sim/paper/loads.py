"""What is asked of the cluster in each experiment of the paper, by the name that plays use."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from evolving_sim.kinds import Kind
from evolving_sim.machines import FITTED, Fitted, glm_5_2, kimi_k2_6
from evolving_sim.mixes import (
    AGENTS_PER_CODING_AGENT,
    ARRIVALS_PER_CODING_AGENT,
    CLAUDE_CODE,
    CODING,
    COMPUTER_USE,
    MATH,
    MATH_LONG,
)
from evolving_sim.node_config import NodeConfig
from evolving_sim.population import Arrivals, Burst, Period, WorkloadConfig

SHIFT_PERIOD_S = 3600.0
"""§5.4: three hours, three compositions."""

PARTITION_PERIOD_S = 1800.0
BURST_AGENTS = 20

_COMPOSITIONS: Sequence[Mapping[Kind, int]] = (
    {MATH_LONG: 288},
    {MATH_LONG: 144, COMPUTER_USE: 72},
    {COMPUTER_USE: 144},
)
"""§5.4, of nine nodes; with Kimi K2.6."""

# Nodes, agents, and how many of ours stand for one of the paper's: at a time, and where they arrive.
_STATIC: Mapping[str, tuple[Callable[[Fitted], NodeConfig], Kind, float, float]] = {
    "Putnam": (glm_5_2, MATH, 1.0, 1.0),
    "CC": (glm_5_2, CLAUDE_CODE, AGENTS_PER_CODING_AGENT, ARRIVALS_PER_CODING_AGENT),
    "OSWorld": (kimi_k2_6, COMPUTER_USE, 1.0, 1.0),
}


@dataclass(frozen=True, slots=True)
class Load:
    """Nodes and what is asked of them."""

    machine: NodeConfig
    workload: WorkloadConfig


def load_of(name: str, fit: Fitted = FITTED) -> Load:
    """By name, on machines as `fit` has them. ValueError: there is none such.

    "CC (90)": so many agents at a time; "CC, 0.5 agents/min": arrivals; "shift": §5.4; "partition 3": a partition of
    nine nodes whose composition goes round, each partition's at another place, so that all of them together are asked
    nearly the same all the time (§5.5; the paper tells neither the compositions nor for how long).
    """
    if match := re.fullmatch(r"(\w+) \((\d+)\)", name):
        machine, kind, per_agent, _ = _STATIC[match[1]]
        return Load(machine(fit), WorkloadConfig((Period(0.0, {kind: round(int(match[2]) * per_agent)}),)))
    if match := re.fullmatch(r"(\w+), ([\d.]+) agents/min", name):
        machine, kind, _, per_arrival = _STATIC[match[1]]
        return Load(machine(fit), WorkloadConfig(arrivals=(Arrivals(kind, float(match[2]) * per_arrival),)))
    if name == "shift":
        return Load(kimi_k2_6(fit), WorkloadConfig(_periods(_COMPOSITIONS, SHIFT_PERIOD_S)))
    if match := re.fullmatch(r"partition (\d+)", name):
        at = int(match[1]) % len(_COMPOSITIONS)
        around = [*_COMPOSITIONS[at:], *_COMPOSITIONS[:at]]
        return Load(kimi_k2_6(fit), WorkloadConfig(_periods(around, PARTITION_PERIOD_S)))
    raise ValueError(f"no load is called {name!r}")


def _periods(compositions: Sequence[Mapping[Kind, int]], period_s: float) -> tuple[Period, ...]:
    return tuple(Period(period_s * number, agents) for number, agents in enumerate(compositions))


def bursts(per_hour: float, until_s: float) -> tuple[Burst, ...]:
    """So many times an hour, evenly, 20 sub-agents that start at once."""
    sub_agents = CODING.sub_agents
    assert sub_agents is not None
    count = int(until_s / 3600.0 * per_hour)
    return tuple(Burst((number + 0.5) * 3600.0 / per_hour, BURST_AGENTS, sub_agents.kind) for number in range(count))
