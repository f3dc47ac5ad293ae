"""What waits to be sent to one node: in order, gathered for a moment, and bounded."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator

from evolving.core.directory_types import CountUpdate
from evolving.core.terms import NAME_BYTES
from evolving.internal.v1 import directory_pb2
from evolving.runtime.clock import Clock
from evolving_directory.errors import NodeTooSlow

# Blocks in one message: a few hundred kilobytes, built in about a millisecond.
BLOCKS_PER_MESSAGE = 4096

_Response = directory_pb2.ConnectNodeResponse


class Outbox:
    """Filled by the directory, emptied by the node's stream. Counts keep their order among themselves and with other
    messages, so a node that has a message has every count from before it."""

    def __init__(self, term: int, clock: Clock, delay_s: float, limit_blocks: int) -> None:
        """delay_s: how long counts are gathered. limit_blocks: counts that may wait, in blocks."""
        self._term = term
        self._clock = clock
        self._delay_s = delay_s
        self._limit_blocks = limit_blocks
        self._items: deque[CountUpdate | _Response] = deque()
        self._waiting_blocks = 0
        self._ack = directory_pb2.Ack()
        self._ack_due = False
        self._sequence = 0
        self._filled = asyncio.Event()
        self._end: BaseException | None = None
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether the stream is over, or will be once its node reads again."""
        return self._closed

    def counts(self, update: CountUpdate) -> None:
        """Blocks have a new count on the node."""
        if self._closed or not update.names:
            return
        self._waiting_blocks += len(update.names) // NAME_BYTES
        if self._waiting_blocks > self._limit_blocks:
            self.close(NodeTooSlow(f"{self._waiting_blocks} counts wait and none is read"))
            return
        self._items.append(update)
        self._filled.set()

    def counts_complete(self) -> None:
        """The node has all its counts once it has read what waits now."""
        self._push(_Response(counts=directory_pb2.Counts(complete=True)))

    def acknowledge(self, sequence: int) -> None:
        """Every KV batch up to this one was taken."""
        self._ack.sequence = sequence
        self._acknowledge_soon()

    def acknowledge_reports(self, reports: int) -> None:
        """So many of the stream's first reports of requests were taken."""
        self._ack.reports = reports
        self._acknowledge_soon()

    def resync(self, reason: str) -> None:
        """Ask for everything the node holds."""
        self._push(_Response(resync=directory_pb2.Resync(reason=reason)))

    def retier(self, reason: str) -> None:
        """The node became a prefill node."""
        self._push(_Response(retier=directory_pb2.Retier(reason=reason)))

    def clear(self, reason: str) -> None:
        """The node became a prefill node, and the cluster keeps the paper's rule."""
        self._push(_Response(clear=directory_pb2.Clear(reason=reason)))

    def query_counts(self, query_id: int) -> None:
        """Ask what the node evicts by."""
        self._push(_Response(counts_query=directory_pb2.CountsQuery(query_id=query_id)))

    def close(self, error: BaseException | None = None) -> None:
        """End the stream, with `error` where there is one. What still waits is dropped."""
        if not self._closed:
            self._closed = True
            self._end = error
            self._items.clear()
            self._waiting_blocks = 0
            self._filled.set()

    async def messages(self) -> AsyncIterator[_Response]:
        """What the stream sends, until closed; raises what `close` was given."""
        while True:
            await self._filled.wait()
            if self._waiting_blocks < BLOCKS_PER_MESSAGE and not self._closed:
                await self._clock.sleep(self._delay_s)
            self._filled.clear()
            for message in self._take():
                yield message
            if self._closed:
                break
        if self._end is not None:
            raise self._end

    def _acknowledge_soon(self) -> None:
        self._ack_due = True
        self._filled.set()

    def _push(self, message: _Response) -> None:
        if not self._closed:
            self._items.append(message)
            self._filled.set()

    def _take(self) -> Iterator[_Response]:
        """Everything that waits, built message by message so that other streams get their turn in between."""
        while self._items:
            message = self._items[0]
            if isinstance(message, CountUpdate):
                message = _Response(counts=self._next_counts())
            else:
                self._items.popleft()
            if message.HasField("counts"):
                self._sequence += 1
                message.counts.sequence = self._sequence
            message.term = self._term
            yield message
        if self._ack_due and not self._closed:
            self._ack_due = False
            yield _Response(term=self._term, ack=self._ack)

    def _next_counts(self) -> directory_pb2.Counts:
        room = BLOCKS_PER_MESSAGE
        batch: list[directory_pb2.CountedBlocks] = []
        while room and self._items and isinstance(update := self._items[0], CountUpdate):
            now, later = update.names[: room * NAME_BYTES], update.names[room * NAME_BYTES :]
            if later:
                self._items[0] = update._replace(names=later)
            else:
                self._items.popleft()
            batch.append(directory_pb2.CountedBlocks(names=now, count=update.count, elsewhere=update.elsewhere))
            room -= len(now) // NAME_BYTES
        self._waiting_blocks -= BLOCKS_PER_MESSAGE - room
        return directory_pb2.Counts(counts=batch)
