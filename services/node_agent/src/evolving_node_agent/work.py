"""What legs cost, reported to the leading planner. A planner that is away costs nothing but old samples."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import grpc
import grpc.aio

from evolving.core.work import query_key_pairs
from evolving.internal.v1 import planner_pb2, planner_pb2_grpc
from evolving.runtime.channel import open_channel
from evolving.runtime.clock import Clock
from evolving.runtime.log import get_logger
from evolving.v1 import common_pb2
from evolving_node_agent.address import Address
from evolving_node_agent.engines.port import CachedTokens

_CALL_TIMEOUT_S = 5.0
_MAX_SAMPLES = 1000  # in one report
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Sample:
    """One leg's work, done at `done_s` of this process's clock."""

    message: planner_pb2.WorkSample
    done_s: float


def prefill_sample(request_id: str, tokens: int, cached: CachedTokens, service_s: float, done_s: float) -> Sample:
    """A prefill leg over `tokens`, of which `cached` were reused (the paper, section 4.2)."""
    uncached = tokens - cached.total
    return Sample(
        planner_pb2.WorkSample(
            request_id=request_id,
            phase=common_pb2.PHASE_PREFILL,
            uncached_tokens=uncached,
            cached_tokens=cached.total,
            restored_tokens=cached.restored,
            query_key_pairs=query_key_pairs(uncached, cached.total),
            service_s=service_s,
        ),
        done_s,
    )


def decode_sample(request_id: str, output_tokens: int, iterations: int, service_s: float, done_s: float) -> Sample:
    """A decode leg that produced `output_tokens`."""
    return Sample(
        planner_pb2.WorkSample(
            request_id=request_id,
            phase=common_pb2.PHASE_DECODE,
            output_tokens=output_tokens,
            iterations=iterations,
            service_s=service_s,
        ),
        done_s,
    )


class WorkReporter:
    """Keeps the newest samples and sends them in numbered reports. A report whose fate is unknown is sent again under
    its number and incarnation, so that it is taken once."""

    def __init__(
        self, partition_id: str, node_id: str, limit: int, period_s: float, clock: Clock, token: str | None
    ) -> None:
        self._partition_id = partition_id
        self._node_id = node_id
        self._period_s = period_s
        self._clock = clock
        self._token = token
        self._samples: deque[Sample] = deque(maxlen=limit)
        self._report: list[Sample] = []  # the one numbered `sequence`, not known to be taken
        self._report_incarnation = ""  # the planner tells repeats by number within an incarnation: it goes unchanged
        self._sequence = 0
        self._channel: grpc.aio.Channel | None = None
        self._channel_address = ""
        self.incarnation = ""  # of the engine's newest life

    def add(self, sample: Sample) -> None:
        """A leg is done."""
        self._samples.append(sample)

    async def run(self, planner: Address) -> None:
        """Report for ever."""
        try:
            while True:
                await self._clock.sleep(self._period_s)
                while planner.value and await self._send(planner.value):
                    pass
        finally:
            await self._close()

    async def _send(self, address: str) -> bool:
        """Send one report; whether more samples wait and the planner answered."""
        if not self._report:
            if not self._samples:
                return False
            self._report = [self._samples.popleft() for _ in range(min(_MAX_SAMPLES, len(self._samples)))]
            self._report_incarnation = self.incarnation
            self._sequence += 1
        stub = await self._stub(address)
        try:
            await stub.ReportWork(self._message(), timeout=_CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            _log.debug("work_not_reported", address=address, code=error.code().name, error=error.details())
            return False
        self._report = []
        return bool(self._samples)

    def _message(self) -> planner_pb2.ReportWorkRequest:
        now_s = self._clock.now_s()
        request = planner_pb2.ReportWorkRequest(
            partition_id=self._partition_id,
            node_id=self._node_id,
            incarnation=self._report_incarnation,
            sequence=self._sequence,
            samples=[sample.message for sample in self._report],
        )
        for message, sample in zip(request.samples, self._report, strict=True):
            message.age_s = now_s - sample.done_s
        return request

    async def _stub(self, address: str) -> planner_pb2_grpc.PlannerServiceAsyncStub:
        if self._channel is None or address != self._channel_address:
            await self._close()
            self._channel = open_channel(address, token=self._token)
            self._channel_address = address
        return planner_pb2_grpc.PlannerServiceStub(self._channel)

    async def _close(self) -> None:
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close()
