"""The branch counts this node evicts by, as the directory pushed them. Pure."""

from __future__ import annotations

from collections.abc import Mapping


class CountsMirror:
    """The last counts heard. They stay in force, whatever happens to the directory, until a complete set of a new
    stream or resync was heard: unknown is not zero."""

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}
        self._heard: set[bytes] = set()

    def in_force(self) -> dict[bytes, int]:
        """All nonzero counts."""
        return dict(self._counts)

    def start_over(self) -> None:
        """All counts will be sent anew."""
        self._heard.clear()

    def take(self, counts: Mapping[bytes, int]) -> dict[bytes, int]:
        """New counts; those to hand to the engine."""
        self._heard.update(counts)
        for name, count in counts.items():
            if count:
                self._counts[name] = count
            else:
                self._counts.pop(name, None)
        return dict(counts)

    def complete(self) -> dict[bytes, int]:
        """All counts were sent: the ones not heard of are 0. Those to hand to the engine."""
        gone = dict.fromkeys(self._counts.keys() - self._heard, 0)
        for name in gone:
            del self._counts[name]
        return gone
