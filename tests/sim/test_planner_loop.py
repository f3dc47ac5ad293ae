"""The planner in the loop finds the split that serves most (§5.5), smaller and shorter than bench-split."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sim.small import HELPER, READER, WORKER, WRITER, scenario

from evolving.core.config import PlannerConfig
from evolving.core.modes import Mode
from evolving.core.planner import SplitShape
from evolving_sim.arms.named import ours
from evolving_sim.driver import Run, search
from evolving_sim.planner_loop import LoopConfig, shape_of
from evolving_sim.population import Burst
from evolving_sim.sessions import AgentKind

# Slices of half a minute have tens of requests, as those of a minute have in the paper's runs.
PLANNER = PlannerConfig(window_s=300.0, cooldown_s=60.0)
END_S = 3 * PLANNER.window_s + 1.0


@pytest.mark.slow
@pytest.mark.parametrize("kind", [WORKER, READER, WRITER], ids=lambda kind: kind.name)
def test_the_planner_ends_on_the_best_fixed_split_from_anywhere(kind: AgentKind) -> None:
    agents = {kind: 24}
    served = {
        str(shape): summary.requests_per_s
        for shape, summary in search(scenario("3P2D", agents), PLANNER.window_s, END_S).items()
    }
    for start in ("2P3D", "4P1D"):
        run = Run(scenario(start, agents, PLANNER))
        run.until(END_S)
        run.check_invariants()
        assert run.planner is not None
        assert served[str(shape_of(run.cluster))] >= 0.98 * max(served.values()), (start, served)
        assert len(run.planner.switches) <= 2
        assert [switch.at_s % PLANNER.window_s for switch in run.planner.switches] == [0.0] * len(run.planner.switches)


@pytest.mark.slow
def test_a_burst_of_sub_agents_changes_nothing() -> None:
    """§4.3: work per request hardly changes when several sub-agents start at once."""
    settled = Run(scenario("3P2D", planner=PLANNER))
    settled.until(END_S)
    best = str(shape_of(settled.cluster))
    calm = scenario(best, planner=PLANNER)
    workload = replace(calm.workload, bursts=(Burst(1.5 * PLANNER.window_s, 20, HELPER),))
    run = Run(replace(calm, workload=workload))
    run.until(END_S)
    assert run.planner is not None
    assert [switch for switch in run.planner.switches if switch.at_s > 1.5 * PLANNER.window_s] == []


def test_every_request_is_measured_and_decisions_fall_on_windows() -> None:
    run = Run(replace(scenario("2P2D", {WORKER: 6}), arm=ours(LoopConfig(PLANNER, Mode.SHADOW))))
    run.until(2 * PLANNER.window_s)
    run.check_invariants()
    assert run.planner is not None
    assert [decision.decided_at_s for decision in run.planner.decisions] == [300.0, 600.0]
    assert shape_of(run.cluster) == SplitShape(2, 2), "in shadow nothing is changed"
    for number, decision in enumerate(run.planner.decisions):
        assert decision.evaluation is not None
        slices = decision.evaluation.slices
        began_s = number * PLANNER.window_s
        assert sum(each.completions for each in slices) == len(
            [each for each in run.results.served if began_s <= each.done_s < began_s + PLANNER.window_s]
        )
        assert all(each.without_prefill == 0 for each in slices)
