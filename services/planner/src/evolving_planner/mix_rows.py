"""What a node computed lately, as far as the mix of its work is concerned: ū and ρ of the time model (section 4.2)."""

from __future__ import annotations

from collections import deque

from evolving.core.iterations import IterationSums, IterationWindow
from evolving.core.timemodel import PrefillSums

_ROWS_MAX = 2000


class MixRows:
    """Of one node. Bounded."""

    def __init__(self) -> None:
        # When a window ended; its prefill iterations, their Σt_uc, Σt_rst and Σt_c.
        self._rows: deque[tuple[float, int, float, float, float]] = deque(maxlen=_ROWS_MAX)

    def take(self, ended_s: float, window: IterationWindow) -> None:
        """One more window."""
        one, other = window.prefill, window.mixed
        self._rows.append(
            (
                ended_s,
                one.iterations + other.iterations,
                one.prefill.uncached_tokens + other.prefill.uncached_tokens,
                one.prefill.restored_tokens + other.prefill.restored_tokens,
                one.prefill.cached_tokens + other.prefill.cached_tokens,
            )
        )

    def since(self, from_s: float) -> IterationWindow:
        """The prefill part of all windows that ended after `from_s`, as one."""
        iterations, new, restored, cached = 0, 0.0, 0.0, 0.0
        for ended_s, *row in self._rows:
            if ended_s > from_s:
                iterations, new = iterations + int(row[0]), new + row[1]
                restored, cached = restored + row[2], cached + row[3]
        return IterationWindow(IterationSums(iterations, prefill=PrefillSums(new, 0.0, restored, cached)))
