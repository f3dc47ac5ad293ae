"""The split follows the work, over live services in compressed time (paper, sections 4.3 and 5.5).

Windows last seconds instead of ten minutes, and nodes compute ten times as fast as their coefficients say. Agents first
ask much of prefill, then much of decode; each time the planner finds the split that an exhaustive search with the true
coefficients finds, deciding as it would from what the agents themselves recorded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path

import pytest
from cluster import ClusterSpec, LocalCluster
from split_load import Agents, Asks, working

from evolving.core.config import PlannerConfig
from evolving.core.planner import SplitShape
from evolving.core.replan import evaluate
from evolving.core.terms import Role
from evolving.core.throughput import NodeModel, throughput
from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients
from evolving.runtime.channel import open_channel
from evolving.v1 import planner_pb2, planner_pb2_grpc

SPEED_UP = 10
SLOW_PREFILL, SLOW_DECODE = PrefillCoefficients(0.04, 5e-3, 0.0, 1e-6), DecodeCoefficients(0.2, 0.0, 0.06)
CHUNK_TOKENS, SLOTS = 512, 24
CONFIG = PlannerConfig(window_s=10.0, cooldown_s=3.0)
NODES, AGENTS = 5, 32
PREFILL_HEAVY, DECODE_HEAVY = Asks((400, 600), (6, 10)), Asks((24, 40), (16, 24))
# Reports come every second or less, and the newest slice is read half a slice after its end.
SETTLED_S = 5 * CONFIG.window_s
TRUE_MODEL = NodeModel(
    PrefillCoefficients(*(each / SPEED_UP for each in astuple(SLOW_PREFILL))),
    DecodeCoefficients(SLOW_DECODE.d0_s / SPEED_UP, 0.0, SLOW_DECODE.d2_s / SPEED_UP),
    new_tokens_per_iteration=CHUNK_TOKENS,
    decode_slots=SLOTS,
)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """Five mock nodes behind all services, one process each, and a planner in a hurry."""
    prefill, decode = (
        ",".join(map(str, astuple(each)[:count])) for each, count in ((SLOW_PREFILL, 5), (SLOW_DECODE, 4))
    )
    node_flags = (
        f"--mock-speed-up {SPEED_UP} --chunk-tokens {CHUNK_TOKENS} --decode-slots {SLOTS} --work-period-s 0.3 "
        f"--prefill-coefficients {prefill} --decode-coefficients {decode} "
        "--l1-tokens 65536 --l2-tokens 131072 --max-prompt-tokens 4096 --max-context-tokens 6144"
    )
    planner_flags = (
        f"--mode auto --window-s {CONFIG.window_s} --slices {CONFIG.slices} --cooldown-s {CONFIG.cooldown_s}"
    )
    spec = ClusterSpec(
        state_dir=tmp_path,
        model_path=Path("/dev/null"),
        engine="mock",
        nodes=NODES,
        initial_split="3P2D",
        gateway_port=0,
        node_flags=tuple(node_flags.split()),
        planner_flags=tuple(planner_flags.split()),
        start_timeout_s=60,
        grace_s=8,
    )
    running = LocalCluster(spec)
    running.start()
    try:
        yield running
    finally:
        assert running.stop() == [], "these did not stop in their grace period"


def search(asks: Asks) -> SplitShape:
    """The best of all splits, by the true coefficients and by the numbers that agents draw from."""
    found = {}
    for prefills in range(1, NODES):
        roles = {f"n{i}": Role.PREFILL if i < prefills else Role.DECODE for i in range(NODES)}
        shape = SplitShape(prefills, NODES - prefills)
        found[shape] = throughput(dict.fromkeys(roles, TRUE_MODEL), roles, asks.mean(), AGENTS).total
    best, second = sorted(found, key=found.__getitem__, reverse=True)[:2]
    assert found[best] > 1.15 * found[second], "a search with a clear result, or the test says nothing"
    return best


def shape_of(roles: Mapping[str, int]) -> SplitShape:
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

    async def settles(self, agents: Agents, shape: SplitShape) -> list[planner_pb2.Decision]:
        """Wait until a whole window of the present work says that the split shall stay at `shape`.

        All decisions from now on.
        """
        began_s = time.time()
        async with asyncio.timeout(SETTLED_S):
            while True:
                found = await self.decisions(began_s)
                last = found[-1] if found else None
                if last and last.kind == "stay" and whole(last, began_s) and shape_of(last.roles_after) == shape:
                    return found
                assert not agents.record.failures, agents.record.failures[:5]
                await asyncio.sleep(0.3)


def whole(decision: planner_pb2.Decision, began_s: float) -> bool:
    """Whether a decision looks back on nothing earlier than `began_s`, and on enough."""
    slack_s = 2 * CONFIG.slice_s  # requests that were open then, and the time reports take
    since_s = decision.decided_at_s - CONFIG.window_s - slack_s
    return since_s >= began_s and not decision.evaluation.problem


def wanted(evaluation: planner_pb2.Evaluation) -> SplitShape:
    """What the planner finds best, whether or not it may switch yet."""
    passing = [each for each in evaluation.candidates if each.passes]
    if not passing:
        return shape_of(evaluation.roles)
    best = max(passing, key=lambda each: each.mean_gain).shape
    return SplitShape(best.prefill_nodes, best.decode_nodes)


def check_same(decisions: Sequence[planner_pb2.Decision], began_s: float, agents: Agents) -> int:
    """What the planner finds best is what the same rules find in the agents' own record, or within 2 % of it.

    Returns how many decisions were compared.
    """
    clock_s = time.monotonic() - time.time()
    compared = [each for each in decisions if whole(each, began_s)]
    for decision in compared:
        slices = agents.record.slices(
            decision.decided_at_s + clock_s - CONFIG.slice_s / 2, CONFIG.slices, CONFIG.slice_s
        )
        roles = {node: Role(role) for node, role in decision.evaluation.roles.items()}
        ours = evaluate(slices, roles, dict.fromkeys(roles, TRUE_MODEL), CONFIG)
        best = ours.best.shape if ours.best is not None else shape_of(decision.evaluation.roles)
        ours_at = {each.shape: each.throughput for each in ours.candidates}
        assert ours_at[wanted(decision.evaluation)] >= 0.98 * ours_at[best], f"{decision.reason}, but {best} it is"
    return len(compared)


@pytest.mark.deep
async def test_the_split_follows_the_work_and_then_stays(cluster: LocalCluster) -> None:
    first, second = search(PREFILL_HEAVY), search(DECODE_HEAVY)
    assert (first, second) == (SplitShape(4, 1), SplitShape(1, 4))
    async with open_channel(cluster.processes["planner"].address) as channel:
        watch = Watch(planner_pb2_grpc.PlannerServiceStub(channel))
        async with working([cluster.gateway_address], AGENTS, PREFILL_HEAVY) as agents:
            for asks, best in ((PREFILL_HEAVY, first), (DECODE_HEAVY, second)):
                agents.asks, began_s = asks, time.time()
                decisions = await watch.settles(agents, best)
                print(*(f"{d.decided_at_s - began_s:.1f} s: {d.kind}, {d.reason}" for d in decisions), sep="\n")
                assert 1 <= sum(each.kind == "switch" for each in decisions) <= 2
                assert check_same(decisions, began_s, agents) >= 1
        assert agents.record.failures == []
        assert agents.record.finished > 0
