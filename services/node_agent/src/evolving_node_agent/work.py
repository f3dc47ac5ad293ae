"""What this node did, reported to the leading planner: samples of legs, and windows of its engine's iterations.

A planner that is away costs nothing but the oldest of it.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc
import grpc.aio

from evolving.core.iterations import IterationWindow, WindowCutter
from evolving.internal.v1 import planner_pb2, planner_pb2_grpc
from evolving.runtime.clock import Clock
from evolving.runtime.following import FollowingChannel
from evolving.runtime.log import get_logger
from evolving.runtime.metrics import Metrics
from evolving_node_agent.samples import window_message

_CALL_TIMEOUT_S = 5.0
_REPORT_MAX = 1000  # samples in one report, and as many windows
_IDLE_MAX_S = 10.0  # without a report: a planner has something to say, too
_LAST_RETRY_S = 0.05  # between attempts when the agent leaves
_EMPTY = IterationWindow()

_log = get_logger(__name__)
Message = TypeVar("Message", planner_pb2.WorkSample, planner_pb2.IterationWindow)


@dataclass(frozen=True, slots=True)
class _Dated(Generic[Message]):
    """A message about what ended at `ended_s` of this process's clock."""

    message: Message
    ended_s: float

    def aged(self, now_s: float) -> Message:
        """The message as it is to be sent now."""
        self.message.age_s = max(0.0, now_s - self.ended_s)
        return self.message


class _Waiting(Generic[Message]):
    """The newest messages not in a report yet, at most `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._messages: deque[_Dated[Message]] = deque()

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: Message, now_s: float) -> int:
        """Add one; how many were given up for it."""
        self._messages.append(_Dated(message, now_s))
        if len(self._messages) <= self._limit:
            return 0
        self._messages.popleft()
        return 1

    def take(self) -> list[_Dated[Message]]:
        """The oldest, as many as go into a report."""
        return [self._messages.popleft() for _ in range(min(_REPORT_MAX, len(self._messages)))]


@dataclass(frozen=True, slots=True)
class _Report:
    """It goes unchanged until a planner took it: by number, within an incarnation, one tells repeats."""

    incarnation: str
    sequence: int
    samples: list[_Dated[planner_pb2.WorkSample]]
    windows: list[_Dated[planner_pb2.IterationWindow]]

    def __len__(self) -> int:
        return len(self.samples) + len(self.windows)


class WorkReporter:
    """Keeps the newest samples and windows and sends them in numbered reports, each until it is known to be taken."""

    def __init__(
        self,
        partition_id: str,
        node_id: str,
        *,
        limit: int,
        period_s: float,
        window_s: float,
        planner: FollowingChannel,
        answered: Callable[[planner_pb2.ReportWorkResponse], None],
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        """limit: samples, and windows, kept. window_s: as for `WindowCutter`. planner: goes where one leads.
        answered: told what each report was answered."""
        self._partition_id = partition_id
        self._node_id = node_id
        self._period_s = period_s
        self._planner = planner
        self._answered = answered
        self._clock = clock
        self._samples: _Waiting[planner_pb2.WorkSample] = _Waiting(limit)
        self._windows: _Waiting[planner_pb2.IterationWindow] = _Waiting(limit)
        self._cutter = WindowCutter(window_s)
        self._incarnation = ""  # of the engine's newest life
        self._report: _Report | None = None  # not known to be taken
        self._sequence = 0
        self._begun_s = -math.inf  # when the last report was made
        self._sending = asyncio.Lock()
        self._failing = ""  # how reports fail, by the status code
        self._dropped = 0
        unsent = metrics.gauge("node_work_unsent", "Work samples and iteration windows that wait for a planner.")
        unsent.set_function(lambda: float(self._unsent))
        dropped = metrics.gauge("node_work_dropped", "Those given up: too many waited, or a planner refused them.")
        dropped.set_function(lambda: float(self._dropped))

    # -- what is to be reported

    def begin_life(self, incarnation: str) -> None:
        """The engine started; its totals count from nothing."""
        self._incarnation = incarnation
        self._cutter.add(self._clock.now_s(), incarnation, _EMPTY)

    def ran(self, totals: IterationWindow) -> None:
        """The engine said what it ran since it started."""
        self._add_window(self._cutter.add(self._clock.now_s(), self._incarnation, totals))

    def end_life(self, totals: IterationWindow) -> None:
        """The engine ended, or is about to; `totals` as far as they are known. What is in no window yet becomes one."""
        self.ran(totals)
        self._add_window(self._cutter.rest(self._clock.now_s()))

    def add(self, sample: planner_pb2.WorkSample) -> None:
        """A leg ended just now."""
        self._dropped += self._samples.put(sample, self._clock.now_s())

    def _add_window(self, window: IterationWindow | None) -> None:
        if window is not None and window != _EMPTY:
            message = window_message(self._incarnation, window)
            self._dropped += self._windows.put(message, self._clock.now_s())

    # -- reports

    async def run(self) -> None:
        """Report for ever."""
        while True:
            await self._clock.sleep(self._period_s)
            await self._send_all()

    async def farewell(self) -> None:
        """Report what there is, until all of it is taken, or nobody is there to take it."""
        if self._unsent:
            await self._send_all()
        while self._unsent and self._planner.address:
            await self._clock.sleep(_LAST_RETRY_S)
            await self._send_all()

    @property
    def _unsent(self) -> int:
        return len(self._samples) + len(self._windows) + (len(self._report) if self._report is not None else 0)

    @property
    def _due(self) -> bool:
        if self._unsent or self._report is not None:
            return True
        return bool(self._incarnation) and self._clock.now_s() - self._begun_s >= _IDLE_MAX_S

    async def _send_all(self) -> None:
        """Until nothing waits, or a planner does not answer. Where there was nothing for long, a report of that."""
        async with self._sending:
            while self._due and await self._send():
                pass

    async def _send(self) -> bool:
        """Send the report that was not taken yet, or else the next; whether it is settled."""
        channel = self._planner.get()
        if channel is None:
            return False
        if self._report is None:
            self._sequence += 1
            self._begun_s = self._clock.now_s()
            self._report = _Report(self._incarnation, self._sequence, self._samples.take(), self._windows.take())
        try:
            answer = await planner_pb2_grpc.PlannerServiceStub(channel).ReportWork(
                self._request(self._report), timeout=_CALL_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            self._failed(error)
            if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                return False
            self._dropped += len(self._report)  # it would be refused again
        else:
            self._failing = ""
            self._answered(answer)
        self._report = None
        return True

    def _failed(self, error: grpc.aio.AioRpcError) -> None:
        if self._failing != error.code().name:  # once, and not every second
            self._failing = error.code().name
            address, code = self._planner.address, self._failing
            _log.warning("work_not_reported", address=address, code=code, error=error.details())

    def _request(self, report: _Report) -> planner_pb2.ReportWorkRequest:
        now_s = self._clock.now_s()
        return planner_pb2.ReportWorkRequest(
            partition_id=self._partition_id,
            node_id=self._node_id,
            incarnation=report.incarnation,
            sequence=report.sequence,
            samples=[sample.aged(now_s) for sample in report.samples],
            windows=[window.aged(now_s) for window in report.windows],
            dropped=self._dropped,
        )
