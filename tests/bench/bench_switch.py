"""What a role switch takes, and what it loses, under load: ours, and SGLang's own.

    make bench-switch                25 minutes (or: python tests/bench/bench_switch.py)
    make bench-switch ARGS=--quick   few switches of each, minutes

Three nodes, agents in a closed loop on them, prompts of at most 128 tokens, blocks of 16, and so few slots that
requests wait for decode as well. Every switch gives one node the other role, to decode and to prefill in turn, while a
request waits for that phase. Its seconds are from the write of the split in etcd to the first request in a batch of the
new role. Two tell of it, both on the late side, and the first counts: the node's status stream, and the clients: by the
first token of a prefill on that node less the prefill's own time, or by the first token that node decoded.

Lost reuse is the share of prompt tokens whose KV some earlier request produced and that are computed again, with
switches and without. Two losses that no switch causes are kept out. Gateways fetch all that peers hold (--fetch
always): by time alone (--fetch sooner) they compute some of it anew, with switches and without, because a node's
configured time model is of a core of its own while the rate of its fetches is measured where three engines share two
cores. And a tool takes an agent half a second or more, so that what an answer added lies in host memory, where peers
can read it, by its next turn.

Upstream's nodes are switched by its POST /pd_role_switch: asked at once, and where it refuses because the node is busy,
drained and asked again. Its seconds are from the first asking to a token of the new role, as it does not tell how long
a prefill took. Plain SGLang has no pool, so it loses much without any switch too.

Writes build/bench-switch.json; exits with 1 when a bar is missed.
"""

from __future__ import annotations

import asyncio
import json
import math
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "deploy" / "local"))
from bench.switch_arm import Plan
from bench.switch_cluster import measure_cluster
from bench.switch_figures import bars
from bench.switch_upstream import measure_upstream
from cluster import DEFAULT_MODEL, ROOT

OUTPUT = ROOT / "build" / "bench-switch.json"
STATE = ROOT / "build" / "bench-switch"
PLANS = {
    False: {"mock": Plan(40, 60), "sglang": Plan(12, 60, still=200), "upstream": Plan(12, 30, still=200)},
    True: {
        "mock": Plan(40, 6, warm_up=20, still=60),
        "sglang": Plan(12, 6, warm_up=20, still=30),
        "upstream": Plan(12, 2, warm_up=20, still=30),
    },
}
"""By whether it is the quick run, by arm."""


def main(
    model_path: Annotated[Path, typer.Option(help="Model of the nodes.")] = DEFAULT_MODEL,
    quick: Annotated[bool, typer.Option("--quick", help="Few switches of each: minutes.")] = False,
    only: Annotated[str, typer.Option(help="One arm alone: mock, sglang or upstream.")] = "",
    fetch: Annotated[str, typer.Option(help="The gateway's rule for what is fetched from peers.")] = "always",
) -> None:
    """Measure, write build/bench-switch.json, and show which bars are met."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is stopped on the way out
    begun_s = time.monotonic()
    result: dict[str, Any] = {"quick": quick, "engines": []}
    for arm, plan in PLANS[quick].items():
        if only not in ("", arm):
            continue
        print(f"{arm}: {plan.switches} switches, {plan.agents} agents", flush=True)
        if arm == "upstream":
            result["upstream"] = asyncio.run(measure_upstream(model_path, STATE / arm, plan))
        else:
            result["engines"].append(asyncio.run(measure_cluster(arm, model_path, STATE / arm, fetch, plan)))
        result["bars"] = [bar.as_json() for bar in bars(result)]
        result["wall_s"] = round(time.monotonic() - begun_s, 1)
        OUTPUT.parent.mkdir(parents=True, exist_ok=True)
        OUTPUT.write_text(json.dumps(_finite(result), indent=1, allow_nan=False) + "\n")
    show(result)
    raise typer.Exit(0 if all(bar["met"] for bar in result["bars"]) else 1)


def show(result: dict[str, Any]) -> None:
    """Figures of each arm, then the bars, the missed ones marked."""
    for row in [*result["engines"], *([result["upstream"]] if "upstream" in result else [])]:
        still = row["without_switches"]
        print(
            f"{row['engine']}: {row['switches']} switches, seconds p50 {row['seconds_p50']:.3f}, max "
            f"{row['seconds_max']:.3f}; {row['failed_requests']} of {row['requests'] + still['requests']} failed; "
            f"{row['refusals']} refusals; lost {_causes(row)}, without switches {_causes(still)}"
        )
    print(f"\n{'':40} {'bar':>12} {'value':>12}")
    for bar in result["bars"]:
        print(f"{bar['name']:40} {bar['bar']:>12} {bar['value']:>12}  {'met' if bar['met'] else 'MISSED'}")
    print(f"{result['wall_s']:.0f} s; all figures are in {OUTPUT}")


def _finite(value: Any) -> Any:
    """With null for what never came: JSON has no infinity."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and math.isinf(value) else value


def _causes(reuse: dict[str, Any]) -> str:
    causes = ", ".join(f"{cause} {100 * share:.2f}" for cause, share in reuse["lost_by"].items())
    return f"{100 * reuse['lost_reuse']:.2f} % of {100 * reuse['reusable']:.0f}" + (f" ({causes})" if causes else "")


if __name__ == "__main__":
    typer.run(main)
