"""What the gateway measures of its requests."""

from __future__ import annotations

from evolving.runtime.metrics import Metrics

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
        self.reroutes = metrics.counter("gateway_reroutes", "Requests that left a queue because of a role switch.")
        self.moves = metrics.counter("gateway_moves", "Requests moved after a leg failed, by reason.", ("reason",))
