"""Whether the planner finds the split that serves most: against an exhaustive search over fixed ones, all simulated.

    make bench-split                    a quarter of an hour, two processes (or: python tests/bench/bench_split.py)
    make bench-split ARGS="--seed 2"    other agents of the same kinds

The planner is the product's core in virtual time; nodes, links and agents are simulated (libs/sim/README.md). Each
fixed split of nine nodes serves the same agents, drawn from one seed; by what it served per second the splits are
compared that planners end on. The bars are the default gate's; what the paper's does is kept beside it. Writes
build/bench-split.json and exits with 1 where a bar is missed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.split_cases import (
    BURST_AGENTS,
    BURST_AT_S,
    CASES,
    END_S,
    SHIFT,
    SHIFT_END_S,
    SHIFT_FOLLOWED_WINDOWS,
    SHIFT_PERIOD_S,
    SHIFT_PERIODS,
    SHIFT_WINDOWS,
    STEADY_END_S,
    WARM_S,
    Case,
    burst_scenario,
    planner,
    shift_scenario,
)

from evolving.core.config import Gate
from evolving.core.planner import SplitShape
from evolving_sim.arms.arm import Switch
from evolving_sim.arms.named import ARMS
from evolving_sim.driver import Run, Scenario, serve, shapes
from evolving_sim.results import Summary

OUTPUT = Path(__file__).resolve().parents[2] / "build" / "bench-split.json"
PROCESSES = 2
NODES = 9
SHORT_MOST = 0.02
SWITCHES_MOST = 2


@dataclass(frozen=True, slots=True)
class Planned:
    """What a planner did in a run."""

    start: str
    gate: str
    switches: tuple[Switch, ...]
    reasons: tuple[str, ...]  # of every decision, in order
    oldest_open_s: float  # at the end: how long the request that was open longest had been

    def stands_at(self, now_s: float) -> str:
        """The split in force after what was decided up to then."""
        before = [switch.shape for switch in self.switches if switch.at_s <= now_s]
        return before[-1] if before else self.start


def plan(scenario: Scenario, end_s: float, seed: int) -> Planned:
    """Play a scenario that has a planner."""
    run = Run(replace(scenario, seed=seed))
    run.until(end_s)
    run.check_invariants()
    assert run.planner is not None
    reasons = tuple(decision.reason for decision in run.planner.decisions)
    gate, switches = run.planner.config.planner.gate.value, tuple(run.planner.switches)
    return Planned(str(scenario.shape), gate, switches, reasons, run.cluster.oldest_open_s())


# What processes are told to play: by name, as what the core is made of does not travel between them once compiled.


def serve_case(number: int, shape: str, seed: int) -> Summary:
    """What a fixed split serves of `CASES[number]`."""
    first = SplitShape.parse(shape)
    return serve(replace(CASES[number].scenario(first), seed=seed), first, WARM_S, END_S)


def plan_case(number: int, start: str, gate: Gate, seed: int) -> Planned:
    """What a planner makes of `CASES[number]`."""
    return plan(replace(CASES[number].scenario(SplitShape.parse(start)), arm=planner(gate)), STEADY_END_S, seed)


def plan_shift(gate: Gate, seed: int) -> Planned:
    """What a planner makes of the shift."""
    return plan(shift_scenario(planner(gate)), SHIFT_END_S, seed)


def plan_burst(shape: str, gate: Gate, seed: int) -> Planned:
    """What a planner makes of a burst."""
    return plan(burst_scenario(SplitShape.parse(shape), gate), STEADY_END_S, seed)


def serve_shift(shape: str, seed: int) -> list[Summary]:
    """What a fixed split serves of the shift: of each window, then of each period."""
    run = Run(replace(shift_scenario(ARMS["ours-static"]), shape=SplitShape.parse(shape), seed=seed))
    run.until(SHIFT_END_S)
    return [run.results.between(from_s, to_s) for from_s, to_s in (*SHIFT_WINDOWS, *SHIFT_PERIODS)]


@dataclass(frozen=True, slots=True)
class Searched:
    """What every fixed split served, requests/s."""

    served: dict[str, Summary]

    @property
    def order(self) -> list[str]:
        """Splits, the best first."""
        return sorted(self.served, key=lambda shape: -self.served[shape].requests_per_s)

    def short(self, shape: str) -> float:
        """Share of the best split's throughput that another one lacks."""
        return 1.0 - self.served[shape].requests_per_s / self.served[self.order[0]].requests_per_s

    def good(self) -> list[str]:
        """Splits that lack no more than the bar allows."""
        return [shape for shape in self.served if self.short(shape) <= SHORT_MOST]

    def as_json(self) -> dict[str, Any]:
        """With the margin of the best over the one after it."""
        best, after = self.order[:2]
        rows = {shape: summary.as_json() for shape, summary in self.served.items()}
        return {"best": best, "runner_up": after, "margin": self.short(after), "splits": rows}


@dataclass(frozen=True, slots=True)
class Shifted:
    """What every fixed split served of the shift, which it played from beginning to end."""

    windows: Sequence[Searched]
    periods: Sequence[Searched]  # without the first windows, as of the other cases

    def in_range(self, window: int, shape: str) -> bool:
        """Whether a split in force in a window lies among the good ones of it and of the two before.

        While work moves from the one to the other, so does the best split, and a planner goes by work that is done: it
        may be as far behind as `SHIFT_FOLLOWED_WINDOWS`, and anywhere between.
        """
        lately = self.windows[max(0, window - SHIFT_FOLLOWED_WINDOWS) : window + 1]
        prefills = [SplitShape.parse(good).prefill for searched in lately for good in searched.good()]
        return min(prefills) <= SplitShape.parse(shape).prefill <= max(prefills)


@dataclass(frozen=True, slots=True)
class Bar:
    """One thing to show."""

    name: str
    bar: str
    value: str
    met: bool


class Bench:
    """All runs, most of them asked for before the first is waited for."""

    def __init__(self, pool: ProcessPoolExecutor, seed: int = 1) -> None:
        self._pool = pool
        self._seed = seed
        self.bars: list[Bar] = []
        self.searched: dict[str, Searched] = {}
        self.shifted = Shifted((), ())
        self.planned: dict[str, list[dict[str, Any]]] = {}

    def run(self) -> None:
        """Search, plan, compare."""
        splits = [str(shape) for shape in shapes(NODES)]
        shifted = {shape: self._pool.submit(serve_shift, shape, self._seed) for shape in splits}
        fixed = {
            case.name: {shape: self._pool.submit(serve_case, number, shape, self._seed) for shape in splits}
            for number, case in enumerate(CASES)
        }
        steady = [
            (case, self._pool.submit(plan_case, number, start, gate, self._seed))
            for number, case in enumerate(CASES)
            for gate in Gate
            for start in case.starts
        ]
        shifts = [self._pool.submit(plan_shift, gate, self._seed) for gate in Gate]
        for key, runs in fixed.items():
            self.searched[key] = Searched({shape: run.result() for shape, run in runs.items()})
            told(f"{key}: " + ", ".join(f"{s} {r.requests_per_s:.3f}/s" for s, r in self.searched[key].served.items()))
        best = self.searched[CASES[0].name].order[0]
        bursts = [self._pool.submit(plan_burst, best, gate, self._seed) for gate in Gate]
        for case in CASES:
            self._best(case)
        for case, run in steady:
            self._steady(case, run.result())
        self._search_shift({shape: run.result() for shape, run in shifted.items()})
        for run in shifts:
            self._shift(run.result())
        for run in bursts:
            self._burst(run.result())

    def _best(self, case: Case) -> None:
        if case.bests:
            best = self.searched[case.name].order[0]
            self.bars.append(Bar(f"{case.name}: best split", " or ".join(case.bests), best, best in case.bests))

    def _steady(self, case: Case, run: Planned) -> None:
        searched = self.searched[case.name]
        last = run.stands_at(END_S)
        short = searched.short(last)
        self._keep(case.name, run, {"last": last, "short": short})
        if run.gate == Gate.DEFAULT:
            text = f"{last}, {short:.1%} short, {len(run.switches)} switches"
            met = short <= SHORT_MOST and len(run.switches) <= SWITCHES_MOST
            bar = f"<= {SHORT_MOST:.0%}, <= {SWITCHES_MOST}"
            self.bars.append(Bar(f"{case.name} from {run.start}", bar, text, met))

    def _burst(self, run: Planned) -> None:
        after = [switch for switch in run.switches if switch.at_s >= BURST_AT_S]
        self._keep("burst", run, {"agents": BURST_AGENTS, "at_s": BURST_AT_S, "switches_after": len(after)})
        if run.gate == Gate.DEFAULT:
            self.bars.append(Bar(f"burst of {BURST_AGENTS} at {run.start}", "0 switches", str(len(after)), not after))

    def _search_shift(self, served: dict[str, list[Summary]]) -> None:
        stretches = range(len(SHIFT_WINDOWS) + len(SHIFT_PERIODS))
        searched = [Searched({shape: all_of_it[at] for shape, all_of_it in served.items()}) for at in stretches]
        self.shifted = Shifted(searched[: len(SHIFT_WINDOWS)], searched[len(SHIFT_WINDOWS) :])

    def _shift(self, run: Planned) -> None:
        periods = []
        for number, (case, searched) in enumerate(zip(SHIFT, self.shifted.periods, strict=True)):
            warm, last = (run.stands_at(SHIFT_PERIOD_S * number + at_s) for at_s in (WARM_S, SHIFT_PERIOD_S - 1.0))
            row = {"period": case.name, "best": searched.order[0], "after_two_windows": warm, "last": last}
            periods.append(row | {"short": searched.short(warm), "short_last": searched.short(last)})
            if run.gate == Gate.DEFAULT:
                text = f"{last}, {searched.short(last):.1%} short of {searched.order[0]}"
                met = searched.short(last) <= SHORT_MOST
                self.bars.append(Bar(f"shift, end of {case.name}", f"<= {SHORT_MOST:.0%}", text, met))
        in_force = [run.stands_at(from_s) for from_s, _ in SHIFT_WINDOWS]
        judged = range(SHIFT_FOLLOWED_WINDOWS, len(in_force))
        behind = [window for window in judged if not self.shifted.in_range(window, in_force[window])]
        self._keep("shift", run, {"periods": periods, "in_force": in_force, "windows_behind": behind})
        if run.gate == Gate.DEFAULT:
            text = f"{len(behind)} of {len(judged)} windows"
            self.bars.append(Bar("shift, more than two windows behind", "none", text, not behind))

    def _keep(self, name: str, run: Planned, more: dict[str, Any]) -> None:
        self.planned.setdefault(name, []).append(asdict(run) | more)
        switches = ", ".join(f"{switch.shape} at {switch.at_s:.0f} s" for switch in run.switches) or "no switch"
        told(f"{name}, {run.gate} gate, from {run.start}: {switches}; {more}; oldest open {run.oldest_open_s:.0f} s")

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        return {
            "simulated": True,
            "seed": self._seed,
            "searched": {key: searched.as_json() for key, searched in self.searched.items()},
            "shift": {
                "windows": [searched.as_json() for searched in self.shifted.windows],
                "periods": [searched.as_json() for searched in self.shifted.periods],
            },
            "planned": self.planned,
            "bars": [asdict(bar) for bar in self.bars],
        }


def told(line: str) -> None:
    """Show how far it is."""
    print(line, flush=True)


def rows(bars: list[Bar]) -> Iterator[str]:
    """A table, the missed bars marked."""
    yield f"{'':44} {'bar':>16} {'value':>40}"
    for bar in bars:
        yield f"{bar.name:44} {bar.bar:>16} {bar.value:>40}  {'met' if bar.met else 'MISSED'}"


def main(seed: Annotated[int, typer.Option(help="Of what agents ask.")] = 1) -> None:
    """Run, write build/bench-split.json, show, and exit with 1 where a bar is missed."""
    begun_s = time.monotonic()
    with ProcessPoolExecutor(PROCESSES) as pool:
        bench = Bench(pool, seed)
        bench.run()
    result = bench.as_json() | {"wall_s": round(time.monotonic() - begun_s, 1)}
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps(result, indent=1) + "\n")
    print("\n" + "\n".join(rows(bench.bars)))
    for key, searched in bench.searched.items():
        best, after = searched.order[:2]
        print(f"{key}: best {best}, {searched.short(after):.1%} before {after}")
    print(f"{result['wall_s']:.0f} s; all figures are in {OUTPUT}")
    raise typer.Exit(0 if all(bar.met for bar in bench.bars) else 1)


if __name__ == "__main__":
    typer.run(main)
