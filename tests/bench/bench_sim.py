"""How fast the simulator is, and how much memory it takes: beside Dynamo's offline replay, and at 3,072 GPUs.

It runs compiled (libs/sim/compile.py); the same requests not compiled have to be answered at the same times.

    make bench-sim TRACE=claude_code.jsonl.xz           a quarter of an hour and more
    make bench-sim TRACE=claude_code.jsonl.xz QUICK=1   two minutes, without the 3,072 GPUs

Each case runs in a process of its own on one core, so that its time and its peak memory are its own; the 3,072 GPUs on
two. Writes build/bench-sim.json; exits with 1 when a bar is missed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.sim_cases import (
    PROCESSES,
    agents_of_the_paper,
    not_compiled,
    partitions,
    peak_memory_mib,
    recorded,
    recorded_by_dynamo,
)

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "build" / "bench-sim.json"
REQUESTS_PER_S_LEAST = 600.0  # Dynamo's offline replay on a machine of this class
PARTITIONS_WALL_S_MOST = 600.0
CASES: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    "agents of the paper": agents_of_the_paper,
    "agents of the paper, not compiled": not_compiled,
    "recorded sessions": recorded,
    "recorded sessions, by Dynamo": recorded_by_dynamo,
    "3,072 GPUs": partitions,
}


@dataclass(frozen=True, slots=True)
class Bar:
    """One thing to show."""

    name: str
    bar: str
    value: str
    met: bool


def main(
    trace: Annotated[Path, typer.Option(help="Recorded agent sessions, Weka/AgentX form.")],
    quick: Annotated[bool, typer.Option("--quick", help="Without the 3,072 GPUs.")] = False,
    case: Annotated[str, typer.Option(help="Run this one alone and print what came of it.")] = "",
) -> None:
    """Measure, write build/bench-sim.json, and show which bars are met."""
    if case:
        print(json.dumps(measured(case, trace)))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the case under way is stopped on the way out
    result = {}
    for name in CASES:
        if not quick or CASES[name] is not partitions:
            result[name] = apart(name, trace)
            print(f"{name}: {told(result[name])}", flush=True)
    shown = list(bars(result))
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps({**result, "bars": [asdict(bar) for bar in shown]}, indent=1) + "\n")
    for bar in shown:
        print(f"{bar.name:60} {bar.bar:>10} {bar.value:>10}  {'met' if bar.met else 'MISSED'}")
    print(f"all figures are in {OUTPUT}")
    raise typer.Exit(0 if all(bar.met for bar in shown) else 1)


def measured(name: str, trace: Path) -> dict[str, Any]:
    """A case in this process, on one core, or as many as the case has processes."""
    cores = PROCESSES if CASES[name] is partitions else 1
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    begun_s = time.perf_counter()
    found = CASES[name](trace)
    return {"peak_memory_mib": peak_memory_mib(), **found, "whole_wall_s": time.perf_counter() - begun_s}


def apart(name: str, trace: Path) -> dict[str, Any]:
    """A case in a process of its own."""
    command = [sys.executable, __file__, "--trace", str(trace), "--case", name]
    environment = dict(os.environ)
    if CASES[name] is not_compiled:
        environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def told(found: Mapping[str, Any]) -> str:
    """A line."""
    if "unavailable" in found:
        return str(found["unavailable"])
    if "requests" not in found:
        return f"{found['summary']} in {found['wall_s']:.1f} s; {found['peak_memory_mib']:.0f} MiB"
    return (
        f"{found['requests']} requests of {found['prompt_tokens_mean']:.0f} tokens in {found['wall_s']:.1f} s, "
        f"{found['requests'] / found['wall_s']:.0f} a second; {found['simulated_s']:.0f} s simulated; "
        f"{found['peak_memory_mib']:.0f} MiB"
    )


def bars(result: Mapping[str, Mapping[str, Any]]) -> Iterator[Bar]:
    """Of the cases that were run."""
    for name in ("agents of the paper", "recorded sessions"):
        per_s = result[name]["requests"] / result[name]["wall_s"]
        yield Bar(f"{name}: requests a second of one core", f"≥ {REQUESTS_PER_S_LEAST:.0f}", f"{per_s:.0f}",
                  per_s >= REQUESTS_PER_S_LEAST)  # fmt: skip
    digests = {
        result[name]["first_requests_sha256"] for name in ("agents of the paper", "agents of the paper, not compiled")
    }
    yield Bar(
        "compiled or not: the same answers, to the last bit",
        "equal",
        "equal" if len(digests) == 1 else "not",
        len(digests) == 1,
    )
    if "3,072 GPUs" in result:
        wall_s = result["3,072 GPUs"]["wall_s"]
        name = f"3,072 GPUs for 5 minutes: wall time on {PROCESSES} cores"
        met = wall_s < PARTITIONS_WALL_S_MOST
        yield Bar(name, f"< {PARTITIONS_WALL_S_MOST:.0f} s", f"{wall_s:.0f} s", met)


if __name__ == "__main__":
    typer.run(main)
