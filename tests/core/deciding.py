"""The life of a split under every kind of decision, made from a seed alone; as a program, printed whole.

PYTHONPATH=tests python -m core.deciding SEED…
"""

from __future__ import annotations

import random
import sys

from core.planning import NINE, a_slice, mean_work, node_model

from evolving.core.config import PlannerConfig
from evolving.core.membership import follow_membership
from evolving.core.modes import Mode
from evolving.core.planner import (
    Decision,
    Split,
    SplitRefused,
    SplitShape,
    effective_roles,
    propose_changes,
    propose_shape,
)
from evolving.core.replan import decide_by_throughput, evaluate
from evolving.core.slices import Slice
from evolving.core.terms import Role

_STEPS = 20
_AUTHOR = "planner"


class _Life:
    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        kinds = [
            node_model(self._draw.uniform(0.5, 2), self._draw.uniform(0.5, 2)) for _ in range(1 + 2 * (seed % 3 == 0))
        ]
        self._models = {node: self._draw.choice(kinds) for node in NINE}
        self._live = set(NINE[:6])  # comes in another order in each process
        self._now_s = 1000.0
        self._split = Split()
        self._prefill_share = 0.5

    def step(self) -> Decision | None:
        """What is decided next, written at once; None: nothing."""
        self._now_s += self._draw.choice([1, 20, 60, 119.5, 120, 130, 600])
        choose = self._draw.choices([self._follow, self._shape, self._changes, self._measure], [2, 1, 1, 6])[0]
        try:
            decision = choose() if self._split.epoch else self._follow()
        except SplitRefused:
            return None
        if decision is None:
            return None
        self._prefill_share = decision.prefill_share
        if decision.changes_split:
            self._split = decision.split()
        return decision

    def _follow(self) -> Decision | None:
        self._live ^= {self._draw.choice(NINE)}
        return follow_membership(
            self._split,
            self._live,
            initial=None,
            prefill_share=self._prefill_share,
            author=_AUTHOR,
            now_s=self._now_s,
        )

    def _shape(self) -> Decision:
        prefills = self._draw.randrange(1, 6)
        shape = SplitShape(prefills, max(1, len(self._live) - prefills))
        return propose_shape(
            self._split, self._live, shape, expected_epoch=0, reason="", author="ops", now_s=self._now_s
        )

    def _changes(self) -> Decision:
        changes = {self._draw.choice(NINE): self._draw.choice(list(Role)) for _ in range(2)}
        return propose_changes(
            self._split,
            self._live,
            changes,
            expected_epoch=0,
            reason="",
            author="ops",
            prefill_share=self._prefill_share,
            now_s=self._now_s,
        )

    def _measure(self) -> Decision:
        roles = effective_roles(self._split, self._live)
        evaluation = evaluate(self._slices(), roles, self._models, PlannerConfig())
        return decide_by_throughput(
            self._split,
            self._live,
            evaluation,
            mode=Mode.AUTO,
            hold=None,
            prefill_share=self._prefill_share,
            author=_AUTHOR,
            now_s=self._now_s,
        )

    def _slices(self) -> list[Slice]:
        """A window of work that asks now more of one phase, now of the other."""
        iterations = self._draw.choice([30, 300, 1200])
        works = [mean_work(iterations=iterations * self._draw.gauss(1, 0.05)) for _ in range(10)]
        return [a_slice(work, 60 * self._draw.gauss(1, 0.05)) for work in works]


def life_of_a_split(seed: int) -> list[Decision]:
    """What is decided in it, in order."""
    life = _Life(seed)
    return [decision for decision in (life.step() for _ in range(_STEPS)) if decision is not None]


if __name__ == "__main__":
    for each in sys.argv[1:]:
        print(*life_of_a_split(int(each)), sep="\n")
