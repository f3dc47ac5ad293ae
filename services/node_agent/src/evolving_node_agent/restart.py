"""When an engine that died may start again. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartConfig:
    """Waits double from `first_s` to `max_s`; `attempts` failures within `window_s` are the end. Else ValueError."""

    first_s: float = 0.5
    max_s: float = 30.0
    attempts: int = 5
    window_s: float = 300.0

    def __post_init__(self) -> None:
        if not 0 < self.first_s <= self.max_s or self.attempts < 1 or self.window_s <= 0:
            raise ValueError(f"restarts need 0 < first_s <= max_s, attempts >= 1 and window_s > 0: {self}")


class RestartPolicy:
    """Remembers failures: of starts, and of engines that had started."""

    def __init__(self, config: RestartConfig) -> None:
        self._config = config
        self._failures: deque[float] = deque()

    def failed(self, now_s: float) -> float | None:
        """Seconds to wait before the next start; None: give up.

        The wait is a function of the failures within the window, so an engine that ran well for long starts again fast.
        """
        while self._failures and self._failures[0] <= now_s - self._config.window_s:
            self._failures.popleft()
        self._failures.append(now_s)
        if len(self._failures) >= self._config.attempts:
            return None
        return float(min(self._config.max_s, self._config.first_s * 2 ** (len(self._failures) - 1)))
