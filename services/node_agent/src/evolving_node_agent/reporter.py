"""The node's stream to the directory: what it holds and what landed, up; counts, down.

The table and the sequence number belong to one life of the engine. Without a stream changes only count the sequence
up; the gap then makes the directory ask for a snapshot. Reports of requests wait in the outbox.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import grpc
import grpc.aio

from evolving.core.blocks import split_names
from evolving.core.needs import count_of, is_last, need
from evolving.internal.v1 import directory_pb2, directory_pb2_grpc
from evolving.runtime.channel import open_channel
from evolving.runtime.clock import Clock
from evolving.runtime.log import get_logger
from evolving.runtime.metrics import Metrics
from evolving.runtime.tasks import end_tasks, first_of
from evolving.v1 import common_pb2
from evolving_node_agent.address import Address
from evolving_node_agent.engines.port import Cleared, Engine, EngineError, EngineInfo, KvEvent, Removed, Tier
from evolving_node_agent.held import Change, HeldTable
from evolving_node_agent.needs import NeedsMirror
from evolving_node_agent.outbox import Entry, Outbox
from evolving_node_agent.reports import RequestRef
from evolving_node_agent.stream import DirectoryStream

_SLICE_BLOCKS = 4096  # in one message of a snapshot or of counts
_RECONNECT_FIRST_S, _RECONNECT_MAX_S = 0.1, 5.0
_FAREWELL_S = 2.0  # for the directory to read the last messages
_log = get_logger(__name__)

_KINDS = {True: directory_pb2.KvChange.KIND_STORED, False: directory_pb2.KvChange.KIND_REMOVED}


class DirectoryReporter:
    """One per node, for all lives of its engine."""

    def __init__(
        self,
        partition_id: str,
        node_id: str,
        engine: Engine,
        clock: Clock,
        token: str | None,
        unsent_reports: int,
        metrics: Metrics,
    ) -> None:
        self.clock = clock
        self.held = HeldTable()
        self.needs = NeedsMirror()
        self.known_term = 0
        self._partition_id = partition_id
        self._node_id = node_id
        self._engine = engine
        self._token = token
        self._outbox = Outbox(unsent_reports)
        self._life: EngineInfo | None = None
        self._life_changed = asyncio.Event()
        self._sequence = 0  # of the KV batch numbered last in this life
        self._kv_lock = asyncio.Lock()  # held while a snapshot is taken
        self._stream: DirectoryStream | None = None
        self._stream_closed = asyncio.Event()
        self._filled = asyncio.Event()
        self._connected = metrics.gauge("node_directory_connected", "Whether the stream to the directory is up.")
        self._unsent = metrics.gauge("node_reports_unsent", "Reports of requests that wait for the directory.")
        self._dropped = metrics.gauge("node_reports_dropped", "Reports given up because too many waited.")
        self._left = metrics.counter("node_blocks_left", "Blocks evicted or dropped from a tier.", ("tier",))
        self._misplaced = metrics.gauge("node_kv_events_misplaced", "KV events about blocks of an unknown place.")

    # -- the engine's life

    async def begin_life(self, info: EngineInfo) -> None:
        """A new incarnation: it knows no counts and its table is empty until its first KV events."""
        self.held = HeldTable()
        self._sequence = 0
        await self._engine.set_needs(self.needs.in_force())
        self._life = info
        self._life_changed.set()

    async def follow_kv(self) -> None:
        """Take the engine's KV events until its life ends."""
        async for events in self._engine.kv_events():
            async with self._kv_lock:
                self._take(events)

    def end_life(self) -> None:
        """The engine is gone, and with it every copy that peers could read."""
        if self._life is None:
            return
        self._take([Cleared(Tier.L1), Cleared(Tier.L2)])
        self._life = None
        self._life_changed.set()
        if self._stream is not None:
            self._stream.end()

    def _take(self, events: Sequence[KvEvent]) -> None:
        changes = self.held.apply(events)
        for event in events:
            if isinstance(event, Removed):
                self._left.labels(event.tier.name.lower()).inc(len(event.names))
        self._misplaced.set(self.held.unknown_parents + self.held.unknown_removals)
        if changes:
            self._sequence += 1
            if self._stream is not None:
                batch = directory_pb2.KvBatch(sequence=self._sequence, changes=map(_to_proto, changes))
                self._stream.send(directory_pb2.ConnectNodeRequest(kv=batch))
        self._flush()

    # -- reports of requests

    def tell(self, ref: RequestRef, message: directory_pb2.ConnectNodeRequest, needs: bytes = b"") -> None:
        """Send a report, after the block named `needs` was announced."""
        self._outbox.put(Entry(ref.key, message, needs, self.clock.now_s()))
        self._flush()

    @property
    def _writable(self) -> bool:
        return self._stream is not None and self._stream.writable

    def _flush(self) -> None:
        if self._stream is not None and self._stream.writable:
            for entry in self._outbox.take(self.held.holds, self.clock.now_s()):
                self._stream.send(entry.message)
        self._unsent.set(len(self._outbox))
        self._dropped.set(self._outbox.dropped)
        self._filled.set()

    async def flush_late(self) -> None:
        """Send what waited long enough for its block, for ever."""
        while True:
            self._filled.clear()
            due_s = self._outbox.next_wakeup_s() if self._writable else None
            if due_s is None:
                await self._filled.wait()
                continue
            await self.clock.sleep(due_s - self.clock.now_s())
            self._flush()

    # -- the stream

    async def run(self, directory: Address) -> None:
        """Keep a stream to the directory while the engine lives, for ever."""
        backoff_s = _RECONNECT_FIRST_S
        while True:
            life, address = self._life, directory.value
            self._life_changed.clear()
            directory.changed.clear()
            if life is None or not address:
                await first_of(self._life_changed.wait(), directory.changed.wait())
                continue
            started_s = self.clock.now_s()
            await self._connect(life, address, directory)
            if self.clock.now_s() - started_s > _RECONNECT_MAX_S:
                backoff_s = _RECONNECT_FIRST_S
            if self._life is life and directory.value == address:
                await self.clock.sleep(backoff_s)
                backoff_s = min(_RECONNECT_MAX_S, 2 * backoff_s)

    async def farewell(self) -> None:
        """Wait until the stream of a life that ended is closed, its last messages read."""
        while self._stream is not None:
            self._stream_closed.clear()
            await self._stream_closed.wait()

    async def _connect(self, life: EngineInfo, address: str, directory: Address) -> None:
        """One stream, from hello until it breaks, the life ends or the directory moves."""
        hello = directory_pb2.NodeHello(
            partition_id=self._partition_id,
            node_id=self._node_id,
            incarnation=life.incarnation,
            next_sequence=self._sequence + 1,
            known_term=self.known_term,
        )
        async with open_channel(address, token=self._token) as channel:
            stream = DirectoryStream(directory_pb2_grpc.DirectoryServiceStub(channel), hello)
            self._stream = stream
            self.needs.start_over()
            self._outbox.reconnected(self.clock.now_s())
            self._flush()
            self._connected.set(1)
            reading = asyncio.create_task(self._read(stream))
            try:
                await first_of(_done(reading), self._life_changed.wait(), directory.changed.wait())
                stream.end()
                await asyncio.wait({reading}, timeout=_FAREWELL_S)
            finally:
                self._stream = None
                self._stream_closed.set()
                self._connected.set(0)
                stream.cancel()
                await end_tasks(reading)
            if not reading.cancelled():
                reading.result()  # a bug in reading ends this loop too

    async def _read(self, stream: DirectoryStream) -> None:
        """Obey the directory until the stream breaks or a newer directory is known."""
        try:
            async for response in stream.responses():
                if response.term < self.known_term:
                    _log.warning("stale_directory", term=response.term, known_term=self.known_term)
                    return
                self.known_term = response.term
                await self._take_response(stream, response)
        except grpc.aio.AioRpcError as error:
            _log.warning("directory_stream_broke", code=error.code().name, error=error.details())
        except EngineError as error:
            _log.warning("directory_stream_ends", error=str(error))  # the engine went away under it

    async def _take_response(self, stream: DirectoryStream, response: directory_pb2.ConnectNodeResponse) -> None:
        match response.WhichOneof("event"):
            case "ack":
                self._outbox.acknowledged(response.ack.reports)
            case "resync":
                _log.info("snapshot", reason=response.resync.reason, blocks=len(self.held))
                await self._send_snapshot(stream)
            case "counts":
                await self._take_counts(response.counts)
            case "counts_query":
                await self._answer_counts(stream, response.counts_query.query_id)
            case "retier":
                dropped = await self._engine.free_l1()
                _log.info("l1_freed", blocks=dropped, reason=response.retier.reason)
            case "clear":
                dropped = await self._engine.clear()
                _log.info("cleared", blocks=dropped, reason=response.clear.reason)

    async def _take_counts(self, counts: directory_pb2.Counts) -> None:
        heard: dict[bytes, int] = {}
        for blocks in counts.counts:  # in order: a block may come more than once
            heard |= dict.fromkeys(split_names(blocks.names), need(blocks.count, blocks.elsewhere))
        changed = self.needs.take(heard)
        if counts.complete:
            changed |= self.needs.complete()
        if changed:
            await self._engine.set_needs(changed)

    async def _answer_counts(self, stream: DirectoryStream, query_id: int) -> None:
        by_need: dict[int, list[bytes]] = {}
        for name, needed in (await self._engine.needs()).items():
            by_need.setdefault(needed, []).append(name)
        for needed, names in by_need.items():
            for start in range(0, len(names), _SLICE_BLOCKS):
                part = b"".join(names[start : start + _SLICE_BLOCKS])
                elsewhere = not is_last(needed)
                blocks = directory_pb2.CountedBlocks(names=part, count=count_of(needed), elsewhere=elsewhere)
                reply = directory_pb2.CountsReply(query_id=query_id, counts=[blocks])
                stream.send(directory_pb2.ConnectNodeRequest(counts_reply=reply))
        last = directory_pb2.CountsReply(query_id=query_id, last=True)
        stream.send(directory_pb2.ConnectNodeRequest(counts_reply=last))

    async def _send_snapshot(self, stream: DirectoryStream) -> None:
        """All that is held, in slices; other work gets its turn in between, but the table stays as it is."""
        async with self._kv_lock:
            self.needs.start_over()
            self._sequence += 1
            blocks = 0
            slice_: list[directory_pb2.KvChange] = []
            for change in self.held.snapshot():
                slice_.append(_to_proto(change))
                blocks += len(change.run.names) if change.run is not None else 0
                if blocks >= _SLICE_BLOCKS:
                    self._send_slice(stream, slice_, end=False)
                    slice_, blocks = [], 0
                    await asyncio.sleep(0)
            self._send_slice(stream, slice_, end=True)

    def _send_slice(self, stream: DirectoryStream, changes: Iterable[directory_pb2.KvChange], *, end: bool) -> None:
        batch = directory_pb2.KvBatch(sequence=self._sequence, changes=changes, snapshot=True, snapshot_end=end)
        stream.send(directory_pb2.ConnectNodeRequest(kv=batch))


def _to_proto(change: Change) -> directory_pb2.KvChange:
    tier = common_pb2.Tier.ValueType(change.tier)
    if change.run is None:
        return directory_pb2.KvChange(kind=directory_pb2.KvChange.KIND_CLEARED, tier=tier)
    return directory_pb2.KvChange(
        kind=_KINDS[change.stored],
        tier=tier,
        first_block=change.run.first_block,
        names=b"".join(change.run.names),
        skip=change.run.skip,
    )


async def _done(task: asyncio.Task[None]) -> None:
    await asyncio.wait({task})
