"""The nodes and the split as this gateway sees them: by etcd, by each node itself, and by what was sent since."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc.aio

from evolving.core.terms import Role
from evolving.internal.v1 import node_agent_pb2, node_agent_pb2_grpc
from evolving.runtime.channel import open_channel
from evolving.runtime.clock import Clock
from evolving.runtime.discovery import read_record
from evolving.runtime.keys import Keys, NodeRegistration, Split
from evolving.runtime.log import get_logger
from evolving.runtime.metrics import Metrics
from evolving.runtime.store import Store, StoreUnavailable, Versioned
from evolving.runtime.tasks import end_tasks
from evolving_gateway.node import Node

_StatusCall = grpc.aio.UnaryStreamCall[node_agent_pb2.WatchStatusRequest, node_agent_pb2.WatchStatusResponse]

_RECONNECT_FIRST_S, _RECONNECT_MAX_S = 0.1, 2.0
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Newcomers:
    """Nodes that serve a phase from now on, told to each request that waits, in turn.

    What those told so far made of it is noted here.
    """

    prefill: frozenset[str]
    decode: frozenset[str]
    relieved_s: dict[str, float] = field(default_factory=dict)  # by node: work that left its queue
    waits_s: dict[str, float] = field(default_factory=dict)  # by newcomer: W_n as last reckoned, which grows


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
        self._waiting: dict[Callable[[Newcomers], None], None] = {}  # in the order in which they came
        self._serving: dict[Role, frozenset[str]] = {Role.PREFILL: frozenset(), Role.DECODE: frozenset()}
        self._came: dict[Role, set[str]] = {Role.PREFILL: set(), Role.DECODE: set()}  # not told yet
        self._somebody_came = asyncio.Event()
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

    def serves(self, node: Node, phase: Role) -> bool:
        """Whether requests are sent there for a phase while nodes have it."""
        return self.role(node) in (phase, Role.MIXED)

    def serving(self, phase: Role) -> frozenset[str]:
        """Nodes that are ready and serve a phase."""
        return self._serving[phase]

    def now_s(self) -> float:
        """Of the gateway's clock."""
        return self._clock.now_s()

    def see_epoch(self, epoch: int) -> None:
        """A node answered with this epoch. A newer one than etcd told us makes us ask etcd."""
        if epoch > self.epoch:
            self._seen_epoch = epoch
            self._stale.set()

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after each change of nodes or roles; the returned function ends that."""
        self._listeners.add(listener)
        return lambda: self._listeners.discard(listener)

    def on_newcomers(self, listener: Callable[[Newcomers], None]) -> Callable[[], None]:
        """Call `listener` for nodes that get a phase, after those that asked before it; the returned function ends
        that."""
        self._waiting[listener] = None

        def stop() -> None:
            self._waiting.pop(listener, None)

        return stop

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

    async def tell_newcomers(self) -> None:
        """Tell who waits of nodes that get a phase, for ever.

        Between any two of them other work of the gateway goes on: thousands may wait, and each looks for what it gains.
        """
        while True:
            await self._somebody_came.wait()
            self._somebody_came.clear()
            newcomers = Newcomers(frozenset(self._came[Role.PREFILL]), frozenset(self._came[Role.DECODE]))
            for came in self._came.values():
                came.clear()
            for listener in list(self._waiting):
                if listener in self._waiting:
                    listener(newcomers)
                    await asyncio.sleep(0)

    async def close(self) -> None:
        """End all streams and channels."""
        nodes = [*self.nodes.values(), *self._retired]
        self.nodes.clear()
        self._serving = dict.fromkeys(self._serving, frozenset())
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
        before, self._serving = self._serving, {phase: self._that_serve(phase) for phase in self._serving}
        for phase, serving in self._serving.items():
            self._came[phase] |= serving - before[phase]
        if any(self._came.values()):
            self._somebody_came.set()
        for listener in list(self._listeners):
            listener()

    def _that_serve(self, phase: Role) -> frozenset[str]:
        return frozenset(node_id for node_id, node in self.nodes.items() if node.ready and self.serves(node, phase))


async def _end(node: Node) -> None:
    if node.task is not None:
        await end_tasks(node.task)
    await node.channel.close()
