"""How much reuse the pool loses, by policy and size, and what fetching under the wait saves, on real agent sessions.

    make bench-kv TRACE=claude_code.jsonl.xz           over an hour (or: python tests/bench/bench_kv.py --trace FILE)
    make bench-kv TRACE=claude_code.jsonl.xz QUICK=1   minutes; fewer arms and sessions

Each arm has a cluster of its own: etcd, the services and six nodes with the mock engine, all as processes. A first arm
with host memory that never fills tells the peak active working set: most copies that branches counted at a moment, over
all nodes. The policy arms get shares of it as host memory. What a single pool could have saved, computed from the trace
alone, stands beside each. Writes build/bench-kv.json; shares and losses are of prompt tokens.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "deploy" / "local"))
from bench.kv_arm import Arm, Measured, measure, pool_tokens
from bench.kv_bars import bars
from bench.kv_plan import QUICK, Plan, fetch_sessions, policy_sessions
from cluster import ROOT

from evolving_sim.oracle import Policy, simulate
from evolving_sim.trace_files import read_sessions
from evolving_sim.traces import TraceSession
from evolving_sim.workload import make_workload

OUTPUT = ROOT / "build" / "bench-kv.json"
FETCH_FLAGS = {
    "async": ((), ()),
    "at_start": (("--fetch-start", "admission"), ()),
    "recompute": ((), ("--fetch", "never")),
}
"""Flags of nodes and gateway."""
FETCH_ALWAYS = ("--fetch", "always")


def policy_arms(sessions: Sequence[TraceSession], plan: Plan) -> Iterator[dict[str, Any]]:
    """The arm that never evicts, then each share with both policies."""

    def arm(name: str, **more: Any) -> Arm:
        # Reads do not speed up with the mock as computing does: by time alone, short tails would be computed anew.
        common = Arm(
            name, sessions, plan.concurrency, plan.compression, plan.stagger_s, plan.split, gateway_flags=FETCH_ALWAYS
        )
        return replace(common, **more)

    whole = told(arm("pool that never fills"), plan)
    yield {"pool_share": None, "policy": "never evicts", **_policy_row(whole), "oracle": None}
    workload = make_workload(sessions, plan.concurrency, plan.stagger_s)
    for share in plan.pool_shares:
        l2_tokens = pool_tokens(whole.peak_held_blocks, share, plan.nodes)
        capacity = int(share * workload.peak_counted_blocks)
        oracle = {policy.value: simulate(workload, capacity, policy).lost_reuse for policy in Policy}
        for policy in ("agent", "lru"):
            sized = arm(f"pool {share}, {policy}", l2_tokens=l2_tokens, node_flags=("--eviction", policy))
            row = {"pool_share": share, "policy": policy, **_policy_row(told(sized, plan)), "oracle": oracle}
            yield row


def fetch_arms(sessions: Sequence[TraceSession], plan: Plan) -> Iterator[dict[str, Any]]:
    """The same requests with each way to get KV from peers."""
    coefficients = ",".join(map(str, plan.prefill_coefficients))
    for mode in plan.fetch_modes:
        node_flags, gateway_flags = FETCH_FLAGS[mode]
        arm = Arm(
            f"fetch {mode}",
            sessions,
            plan.fetch_concurrency,
            plan.fetch_compression,
            plan.fetch_stagger_s,
            plan.fetch_split,
            plan.fetch_l2_tokens,
            node_flags=("--prefill-coefficients", coefficients, *node_flags),
            gateway_flags=gateway_flags,
        )
        measured = told(arm, plan)
        report = measured.report
        yield {
            "mode": mode,
            "ttft_p95_s": report.ttft.p95_s,
            "hidden_share": report.hidden_share,
            "ttft_p50_s": report.ttft.p50_s,
            "ttft_mean_s": report.ttft.mean_s,
            "fetch_s": report.fetch_s,
            "lost_by": dict(report.lost_by),
            **_reuse(measured),
        }


def _policy_row(measured: Measured) -> dict[str, Any]:
    report = measured.report
    return {
        "lost_reuse": report.lost_reuse,
        "lost_by": dict(report.lost_by),
        **_reuse(measured),
    }


def _reuse(measured: Measured) -> dict[str, Any]:
    report = measured.report
    return {
        "hit_rate": report.hit_rate,
        "ideal_hit_rate": report.ideal_hit_rate,
        "beyond_ideal": report.beyond_ideal,
        "cached_by": dict(report.cached_by),
        "most_loaded_prefill": report.most_loaded_prefill,
        **measured.seen,
    }


def told(arm: Arm, plan: Plan) -> Measured:
    """Measure an arm and say what came of it."""
    print(f"{arm.name}: {len(arm.sessions)} sessions, {arm.concurrency} at a time, {arm.compression:g} times as fast")
    measured = measure(arm, plan)
    report = measured.report
    hidden = "" if report.hidden_share is None else f", {100 * report.hidden_share:.1f} % of fetch time hidden"
    print(
        f"  {report.requests} requests in {report.wall_s:.0f} s, {report.failed} failed; "
        f"{100 * report.hit_rate:.2f} % reused of ideally {100 * report.ideal_hit_rate:.2f}, "
        f"{100 * report.lost_reuse:.2f} % lost; P95 TTFT {report.ttft.p95_s:.3f} s{hidden}; "
        f"{measured.peak_held_blocks} copies counted at most; "
        f"audit {'clean' if measured.seen['audit']['clean'] else 'NOT CLEAN'}",
        flush=True,
    )
    return measured


def main(
    trace: Annotated[Path, typer.Option(help="Recorded agent sessions, Weka/AgentX form.")],
    quick: Annotated[bool, typer.Option("--quick", help="Fewer arms and sessions: minutes, not an hour.")] = False,
) -> None:
    """Measure, write build/bench-kv.json, and show which bars are met."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the cluster is stopped on the way out
    begun_s = time.monotonic()
    plan = QUICK if quick else Plan()
    recorded = list(read_sessions(trace))
    played, fetched = policy_sessions(recorded, plan), fetch_sessions(recorded, plan)
    result: dict[str, Any] = {"quick": quick, "plan": plan.as_json(), "arms": [], "fetch": []}
    for row in policy_arms(played, plan):
        keep(result, "arms" if row["oracle"] else "never_evicts", row)
    result["peak_active_working_set_blocks"] = result["never_evicts"]["peak_held_blocks"]
    for row in fetch_arms(fetched, plan):
        keep(result, "fetch", row)
    result["bars"] = [bar.as_json() for bar in bars(result)]
    result["wall_s"] = round(time.monotonic() - begun_s, 1)
    write(result)
    show(result)


def keep(result: dict[str, Any], place: str, row: dict[str, Any]) -> None:
    """Add an arm, and write what there is: a run that ends early leaves its first arms."""
    if isinstance(result.get(place), list):
        result[place].append(row)
    else:
        result[place] = row
    write(result)


def write(result: dict[str, Any]) -> None:
    """To the file."""
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps(result, indent=1) + "\n")


def show(result: dict[str, Any]) -> None:
    """A table, the missed bars marked."""
    print(f"\n{'':52} {'bar':>18} {'value':>28}")
    for bar in result["bars"]:
        print(f"{bar['name']:52} {bar['bar']:>18} {bar['value']:>28}  {'met' if bar['met'] else 'MISSED'}")
    print(f"{result['wall_s']:.0f} s; all figures are in {OUTPUT}")


if __name__ == "__main__":
    typer.run(main)
