"""What a node measures of its part of the pool."""

from __future__ import annotations

from evolving.runtime.metrics import Metrics
from evolving_node_agent.engines.port import EngineStatus, Taken


class PoolMetrics:
    """Registered once per process. Counters go on over the engine's lives."""

    def __init__(self, metrics: Metrics) -> None:
        self._fetched = metrics.counter("node_fetched_tokens", "Tokens whose KV came from peers.")
        self._busy = metrics.counter("node_fetch_busy_seconds", "Time with a read from a peer under way.")
        self._fetch = metrics.counter("node_fetch_seconds", "Time in which KV was read for a leg, over all legs.")
        self._hidden = metrics.counter("node_fetch_hidden_seconds", "Of it, what passed while its leg had to wait.")
        self._fetching = metrics.gauge("node_fetching_blocks", "Host pages taken for reads that have not ended.")
        self._backlog = metrics.gauge("node_fetch_backlog_tokens", "Prompt tokens still to come from peers.")
        self._used = metrics.gauge("node_l2_used_tokens", "Tokens of KV in host memory.")
        self._zero = metrics.gauge("node_l2_zero_tokens", "Of them, those that no branch counts here.")
        self._last = EngineStatus()

    def new_life(self) -> None:
        """The engine counts from 0 again."""
        self._last = EngineStatus()

    def observe(self, status: EngineStatus) -> None:
        """The engine's newest status."""
        self._fetched.inc(max(0, status.fetched_tokens - self._last.fetched_tokens))
        self._busy.inc(max(0.0, status.fetch_busy_s - self._last.fetch_busy_s))
        self._fetching.set(status.fetching_blocks)
        self._backlog.set(status.fetch_backlog_tokens)
        self._used.set(status.l2_used_tokens)
        self._zero.set(status.l2_zero_tokens)
        self._last = status

    def taken(self, taken: Taken) -> None:
        """A leg left the queue."""
        self._fetch.inc(taken.fetch_s)
        self._hidden.inc(taken.hidden_s)
