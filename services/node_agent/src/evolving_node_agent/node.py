"""What this node is right now: its engine's life, its legs, its role; and who wants to know when that changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager

from evolving.core.contexts import Contexts
from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients
from evolving.internal.v1 import node_agent_pb2, planner_pb2
from evolving.runtime.clock import Clock
from evolving.runtime.metrics import Metrics
from evolving.runtime.tasks import first_of
from evolving.v1 import common_pb2
from evolving_node_agent.engines.port import CachedTokens, Engine, EngineInfo, EngineStatus, Taken
from evolving_node_agent.errors import EngineIsDown
from evolving_node_agent.fetch_rate import FetchRate
from evolving_node_agent.pool_metrics import PoolMetrics
from evolving_node_agent.roles import RoleWatch
from evolving_node_agent.time_model import TimeModel
from evolving_node_agent.waits import LegSize, RestoredShare, new_tokens_per_iteration, wait_s

PUSH_MIN_S = 0.05  # between two pushes to one watcher
PUSH_MAX_S = 1.0  # without a change
_CONTEXTS_BYTES = 24 << 20  # of branches' last contexts: some fifty of 100,000 tokens


class Node:
    """One node. Everything here changes between awaits."""

    def __init__(
        self,
        node_id: str,
        engine: Engine,
        prefill: PrefillCoefficients,
        decode: DecodeCoefficients,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self.node_id = node_id
        self.engine = engine
        self.roles = RoleWatch(node_id, self.notify)
        self.time_model = TimeModel(prefill, decode)
        self.engine_starts = 0
        self.registered = False
        self.waiting: dict[str, LegSize] = {}  # prefill legs not taken yet
        self.running: dict[str, LegSize] = {}  # prefill legs taken and not prefilled
        self.contexts = Contexts(_CONTEXTS_BYTES)
        self._restored_share = RestoredShare()
        self._fetch_rate = FetchRate()
        self._info: EngineInfo | None = None
        self._clock = clock
        self._metrics = PoolMetrics(metrics)
        self._watchers: set[asyncio.Event] = set()
        self._closed = False

    # -- the engine's life

    @property
    def info(self) -> EngineInfo:
        """Facts of the running engine. Raises EngineIsDown."""
        if self._info is None:
            raise EngineIsDown("the engine is not running", retry_after_s=1.0)
        return self._info

    def engine_up(self, info: EngineInfo) -> None:
        """A life began."""
        self._info = info
        self.engine_starts += 1
        self._fetch_rate.new_life()
        self._metrics.new_life()
        self.notify()

    def engine_down(self) -> None:
        """The life ended; its streams end by themselves."""
        self._info = None
        self.registered = False
        self.notify()

    def set_registered(self) -> None:
        """Others can find this life in etcd."""
        self.registered = True
        self.notify()

    async def follow_engine(self, tell: Callable[[EngineStatus], None]) -> None:
        """Pass on the engine's status changes, to `tell` too, until its life ends."""
        async for status in self.engine.status_changes():
            self._fetch_rate.observe(status.fetched_tokens, status.fetch_busy_s, self._clock.now_s())
            self._metrics.observe(status)
            tell(status)
            self.notify()

    def adopt_model(self, answer: planner_pb2.ReportWorkResponse) -> None:
        """A planner said what it knows of this node's time model."""
        if (info := self._info) is None:
            return  # it will say so again
        experts = (info.experts_per_token, info.experts)
        if self.time_model.adopt(answer.prefill_coefficients_s, answer.decode_coefficients_s, *experts):
            self.notify()

    # -- legs

    @contextmanager
    def prefill_leg(self, leg_id: str, size: LegSize) -> Iterator[None]:
        """Count a prefill leg in W_n while the block runs, until `leg_prefilled`."""
        self.waiting[leg_id] = size
        self.notify()
        try:
            yield
        finally:
            self.waiting.pop(leg_id, None)
            self.running.pop(leg_id, None)
            self.notify()

    def leg_taken(self, leg_id: str, taken: Taken) -> None:
        """The engine took it from the queue."""
        self.running[leg_id] = self.waiting.pop(leg_id)
        self._metrics.taken(taken)
        self.notify()

    def leg_prefilled(self, leg_id: str, cached: CachedTokens) -> None:
        """Its prompt is computed but for what was reused."""
        del self.running[leg_id]
        self._restored_share.add(cached)
        self.notify()

    def wait_s(self, status: EngineStatus | None = None) -> float:
        """W_n now. status: the engine's newest, where the caller has it at hand."""
        chunk_tokens = self._info.chunk_tokens if self._info is not None else 1
        return wait_s(
            status or self.engine.status(),
            self.waiting,
            self.running,
            self.time_model.prefill,
            self.time_model.decode,
            chunk_tokens,
            self._restored_share.value,
        )

    # -- being watched

    def notify(self) -> None:
        """Something a watcher may want to know changed."""
        for event in self._watchers:
            event.set()

    def close(self) -> None:
        """Watchers get the last status and end."""
        self._closed = True
        self.notify()

    async def watch(self) -> AsyncGenerator[node_agent_pb2.WatchStatusResponse, None]:
        """The status now, on change at most every PUSH_MIN_S, at least every PUSH_MAX_S; ends after `close`."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            while True:
                changed.clear()
                last = self._closed
                yield self.status()
                if last:
                    return
                await self._clock.sleep(PUSH_MIN_S)
                await first_of(changed.wait(), self._clock.sleep(PUSH_MAX_S - PUSH_MIN_S))
        finally:
            self._watchers.discard(changed)

    def status(self) -> node_agent_pb2.WatchStatusResponse:
        """The message watchers get."""
        info = self._info
        status = self.engine.status() if info is not None else EngineStatus()
        response = node_agent_pb2.WatchStatusResponse(
            node_id=self.node_id,
            role=common_pb2.Role.ValueType(self.roles.role),
            epoch=self.roles.epoch,
            ready=info is not None and self.registered and not self._closed,
            engine_starts=self.engine_starts,
            prefill_coefficients_s=self.time_model.fitted_prefill_s,
            decode_coefficients_s=self.time_model.fitted_decode_s,
        )
        if info is None:
            return response
        response.MergeFrom(
            node_agent_pb2.WatchStatusResponse(
                incarnation=info.incarnation,
                wait_s=self.wait_s(status),
                queued_legs=sum(leg not in status.prefilling for leg in self.waiting),
                queued_tokens=sum(status.queued.values()),
                prefilling_legs=len(status.prefilling),
                holding_legs=status.holding,
                decoding=status.decoding,
                decode_context_tokens=status.decode_context_tokens + status.reserved_context_tokens,
                reserved=status.reserved,
                decode_slots_free=max(0, info.decode_slots - status.decoding - status.reserved),
                l1_used_tokens=status.l1_used_tokens,
                l1_total_tokens=info.l1_tokens,
                l2_used_tokens=status.l2_used_tokens,
                l2_total_tokens=info.l2_tokens,
                engine_pid=info.pid,
                iterations=status.iterations,
                retractions=status.retractions,
                new_tokens_per_iteration=new_tokens_per_iteration(status),
                l2_zero_tokens=status.l2_zero_tokens,
                fetch_backlog_tokens=status.fetch_backlog_tokens,
                fetch_tokens_per_s=self._fetch_rate.tokens_per_s(self._clock.now_s()),
                fetching_blocks=status.fetching_blocks,
            )
        )
        return response
