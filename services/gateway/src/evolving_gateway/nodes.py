"""The nodes and the split as this gateway sees them: by etcd, by each node itself, and by what was sent since."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc.aio

from evolving.core.errors import InvalidArgument
from evolving.core.terms import Role
from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients
from evolving.core.work import PrefillWork
from evolving.internal.v1 import node_agent_pb2, node_agent_pb2_grpc
from evolving.runtime.channel import open_channel
from evolving.runtime.clock import Clock
from evolving.runtime.discovery import read_record
from evolving.runtime.keys import Keys, NodeRegistration, Split
from evolving.runtime.log import get_logger
from evolving.runtime.metrics import Metrics
from evolving.runtime.store import Store, StoreUnavailable, Versioned
from evolving.runtime.tasks import end_tasks
from evolving.wire.timemodel import decode_from_proto, prefill_from_proto

_StatusCall = grpc.aio.UnaryStreamCall[node_agent_pb2.WatchStatusRequest, node_agent_pb2.WatchStatusResponse]

_RECONNECT_FIRST_S, _RECONNECT_MAX_S = 0.1, 2.0
_log = get_logger(__name__)


@dataclass(slots=True)
class Arriving:
    """A prefill leg on its way into a node's status."""

    work: PrefillWork
    fetched_tokens: int  # of its cached ones, those to come from peers
    acknowledged: bool = False  # W_n covers it


@dataclass(slots=True)
class DecodeArriving:
    """A decode leg on its way into a node's status."""

    context_tokens: int
    stored_tokens: int  # of them, what the node's host memory lacks
    reserved: bool = False  # it has a slot
    has_slot: bool = False  # and the node's status counts it
    started: bool = False  # its KV is there


@dataclass(eq=False)
class Node:
    """One life of one node: replaced when its engine or its agent comes back under another incarnation or address."""

    registration: NodeRegistration
    channel: grpc.aio.Channel
    stub: node_agent_pb2_grpc.NodeAgentServiceAsyncStub
    registered: bool = True  # its lease lives
    watching: bool = False  # its status stream is up
    status: node_agent_pb2.WatchStatusResponse = field(default_factory=node_agent_pb2.WatchStatusResponse)
    wait_s: float = 0.0  # W_n as it last said
    arriving: dict[str, Arriving] = field(default_factory=dict)  # prefill legs its status does not cover
    decode_arriving: dict[str, DecodeArriving] = field(default_factory=dict)  # decode legs it does not cover in full
    legs: int = 0  # legs of this gateway running there
    task: asyncio.Task[None] | None = None
    prefill_coefficients: PrefillCoefficients = field(init=False)  # equation 1 on this node
    decode_coefficients: DecodeCoefficients = field(init=False)  # equation 2

    def __post_init__(self) -> None:
        self._take_model(self.status)

    @property
    def node_id(self) -> str:
        """Its id."""
        return self.registration.node_id

    @property
    def ready(self) -> bool:
        """New work may go there, as far as its life is concerned."""
        same = self.status.incarnation == self.registration.incarnation
        return self.registered and self.watching and self.status.ready and same

    @property
    def new_tokens_per_iteration(self) -> float:
        """ū: observed, else the chunk size."""
        return self.status.new_tokens_per_iteration or float(self.registration.chunk_tokens)

    @property
    def slots_free(self) -> int:
        """Decode slots left, legs on their way there taken off."""
        return max(0, self.status.decode_slots_free - len(self._without_slot))

    @property
    def decoding(self) -> int:
        """B, legs that will be in the batch in a moment included."""
        return self.status.decoding + self.status.reserved + len(self._without_slot)

    @property
    def decode_context_tokens(self) -> int:
        """Summed over these B."""
        return self.status.decode_context_tokens + sum(leg.context_tokens for leg in self._without_slot)

    @property
    def decode_memory_tokens(self) -> int:
        """Device memory that decodes leave to another one, prefill's not counted; below 0 where some wait for it."""
        facts = self.registration
        return facts.l1_tokens - facts.reserve_tokens - self.decode_context_tokens

    @property
    def unacknowledged(self) -> tuple[PrefillWork, ...]:
        """Prefill legs that W_n does not cover."""
        return tuple(leg.work for leg in self.arriving.values() if not leg.acknowledged)

    @property
    def fetch_backlog_tokens(self) -> int:
        """Tokens that legs there, or on their way, still have to get from peers."""
        return self.status.fetch_backlog_tokens + sum(leg.fetched_tokens for leg in self.arriving.values())

    @property
    def room_tokens(self) -> float:
        """Host memory that is free or held for no branch, less what legs queued or on their way there will store;
        infinite without any."""
        status = self.status
        if not status.l2_total_tokens:
            return math.inf
        arriving = sum(leg.work.uncached_tokens + leg.fetched_tokens for leg in self.arriving.values())
        decode_arriving = sum(leg.stored_tokens for leg in self.decode_arriving.values())
        free = status.l2_total_tokens - status.l2_used_tokens + status.l2_zero_tokens
        return max(0, free - status.queued_tokens - arriving - decode_arriving)

    @property
    def _without_slot(self) -> list[DecodeArriving]:
        return [leg for leg in self.decode_arriving.values() if not leg.has_slot]

    def take_status(self, status: node_agent_pb2.WatchStatusResponse) -> None:
        """A new status: it covers the legs acknowledged, the slots reserved and the decodes started before it."""
        before, self.status = self.status, status
        if _model_of(before) != _model_of(status):
            self._take_model(status)
        self.wait_s = status.wait_s
        self.arriving = {name: leg for name, leg in self.arriving.items() if not leg.acknowledged}
        self.decode_arriving = {name: leg for name, leg in self.decode_arriving.items() if not leg.started}
        for leg in self.decode_arriving.values():
            leg.has_slot = leg.reserved

    def acknowledge(self, leg_id: str, wait_s: float) -> None:
        """The node has the leg in its queue; `wait_s` says so."""
        if (leg := self.arriving.get(leg_id)) is not None:
            leg.acknowledged = True
        self.wait_s = wait_s

    def _take_model(self, status: node_agent_pb2.WatchStatusResponse) -> None:
        """What the node says was fitted; as registered where it says nothing, or what can't be."""
        facts = self.registration
        experts = (min(facts.experts_per_token, facts.experts), facts.experts)
        self.prefill_coefficients = PrefillCoefficients(*facts.prefill_coefficients)
        self.decode_coefficients = DecodeCoefficients(*facts.decode_coefficients, *experts)
        try:
            if status.prefill_coefficients_s:
                self.prefill_coefficients = prefill_from_proto(status.prefill_coefficients_s)
            if status.decode_coefficients_s:
                self.decode_coefficients = decode_from_proto(status.decode_coefficients_s, *experts)
        except InvalidArgument as error:
            _log.warning("time_model_ignored", node_id=facts.node_id, error=str(error))


def _model_of(status: node_agent_pb2.WatchStatusResponse) -> tuple[list[float], list[float]]:
    return list(status.prefill_coefficients_s), list(status.decode_coefficients_s)


class Cluster:
    """All nodes by id, and the split. Runs its own watches; `changed` tells when roles or nodes change."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        clock: Clock,
        metrics: Metrics,
        *,
        token: str | None,
        max_message_bytes: int,
        silence_s: float,
    ) -> None:
        """silence_s: a node whose status stream says nothing for so long gets no new work until it speaks again."""
        self._store = store
        self._keys = keys
        self._clock = clock
        self._token = token
        self._max_message_bytes = max_message_bytes
        self._silence_s = silence_s
        self._listeners: set[Callable[[], None]] = set()
        self._split = Split(epoch=0, roles={}, reason="none yet", author="", written_at_s=0.0)
        self._seen_epoch = 0
        self._stale = asyncio.Event()
        self._retired: set[Node] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self.nodes: dict[str, Node] = {}
        self._epoch_gauge = metrics.gauge("gateway_split_epoch", "Epoch of the split in force here.")
        self._wait_gauge = metrics.gauge("gateway_node_wait_seconds", "W_n as the node last said.", ("node_id",))

    @property
    def epoch(self) -> int:
        """Newest split epoch heard of, from etcd or a node."""
        return max(self._split.epoch, self._seen_epoch)

    def role(self, node: Node) -> Role:
        """The role in effect: the split's, or the node's own account where that is newer."""
        own = Role(node.status.role) if node.status.role else Role.MIXED
        if own is Role.DRAINING or node.status.epoch > self._split.epoch:
            return own
        return Role[self._split.roles.get(node.node_id, "mixed").upper()]

    def see_epoch(self, epoch: int) -> None:
        """A node answered with this epoch. A newer one than etcd told us makes us ask etcd."""
        if epoch > self.epoch:
            self._seen_epoch = epoch
            self._stale.set()

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after each change of nodes or roles; the returned function ends that."""
        self._listeners.add(listener)
        return lambda: self._listeners.discard(listener)

    async def changed(self) -> None:
        """Wait for the next change."""
        event = asyncio.Event()
        stop = self.on_change(event.set)
        try:
            await event.wait()
        finally:
            stop()

    async def watch_nodes(self) -> None:
        """Follow registrations, for ever."""
        async for batch in self._store.watch(self._keys.nodes):
            present: set[str] = set()
            for item in batch.puts:
                if (registration := read_record(NodeRegistration, item)) is not None:
                    present.add(registration.node_id)
                    self._put(registration)
            gone = {key.rpartition("/")[2] for key in batch.deletes}
            if batch.snapshot:
                gone |= self.nodes.keys() - present
            for node_id in gone & self.nodes.keys():
                _log.info("node_left", node_id=node_id)
                self._retire(self.nodes.pop(node_id))
                self._wait_gauge.remove(node_id)
            self._notify()

    async def watch_split(self) -> None:
        """Follow the split, for ever. A split that vanished stays in force: serving never waits for etcd."""
        async for batch in self._store.watch(self._keys.split):
            for item in batch.puts:
                if item.key == self._keys.split:
                    self._adopt(item)

    async def refresh_split(self) -> None:
        """Read the split whenever a node knows a newer epoch than we do, for ever."""
        while True:
            await self._stale.wait()
            self._stale.clear()
            try:
                current = await self._store.get(self._keys.split)
            except StoreUnavailable as error:
                _log.warning("split_not_refreshed", error=str(error), epoch=self._seen_epoch)
                continue
            if current is not None:
                self._adopt(current)

    async def close(self) -> None:
        """End all streams and channels."""
        nodes = [*self.nodes.values(), *self._retired]
        self.nodes.clear()
        for node in nodes:
            await _end(node)
        await asyncio.gather(*self._closing)

    def release(self, node: Node) -> None:
        """A leg of ours on this node ended; a node that left is closed with its last one."""
        node.legs -= 1
        if node.legs == 0 and node in self._retired:
            self._close_soon(node)

    def _adopt(self, item: Versioned) -> None:
        split = read_record(Split, item)
        if split is not None and split.epoch >= self._split.epoch:
            self._split = split
            self._epoch_gauge.set(split.epoch)
            _log.info("split", epoch=split.epoch, roles=split.roles, reason=split.reason)
            self._notify()

    def _put(self, registration: NodeRegistration) -> None:
        known = self.nodes.get(registration.node_id)
        if known is not None and known.registration == registration:
            return
        if known is not None:
            self._retire(known)
        channel = open_channel(registration.address, token=self._token, max_message_bytes=self._max_message_bytes)
        stub = node_agent_pb2_grpc.NodeAgentServiceStub(channel)
        node = Node(registration, channel, stub)
        node.task = asyncio.create_task(self._follow(node), name=f"status:{node.node_id}")
        node.task.add_done_callback(lambda task: self._stopped_following(node, task))
        self.nodes[node.node_id] = node
        self._wait_gauge.labels(node.node_id).set(node.wait_s)
        _log.info(
            "node_joined", node_id=node.node_id, address=registration.address, incarnation=registration.incarnation
        )

    def _retire(self, node: Node) -> None:
        """No new work; its channel stays until our legs there end by themselves."""
        node.registered = False
        self._retired.add(node)
        if node.legs == 0:
            self._close_soon(node)

    def _close_soon(self, node: Node) -> None:
        self._retired.discard(node)
        task = asyncio.create_task(_end(node), name=f"close:{node.node_id}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _follow(self, node: Node) -> None:
        """Keep the node's status stream up until cancelled."""
        backoff_s = _RECONNECT_FIRST_S
        request = node_agent_pb2.WatchStatusRequest(partition_id=self._keys.partition)
        while True:
            call = node.stub.WatchStatus(request)
            try:
                while isinstance(status := await self._next_status(call), node_agent_pb2.WatchStatusResponse):
                    backoff_s = _RECONNECT_FIRST_S
                    self._take_status(node, status)
            except TimeoutError:
                _log.warning("node_silent", node_id=node.node_id, silence_s=self._silence_s)
            except grpc.aio.AioRpcError as error:
                if node.watching:
                    _log.warning(
                        "node_unreachable", node_id=node.node_id, code=error.code().name, error=error.details()
                    )
            finally:
                call.cancel()
            if node.watching:
                node.watching = False
                self._notify()
            await self._clock.sleep(backoff_s)
            backoff_s = min(_RECONNECT_MAX_S, 2 * backoff_s)

    def _stopped_following(self, node: Node, task: asyncio.Task[None]) -> None:
        """Following ends by being cancelled; otherwise a bug ended it, and what is known of the node grows stale."""
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.critical("status_loop_failed", node_id=node.node_id, exc_info=error)
            node.watching = False
            self._notify()

    async def _next_status(self, call: _StatusCall) -> object:
        """The next status, or EOF. Raises TimeoutError when the node says nothing: it speaks every second if it can."""
        async with asyncio.timeout(self._silence_s):
            return await call.read()

    def _take_status(self, node: Node, status: node_agent_pb2.WatchStatusResponse) -> None:
        before = (node.ready, self.role(node))
        node.watching = True
        node.take_status(status)
        if node.registered:
            self._wait_gauge.labels(node.node_id).set(node.wait_s)
        self.see_epoch(status.epoch)
        if (node.ready, self.role(node)) != before:
            self._notify()

    def _notify(self) -> None:
        for listener in list(self._listeners):
            listener()


async def _end(node: Node) -> None:
    if node.task is not None:
        await end_tasks(node.task)
    await node.channel.close()
