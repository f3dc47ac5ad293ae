"""How fast this node's reads from peers are, by what they brought lately. Pure."""

from __future__ import annotations

import math


class FetchRate:
    """Tokens over time of reading, both fading by e in `horizon_s` seconds of *reading*: a pause forgets nothing.

    The engine counts tokens when a read ends and time while any is under way; so the rate is that of all reads
    together, and a read that hangs lowers it while it hangs. A rate that keeps gateways from asking for reads would
    never be seen to be out of date: without a read for `forget_s` it is unknown again.
    """

    def __init__(self, horizon_s: float = 2.0, forget_s: float = 30.0) -> None:
        self._horizon_s = horizon_s
        self._forget_s = forget_s
        self._tokens = 0.0
        self._busy_s = 0.0
        self._last_tokens = 0
        self._last_busy_s = 0.0
        self._read_s = 0.0  # when a read was last seen

    def new_life(self) -> None:
        """The engine counts from 0 again."""
        self._last_tokens, self._last_busy_s = 0, 0.0

    def observe(self, fetched_tokens: int, fetch_busy_s: float, now_s: float) -> None:
        """What the engine counted until now."""
        tokens, busy_s = fetched_tokens - self._last_tokens, fetch_busy_s - self._last_busy_s
        if tokens <= 0 and busy_s <= 0:
            return
        if self.tokens_per_s(now_s) == 0.0:
            self._tokens = self._busy_s = 0.0
        self._read_s = now_s
        kept = math.exp(-busy_s / self._horizon_s)
        self._tokens = kept * self._tokens + tokens
        self._busy_s = kept * self._busy_s + busy_s
        self._last_tokens, self._last_busy_s = fetched_tokens, fetch_busy_s

    def tokens_per_s(self, now_s: float) -> float:
        """Tokens a second of reading; 0: not known."""
        known = self._busy_s > 0 and now_s - self._read_s < self._forget_s
        return self._tokens / self._busy_s if known else 0.0
