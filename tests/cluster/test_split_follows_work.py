"""The split follows the work, over live services in compressed time (paper, sections 4.3 and 5.5).

Windows last eight seconds, and nodes compute ten times as fast as their coefficients say. Agents first ask much of
prefill, then much of decode. Each time the planner ends on the split that serves most of all fixed ones, as it does in
virtual time, and decides as it would from what the agents themselves recorded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path

import pytest
from cluster import ClusterSpec, LocalCluster
from split_load import Agents, working

from evolving.core.config import PlannerConfig
from evolving.core.planner import SplitShape
from evolving.core.replan import evaluate
from evolving.core.terms import Role
from evolving.core.throughput import NodeModel
from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients
from evolving.runtime.channel import open_channel
from evolving.v1 import planner_pb2, planner_pb2_grpc
from evolving_sim.arms.named import ours
from evolving_sim.driver import Run, Scenario, search
from evolving_sim.node_config import NodeConfig
from evolving_sim.planner_loop import LoopConfig, shape_of
from evolving_sim.population import Period, WorkloadConfig
from evolving_sim.sessions import AgentKind, Spread

SPEED_UP = 10
MACHINE = NodeConfig(
    PrefillCoefficients(0.04, 5e-3, 0.0, 1e-6),
    DecodeCoefficients(0.2, 0.0, 0.06),
    chunk_tokens=512,
    decode_slots=24,
)
FIRST, AGENTS = SplitShape(3, 2), 32
SLOW = PlannerConfig(window_s=80.0, cooldown_s=24.0)
CONFIG = PlannerConfig(window_s=SLOW.window_s / SPEED_UP, cooldown_s=SLOW.cooldown_s / SPEED_UP)
SETTLED_S = 6 * CONFIG.window_s  # whole windows, of which the second should do


def agents_that_ask(name: str, new_tokens: int, output_tokens: int) -> AgentKind:
    """Sessions of three turns without pauses; each has about so many new tokens and so much output."""
    new, output = (Spread(mean, 1.02 * mean, 0.8 * mean, 1.2 * mean) for mean in (new_tokens, output_tokens))
    nothing = Spread(1.0, 1.0, 0.0, 0.0)
    return AgentKind(name, 0, new, new, output, nothing, Spread(3.0, 3.0), 4000, 0.5, 100)


KINDS = (agents_that_ask("much to prefill", 500, 8), agents_that_ask("much to decode", 20, 16))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """Mock nodes behind all services, one process each, and a planner in a hurry."""
    prefill = ",".join(map(str, astuple(MACHINE.prefill)))
    decode = ",".join(map(str, astuple(MACHINE.decode)[:4]))
    node_flags = (
        f"--mock-speed-up {SPEED_UP} --chunk-tokens {MACHINE.chunk_tokens} --decode-slots {MACHINE.decode_slots} "
        f"--prefill-coefficients {prefill} --decode-coefficients {decode} --work-period-s 0.3 "
        "--l1-tokens 65536 --l2-tokens 131072 --max-prompt-tokens 4096 --max-context-tokens 6144"
    )
    planner_flags = (
        f"--mode auto --window-s {CONFIG.window_s} --slices {CONFIG.slices} --cooldown-s {CONFIG.cooldown_s}"
    )
    running = LocalCluster(
        ClusterSpec(
            state_dir=tmp_path,
            model_path=Path("/dev/null"),
            engine="mock",
            nodes=FIRST.total,
            initial_split=str(FIRST),
            gateway_port=0,
            node_flags=tuple(node_flags.split()),
            planner_flags=tuple(planner_flags.split()),
            start_timeout_s=60,
            grace_s=8,
        )
    )
    running.start()
    try:
        yield running
    finally:
        assert running.stop() == [], "these did not stop in their grace period"


def best_fixed_split(kind: AgentKind) -> SplitShape:
    """The one that serves most, of all fixed ones: searched in virtual time."""
    scenario = Scenario(MACHINE, FIRST, WorkloadConfig((Period(0.0, {kind: AGENTS}),)))
    served = {shape: found.requests_per_s for shape, found in search(scenario, 100.0, 250.0).items()}
    best, second = sorted(served, key=served.__getitem__, reverse=True)[:2]
    assert served[best] > 1.1 * served[second], "a search with a clear result, or the test says nothing"
    return best


def splits_in_virtual_time() -> list[SplitShape]:
    """What the planner makes of the same work in the simulator: the split at the end of either period."""
    periods = tuple(Period(4 * SLOW.window_s * number, {kind: AGENTS}) for number, kind in enumerate(KINDS))
    run = Run(Scenario(MACHINE, FIRST, WorkloadConfig(periods), ours(LoopConfig(SLOW))))
    found = []
    for number in range(len(KINDS)):
        run.until(4 * SLOW.window_s * (number + 1) - 1)
        found.append(shape_of(run.cluster))
    return found


def true_model() -> NodeModel:
    """A node as it is, by its own clock."""
    prefill = PrefillCoefficients(*(each / SPEED_UP for each in astuple(MACHINE.prefill)))
    decode = DecodeCoefficients(*(each / SPEED_UP for each in astuple(MACHINE.decode)[:4]))
    return NodeModel(prefill, decode, MACHINE.chunk_tokens, MACHINE.decode_slots)


def shape(roles: Mapping[str, int]) -> SplitShape:
    """How many of each phase."""
    values = list(roles.values())
    return SplitShape(values.count(Role.PREFILL), values.count(Role.DECODE))


class Watch:
    """The planner's decisions by measurement, as an operator reads them."""

    def __init__(self, planner: planner_pb2_grpc.PlannerServiceAsyncStub) -> None:
        self._planner = planner

    async def decisions(self, since_s: float) -> list[planner_pb2.Decision]:
        """Those made since a unix time, oldest first."""
        request = planner_pb2.ListDecisionsRequest(page_size=1000, with_evaluations=True)
        answer = await self._planner.ListDecisions(request, timeout=10)
        found = [each for each in reversed(answer.decisions) if each.decided_at_s >= since_s]
        return [each for each in found if each.kind in ("switch", "stay")]

    async def settles(self, agents: Agents, at: SplitShape) -> list[planner_pb2.Decision]:
        """Wait until a whole window of the present work says that the split shall stay there.

        All decisions from now on.
        """
        began_s = time.time()
        found: list[planner_pb2.Decision] = []
        try:
            async with asyncio.timeout(SETTLED_S):
                while True:
                    found = await self.decisions(began_s)
                    last = found[-1] if found else None
                    if last and last.kind == "stay" and whole(last, began_s) and shape(last.roles_after) == at:
                        return found
                    assert not agents.record.failures, agents.record.failures[:5]
                    await asyncio.sleep(0.3)
        except TimeoutError:
            raise AssertionError(told(found, began_s)) from None


def told(decisions: Sequence[planner_pb2.Decision], began_s: float) -> str:
    """One decision a line."""
    return "\n".join(f"{each.decided_at_s - began_s:.1f} s: {each.kind}, {each.reason}" for each in decisions)


def whole(decision: planner_pb2.Decision, began_s: float) -> bool:
    """Whether a decision looks back on nothing earlier than `began_s`, and on enough."""
    # Requests that were open then end within a window more; what they were slows or speeds those beside them.
    return decision.decided_at_s - 2 * CONFIG.window_s >= began_s and not decision.evaluation.problem


def wanted(evaluation: planner_pb2.Evaluation) -> SplitShape:
    """What the planner finds best, whether or not it may switch yet."""
    passing = [each for each in evaluation.candidates if each.passes]
    if not passing:
        return shape(evaluation.roles)
    best = max(passing, key=lambda each: each.mean_gain).shape
    return SplitShape(best.prefill_nodes, best.decode_nodes)


def check_same(decisions: Sequence[planner_pb2.Decision], began_s: float, agents: Agents) -> None:
    """What the planner finds best is what the same rules find in the agents' own record, or within 2 % of it."""
    clock_s = time.monotonic() - time.time()
    compared = [each for each in decisions if whole(each, began_s)]
    assert compared
    for decision in compared:
        end_s = decision.decided_at_s + clock_s - CONFIG.slice_s / 2
        slices = agents.record.slices(end_s, CONFIG.slices, CONFIG.slice_s)
        roles = {node: Role(role) for node, role in decision.evaluation.roles.items()}
        ours = evaluate(slices, roles, dict.fromkeys(roles, true_model()), CONFIG)
        best = ours.best.shape if ours.best is not None else shape(roles)
        served = {each.shape: each.throughput for each in ours.candidates}
        assert served[wanted(decision.evaluation)] >= 0.98 * served[best], f"{decision.reason}, but {best} it is"


@pytest.mark.slow
async def test_the_split_follows_the_work_and_then_stays(cluster: LocalCluster) -> None:
    best = [best_fixed_split(kind) for kind in KINDS]
    assert best == [SplitShape(4, 1), SplitShape(1, 4)] == splits_in_virtual_time()
    async with open_channel(cluster.processes["planner"].address) as channel:
        watch = Watch(planner_pb2_grpc.PlannerServiceStub(channel))
        async with working([cluster.gateway_address], AGENTS, KINDS[0]) as agents:
            for kind, at in zip(KINDS, best, strict=True):
                agents.kind, began_s = kind, time.time()
                decisions = await watch.settles(agents, at)
                print(told(decisions, began_s))
                assert 1 <= sum(each.kind == "switch" for each in decisions) <= 2
                check_same(decisions, began_s, agents)
        assert agents.record.failures == []
