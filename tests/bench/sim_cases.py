"""What bench-sim runs, each case in a process of its own."""

from __future__ import annotations

import hashlib
import resource
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from evolving.core.planner import SplitShape
from evolving_sim.arms.named import ARMS
from evolving_sim.driver import Run, Scenario
from evolving_sim.machines import GLM_5_2
from evolving_sim.mixes import CODING
from evolving_sim.population import Period, WorkloadConfig
from evolving_sim.results import Table
from evolving_sim.trace_files import read_sessions
from evolving_sim.traced import TraceKind
from evolving_sim.traces import TraceSession

REQUESTS, REQUESTS_COMPARED = 10_000, 1_500
STEP_S = 10.0
CONTEXT_TOKENS_MAX = 400_000
THINK_S_MAX = 60.0
SESSIONS, SESSIONS_AT_ONCE = 200, 126
NODES, PARTITIONS, PARTITION_NODES, PARTITION_S = 9, 8, 96, 300.0
PROCESSES = 2  # that play partitions
AGENTS_PER_NODE = 14  # as many as nine nodes have in the paper's coding runs: 126

_CODING = WorkloadConfig(periods=(Period(0.0, {CODING: AGENTS_PER_NODE * NODES}),))
_AGENTS_OF_THE_PAPER = Scenario(GLM_5_2, SplitShape(4, 5), _CODING, ARMS["ours"])


def agents_of_the_paper(trace: Path) -> dict[str, Any]:
    """Nine nodes and 126 coding agents, with the planner, until so many requests are answered."""
    return _until_answered(_AGENTS_OF_THE_PAPER, REQUESTS)


def not_compiled(trace: Path) -> dict[str, Any]:
    """The same, fewer requests."""
    return _until_answered(_AGENTS_OF_THE_PAPER, REQUESTS_COMPARED)


def recorded(trace: Path) -> dict[str, Any]:
    """The first sessions of the trace on the same nodes, so many at a time, to their end."""
    kind = TraceKind("recorded", tuple(_sessions(trace)), shuffled=False, repeated=False)
    workload = WorkloadConfig(periods=(Period(0.0, {kind: SESSIONS_AT_ONCE}),), begun=False)
    requests = sum(session.request_count for session in kind.sessions())
    return _until_answered(Scenario(GLM_5_2, SplitShape(4, 5), workload), requests)


def recorded_by_dynamo(trace: Path) -> dict[str, Any]:
    """The same sessions in Dynamo's offline replay, on as many workers with its KV router."""
    from bench.dynamo_replay import replay, write_sessions

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sessions.jsonl"
        write_sessions(_sessions(trace), path)
        try:
            return replay(path, GLM_5_2, 4, 5, SESSIONS_AT_ONCE)
        except ImportError as error:
            return {"unavailable": f"ai-dynamo-runtime is not installed here ({error})"}
        except Exception as error:  # noqa: BLE001  # no narrower type; what it takes changes from release to release
            return {"unavailable": f"Dynamo's replay refuses: {error}"}


def partitions(trace: Path) -> dict[str, Any]:
    """768 nodes of four GPUs in eight partitions, each with its planner, router, directory and agents.

    They have nothing in common, so each is played in a process of its own, as many at a time as `PROCESSES`.
    """
    begun_s = time.perf_counter()
    with ProcessPoolExecutor(PROCESSES, get_context("spawn"), max_tasks_per_child=1) as pool:
        tables, peaks_mib = zip(*pool.map(_partition, range(1, PARTITIONS + 1)), strict=True)
    found = _figures(tables, PARTITION_S, time.perf_counter() - begun_s)
    return {**found, "peak_memory_mib": peak_memory_mib() + PROCESSES * max(peaks_mib)}


def _partition(seed: int) -> tuple[Table, float]:
    """One, and the most memory it took, MiB."""
    workload = WorkloadConfig(periods=(Period(0.0, {CODING: AGENTS_PER_NODE * PARTITION_NODES}),))
    run = Run(Scenario(GLM_5_2, SplitShape(43, 53), workload, ARMS["ours"], seed=seed))
    run.until(PARTITION_S)
    return run.results.table(), peak_memory_mib()


def peak_memory_mib() -> float:
    """Of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _until_answered(scenario: Scenario, requests: int) -> dict[str, Any]:
    begun_s = time.perf_counter()
    run = Run(scenario)
    made_s = time.perf_counter() - begun_s
    while len(run.results) < requests:
        run.until(run.events.now_s + STEP_S)
    wall_s = time.perf_counter() - begun_s
    return {"made_s": made_s, **_figures([run.results.table()], run.events.now_s, wall_s)}


def _figures(tables: Sequence[Table], simulated_s: float, wall_s: float) -> dict[str, Any]:
    prompts = np.concatenate([table.prompt_tokens for table in tables])
    first = [column[:REQUESTS_COMPARED].tobytes() for table in tables for column in (table.sent_s, table.done_s)]
    return {
        "first_requests_sha256": hashlib.sha256(b"".join(first)).hexdigest(),
        "requests": len(prompts),
        "prompt_tokens_mean": float(prompts.mean()),
        "simulated_s": simulated_s,
        "wall_s": wall_s,
        "ttft_mean_s": float(np.concatenate([table.ttft_s for table in tables]).mean()),
        "e2e_mean_s": float(np.concatenate([table.e2e_s for table in tables]).mean()),
    }


def _sessions(trace: Path) -> list[TraceSession]:
    """The first that fit, without their hours of silence: those cost no simulator anything."""
    fitting = (session for session in read_sessions(trace) if _longest(session) <= CONTEXT_TOKENS_MAX)
    return [_busy(session) for session, _ in zip(fitting, range(SESSIONS), strict=False)]


def _busy(session: TraceSession) -> TraceSession:
    """Nobody thinks for longer than a minute; when requests came is told accordingly."""
    agents = []
    for agent in session.agents:
        at_s, requests = 0.0, []
        for request in agent.requests:
            think_s = min(request.think_s, THINK_S_MAX)
            at_s += think_s
            requests.append(replace(request, at_s=at_s, think_s=think_s))
            at_s += request.service_s
        agents.append(replace(agent, requests=tuple(requests)))
    return replace(session, agents=tuple(agents))


def _longest(session: TraceSession) -> int:
    return max(request.input_tokens + request.output_tokens for each in session.agents for request in each.requests)
