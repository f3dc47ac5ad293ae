"""How near nodes (machines.py) and arrivals (mixes.py) come to the numbers of static SGLang that they are fitted to.

    python -m evolving_sim.paper.calibration                         minutes on two cores, compiled
    python -m evolving_sim.paper.calibration --host-copies 4.0       with another value than machines.py has

Six numbers (figures.FITTED) for five unknowns: `machines.Fitted`, `mixes.ARRIVALS_PER_CODING_AGENT`. How much prefill
takes comes from throughputs: GLM-5.2's from 90 and 126 coding agents, Kimi K2.6's from 128 computer-use agents. How
much host memory holds without a pool comes from the reuse that 126 lose, how long a request's way to a node is from the
mean TTFT of agents that hardly wait for prefill, how much work an arriving agent brings from the median E2E where 1.0
arrive a minute. Nothing else of the paper's results is used; every other number of static SGLang tests the fit as much
as the simulator.

The unknowns were chosen by hand with this: host memory is nearly full with 126 agents, so their numbers differ by 10 %
from one seed to the next, and slopes between two runs say little.
"""

from __future__ import annotations

import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Annotated

import typer

from evolving_sim.machines import FITTED, Fitted
from evolving_sim.paper import figures
from evolving_sim.paper.figures import Figure
from evolving_sim.paper.performing import perform
from evolving_sim.paper.plays import Play, Stretch
from evolving_sim.paper.runs import HOUR, SEEDS, SGLANG, TO_85

PROCESSES = 2


@dataclass(frozen=True, slots=True)
class Target:
    """A run of static SGLang, and which of its numbers are fitted to."""

    load: str
    shape: str
    stretch: Stretch
    figures: tuple[Figure, ...]

    def ours(self, fit: Fitted, seed: int) -> list[float]:
        """The same numbers."""
        play = Play(self.load, SGLANG, self.shape, (self.stretch,), seed=seed)
        values = perform(play, fit).stretches[self.stretch.name]
        return [values[figure.metric] for figure in self.figures]


def _target(load: str, shape: str, stretch: Stretch = TO_85) -> Target:
    found = (each for each in figures.FIGURES if each.fitted and each.row.startswith(load.removeprefix("CC, ")))
    return Target(load, shape, stretch, tuple(found))


TARGETS = (
    _target("CC (126)", "4P5D"),
    _target("CC (90)", "4P5D"),
    _target("CC, 1.0 agents/min", "4P5D", HOUR),
    _target("Putnam (224)", "2P7D"),
    _target("OSWorld (128)", "6P3D"),
)


def _played(number: int, fit: Fitted, seed: int) -> list[float]:
    return TARGETS[number].ours(fit, seed)


def main(
    glm_prefill: Annotated[float, typer.Option(help="Factor on GLM-5.2's c1 and c2.")] = FITTED.glm_prefill,
    kimi_prefill: Annotated[float, typer.Option(help="Factor on Kimi K2.6's.")] = FITTED.kimi_prefill,
    host_copies: Annotated[float, typer.Option(help="Of KV in a node's host memory.")] = FITTED.host_copies,
    gateway_s: Annotated[float, typer.Option(help="Until a request is routed.")] = FITTED.gateway_s,
) -> None:
    """Play the runs, and print the means over seeds beside the paper's numbers."""
    fit = replace(FITTED, glm_prefill=glm_prefill, kimi_prefill=kimi_prefill)
    fit = replace(fit, host_copies=host_copies, gateway_s=gateway_s)
    with ProcessPoolExecutor(PROCESSES, get_context("spawn")) as pool:
        runs = {
            (number, seed): pool.submit(_played, number, fit, seed) for number in range(len(TARGETS)) for seed in SEEDS
        }
        for number, target in enumerate(TARGETS):
            for figure, *values in zip(target.figures, *(runs[number, seed].result() for seed in SEEDS), strict=True):
                mean = statistics.mean(values)
                print(
                    f"{figure.table}, {figure.row}: {figure.name} {mean:.2f} ({min(values):.2f} to {max(values):.2f}), "
                    f"paper {figure.value:g}, {mean / figure.value - 1:+.1%}",
                    flush=True,
                )


if __name__ == "__main__":
    typer.run(main)
