"""What one node says on its stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import closing
from functools import partial

from evolving.core.directory_types import Cleared, Effect, Ignored, NeedResync, NodeEvent
from evolving.core.errors import InvalidArgument
from evolving.core.terms import NAME_BYTES
from evolving.internal.v1 import directory_pb2
from evolving.runtime.log import get_logger
from evolving.wire.directory import landed_from_proto, node_events_from_proto, output_from_proto
from evolving_directory.audit import CountsQueries
from evolving_directory.host import Host
from evolving_directory.outbox import Outbox

# Blocks of a snapshot taken at once; then other calls get their turn.
_SLICE_BLOCKS = 4096
_log = get_logger(__name__)


class NodeStream:
    """Reads one stream until it ends, is replaced, or breaks the protocol."""

    def __init__(self, host: Host, queries: CountsQueries, hello: directory_pb2.NodeHello, outbox: Outbox) -> None:
        self._host = host
        self._queries = queries
        self._hello = hello
        self._node_id = hello.node_id
        self._incarnation = hello.incarnation
        self._outbox = outbox
        self._in_snapshot = False
        self._reports = 0  # Landed, Output and RequestDone read from this stream

    async def send_all_counts(self) -> None:
        """Has to come before anything is read."""
        await self._host.send_all_counts(self._hello, self._outbox)

    async def read(self, requests: AsyncIterator[directory_pb2.ConnectNodeRequest]) -> None:
        """Take what the node sends, in order. Raises CoreError when it sends what can't be."""
        async for request in requests:
            if self._outbox.closed:
                return
            kind = request.WhichOneof("event")
            if kind == "kv":
                await self._take_batch(request.kv)
            elif kind == "counts_reply":
                self._queries.take_reply(self._node_id, request.counts_reply)
            elif kind == "hello":
                raise InvalidArgument("a second hello on one stream")
            elif kind is None:
                raise InvalidArgument("an event of no known kind")
            else:
                self._take_request_event(request, kind)
                self._reports += 1
                acknowledge = partial(self._outbox.acknowledge_reports, self._reports)
                self._host.journal.when_settled(acknowledge)

    def _take_request_event(self, request: directory_pb2.ConnectNodeRequest, kind: str) -> None:
        """An event of one request that can't be is counted and skipped: the node's other requests go on."""
        directory, now_s = self._host.directory, self._host.now_s()
        try:
            if kind == "landed":
                effects = directory.landed(now_s, landed_from_proto(request.landed, self._node_id))
            elif kind == "output":
                effects = directory.output(now_s, output_from_proto(request.output, self._node_id))
            else:
                done = request.done
                effects = directory.request_done(now_s, done.tenant, done.branch_id, done.request_id)
        except InvalidArgument as error:
            _log.warning("event_refused", node=self._node_id, kind=kind, error=str(error))
            self._host.metrics.ignored.labels(f"invalid_{kind}").inc()
            return
        self._host.carry_out(effects)

    async def _take_batch(self, batch: directory_pb2.KvBatch) -> None:
        events = node_events_from_proto(batch.changes)
        if batch.snapshot:
            await self._take_snapshot(batch, events)
            return
        directory = self._host.directory
        of = (self._node_id, self._incarnation, batch.sequence, events)
        self._in_snapshot = False
        with closing(directory.clear_in_parts(self._host.now_s(), *of)) as parts:
            for effects in parts:
                self._host.carry_out(effects)
                await asyncio.sleep(0)
                if self._outbox.closed:
                    return
        effects = directory.node_events(self._host.now_s(), *of)
        self._host.carry_out(effects)
        if not any(_not_taken(effect) for effect in effects):
            self._outbox.acknowledge(batch.sequence)

    async def _take_snapshot(self, batch: directory_pb2.KvBatch, events: Sequence[NodeEvent]) -> None:
        host, directory = self._host, self._host.directory
        node = (self._node_id, self._incarnation)
        if not self._in_snapshot:
            self._host.carry_out(directory.resync_begin(host.now_s(), *node))
            self._in_snapshot = True
        for part in _slices(events):
            self._host.carry_out(directory.resync_events(host.now_s(), *node, part))
            await asyncio.sleep(0)
            if self._outbox.closed:
                return
        if batch.snapshot_end:
            self._in_snapshot = False
            self._host.carry_out(directory.resync_end(host.now_s(), *node, batch.sequence))
            self._outbox.acknowledge(batch.sequence)


def _not_taken(effect: Effect) -> bool:
    """Whether the batch has to come again, in a snapshot."""
    return isinstance(effect, NeedResync) or (isinstance(effect, Ignored) and effect.kind == "awaiting_resync")


def _slices(events: Sequence[NodeEvent]) -> Iterator[list[NodeEvent]]:
    part: list[NodeEvent] = []
    blocks = 0
    for event in events:
        part.append(event)
        blocks += 1 if isinstance(event, Cleared) else len(event.run.names) // NAME_BYTES
        if blocks >= _SLICE_BLOCKS:
            yield part
            part, blocks = [], 0
    if part:
        yield part
