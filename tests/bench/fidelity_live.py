"""The live side of bench-fidelity: the sessions played against a cluster of real services with mock engines."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from bench.fidelity_figures import Row
from bench.fidelity_plan import Plan
from cluster import ROOT, ClusterSpec, LocalCluster

from evolving_replay import Answered, Progress, ReplayOptions, Report, replay
from evolving_sim.traces import TraceSession

STATE = ROOT / "build" / "bench-fidelity-cluster"
PROGRESS_S = 20.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Live:
    """What the live run gave. costs: what the simulator doesn't have, and how busy this machine was."""

    rows: list[Row]
    report: Report
    costs: dict[str, Any]


def play_live(sessions: Sequence[TraceSession], plan: Plan) -> Live:
    """Start a cluster, play, stop it."""
    cluster = LocalCluster(_spec(plan))
    cluster.start()
    try:
        return uvloop.run(_play(cluster, sessions, plan))
    finally:
        cluster.stop()


def _spec(plan: Plan) -> ClusterSpec:
    machine = plan.machine
    prefill, decode = machine.prefill, machine.decode
    node_flags = {
        "prefill-coefficients": _listed(prefill.c0_s, prefill.c1_s, prefill.c2_s, prefill.c3_s, prefill.c4_s),
        "decode-coefficients": _listed(decode.d0_s, decode.d1_s, decode.d2_s, decode.d3_s),
        "block-tokens": machine.block_tokens,
        "l1-tokens": machine.l1_tokens,
        "l2-tokens": machine.l2_tokens,
        "chunk-tokens": machine.chunk_tokens,
        "decode-slots": machine.decode_slots,
        "max-prompt-tokens": plan.prompt_tokens,
        "max-context-tokens": machine.context_tokens_max,
        "mock-tokens-per-iteration": round(machine.accepted_tokens),
        "mock-bytes-per-token": round(machine.kv_bytes_per_token),
        "mock-fetch-bytes-per-s": machine.fetch_bytes_per_s,
        "fetch-readers": plan.fetch_readers,
        "fetch-deadline-s": 600,  # nobody gives up waiting for KV in the simulator
        "log-level": "warning",
    }
    # A machine with fewer cores than processes is slow at times; nobody is given up for it.
    gateway_flags = {
        "fetch-bytes-per-s": machine.fetch_bytes_per_s,
        "fetch-fixed-s": machine.fetch_fixed_s,
        "directory-timeout-s": 10,
        "node-silence-s": 30,
        "log-level": "warning",
    }
    return ClusterSpec(
        state_dir=STATE,
        nodes=plan.shape.total,
        engine="mock",
        model_path=STATE / "no-model",
        gateway_port=0,
        initial_split=str(plan.shape),
        node_flags=("--no-mock-verify-kv", *_flags(node_flags)),
        gateway_flags=tuple(_flags(gateway_flags)),
        planner_flags=("--mode", "manual"),  # the split is nobody's to change
        service_flags=("--registration-ttl-s", "60"),
    )


def _listed(*values: float) -> str:
    return ",".join(map(str, values))


def _flags(values: dict[str, object]) -> list[str]:
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]


async def _play(cluster: LocalCluster, sessions: Sequence[TraceSession], plan: Plan) -> Live:
    options = ReplayOptions(
        gateways=(cluster.gateway_address,),
        concurrency=plan.concurrency,
        compression=plan.compression,
        stagger_s=plan.stagger_s,
    )
    answers: list[Answered] = []
    begun_s, cluster_s, own_s = time.monotonic(), _cluster_cpu_s(cluster), time.process_time()
    report = await replay(sessions, options, _Teller(), on_answer=answers.append)
    passed_s = time.monotonic() - begun_s
    own_s, cluster_s = time.process_time() - own_s, _cluster_cpu_s(cluster) - cluster_s
    costs = {
        "wall_s": passed_s,
        "cores": os.cpu_count(),
        "cluster_cores_used": cluster_s / passed_s,
        "client_cores_used": own_s / passed_s,
        "machine_busy_share": (cluster_s + own_s) / passed_s / (os.cpu_count() or 1),
        **_overheads(answers, plan),
    }
    return Live([_row(each) for each in answers], report, costs)


def _row(answered: Answered) -> Row:
    finished = answered.finished
    return Row(
        answered.session,
        answered.agent,
        answered.request,
        answered.sent_s,
        answered.ttft_s,
        answered.e2e_s,
        finished.usage.prompt_tokens,
        finished.usage.output_tokens,
        finished.cached.total,
        answered.ideal_tokens,
    )


def _overheads(answers: Sequence[Answered], plan: Plan) -> dict[str, Any]:
    """What a live request takes beyond queue, computing and iterations: means of requests that stayed on their nodes.

    The engine's own iterations take longer than modelled too, by timers that fire late; that shows in the queues, the
    prefills and the decodes, and is told as the decode iterations' share.
    """
    calm = [each for each in answers if not each.finished.attempts and not each.finished.reconnects]
    client_s = [each.ttft_s - each.finished.timings.ttft_s for each in calm]
    control_s = [each.finished.timings.ttft_s - _node_s(each) for each in calm]
    machine = plan.machine
    least_s, taken_s = 0.0, 0.0
    for each in calm:
        # Alone in its batch; so the share is of long answers in small batches an upper bound.
        least_s += machine.decode_iterations(each.finished.usage.output_tokens) * machine.decode.decode_iteration_s(
            1, 0
        )
        taken_s += each.finished.timings.total_s - each.finished.timings.ttft_s
    return {
        "moved_or_resent": len(answers) - len(calm),
        "client_to_gateway_s": {"mean": float(np.mean(client_s)), "p95": float(np.percentile(client_s, 95))},
        "gateway_to_node_s": {"mean": float(np.mean(control_s)), "p95": float(np.percentile(control_s, 95))},
        "decode_s_over_lone_decode_s": taken_s / least_s,
        "queue_mean_s": float(np.mean([each.finished.timings.queue_s for each in calm])),
        "prefill_mean_s": float(np.mean([each.finished.timings.prefill_s for each in calm])),
        "transfer_mean_s": float(np.mean([each.finished.timings.transfer_s for each in calm])),
        "fetch_mean_s": float(np.mean([each.finished.timings.fetch_s for each in calm])),
    }


def _node_s(answered: Answered) -> float:
    """In the queue, and from there to the first token."""
    return answered.finished.timings.queue_s + answered.finished.timings.prefill_s


def _cluster_cpu_s(cluster: LocalCluster) -> float:
    return sum(_cpu_s(process.pid) for process in cluster.processes.values())


def _cpu_s(pid: int) -> float:
    """Processor time of a process; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


class _Teller:
    """A line now and then."""

    def __init__(self) -> None:
        self._begun_s = self._told_s = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s < PROGRESS_S:
            return
        self._told_s = now_s
        reused = progress.cached_tokens / max(1, progress.prompt_tokens)
        print(
            f"  {now_s - self._begun_s:.0f} s: {progress.finished_requests} of {progress.total_requests} requests, "
            f"{progress.running_requests} running, {progress.failed_requests} failed, "
            f"{progress.running_sessions} sessions, {100 * reused:.2f} % reused",
            flush=True,
        )
