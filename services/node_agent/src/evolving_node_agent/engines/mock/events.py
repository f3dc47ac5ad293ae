"""KV events, gathered into as few as say the same."""

from __future__ import annotations

from dataclasses import dataclass, field

from evolving_node_agent.engines.port import Cleared, KvEvent, Removed, Stored, Tier


@dataclass(slots=True)
class _Run:
    kind: type[Stored] | type[Removed]
    tier: Tier
    parent: bytes | None = None
    names: list[bytes] = field(default_factory=list)


class EventLog:
    """Changes since the last `take`, in order; neighbours that continue one another are one event."""

    def __init__(self) -> None:
        self._events: list[_Run | Cleared] = []

    def stored(self, tier: Tier, parent: bytes | None, name: bytes) -> None:
        """A block came."""
        last = self._events[-1] if self._events else None
        continues = isinstance(last, _Run) and last.kind is Stored and last.tier is tier and last.names[-1] == parent
        if continues and isinstance(last, _Run):
            last.names.append(name)
        else:
            self._events.append(_Run(Stored, tier, parent, [name]))

    def removed(self, tier: Tier, name: bytes) -> None:
        """A block went."""
        last = self._events[-1] if self._events else None
        if isinstance(last, _Run) and last.kind is Removed and last.tier is tier:
            last.names.append(name)
        else:
            self._events.append(_Run(Removed, tier, None, [name]))

    def cleared(self, tier: Tier) -> None:
        """A tier was emptied."""
        self._events.append(Cleared(tier))

    def take(self) -> list[KvEvent]:
        """The events, and forget them."""
        events, self._events = self._events, []
        return [_event(each) for each in events]


def _event(entry: _Run | Cleared) -> KvEvent:
    if isinstance(entry, Cleared):
        return entry
    if entry.kind is Stored:
        return Stored(entry.tier, entry.parent, tuple(entry.names))
    return Removed(entry.tier, tuple(entry.names))
