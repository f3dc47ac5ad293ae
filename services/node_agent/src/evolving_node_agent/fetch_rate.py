"""How fast this node's reads from peers are, by what they brought lately. Pure."""

from __future__ import annotations

import math


class FetchRate:
    """Tokens over time of reading, both fading by e in `horizon_s` seconds of *reading*: an idle hour forgets nothing.

    The engine counts tokens when a read ends and time while any is under way; so the rate is that of all reads
    together, as deep as they were at once, and a read that hangs lowers it while it hangs.
    """

    def __init__(self, horizon_s: float = 2.0) -> None:
        self._horizon_s = horizon_s
        self._tokens = 0.0
        self._busy_s = 0.0
        self._last_tokens = 0
        self._last_busy_s = 0.0

    def new_life(self) -> None:
        """The engine counts from 0 again."""
        self._last_tokens, self._last_busy_s = 0, 0.0

    def observe(self, fetched_tokens: int, fetch_busy_s: float) -> None:
        """What the engine counted until now."""
        tokens, busy_s = fetched_tokens - self._last_tokens, fetch_busy_s - self._last_busy_s
        if tokens <= 0 and busy_s <= 0:
            return
        kept = math.exp(-busy_s / self._horizon_s)
        self._tokens = kept * self._tokens + tokens
        self._busy_s = kept * self._busy_s + busy_s
        self._last_tokens, self._last_busy_s = fetched_tokens, fetch_busy_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of reading; 0: nothing came yet."""
        return self._tokens / self._busy_s if self._busy_s > 0 else 0.0
