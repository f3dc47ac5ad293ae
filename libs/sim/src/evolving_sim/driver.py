"""One simulated run: a cluster, the agents that use it, and perhaps a planner.

The same scenario gives the same run in every process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from evolving.core.planner import Split, SplitShape, assign
from evolving.core.routing import RoutingConfig
from evolving_sim.events import EventHeap
from evolving_sim.node_config import NodeConfig
from evolving_sim.planner_loop import LoopConfig, PlannerLoop
from evolving_sim.population import Burst, Period, Population
from evolving_sim.results import Results, Summary
from evolving_sim.sim_cluster import Listeners, SimCluster


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated."""

    machine: NodeConfig  # every node is one
    shape: SplitShape  # to begin with
    periods: Sequence[Period]
    planner: LoopConfig | None = None  # None: the split stays
    bursts: Sequence[Burst] = ()
    seed: int = 1


@dataclass(slots=True)
class Run:
    """A scenario that is being played."""

    scenario: Scenario
    events: EventHeap = field(init=False)
    cluster: SimCluster = field(init=False)
    population: Population = field(init=False)
    planner: PlannerLoop | None = field(init=False, default=None)
    results: Results = field(init=False, default_factory=Results)

    def __post_init__(self) -> None:
        scenario = self.scenario
        node_ids = [f"n{number:03}" for number in range(scenario.shape.total)]
        split = Split(1, assign(scenario.shape, {}, node_ids), "as the scenario says", "scenario", -1e9)
        routing = RoutingConfig(fetch_bytes_per_s=scenario.machine.fetch_bytes_per_s)
        self.events = EventHeap()
        self.cluster = SimCluster(self.events, dict.fromkeys(node_ids, scenario.machine), split, routing)
        self.cluster.listeners.append(Listeners(done=self.results.add))
        self.population = Population(self.events, self.cluster, scenario.periods, scenario.seed, scenario.bursts)
        self.population.begin()
        if scenario.planner is not None:
            self.planner = PlannerLoop(self.events, self.cluster, scenario.planner)
            self.planner.begin()

    def until(self, end_s: float) -> None:
        """Go on to `end_s` of virtual time."""
        self.events.run_until(end_s)

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        self.cluster.check_invariants()
        self.population.check_invariants()
        if self.planner is not None:
            self.planner.check_invariants()


def search(scenario: Scenario, from_s: float, to_s: float) -> dict[SplitShape, Summary]:
    """What every fixed split of the scenario's nodes serves in [from_s, to_s): the exhaustive search."""
    return {shape: serve(scenario, shape, from_s, to_s) for shape in shapes(scenario.shape.total)}


def serve(scenario: Scenario, shape: SplitShape, from_s: float, to_s: float) -> Summary:
    """What a fixed split serves in [from_s, to_s)."""
    run = Run(replace(scenario, shape=shape, planner=None))
    run.until(to_s)
    return run.results.between(from_s, to_s)


def shapes(nodes: int) -> list[SplitShape]:
    """Every split of so many nodes, by prefill nodes."""
    return [SplitShape(prefill, nodes - prefill) for prefill in range(1, nodes)]
