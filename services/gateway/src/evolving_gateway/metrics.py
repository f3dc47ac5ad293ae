"""What the gateway measures of its requests."""

from __future__ import annotations

from collections.abc import Iterable

from evolving.runtime.metrics import Metrics
from evolving.v1 import common_pb2, gateway_pb2

_TPOT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2)


class GatewayMetrics:
    """Registered once per process."""

    def __init__(self, metrics: Metrics) -> None:
        self.requests = metrics.counter("gateway_requests", "Generations ended, by outcome.", ("outcome",))
        self.running = metrics.gauge("gateway_requests_running", "Generations accepted and unfinished.")
        self.ttft = metrics.histogram("gateway_ttft_seconds", "From a call's arrival to its first token.")
        self.tpot = metrics.histogram(
            "gateway_tpot_seconds", "Mean time per output token after the first.", buckets=_TPOT_BUCKETS_S
        )
        self.queue = metrics.histogram("gateway_queue_seconds", "Wait in the prefill node's queue.")
        self.route = metrics.histogram("gateway_route_seconds", "Begin and routing, from a prompt's ids to a dispatch.")
        self.prompt_tokens = metrics.counter("gateway_prompt_tokens", "Prompt tokens of finished requests.")
        self.cached_tokens = metrics.counter(
            "gateway_cached_tokens", "Prompt tokens not computed, by where their KV came from.", ("source",)
        )
        self.output_tokens = metrics.counter("gateway_output_tokens", "Output tokens sent.")
        self.attempts = metrics.counter("gateway_attempts", "Dispatches of requests to prefill nodes.")
        self.requotes = metrics.counter("gateway_requotes", "Requests sent back by a node for a longer wait.")
        self.reroutes = metrics.counter(
            "gateway_reroutes",
            "Times that requests left a node they waited at because it or another one switched.",
        )
        self.choices = metrics.counter("gateway_choices", "Choices of a prefill node.")
        self.choices_hung_on = metrics.counter(
            "gateway_choices_hung_on",
            "Choices that would have been others without a term of equation 7: fetch, duplicate, all_but_wait.",
            ("term",),
        )
        self.lost_tokens = metrics.counter(
            "gateway_lost_tokens",
            "Prompt tokens computed though a node held them: routing, sooner computed than fetched; arrival, meant to "
            "be reused and not there in time.",
            ("cause",),
        )
        self.losses = metrics.counter(
            "gateway_losses", "Requests whose branch lost counted copies other than by eviction, by cause.", ("cause",)
        )
        self.fetch = metrics.counter("gateway_fetch_seconds", "Time in which nodes read KV from peers for requests.")
        self.fetch_hidden = metrics.counter(
            "gateway_fetch_hidden_seconds", "Of it, what passed while the request had to wait anyway."
        )
        self.moves = metrics.counter("gateway_moves", "Requests moved after a leg failed, by reason.", ("reason",))

    def chosen(self, found: bool, hung_on: Iterable[str]) -> None:
        """A prefill node was chosen, or none was found; the terms of equation 7 that decided it."""
        if found:
            self.choices.inc()
        for term in hung_on:
            self.choices_hung_on.labels(term).inc()

    def reused(self, reuse: gateway_pb2.Reuse, cached: gateway_pb2.CachedTokens) -> None:
        """A request is over: what it reused of what it could have."""
        for source in ("own_l1", "own_l2", "peer_l2"):
            self.cached_tokens.labels(source).inc(getattr(cached, source))
        cached_tokens = cached.own_l1 + cached.own_l2 + cached.peer_l2
        missed_tokens = max(0, reuse.pool_tokens - cached_tokens)
        not_planned = min(missed_tokens, reuse.pool_tokens - reuse.planned_tokens)
        self.lost_tokens.labels("routing").inc(not_planned)
        self.lost_tokens.labels("arrival").inc(missed_tokens - not_planned)
        if reuse.loss:
            cause = common_pb2.LossCause.Name(reuse.loss).removeprefix("LOSS_CAUSE_").lower()
            self.losses.labels(cause).inc()
