"""One simulated run: a cluster, an arm that routes and changes its split, the work that it gets, what goes wrong.

The same scenario gives the same run in every process.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from evolving.core.planner import Split, SplitShape, assign
from evolving.core.terms import Role
from evolving_sim.arms.arm import Arm, Controller, Policies, PolicySetup
from evolving_sim.arms.named import ARMS
from evolving_sim.events import EventHeap, Priority
from evolving_sim.faults import Fault, plan_faults
from evolving_sim.node_config import NodeConfig
from evolving_sim.planner_loop import PlannerLoop
from evolving_sim.population import WorkloadConfig
from evolving_sim.ports import Workload
from evolving_sim.results import Results, Summary
from evolving_sim.role_changes import RoleChange
from evolving_sim.sim_cluster import Listeners, SimCluster

_LOOK_S = 1.0  # between looks at prefill nodes' waits
_DEBUG_EVENTS = 100  # between checks of all invariants
_YOUNG = 50_000  # objects made between looks for garbage: a run makes many, and hardly any that only cycles keep


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated."""

    machine: NodeConfig  # every node is one
    shape: SplitShape  # to begin with
    workload: WorkloadConfig
    arm: Arm = ARMS["ours-static"]
    seed: int = 1
    faults: Sequence[Fault] = ()
    gateway_s: float = 0.0  # from a request's being sent until it is routed: its way, and making tokens of its text
    debug: bool = False  # check invariants all the while: for small clusters


@dataclass(slots=True)
class Run:
    """A scenario that is being played."""

    scenario: Scenario
    events: EventHeap = field(init=False)
    cluster: SimCluster = field(init=False)
    workload: Workload = field(init=False)
    results: Results = field(init=False, default_factory=Results)

    def __post_init__(self) -> None:
        scenario = self.scenario
        node_ids = [f"n{number:03}" for number in range(scenario.shape.total)]
        split = Split(1, assign(scenario.shape, {}, node_ids), "as the scenario says", "scenario", -1e9)
        self.events = EventHeap()
        machines = dict.fromkeys(node_ids, scenario.machine)
        self.cluster = SimCluster(
            self.events, machines, split, scenario.arm, scenario.seed, gateway_s=scenario.gateway_s
        )
        self.cluster.listeners.append(Listeners(done=self.results.add, role_changed=self._role_changed))
        self.workload = scenario.workload.workload(scenario.seed)
        self.workload.begin(self.events, self.cluster)
        if self.controller is not None:
            self.controller.begin(self.events, self.cluster)
        plan_faults(scenario.faults, self.events, self.cluster, self.planner.fail_over if self.planner else None)
        self._look()
        if scenario.debug:
            self._check_after(_DEBUG_EVENTS)

    @property
    def controller(self) -> Controller | None:
        """Who changes the split; None: it stays."""
        return self.cluster.policies.controller

    @property
    def planner(self) -> PlannerLoop | None:
        """Our planner, where it is the one."""
        return self.controller if isinstance(self.controller, PlannerLoop) else None

    def until(self, end_s: float) -> None:
        """Go on to `end_s` of virtual time."""
        threshold = gc.get_threshold()
        gc.set_threshold(_YOUNG, *threshold[1:])
        try:
            self.events.run_until(end_s)
        finally:
            gc.set_threshold(*threshold)

    def _look(self) -> None:
        """Note how long prompts wait where they are computed, and how many of those nodes do nothing."""
        nodes = self.cluster.candidates(Role.PREFILL)
        if nodes:
            idle = sum(node.idle for node in nodes)
            self.results.sample_waits(self.events.now_s, [node.wait_s for node in nodes], idle)
        self.events.after(_LOOK_S, Priority.REPORT, self._look)

    def _role_changed(self, change: RoleChange) -> None:
        """A switch is over when all the nodes it moved are."""
        times = [each.took_s for each in self.cluster.changes.all if each.decided_s == change.decided_s]
        if not any(math.isnan(took_s) for took_s in times):
            self.results.switched(change.decided_s, max(times))

    def _check_after(self, events: int) -> None:
        left = events

        def happened() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                left = events
                self.check_invariants()

        self.events.after_each = happened

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
        self.cluster.check_invariants()
        self.workload.check_invariants()
        if self.planner is not None:
            self.planner.check_invariants()


def search(scenario: Scenario, from_s: float, to_s: float) -> dict[SplitShape, Summary]:
    """What every fixed split of the scenario's nodes serves in [from_s, to_s): the exhaustive search."""
    return {shape: serve(scenario, shape, from_s, to_s) for shape in shapes(scenario.shape.total)}


def serve(scenario: Scenario, shape: SplitShape, from_s: float, to_s: float) -> Summary:
    """What a fixed split serves in [from_s, to_s)."""
    run = Run(replace(scenario, shape=shape, arm=fixed(scenario.arm)))
    run.until(to_s)
    return run.results.between(from_s, to_s)


def fixed(arm: Arm) -> Arm:
    """An arm whose split stays."""

    def policies(setup: PolicySetup) -> Policies:
        return replace(arm.policies(setup), controller=None)

    return replace(arm, policies=policies)


def shapes(nodes: int) -> list[SplitShape]:
    """Every split of so many nodes, by prefill nodes."""
    return [SplitShape(prefill, nodes - prefill) for prefill in range(1, nodes)]
