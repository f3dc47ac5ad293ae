"""Keeps the journal short: closed segments become a snapshot, in a process of its own, so that no call waits for it.

The process replays the segments as a restart would, and writes what they amount to. Only when that is whole and on the
disk does it get its name, and only then are the segments removed.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from itertools import chain
from pathlib import Path

from evolving.core.config import DirectoryConfig
from evolving.runtime.clock import Clock
from evolving.runtime.log import get_logger
from evolving_directory.data_dir import DataDir, DataDirError
from evolving_directory.frames import frame
from evolving_directory.journal import DiskJournal
from evolving_directory.records import FORMAT, FileEnd, FileHeader, RoleTaken, encode
from evolving_directory.recovery import read

_SEGMENTS_MAX = 64  # closed ones, however small: each restart begins one
_RETRY_S = 60.0
_NICENESS = 10  # the directory itself goes first
_log = get_logger(__name__)


class _Failed(Exception):
    """The process that writes a snapshot wrote none."""


class Compactor:
    """Watches one journal."""

    def __init__(
        self, data: DataDir, partition_id: str, journal: DiskJournal, segment_bytes: int, clock: Clock
    ) -> None:
        self._data = data
        self._partition_id = partition_id
        self._journal = journal
        self._segment_bytes = segment_bytes
        self._clock = clock

    async def run(self) -> None:
        """For ever. A failure costs disk space only, and is tried again."""
        while True:
            await self._journal.rotated.wait()
            self._journal.rotated.clear()
            while not await self._compacted(self._journal.segment):
                await self._clock.sleep(_RETRY_S)

    async def _compacted(self, before: int) -> bool:
        """Whether nothing is left to do about the segments before that one."""
        try:
            if self._due(before):
                await self._compact(before)
        except (OSError, _Failed) as error:
            _log.warning("compaction_failed", error=str(error), segments_before=before)
            return False
        return True

    def _due(self, before: int) -> bool:
        """Whether the closed segments outgrew the snapshot: then all of it is written anew about once for each
        doubling."""
        snapshots = self._data.snapshots()
        first = snapshots[-1] if snapshots else 0
        closed = [number for number in self._data.segments() if first <= number < before]
        size = sum(self._data.segment(number).stat().st_size for number in closed)
        kept = self._data.snapshot(first).stat().st_size if snapshots else 0
        return size >= max(self._segment_bytes, kept) or len(closed) >= _SEGMENTS_MAX

    async def _compact(self, before: int) -> None:
        """Put a snapshot in the place of all segments before that one. Raises _Failed, OSError."""
        started_s = self._clock.now_s()
        command = [sys.executable, "-m", "evolving_directory.compaction"]
        process = await asyncio.create_subprocess_exec(
            *command, str(self._data.path), self._partition_id, str(before), stdout=asyncio.subprocess.PIPE
        )
        try:
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode != 0:
            self._data.drop_unfinished()  # at once: the disk may be full because of it
            raise _Failed(f"its process ended with status {process.returncode}")
        await asyncio.to_thread(self._put_in_place, Path(output.decode().strip()), before)
        size = self._data.snapshot(before).stat().st_size
        _log.info("journal_compacted", segments_before=before, bytes=size, seconds=self._clock.now_s() - started_s)

    def _put_in_place(self, written: Path, before: int) -> None:
        written.rename(self._data.snapshot(before))
        self._data.sync()
        self._data.drop_before(before)


def write_snapshot(data: DataDir, partition_id: str, before: int) -> Path:
    """Write what all segments before a number amount to; the file, durable but not yet in its place. Raises
    DataDirError, OSError."""
    found = read(data, partition_id, DirectoryConfig(), before)
    path = data.unfinished_snapshot()
    records = chain(
        [FileHeader(FORMAT, partition_id, before, found.now_s)],
        (RoleTaken(node_id, role) for node_id, role in found.roles.items()),
        found.directory.snapshot(),
    )
    written = 0
    with path.open("wb") as file:
        for record in records:
            file.write(frame(encode(record)))
            written += 1
        file.write(frame(encode(FileEnd(written))))
        file.flush()
        os.fsync(file.fileno())
    return path


def main(path: str, partition_id: str, before: str) -> int:
    """The process. Prints the file's path."""
    os.nice(_NICENESS)
    gc.disable()  # what is read is kept, and the process ends with it
    try:
        print(write_snapshot(DataDir(Path(path)), partition_id, int(before)))
    except (DataDirError, OSError) as error:
        print(f"snapshot of the segments before {before}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
