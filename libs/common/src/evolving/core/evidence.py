"""What earlier windows measured under the present split, for where the last one alone is not sure; all of it pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from evolving.core.config import PlannerConfig
from evolving.core.slices import Slice

_ROUNDING_S = 1e-6  # where one window ends and the next begins may differ by this


@dataclass(slots=True)
class Evidence:
    """Slices of the windows that were decided by, since the split last changed; the newest `evidence_windows`."""

    config: PlannerConfig
    _epoch: int = field(init=False, default=0)  # of the split they were measured under
    _slices: tuple[Slice, ...] = field(init=False, default=())  # oldest first, none overlaps another

    def before(self, window: Sequence[Slice], epoch: int) -> tuple[Slice, ...]:
        """The slices kept that ended before the window began, if the split is still that of `epoch`."""
        if epoch != self._epoch or not window:
            return ()
        begins_s = window[0].started_s + _ROUNDING_S
        most = (self.config.evidence_windows - 1) * self.config.slices
        ended = [kept for kept in self._slices if kept.ended_s <= begins_s]
        return tuple(ended[max(0, len(ended) - most) :])

    def keep(self, window: Sequence[Slice], epoch: int) -> None:
        """A window was decided by, under the split of `epoch`. Windows come in order; one may overlap the last."""
        self._slices = (*self.before(window, epoch), *window)
        self._epoch = epoch
