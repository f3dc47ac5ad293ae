"""One arm: a cluster of its own, the sessions played against it, and what was seen meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import uvloop
from bench.kv_plan import BLOCK_TOKENS, BYTES_PER_TOKEN, NEVER_EVICTS_TOKENS, Plan
from bench.kv_watch import Watch
from cluster import ROOT, ClusterSpec, LocalCluster

from evolving.v1 import directory_pb2, directory_pb2_grpc
from evolving_replay import Progress, ReplayOptions, Report, replay
from evolving_sim.traces import TraceSession

AT_REST_S = 60.0  # longest wait for the last counts to reach every node
PROGRESS_S = 20.0
FETCH_FIXED_S = 0.002  # what a fetch takes before its first byte, seconds before compression


@dataclass(frozen=True, slots=True)
class Arm:
    """What one cluster is measured with."""

    name: str
    sessions: Sequence[TraceSession]
    concurrency: int
    compression: float
    stagger_s: float  # the first sessions start spread over so much of the trace's time
    split: str
    l2_tokens: int = NEVER_EVICTS_TOKENS  # of each node
    node_flags: tuple[str, ...] = ()
    gateway_flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """What one arm gave."""

    report: Report
    peak_held_blocks: int  # most copies that branches counted at a moment, over all nodes
    seen: dict[str, Any]  # what goes into the JSON as it is


def measure(arm: Arm, plan: Plan) -> Measured:
    """Start a cluster, play, wait until it is at rest, audit it, stop it."""
    state = ROOT / "build" / "bench-kv-cluster"
    cluster = LocalCluster(_spec(arm, plan, state))
    begun_s = time.monotonic()
    cluster.start()
    try:
        return uvloop.run(_measure(cluster, arm, begun_s))
    finally:
        cluster.stop()


def _spec(arm: Arm, plan: Plan, state: Path) -> ClusterSpec:
    per_s = plan.fetch_tokens_per_s * BYTES_PER_TOKEN
    node_flags = {
        "l1-tokens": plan.l1_tokens,
        "l2-tokens": arm.l2_tokens,
        "max-prompt-tokens": plan.prompt_tokens,
        "max-context-tokens": plan.context_tokens,
        "mock-speed-up": arm.compression,
        "mock-tokens-per-iteration": 1024,
        "mock-bytes-per-token": BYTES_PER_TOKEN,
        "mock-fetch-bytes-per-s": per_s,
        "log-level": "warning",
    }
    # A machine with fewer cores than processes is slow at times; nobody is given up for it.
    gateway_flags = {
        "fetch-bytes-per-s": per_s * arm.compression,
        "fetch-fixed-s": FETCH_FIXED_S / arm.compression,
        "directory-timeout-s": 10,
        "node-silence-s": 30,
        "context-cache-bytes": 48 << 20,  # fills early, so that what grows later is no cache
        "log-level": "warning",
    }
    return ClusterSpec(
        state_dir=state,
        nodes=plan.nodes,
        engine="mock",
        model_path=state / "no-model",
        gateway_port=0,
        initial_split=arm.split,
        node_flags=("--no-mock-verify-kv", *_flags(node_flags), *arm.node_flags),
        gateway_flags=(*_flags(gateway_flags), *arm.gateway_flags),
        planner_flags=("--mode", "manual"),  # the arm's split is nobody's to change
        service_flags=("--registration-ttl-s", "60"),
    )


def _flags(values: dict[str, object]) -> list[str]:
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]


async def _measure(cluster: LocalCluster, arm: Arm, begun_s: float) -> Measured:
    options = ReplayOptions(
        gateways=(cluster.gateway_address,),
        concurrency=arm.concurrency,
        compression=arm.compression,
        stagger_s=arm.stagger_s,
    )
    async with grpc.aio.insecure_channel(cluster.processes["directory"].address) as channel:
        directory: Any = directory_pb2_grpc.DirectoryServiceStub(channel)
        watch = Watch(cluster, directory)
        watching = asyncio.create_task(watch.run())
        try:
            report = await replay(arm.sessions, options, _Teller(arm.name))
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        audit = await _audit(directory)
    seen = {
        "sessions": report.sessions,
        "concurrency": arm.concurrency,
        "compression": arm.compression,
        "requests": report.requests,
        "failed": report.failed,
        "failures": dict(report.failures),
        "wall_s": round(report.wall_s, 1),
        "arm_wall_s": round(time.monotonic() - begun_s, 1),
        "prompt_tokens": report.prompt_tokens,
        "l1_tokens_per_node": _flag(cluster, "l1-tokens"),
        "l2_tokens_per_node": arm.l2_tokens,
        "peak_held_blocks": watch.peak_held_blocks,
        "peak_held_blocks_by_node": watch.peak_held_by_node,
        "peak_l1_blocks": watch.peak_l1_blocks,
        "peak_l2_blocks": watch.peak_l2_blocks,
        "audit": audit,
        "memory": watch.memory(),
    }
    return Measured(report, watch.peak_held_blocks, seen)


def _flag(cluster: LocalCluster, name: str) -> int:
    flags = cluster.spec.node_flags
    return int(flags[flags.index(f"--{name}") + 1])


async def _audit(directory: Any) -> dict[str, Any]:
    """All three counts of every block on every node compared, once the last ones have arrived everywhere."""
    deadline_s = time.monotonic() + AT_REST_S
    while True:
        reply = await directory.Audit(directory_pb2.AuditRequest(), timeout=AT_REST_S)
        stats = await directory.GetStats(directory_pb2.GetStatsRequest(), timeout=AT_REST_S)
        held_blocks = sum(node.held_blocks for node in stats.nodes)
        left = reply.mismatch_count + reply.nonzero_after_end + held_blocks + stats.live_branches
        if (not left and not reply.unreachable_node_ids) or time.monotonic() > deadline_s:
            return {
                "compared": reply.compared,
                "mismatches": reply.mismatch_count,
                "nonzero_after_end": reply.nonzero_after_end,
                "unreachable_nodes": list(reply.unreachable_node_ids),
                "held_blocks": held_blocks,
                "live_branches": stats.live_branches,
                "clean": not left and not reply.unreachable_node_ids,
            }
        await asyncio.sleep(1.0)


class _Teller:
    """A line now and then."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun_s = self._told_s = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s < PROGRESS_S:
            return
        self._told_s = now_s
        reused = progress.cached_tokens / max(1, progress.prompt_tokens)
        failed = f", {progress.failed_requests} failed" if progress.failed_requests else ""
        print(
            f"  {self._name}: {now_s - self._begun_s:.0f} s, "
            f"{progress.finished_requests} of {progress.total_requests} requests{failed}, "
            f"{progress.finished_sessions} of {progress.total_sessions} sessions, {100 * reused:.2f} % reused",
            flush=True,
        )


def pool_tokens(peak_held_blocks: int, share: float, nodes: int) -> int:
    """Host memory of each node, tokens, so that all together hold `share` of the peak active working set."""
    return round(share * peak_held_blocks / nodes) * BLOCK_TOKENS
