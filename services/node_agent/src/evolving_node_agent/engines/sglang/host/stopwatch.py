"""Adding up time across threads."""

from __future__ import annotations

import time


class Stopwatch:
    """Seconds in which at least one thing was under way. One thread starts and stops it, any may read it."""

    def __init__(self) -> None:
        self._state = (0.0, 0.0, 0)  # (seconds until the last start, when that was, things under way); one assignment

    def start(self) -> None:
        """One more is under way."""
        total_s, since_s, running = self._state
        self._state = (total_s, since_s if running else time.monotonic(), running + 1)

    def stop(self) -> None:
        """One of them ended."""
        total_s, since_s, running = self._state
        assert running > 0
        if running == 1:
            total_s += time.monotonic() - since_s
        self._state = (total_s, since_s, running - 1)

    @property
    def total_s(self) -> float:
        """Seconds up to now."""
        total_s, since_s, running = self._state
        return total_s + (time.monotonic() - since_s if running else 0.0)
