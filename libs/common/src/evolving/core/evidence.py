"""Slices of earlier windows under the present split, for decisions that the last window alone can't make; all pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from evolving.core.config import PlannerConfig
from evolving.core.slices import Slice

_ROUNDING_S = 1e-6  # where one window ends and the next begins may differ by this


@dataclass(slots=True)
class Evidence:
    """Slices of past windows, without overlap: `evidence_windows` windows' worth with the last one, at most."""

    config: PlannerConfig
    _slices: tuple[Slice, ...] = field(init=False, default=())  # oldest first

    def before(self, window: Sequence[Slice], since_s: float) -> tuple[Slice, ...]:
        """The slices that may count with a window: the newest that ended before it began, and began since the split was
        written at `since_s`, by the clock that slices go by."""
        begins_s = window[0].started_s + _ROUNDING_S
        most = (self.config.evidence_windows - 1) * self.config.slices
        found = [kept for kept in self._slices if kept.started_s >= since_s and kept.ended_s <= begins_s]
        return tuple(found[max(0, len(found) - most) :])

    def add(self, window: Sequence[Slice], since_s: float) -> tuple[Slice, ...]:
        """Keep a window, for those after it; `before` it. Of slices that overlap the newer ones are kept."""
        earlier = self.before(window, since_s)
        self._slices = (*earlier, *window)
        return earlier
