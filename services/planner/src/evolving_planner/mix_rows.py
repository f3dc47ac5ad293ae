"""The mix of nodes' work, from what windows of iterations sum up to: ū and ρ of the time model (section 4.2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from evolving.core.iterations import IterationSums, IterationWindow, Mix, measure_mix
from evolving.core.timemodel import PrefillSums

MixRow = tuple[float, float, float, float]  # prefill iterations, their Σt_uc, Σt_rst and Σt_c
NOTHING: MixRow = (0.0, 0.0, 0.0, 0.0)
_ITERATIONS_LEAST = 20  # below, nobody knows their mean size
_ROWS_MAX = 2000


class MixRows:
    """Of one node. Bounded."""

    def __init__(self) -> None:
        self._rows: deque[tuple[float, MixRow]] = deque(maxlen=_ROWS_MAX)  # when it ended, what it sums up to

    def take(self, ended_s: float, window: IterationWindow) -> None:
        """One more window."""
        one, other = window.prefill, window.mixed
        row = (
            one.iterations + other.iterations,
            one.prefill.uncached_tokens + other.prefill.uncached_tokens,
            one.prefill.restored_tokens + other.prefill.restored_tokens,
            one.prefill.cached_tokens + other.prefill.cached_tokens,
        )
        self._rows.append((ended_s, row))

    def since(self, from_s: float) -> MixRow:
        """Sums over windows that ended after `from_s`."""
        return sum_rows(row for ended_s, row in self._rows if ended_s > from_s)


def sum_rows(rows: Iterable[MixRow]) -> MixRow:
    """Their sums."""
    iterations, new, restored, cached = zip(NOTHING, *rows, strict=True)
    return sum(iterations), sum(new), sum(restored), sum(cached)


def says_something(row: MixRow) -> bool:
    """Whether there were iterations enough."""
    return row[0] >= _ITERATIONS_LEAST


def mix_of(row: MixRow) -> Mix:
    """What the sums tell; nothing where they say nothing."""
    iterations, new, restored, cached = row
    if not says_something(row):
        return Mix(None, None)
    sums = IterationSums(int(iterations), prefill=PrefillSums(new, 0.0, restored, cached))
    return measure_mix((IterationWindow(prefill=sums),))
