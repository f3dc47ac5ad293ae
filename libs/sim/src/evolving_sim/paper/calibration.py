"""Fits the nodes' coefficients to rows of static SGLang, and to nothing else of the paper's results.

    python -m evolving_sim.paper.calibration         some minutes on two cores, compiled; prints what machines.py keeps
    python -m evolving_sim.paper.calibration 0.4     runs of so much of their time

Two rows for two unknowns (figures.FITTED): one factor on c1 and c2 of either model, such that SGLang's arm serves what
Table 5 says in the very run that the row is of: GLM-5.2's 90 coding agents on 4P5D, Kimi K2.6's 128 computer-use agents
on 6P3D. Which share of prefill is c1's and which c2's, and all else, is set by hand (machines.py): no row tells them
apart. Every other number of static SGLang tests the fit as much as the simulator.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

from scipy.optimize import root_scalar

from evolving_sim.machines import ASSUMED_GLM_5_2, ASSUMED_KIMI_K2_6, fitted
from evolving_sim.node_config import NodeConfig
from evolving_sim.paper.figures import FIGURES, Figure
from evolving_sim.paper.performing import perform
from evolving_sim.paper.plays import Play
from evolving_sim.paper.runs import SGLANG, TO_85, shortened

# Smaller steps of a factor end the search: rows repeat no better (4.57, 4.62, 4.66 requests/s are of one setup).
_CLOSE = 0.005


@dataclass(frozen=True, slots=True)
class Target:
    """One number that is fitted to, and the run that gives ours."""

    load: str
    shape: str
    assumed: NodeConfig

    @property
    def figure(self) -> Figure:
        """The paper's."""
        (figure,) = (each for each in FIGURES if each.fitted and each.row == self.load)
        return figure

    def ours(self, factor: float, share: float) -> float:
        """The same number with c1 and c2 so many times as large as assumed, of so much of the time."""
        play = shortened(Play(self.load, SGLANG, self.shape, (TO_85,)), share)
        return perform(play, fitted(self.assumed, factor)).stretches[TO_85.name][self.figure.metric]


TARGETS = (Target("CC (90)", "4P5D", ASSUMED_GLM_5_2), Target("OSWorld (128)", "6P3D", ASSUMED_KIMI_K2_6))
"""One for each number of `figures.FITTED`."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What came out. `tried`: factors and our number with each."""

    factor: float
    residual: float  # ours over the paper's, less 1
    tried: tuple[tuple[float, float], ...]

    @property
    def slope(self) -> float:
        """By how many percent our number changes where the factor does by one: near 0 nothing could be told from it."""
        (first, ours), (last, other) = min(self.tried), max(self.tried)
        return math.log(other / ours) / math.log(last / first)


def fit(ours: Callable[[float], float], wanted: float) -> Fit:
    """The factor, near 1, with which a number is the wanted one."""
    tried: list[tuple[float, float]] = []

    def off(log_factor: float) -> float:
        factor = math.exp(log_factor)
        tried.append((factor, ours(factor)))
        return math.log(tried[-1][1] / wanted)

    found = root_scalar(off, x0=0.0, x1=0.1, method="secant", xtol=_CLOSE, maxiter=8)
    factor = math.exp(found.root)
    nearest = min(tried, key=lambda each: abs(each[0] - factor))
    return Fit(nearest[0], nearest[1] / wanted - 1.0, tuple(tried))


def _fit(number: int, share: float) -> Fit:
    target = TARGETS[number]
    return fit(lambda factor: target.ours(factor, share), target.figure.value)


def main(share: float) -> None:
    """Fit both machines and print what came out."""
    with ProcessPoolExecutor(len(TARGETS), get_context("spawn")) as pool:
        for target, found in zip(TARGETS, pool.map(partial(_fit, share=share), range(len(TARGETS))), strict=True):
            tried = ", ".join(f"{factor:.3f}: {value:.3f}" for factor, value in found.tried)
            print(f"{target.load} on {target.shape}: factor {found.factor:.3f}, residual {found.residual:+.1%}")
            print(f"  by which {target.figure.metric} changes {found.slope:+.2f} % per percent; tried {tried}")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 1.0)
