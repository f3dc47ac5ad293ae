"""Changes of what a node holds, gathered into as few as say the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from evolving.core.terms import Tier


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

    def stored(self, tier: Tier, parent: bytes | None, names: Sequence[bytes]) -> None:
        """Blocks came."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksStored) and last.tier is tier and last.names[-1] == parent:
            last.names.extend(names)
        else:
            self._events.append(BlocksStored(tier, parent, list(names)))

    def removed(self, tier: Tier, names: Sequence[bytes]) -> None:
        """Blocks went."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksRemoved) and last.tier is tier:
            last.names.extend(names)
        else:
            self._events.append(BlocksRemoved(tier, list(names)))

    def cleared(self, tier: Tier) -> None:
        """A tier is lost."""
        self._events.append(TierCleared(tier))

    def take(self) -> list[PoolEvent]:
        """The events, and forget them."""
        events, self._events = self._events, []
        return events
