"""Changes of what a node holds, gathered into as few as say the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from evolving.core.pool_runs import Run
from evolving.core.terms import Tier


class PoolLog(Protocol):
    """Who hears of changes as they happen. A run is as it is at that moment, and changes afterwards."""

    def stored(self, tier: Tier, run: Run) -> None:
        """A run came into a tier."""

    def removed(self, tier: Tier, run: Run) -> None:
        """A run leaves a tier; what stands above it is still there."""

    def cleared(self, tier: Tier) -> None:
        """A tier is lost."""


@dataclass(slots=True)
class BlocksStored:
    """Blocks came into a tier, root-most first; `parent` names the block before names[0], None: there is none."""

    tier: Tier
    parent: bytes | None
    names: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class BlocksRemoved:
    """Blocks left a tier, in any order."""

    tier: Tier
    names: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class TierCleared:
    """A tier was lost as a whole."""

    tier: Tier


PoolEvent = BlocksStored | BlocksRemoved | TierCleared


class PoolEvents:
    """Changes since the last `take`, in order; neighbours that continue one another are one."""

    def __init__(self) -> None:
        self._events: list[PoolEvent] = []

    def stored(self, tier: Tier, run: Run) -> None:
        """Blocks came."""
        parent = run.parent.names[-1] if run.parent is not None else None
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksStored) and last.tier is tier and last.names[-1] == parent:
            last.names.extend(run.names)
        else:
            self._events.append(BlocksStored(tier, parent, list(run.names)))

    def removed(self, tier: Tier, run: Run) -> None:
        """Blocks went."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksRemoved) and last.tier is tier:
            last.names.extend(run.names)
        else:
            self._events.append(BlocksRemoved(tier, list(run.names)))

    def cleared(self, tier: Tier) -> None:
        """A tier is lost."""
        self._events.append(TierCleared(tier))

    def take(self) -> list[PoolEvent]:
        """The events, and forget them."""
        events, self._events = self._events, []
        return events
