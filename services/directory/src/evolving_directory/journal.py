"""The journal: what the directory takes is on the disk before anyone is told so.

Records gather while the disk is busy; then one write and one sync carry all of them. The disk is used by a thread of
its own, never by the event loop.

When the disk fails (full, broken) the journal says so and keeps trying. What was taken and is not on the disk stays in
memory, was acknowledged to nobody, and is written first once the disk works: to a new segment, with the one that failed
cut back to what it durably held.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from evolving.runtime.clock import Clock
from evolving.runtime.log import get_logger
from evolving_directory.data_dir import DataDir
from evolving_directory.errors import JournalFailed
from evolving_directory.frames import frame
from evolving_directory.metrics import DirectoryMetrics
from evolving_directory.records import FORMAT, FileHeader, Record, encode

_RETRY_S = 1.0
_log = get_logger(__name__)


class Journal(Protocol):
    """Where a directory's log goes."""

    @property
    def failed(self) -> str:
        """Why nothing can be made durable now; "": it can."""
        ...

    def append(self, record: Record) -> None:
        """Take a record; it is durable some time later."""
        ...

    async def settled(self) -> None:
        """Wait until everything appended so far is durable. Raises JournalFailed."""
        ...

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Call once everything appended so far is durable; at once when it is."""
        ...


class NoJournal:
    """For a directory in memory only: there is nothing to wait for."""

    failed = ""

    def append(self, record: Record) -> None:
        """Forget it."""

    async def settled(self) -> None:
        """At once."""

    def when_settled(self, callback: Callable[[], None]) -> None:
        """At once."""
        callback()


class SegmentFiles:
    """Writes segment after segment. Blocking; one thread at a time."""

    def __init__(self, data: DataDir, partition_id: str, next_number: int, segment_bytes: int) -> None:
        self._data = data
        self._partition_id = partition_id
        self._segment_bytes = segment_bytes
        self.number = next_number - 1  # of the segment written to, or of the one before the first
        self._handle: int | None = None
        self._durable_bytes = 0

    def write(self, payload: bytes, now_s: float) -> None:
        """Append and sync; in a new segment when there is none or it is full. Raises OSError; then what part of the
        payload is on the disk is not known, and `mend` has to come before the next write."""
        fresh = self._handle is None or self._durable_bytes >= self._segment_bytes
        if fresh:
            self._begin_segment()
            payload = frame(encode(FileHeader(FORMAT, self._partition_id, self.number, now_s))) + payload
        assert self._handle is not None
        left = memoryview(payload)
        while left:
            left = left[os.write(self._handle, left) :]
        os.fdatasync(self._handle)
        if fresh:
            self._data.sync()
        self._durable_bytes += len(payload)

    def _begin_segment(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._handle = os.open(self._data.segment(self.number + 1), flags, 0o600)
        self.number += 1
        self._durable_bytes = 0

    def mend(self) -> None:
        """After a failed write: leave the segment with what it durably held, and go on in a new one. Raises OSError."""
        if self._handle is None:
            return
        if self._durable_bytes:
            os.ftruncate(self._handle, self._durable_bytes)
            os.fsync(self._handle)
            os.close(self._handle)
        else:
            self._data.segment(self.number).unlink(missing_ok=True)
            os.close(self._handle)
            self.number -= 1
        self._handle = None

    def close(self) -> None:
        """No write follows."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


class DiskJournal:
    """One per process; used from its event loop."""

    def __init__(
        self,
        files: SegmentFiles,
        clock: Clock,
        now_s: Callable[[], float],
        metrics: DirectoryMetrics,
        on_change: Callable[[str], None],
    ) -> None:
        """now_s: the directory's clock, written to each segment. on_change: told of a failure, and with "" of its
        end."""
        self.failed = "the journal is not open yet"
        self.rotated = asyncio.Event()  # another segment was begun
        self._files = files
        self._clock = clock
        self._now_s = now_s
        self._metrics = metrics
        self._on_change = on_change
        self._thread = ThreadPoolExecutor(1, "journal")
        self._unwritten: list[bytes] = []
        self._filled = asyncio.Event()
        self._closing = False
        self._ended = asyncio.Event()
        self._appended = 0
        self._durable = 0
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._callbacks: deque[tuple[int, Callable[[], None]]] = deque()

    @property
    def segment(self) -> int:
        """Number of the segment written to; all before it are closed."""
        return self._files.number

    def append(self, record: Record) -> None:
        """See Journal."""
        self._unwritten.append(frame(encode(record)))
        self._appended += 1
        self._filled.set()

    async def settled(self) -> None:
        """See Journal."""
        if self.failed:
            raise JournalFailed(self.failed)
        if self._durable < self._appended:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append((self._appended, waiter))
            await waiter

    def when_settled(self, callback: Callable[[], None]) -> None:
        """See Journal. While the disk fails, callbacks wait for its return."""
        if self._durable == self._appended:
            callback()
        else:
            self._callbacks.append((self._appended, callback))

    async def run(self) -> None:
        """Write what comes, for ever."""
        try:
            await self._write_out()  # a segment's header: it shows that the disk works
            while not self._closing:
                await self._filled.wait()
                self._filled.clear()
                if self._unwritten:
                    await self._write_out()
            self._files.close()
        finally:
            self._thread.shutdown(wait=False)
            self._ended.set()

    async def close(self) -> None:
        """Write what is left, if the disk lets it; `run` then ends."""
        try:
            await self.settled()
        except JournalFailed as error:
            _log.error("journal_not_written_out", error=str(error))
        self._closing = True
        self._filled.set()
        await self._ended.wait()

    async def _write_out(self) -> None:
        """Write all there is, however long the disk takes to let it; only `close` makes it give up."""
        segment = self._files.number
        while not await self._try_to_write():
            await self._clock.sleep(_RETRY_S)
            if self._closing:
                return
        if self._files.number != segment:
            self.rotated.set()

    async def _try_to_write(self) -> bool:
        batch, self._unwritten = self._unwritten, []
        upto, started_s = self._appended, self._clock.now_s()
        try:
            await self._in_thread(batch, mend=bool(self.failed))
        except OSError as error:
            self._unwritten[:0] = batch
            self._fail(error)
            return False
        self._metrics.journal_seconds.observe(self._clock.now_s() - started_s)
        self._metrics.journal_bytes.inc(sum(map(len, batch)))
        if self.failed:
            _log.info("journal_works", segment=self._files.number)
            self.failed = ""
            self._on_change("")
        self._settle(upto)
        return True

    async def _in_thread(self, batch: list[bytes], mend: bool) -> None:
        now_s = self._now_s()

        def write() -> None:
            if mend:
                self._files.mend()
            self._files.write(b"".join(batch), now_s)

        await asyncio.get_running_loop().run_in_executor(self._thread, write)

    def _fail(self, error: OSError) -> None:
        reason = f"the journal can't be written: {error}"
        if reason != self.failed:
            _log.error("journal_failed", error=str(error), unwritten_records=len(self._unwritten))
            self._metrics.journal_failures.inc()
        self.failed = reason
        while self._waiters:
            _, waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(JournalFailed(reason))
        self._on_change(reason)

    def _settle(self, upto: int) -> None:
        self._durable = upto
        while self._waiters and self._waiters[0][0] <= upto:
            _, waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
        while self._callbacks and self._callbacks[0][0] <= upto:
            self._callbacks.popleft()[1]()
