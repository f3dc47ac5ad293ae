"""How far the simulator is from the live system: one real trace, played on both, request beside request.

    make bench-fidelity TRACE=claude_code.jsonl.xz           a quarter of an hour
    make bench-fidelity TRACE=claude_code.jsonl.xz QUICK=1   minutes: that everything runs

Live are etcd, gateway, directory, planner and node agents as processes, with mock engines that take the time equations
1 and 2 say, and the replay client. Simulated are the same sessions on nodes with the same coefficients and sizes.
Requests are paired by session, agent and place. What the live side has and the simulator does not is told beside the
comparison: the control plane's own time, timers that fire late, how busy this machine was. Writes
build/bench-fidelity.json; exits with 1 when a bar is missed.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "deploy" / "local"))
from bench.fidelity_figures import Bar, Row, bars, figures, pair, paired
from bench.fidelity_live import play_live
from bench.fidelity_plan import QUICK, Plan, choose
from bench.fidelity_sim import play_simulated
from cluster import ROOT

from evolving_sim.trace_files import read_sessions

OUTPUT = ROOT / "build" / "bench-fidelity.json"


def main(
    trace: Annotated[Path, typer.Option(help="Recorded agent sessions, Weka/AgentX form.")],
    quick: Annotated[bool, typer.Option("--quick", help="Few sessions: minutes.")] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Only simulate anew, beside the live run that the output file has.")
    ] = False,
) -> None:
    """Play both, compare, write build/bench-fidelity.json, and show which bars are met."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the cluster is stopped on the way out
    plan = QUICK if quick else Plan()
    sessions = choose(list(read_sessions(trace)), plan)
    print(f"{len(sessions)} sessions, {sum(session.request_count for session in sessions)} requests", flush=True)
    if again:
        result = json.loads(OUTPUT.read_text())
        live = [Row(**row) for row in result["live_rows"]]
    else:
        played = play_live(sessions, plan)
        live = played.rows
        result = {
            "live_costs": played.costs,
            "live_report": played.report.as_json(),
            "live_rows": [asdict(row) for row in live],
        }
    begun_s = time.monotonic()
    simulated = play_simulated(sessions, plan)
    result |= {"quick": quick, "plan": plan.as_json(), "simulated_wall_s": time.monotonic() - begun_s}
    met = compare(result, live, simulated)
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps(result, indent=1) + "\n")
    print(f"all figures are in {OUTPUT}")
    raise typer.Exit(0 if met else 1)


def compare(result: dict[str, Any], live: list[Row], simulated: list[Row]) -> bool:
    """Add both sides' figures to the result and show them; whether all bars are met."""
    pairs = pair(live, simulated)
    one, other = figures([row for row, _ in pairs]), figures([row for _, row in pairs])
    failed = result["live_report"]["failed"] + result["live_report"]["unfinished"]
    shown = list(bars(one, other, len(pairs), failed))
    single = paired(pairs)
    result |= {"live": one, "simulated": other, "paired": single, "bars": [bar.as_json() for bar in shown]}
    result["simulated_rows"] = [asdict(row) for row in simulated]
    show(shown, one, other, single, result["live_costs"])
    return all(bar.met for bar in shown)


def show(
    shown: list[Bar], live: dict[str, float], simulated: dict[str, float], single: dict[str, float], costs: Any
) -> None:
    """A table, the missed bars marked; then what has no bar."""
    print(f"\n{'':24} {'bar':>10} {'live':>12} {'simulated':>12} {'part':>8}")
    for bar in shown:
        part = f"{100 * (bar.simulated / bar.live - 1):+.1f} %" if bar.live else ""
        told = "met" if bar.met else "MISSED"
        print(f"{bar.name:24} {bar.bar:>10} {bar.live:12.4f} {bar.simulated:12.4f} {part:>8}  {told}")
    for name, value in live.items():
        if name not in {bar.name for bar in shown}:
            print(f"{name:24} {'':>10} {value:12.4f} {simulated[name]:12.4f}")
    for name, told_value in (single | costs).items():
        print(f"{name:40} {told_value}")


if __name__ == "__main__":
    typer.run(main)
