"""The engine's status, as the node agent sees it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from evolving.core.iterations import IterationMeter
from evolving_node_agent.engines.port import EngineStatus
from evolving_node_agent.engines.sglang import messages as m

from .legs import DecodeLeg, Phase
from .measuring import experts_of

if TYPE_CHECKING:
    from .desk import Desk

CHANGE_S = 0.01  # at most this often
_HEARTBEAT_S = 1.0  # at least this often


class StatusBoard:
    """Counts iterations and publishes the status. Scheduler's thread."""

    def __init__(self, scheduler: Any, desk: Desk) -> None:
        self._scheduler = scheduler
        self._desk = desk
        self._last = EngineStatus()
        self._last_s = 0.0
        self.prefill_iterations = 0
        self.prefill_tokens = 0
        self.retractions = 0
        self.meter = IterationMeter(*experts_of(scheduler.model_config))

    def on_prefill_batch(self, batch: Any) -> None:
        """Count an iteration that computes prompt tokens."""
        self.prefill_iterations += 1
        self.prefill_tokens += int(batch.extend_num_tokens)

    def publish(self, report: Callable[[m.Report], None]) -> bool:
        """Report the status if it changed, or if the last report is old; False: it is too early to."""
        now_s = time.monotonic()
        if now_s - self._last_s < CHANGE_S:
            return False
        status = self._status()
        if status != self._last or now_s - self._last_s >= _HEARTBEAT_S:
            self._last, self._last_s = status, now_s
            report(m.StatusChanged(status))
        return True

    def _status(self) -> EngineStatus:
        scheduler, desk = self._scheduler, self._desk
        running = [request for request in scheduler.running_batch.reqs if not request.finished()]
        by_phase: dict[Phase, list[Any]] = {phase: [] for phase in Phase}
        for leg in desk.prefills.values():
            by_phase[leg.phase].append(leg)
        reserved = [leg for leg in desk.decodes.values() if not leg.running]
        queued = {leg.leg_id: len(leg.tokens) - leg.known_cached_tokens for leg in by_phase[Phase.QUEUED]}
        return EngineStatus(
            queued=queued,
            prefilling={
                leg.leg_id: max(0, len(leg.tokens) - (leg.request.extend_end or 0)) for leg in by_phase[Phase.COMPUTING]
            },
            holding=len(by_phase[Phase.HOLDING]),
            decoding=sum(isinstance(request.leg, DecodeLeg) for request in running),
            decode_context_tokens=sum(request.seqlen for request in running),
            reserved=len(reserved),
            reserved_context_tokens=sum(len(leg.tokens) for leg in reserved),
            l1_used_tokens=scheduler.max_total_num_tokens - scheduler.token_to_kv_pool_allocator.available_size(),
            l2_used_tokens=desk.blocks.pages.used_host_tokens(),
            iterations=scheduler.forward_ct,
            prefill_iterations=self.prefill_iterations,
            prefill_tokens=self.prefill_tokens,
            retractions=self.retractions,
            l2_zero_tokens=desk.blocks.residency.zero_blocks * scheduler.page_size,
            fetch_backlog_tokens=sum(leg.fetch.missing_tokens for leg in by_phase[Phase.QUEUED]),
            fetching_blocks=desk.keeping.blocks_coming,
            fetched_tokens=desk.landing.fetched_tokens,
            fetch_busy_s=desk.landing.busy.total_s,
            ran=self.meter.totals(),
        )
