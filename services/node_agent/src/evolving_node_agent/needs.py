"""What this node evicts by, from the counts the directory pushed (`evolving.core.needs`). Pure."""

from __future__ import annotations

from collections.abc import Mapping


class NeedsMirror:
    """The last needs heard of. They stay in force, whatever happens to the directory, until a complete set of a new
    stream or resync was heard: unknown is not zero."""

    def __init__(self) -> None:
        self._needs: dict[bytes, int] = {}
        self._heard: set[bytes] = set()

    def in_force(self) -> dict[bytes, int]:
        """All that are not 0."""
        return dict(self._needs)

    def start_over(self) -> None:
        """All will be sent anew."""
        self._heard.clear()

    def take(self, needs: Mapping[bytes, int]) -> dict[bytes, int]:
        """New ones; those to hand to the engine."""
        self._heard.update(needs)
        for name, need in needs.items():
            if need:
                self._needs[name] = need
            else:
                self._needs.pop(name, None)
        return dict(needs)

    def complete(self) -> dict[bytes, int]:
        """All were sent: the ones not heard of are 0. Those to hand to the engine."""
        gone = dict.fromkeys(self._needs.keys() - self._heard, 0)
        for name in gone:
            del self._needs[name]
        return gone
