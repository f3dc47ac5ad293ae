"""Whose read from a peer goes next: the most urgent leg's, within bounds of readers and bandwidth (§4.4).

A fetch proceeds in chunks, and each chunk waits for its turn here. So a more urgent leg that comes later overtakes at
the next chunk, and no more host pages are taken than `readers` chunks need. Pure: who drives it passes `now_s` and
asks `next_wakeup_s` when bandwidth alone is what a turn waits for.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from evolving.core.config import FetchConfig

Key = TypeVar("Key")
Rank = tuple[int, int]  # (-priority, arrival): the order of the node's queue, smallest first


class FetchTurns(Generic[Key]):
    """Turns of chunks. Keys are the driver's own; each waits, or reads, at most once at a time."""

    def __init__(self, config: FetchConfig) -> None:
        self._config = config
        self._waiting: dict[Key, tuple[Rank, int]] = {}
        self._reading: set[Key] = set()
        self._free_at_s = 0.0  # when the bandwidth of the turns granted so far is used up

    def ask(self, key: Key, rank: Rank, size_bytes: int) -> None:
        """Wait for a turn to read `size_bytes`. Turns are given by `grant` only."""
        assert key not in self._waiting
        assert key not in self._reading
        self._waiting[key] = (rank, size_bytes)

    def grant(self, now_s: float) -> list[Key]:
        """The keys whose turn begins now, most urgent first."""
        granted: list[Key] = []
        while self._waiting and len(self._reading) < self._config.readers and self._free_at_s <= now_s:
            key = min(self._waiting, key=lambda each: self._waiting[each][0])
            _, size_bytes = self._waiting.pop(key)
            self._free_at_s = max(now_s, self._free_at_s) + size_bytes / self._config.bytes_per_s
            self._reading.add(key)
            granted.append(key)
        return granted

    def end(self, key: Key) -> None:
        """The turn is over and its buffers are free, or the key waits no more. Unknown: no-op."""
        self._waiting.pop(key, None)
        self._reading.discard(key)

    @property
    def reading(self) -> int:
        """Turns under way."""
        return len(self._reading)

    def next_wakeup_s(self, now_s: float) -> float | None:
        """When `grant` gives a turn without anyone's `end` or `ask`; None: never."""
        if not self._waiting or len(self._reading) >= self._config.readers:
            return None
        return max(now_s, self._free_at_s)
