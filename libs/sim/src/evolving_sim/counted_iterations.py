"""Iterations of an engine that are under way. While nothing comes and the batch stays as it is they are counted, not
played: their ends are where they would have been, to the rounding of floating point.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from evolving.core.timemodel import PrefillSums
from evolving_sim.events import Event
from evolving_sim.legs import PrefillLeg


@dataclass(slots=True, eq=False)
class CountedIterations:
    """Those under way: with `chunks` one, else as many as the batch does not change in."""

    began_s: float
    count: int
    first_s: float  # the first one
    growth_s: float  # each one takes so much longer than the one before, for the context grew
    chunks: list[tuple[PrefillLeg, int]] = field(default_factory=list)
    sums: PrefillSums = field(default_factory=PrefillSums)
    end: Event | None = None

    def span_s(self, count: int) -> float:
        """Seconds that the first `count` of them take."""
        return count * self.first_s + self.growth_s * count * (count - 1) / 2

    def ended_by(self, now_s: float) -> int:
        """The first of them that ends at `now_s` or later, from 1."""
        passed_s = now_s - self.began_s
        if self.growth_s > 0:
            half = self.first_s - self.growth_s / 2
            count = math.ceil((math.sqrt(half * half + 2 * self.growth_s * passed_s) - half) / self.growth_s)
        else:
            count = math.ceil(passed_s / self.first_s)
        count = min(max(count, 1), self.count)
        while count > 1 and self.began_s + self.span_s(count - 1) >= now_s:
            count -= 1
        while count < self.count and self.began_s + self.span_s(count) < now_s:
            count += 1
        return count
