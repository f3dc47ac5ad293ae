"""Plays a play."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from evolving.core.config import EvictionPolicy, Gate, PlannerConfig
from evolving.core.planner import SplitShape
from evolving_sim.arms.arm import Arm
from evolving_sim.arms.named import ARMS, dynamo, ours
from evolving_sim.arms.parameters import KIMI_CONTEXT_TOKENS, RESTART_S, RESTARTS_S, DynamoPlannerConfig
from evolving_sim.driver import Run, Scenario, shapes
from evolving_sim.machines import FITTED, KIMI_K2_6, Fitted
from evolving_sim.paper.figures import Metric
from evolving_sim.paper.loads import bursts, load_of
from evolving_sim.paper.plays import (
    BEST,
    SEARCH_FROM_S,
    SEARCH_TO_S,
    WINDOW_S,
    Outcome,
    Play,
    Stretch,
    metrics_of,
)
from evolving_sim.paper.runs import BY_NEED, DYNAMO, HOUR, NODES, OURS, SGLANG
from evolving_sim.planner_loop import LoopConfig, shape_of

_USUAL_END_S = HOUR.to_s

BLOCK_TOKENS = 256
"""Of all runs here: four times a cluster's, as fewer blocks make a faster simulation. So a request computes a hundred
tokens more than it would have to, of some thousands; the fit has that in it."""


def perform(play: Play, fit: Fitted = FITTED) -> Outcome:
    """Play it, on nodes as `fit` has them."""
    if play.shape == BEST:
        return _perform_best(play, fit)
    begun_s = time.perf_counter()
    run = Run(_scenario(play, fit))
    run.until(play.end_s)
    run.check_invariants()
    unneeded = _unneeded_percent(run)
    windows = [run.results.between(WINDOW_S * at, WINDOW_S * (at + 1)) for at in range(int(play.end_s / WINDOW_S))]
    return Outcome(
        stretches={
            each.name: {**metrics_of(run.results.between(each.from_s, each.to_s)), Metric.KEPT_UNNEEDED: unneeded}
            for each in play.stretches
        },
        final_shape=str(shape_of(run.cluster)),
        switches=tuple((switch.at_s, switch.shape) for switch in (run.controller.switches if run.controller else ())),
        windows=tuple(round(window.requests_per_s, 4) for window in windows),
        requests=len(run.results),
        wall_s=time.perf_counter() - begun_s,
    )


def _perform_best(play: Play, fit: Fitted) -> Outcome:
    """The split that serves most in shorter runs, played as long as is wanted."""
    share = min(1.0, play.end_s / _USUAL_END_S)
    search = Stretch("search", SEARCH_FROM_S * share, SEARCH_TO_S * share)
    tried = {str(shape): perform(replace(play, shape=str(shape), stretches=(search,)), fit) for shape in shapes(NODES)}
    searched = {shape: each.stretches[search.name][Metric.THROUGHPUT] for shape, each in tried.items()}
    best = perform(replace(play, shape=max(searched, key=searched.__getitem__)), fit)
    requests = best.requests + sum(each.requests for each in tried.values())
    wall_s = best.wall_s + sum(each.wall_s for each in tried.values())
    return replace(best, searched=searched, requests=requests, wall_s=wall_s)


def _unneeded_percent(run: Run) -> float:
    """Of the blocks that nodes hold: those that no live branch counts."""
    counts = run.cluster.directory.directory.pool_counts()
    held = counts.held_blocks + counts.zero_blocks
    return 100.0 * counts.zero_blocks / held if held else math.nan


def cost(play: Play) -> float:
    """About how long it takes, in no unit."""
    if play.shape == BEST:
        return NODES * (play.end_s + len(shapes(NODES)) * SEARCH_TO_S)
    return play.end_s * SplitShape.parse(play.shape).total


def _scenario(play: Play, fit: Fitted) -> Scenario:
    load = load_of(play.load, fit)
    workload = replace(load.workload, bursts=bursts(play.bursts_per_hour, play.end_s))
    shape = SplitShape.parse(play.shape)
    nodes, arm = replace(load.machine, block_tokens=BLOCK_TOKENS), _arm(play)
    if arm.host_copies != 1.0:
        arm = replace(arm, host_copies=fit.host_copies)
    return Scenario(nodes, shape, workload, arm, seed=play.seed, gateway_s=fit.gateway_s)


def dynamo_of(load: str) -> Arm:
    """Dynamo as it ran with a load: how long its restarts took (Table 1), and the longest context of the model."""
    tokens = KIMI_CONTEXT_TOKENS if load_of(load).machine == KIMI_K2_6 else DynamoPlannerConfig().context_tokens
    name, _, agents = load.removesuffix(")").partition(" (")
    restart_s = RESTARTS_S.get((name, int(agents)), RESTART_S) if agents.isdecimal() else RESTART_S
    return dynamo(DynamoPlannerConfig(context_tokens=tokens), restart_s)


def _arm(play: Play) -> Arm:
    if play.arm == BY_NEED:
        return replace(ARMS[SGLANG], name=BY_NEED, eviction=EvictionPolicy.AGENT)
    if play.arm == DYNAMO:
        return dynamo_of(play.load)
    if play.arm != OURS:
        return ARMS[play.arm]
    planner = PlannerConfig(
        window_s=play.window_s,
        slices=play.slices,
        slices_valid_least=math.ceil(0.8 * play.slices),
        gate=Gate(play.gate),
    )
    return ours(LoopConfig(planner))
