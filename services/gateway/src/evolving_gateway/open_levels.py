"""How many requests are open here, told to the leading planner: the share of this gateway in q̄ (paper, section 4.3)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

from evolving.internal.v1 import planner_pb2, planner_pb2_grpc
from evolving.runtime.clock import Clock
from evolving.runtime.following import FollowingChannel
from evolving.runtime.log import get_logger
from evolving.runtime.metrics import Metrics
from evolving.wire.status import parse_error

LEVEL_S = 1.0
KEPT_LEVELS = 900
"""Levels that wait for a planner; more than a window of evaluation is of no use to one."""
_CALL_TIMEOUT_S = 5.0
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Level:
    """Requests open from `from_s` to `to_s`, in the mean."""

    from_s: float
    to_s: float
    requests: float


class OpenRequests:
    """Counts open requests, and integrates the count over time into levels of LEVEL_S without a gap."""

    def __init__(self, now_s: float) -> None:
        self.count = 0
        self._levels: deque[Level] = deque(maxlen=KEPT_LEVELS)
        self._from_s = now_s  # of the level that has not ended
        self._at_s = now_s
        self._integral_s = 0.0  # ∫ count from `_from_s` to `_at_s`

    def opened(self, now_s: float) -> None:
        """A request is on its way to a node's queue."""
        self._pass(now_s)
        self.count += 1

    def ended(self, now_s: float) -> None:
        """One of them is over, however."""
        self._pass(now_s)
        assert self.count > 0
        self.count -= 1

    def levels(self, now_s: float) -> tuple[Level, ...]:
        """Those that have ended and are kept, oldest first."""
        self._pass(now_s)
        return tuple(self._levels)

    def cut(self, now_s: float) -> None:
        """End the present level now, however short it is."""
        self._pass(now_s)
        if self._at_s > self._from_s:
            self._end_level()

    def forget(self, levels: Sequence[Level]) -> None:
        """Keep these, the oldest of what `levels` returned, no longer."""
        while levels and self._levels and self._levels[0].from_s <= levels[-1].from_s:
            self._levels.popleft()

    def _pass(self, now_s: float) -> None:
        """Time passes with the count as it is."""
        while now_s >= self._from_s + LEVEL_S:
            self._integrate(self._from_s + LEVEL_S)
            self._end_level()
        self._integrate(now_s)

    def _integrate(self, to_s: float) -> None:
        self._integral_s += self.count * (to_s - self._at_s)
        self._at_s = to_s

    def _end_level(self) -> None:
        span_s = self._at_s - self._from_s
        self._levels.append(Level(self._from_s, self._at_s, self._integral_s / span_s))
        self._from_s, self._integral_s = self._at_s, 0.0


class OpenReporter:
    """Sends levels to the leading planner. While there is none, or it does not answer, they wait; what may have come is
    sent again, since a planner goes by what it heard first of a moment."""

    def __init__(
        self,
        open_requests: OpenRequests,
        planner: FollowingChannel,
        partition_id: str,
        gateway_id: str,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        """planner: goes where the leading planner is. gateway_id: this gateway's instance name."""
        self._open = open_requests
        self._planner = planner
        self._partition_id = partition_id
        self._gateway_id = gateway_id
        self._clock = clock
        self._failing = ""  # how reports fail
        self._reports = metrics.counter(
            "gateway_open_reports", "Reports to the leading planner of how many requests are open.", ("outcome",)
        )

    async def run(self) -> None:
        """Report every LEVEL_S, for ever."""
        while True:
            await self._clock.sleep(LEVEL_S)
            await self.report()

    async def farewell(self, timeout_s: float) -> None:
        """The last word of a gateway that leaves, with the level that has not ended."""
        self._open.cut(self._clock.now_s())
        await self.report(timeout_s)

    async def report(self, timeout_s: float = _CALL_TIMEOUT_S) -> None:
        """Send what is kept, and forget it once the planner has it, or refuses what it says."""
        levels = self._open.levels(self._clock.now_s())
        channel = self._planner.get()
        if not levels:
            return
        if channel is None:
            self._failed("away", "nobody leads")
            return
        try:
            await planner_pb2_grpc.PlannerServiceStub(channel).ReportOpen(self._message(levels), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            detail = parse_error(error)
            if detail.status is grpc.StatusCode.INVALID_ARGUMENT:  # it would be so again
                self._failed("refused", detail.message)
                self._open.forget(levels)
            else:
                self._failed("away", detail.message)
            return
        self._open.forget(levels)
        self._reports.labels("answered").inc()
        self._failing = ""

    def _failed(self, outcome: str, why: str) -> None:
        self._reports.labels(outcome).inc()
        if self._failing != outcome:  # once, and not every second
            self._failing = outcome
            _log.warning("open_requests_not_reported", address=self._planner.address, outcome=outcome, error=why)

    def _message(self, levels: Sequence[Level]) -> planner_pb2.ReportOpenRequest:
        now_s = self._clock.now_s()
        return planner_pb2.ReportOpenRequest(
            partition_id=self._partition_id,
            gateway_id=self._gateway_id,
            levels=[
                planner_pb2.OpenLevel(
                    from_age_s=now_s - level.from_s, to_age_s=now_s - level.to_s, requests=level.requests
                )
                for level in levels
            ],
        )
