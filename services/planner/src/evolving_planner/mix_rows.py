"""What a node computed lately, as far as the mix of its work is concerned: ū and ρ of the time model (section 4.2)."""

from __future__ import annotations

import math

from evolving.core.iterations import IterationSums, IterationWindow
from evolving.core.timemodel import PrefillSums

_PARTS = 20  # of the time that is looked back on; what is older goes by the part


class MixRows:
    """Of one node, over the last `span_s` seconds. Bounded."""

    def __init__(self, span_s: float) -> None:
        self._part_s = span_s / _PARTS
        # By the number of the part of time: prefill iterations, their Σt_uc, Σt_rst and Σt_c.
        self._parts: dict[int, tuple[int, float, float, float]] = {}

    def take(self, ended_s: float, window: IterationWindow) -> None:
        """One more window."""
        part, newest = self._part(ended_s), max(self._parts, default=-math.inf)
        if part <= newest - _PARTS:
            return
        if part > newest:
            self._parts = {old: row for old, row in self._parts.items() if old > part - _PARTS}
        iterations, new, restored, cached = self._parts.get(part, (0, 0.0, 0.0, 0.0))
        one, other = window.prefill, window.mixed
        self._parts[part] = (
            iterations + one.iterations + other.iterations,
            new + one.prefill.uncached_tokens + other.prefill.uncached_tokens,
            restored + one.prefill.restored_tokens + other.prefill.restored_tokens,
            cached + one.prefill.cached_tokens + other.prefill.cached_tokens,
        )

    def up_to(self, newest_s: float) -> IterationWindow:
        """The prefill part of all windows of the `span_s` seconds up to then, as one."""
        oldest = self._part(newest_s) - _PARTS
        iterations, new, restored, cached = 0, 0.0, 0.0, 0.0
        for part, row in self._parts.items():
            if part > oldest:
                iterations, new = iterations + row[0], new + row[1]
                restored, cached = restored + row[2], cached + row[3]
        return IterationWindow(IterationSums(iterations, prefill=PrefillSums(new, 0.0, restored, cached)))

    def _part(self, at_s: float) -> int:
        return math.floor(at_s / self._part_s)
