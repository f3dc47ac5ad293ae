"""Who moves nodes: the planner, an operator, or nobody. Everything here is pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Mode(enum.StrEnum):
    """What becomes of a decision by throughput. Nodes that come and go are followed in every mode."""

    AUTO = "auto"  # it is carried out
    SHADOW = "shadow"  # it is recorded and changes nothing
    MANUAL = "manual"  # recorded too; the split is an operator's


@dataclass(frozen=True, slots=True)
class Hold:
    """An operator's word that the split stays as it is, until they release it or its time is over."""

    author: str
    reason: str = ""
    until_s: float | None = None  # unix time; None: until released

    def in_force(self, now_s: float) -> bool:
        """Its time is not over."""
        return self.until_s is None or now_s < self.until_s


def hold_in_force(hold: Hold | None, now_s: float) -> Hold | None:
    """`hold`, unless its time is over."""
    return hold if hold is not None and hold.in_force(now_s) else None
