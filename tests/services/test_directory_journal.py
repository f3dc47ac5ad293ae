"""The directory's files: what is acknowledged is on the disk, what a crash leaves half done is cut, damage is
refused."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from waiting import eventually

from evolving.core.config import DirectoryConfig
from evolving.core.directory_log import Began, BranchesEnded, NodeCame, NodeLost
from evolving.core.directory_types import Begin
from evolving.core.terms import Role
from evolving.runtime.clock import SystemClock
from evolving.runtime.metrics import Metrics
from evolving_directory import compaction
from evolving_directory import journal as journal_module
from evolving_directory.compaction import Compactor, write_snapshot
from evolving_directory.data_dir import DataDir, DataDirError
from evolving_directory.errors import JournalFailed
from evolving_directory.frames import frame
from evolving_directory.journal import DiskJournal, SegmentFiles
from evolving_directory.metrics import DirectoryMetrics
from evolving_directory.records import Record, RoleTaken, encode
from evolving_directory.recovery import Recovered, recover

CONFIG = DirectoryConfig()


def began(number: int) -> Began:
    """The first request of a branch of its own."""
    return Began(1000.0 + number, Begin("t", f"b{number}", "r", new_names=bytes([number]) * 16))


def branches(found: Recovered) -> list[str]:
    """Ids of live branches."""
    return [view.branch_id for view in found.directory.branches(found.now_s, limit=10_000)]


def write_segments(path: Path, *segments: int) -> DataDir:
    """A data directory with so many branches begun in each segment."""
    data, number = DataDir(path), 0
    path.mkdir(exist_ok=True)
    files = SegmentFiles(data, "p0", 1, 4096)
    for count in segments:
        records = [began(number + at) for at in range(count)]
        number += count
        files.write(b"".join(frame(encode(record)) for record in records), 900.0)
        files.close()
        files = SegmentFiles(data, "p0", files.number + 1, 4096)
    return data


def names(count: int) -> list[str]:
    """The branches of `write_segments`, in the order the directory gives them."""
    return sorted(f"b{number}" for number in range(count))


@asynccontextmanager
async def opened(data: DataDir, next_number: int = 1) -> AsyncIterator[tuple[DiskJournal, list[str]]]:
    """A running journal, and what it said of its disk."""
    said: list[str] = []
    clock = SystemClock()
    files = SegmentFiles(data, "p0", next_number, 1 << 20)
    metrics = DirectoryMetrics(Metrics())
    journal = DiskJournal(files, clock, clock.wall_s, metrics, said.append)
    running = asyncio.create_task(journal.run())
    try:
        yield journal, said
        await journal.close()
        await running
    finally:
        running.cancel()


class Disk:
    """Stands before `os.fdatasync` and `os.write`: fails, or holds, as told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: OSError | None = None
        self.write_most: int | None = None  # bytes a failing disk still takes of a write
        self.syncs = 0
        self.free = threading.Event()
        self.free.set()
        self._sync, self._write = os.fdatasync, os.write
        monkeypatch.setattr(os, "fdatasync", self.fdatasync)
        monkeypatch.setattr(os, "write", self.write)

    def fdatasync(self, handle: int) -> None:
        self.syncs += 1
        assert self.free.wait(60)
        if self.error is not None:
            raise self.error
        self._sync(handle)

    def write(self, handle: int, payload: bytes) -> int:
        segment = "/log-" in str(Path(f"/proc/self/fd/{handle}").readlink())
        if segment and self.error is not None and self.write_most is not None:
            self._write(handle, payload[: self.write_most])
            raise self.error
        return self._write(handle, payload)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_RETRY_S", 0.02)
    monkeypatch.setattr(compaction, "_RETRY_S", 0.02)


# ------------------------------------------------------------------------------------------------------------ recovery


def test_no_files_are_an_empty_directory(tmp_path: Path) -> None:
    found = recover(DataDir(tmp_path), "p0", CONFIG)
    assert (branches(found), found.next_segment, found.now_s) == ([], 1, 0.0)


def test_segments_are_read_in_order_and_time_goes_on(tmp_path: Path) -> None:
    found = recover(write_segments(tmp_path, 3, 2), "p0", CONFIG)
    assert branches(found) == names(5)
    assert (found.next_segment, found.records, found.now_s) == (3, 5, 1004.0)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(keep=st.floats(0, 1), garbage=st.binary(max_size=40))
def test_a_torn_tail_is_cut_at_the_first_record_that_is_not_whole(
    tmp_path_factory: pytest.TempPathFactory, keep: float, garbage: bytes
) -> None:
    data = write_segments(tmp_path_factory.mktemp("torn"), 2, 4)
    path = data.segment(2)
    whole = path.read_bytes()
    torn = whole[: int(keep * len(whole))] + garbage
    path.write_bytes(torn)
    good = next((at for at, (a, b) in enumerate(zip(whole, torn, strict=False)) if a != b), min(len(whole), len(torn)))
    ends, at = [], 0
    while at < len(whole):
        at += 8 + int.from_bytes(whole[at : at + 4], "little")
        ends.append(at)
    survivors = max(0, sum(end <= good for end in ends) - 1)  # the first is the header
    found = recover(data, "p0", CONFIG)
    assert branches(found) == names(2 + survivors)
    assert found.next_segment == (3 if path.exists() else 2)
    assert branches(recover(data, "p0", CONFIG)) == names(2 + survivors), "and the cut lasts"


def test_what_is_cut_before_whole_records_is_kept_beside(tmp_path: Path) -> None:
    data = write_segments(tmp_path, 4)
    path = data.segment(1)
    whole = path.read_bytes()
    second = 8 + int.from_bytes(whole[:4], "little")  # the first record after the header
    damaged = bytearray(whole)
    damaged[second + 8] ^= 1
    path.write_bytes(damaged)
    assert branches(recover(data, "p0", CONFIG)) == []
    assert [kept.read_bytes() for kept in tmp_path.glob("cut-*")] == [bytes(damaged[second:])]
    assert branches(recover(data, "p0", CONFIG)) == [], "and the kept file is in nobody's way"


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), snapshot=st.booleans())
def test_a_damaged_byte_anywhere_before_the_last_segment_is_refused(
    tmp_path_factory: pytest.TempPathFactory, at: float, bit: int, snapshot: bool
) -> None:
    data = write_segments(tmp_path_factory.mktemp("damaged"), 2, 4, 1)
    path = data.segment(2)
    if snapshot:
        path = data.snapshot(3)
        write_snapshot(data, "p0", 3).rename(path)
    damaged = bytearray(path.read_bytes())
    damaged[int(at * len(damaged))] ^= 1 << bit
    path.write_bytes(damaged)
    with pytest.raises(DataDirError, match=path.name) as refused:
        recover(data, "p0", CONFIG)
    assert "bring the file back" in str(refused.value)


def test_what_is_missing_or_of_another_partition_is_refused(tmp_path: Path) -> None:
    data = write_segments(tmp_path, 1, 1, 1)
    with pytest.raises(DataDirError, match="partition 'p0', not 'p1'"):
        recover(data, "p1", CONFIG)
    data.segment(2).unlink()
    with pytest.raises(DataDirError, match="log-000000000002 is missing"):
        recover(data, "p0", CONFIG)


def test_a_snapshot_and_the_segments_after_it_are_the_same_as_all_segments(tmp_path: Path) -> None:
    data = write_segments(tmp_path, 3, 2, 4)
    ended = frame(encode(BranchesEnded(1010.0, "t", ("b1",), False))) + frame(encode(RoleTaken("n", Role.DECODE)))
    SegmentFiles(data, "p0", 4, 4096).write(ended, 1005.0)
    before = recover(data, "p0", CONFIG)
    for upto in (3, 5):
        write_snapshot(data, "p0", upto).rename(data.snapshot(upto))
        left = data.unfinished_snapshot()
        left.touch()
        after = recover(data, "p0", CONFIG)
        assert branches(after) == branches(before) == [name for name in names(9) if name != "b1"]
        assert (after.roles, after.now_s) == ({"n": Role.DECODE}, before.now_s) == (before.roles, 1010.0)
        assert data.snapshots() == [upto]
        assert data.segments() == list(range(upto, 5))
        assert not left.exists()


def test_what_a_killed_process_left_unsynced_is_durable_before_anything_builds_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_segments(tmp_path, 2, 1)
    synced: list[str] = []
    sync = os.fsync

    def fsync(handle: int) -> None:
        sync(handle)
        synced.append(Path(f"/proc/self/fd/{handle}").readlink().name)

    monkeypatch.setattr(os, "fsync", fsync)
    assert branches(recover(data, "p0", CONFIG)) == names(3)
    assert synced == [data.segment(2).name, tmp_path.name], "the file, then its name"


def test_the_role_of_a_node_is_forgotten_with_the_node(tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    records: list[Record] = [
        NodeCame(1000.0, "n", "1"),
        RoleTaken("n", Role.DECODE),
        NodeCame(1001.0, "m", "1"),
        RoleTaken("m", Role.DECODE),
        NodeLost(1002.0, "n"),
    ]
    SegmentFiles(data, "p0", 1, 4096).write(b"".join(frame(encode(record)) for record in records), 900.0)
    assert recover(data, "p0", CONFIG).roles == {"m": Role.DECODE}


def test_one_process_at_a_time(tmp_path: Path) -> None:
    first, second = DataDir(tmp_path / "new"), DataDir(tmp_path / "new")
    first.lock()
    with pytest.raises(DataDirError, match="another directory process uses"):
        second.lock()
    first.unlock()
    second.lock()
    second.unlock()


def test_a_data_directory_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataDirError, match="can't be used"):
        DataDir(tmp_path / "file").lock()


# -------------------------------------------------------------------------------------------------------------- writing


def test_a_snapshot_without_its_end_is_refused(tmp_path: Path) -> None:
    data = write_segments(tmp_path, 3, 1)
    written = write_snapshot(data, "p0", 2).read_bytes()
    path = data.snapshot(2)
    for end in range(1, len(written)):
        path.write_bytes(written[:end])
        with pytest.raises(DataDirError, match=path.name):
            recover(data, "p0", CONFIG)
    path.write_bytes(written)
    assert branches(recover(data, "p0", CONFIG)) == names(4)


async def test_nothing_is_settled_before_its_sync_and_one_sync_carries_many(tmp_path: Path, disk: Disk) -> None:
    async with opened(DataDir(tmp_path)) as (journal, _):
        await eventually(lambda: not journal.failed)
        disk.free.clear()
        before, called = disk.syncs, list[int]()
        journal.append(began(0))
        first = asyncio.create_task(journal.settled())
        await eventually(lambda: disk.syncs == before + 1)
        rest = []
        for number in range(1, 51):
            journal.append(began(number))
            journal.when_settled(lambda number=number: called.append(number))  # type: ignore[misc]
            rest.append(asyncio.create_task(journal.settled()))
        await asyncio.sleep(0)
        assert not first.done()
        assert not any(task.done() for task in rest)
        assert not called
        disk.free.set()
        await asyncio.gather(first, *rest)
        assert disk.syncs == before + 2
        assert called == list(range(1, 51))
    assert branches(recover(DataDir(tmp_path), "p0", CONFIG)) == names(51)


@pytest.mark.parametrize("write_most", [None, 0, 5, 100])
async def test_a_disk_that_fails_is_said_so_and_what_it_missed_is_written_when_it_is_back(
    tmp_path: Path, disk: Disk, write_most: int | None
) -> None:
    data = DataDir(tmp_path)
    async with opened(data) as (journal, said):
        journal.append(began(0))
        await eventually(lambda: not journal.failed)
        await journal.settled()
        disk.error, disk.write_most = OSError(errno.ENOSPC, "No space left on device"), write_most
        called: list[str] = []
        journal.append(began(1))
        journal.when_settled(lambda: called.append("later"))
        with pytest.raises(JournalFailed, match="No space left"):
            await journal.settled()
        journal.append(began(2))
        with pytest.raises(JournalFailed):
            await journal.settled()
        failing = disk.syncs
        await eventually(lambda: write_most is not None or disk.syncs > failing + 2)  # it keeps trying
        assert not called
        assert "No space left" in said[-1]
        disk.error = None
        await eventually(lambda: not journal.failed)
        journal.append(began(3))
        await journal.settled()
        assert called == ["later"]
        assert said[-1] == ""
    found = recover(data, "p0", CONFIG)
    assert branches(found) == names(4)
    assert found.records == 4, "none twice"


async def test_a_disk_that_fails_from_the_start_is_waited_for(tmp_path: Path, disk: Disk) -> None:
    disk.error = OSError(errno.EIO, "Input/output error")
    async with opened(DataDir(tmp_path)) as (journal, said):
        await eventually(lambda: bool(said))
        with pytest.raises(JournalFailed, match="Input/output"):
            await journal.settled()
        disk.error = None
        await eventually(lambda: not journal.failed)
        journal.append(began(0))
        await journal.settled()
    assert branches(recover(DataDir(tmp_path), "p0", CONFIG)) == names(1)


async def test_a_journal_whose_disk_fails_can_be_closed_and_keeps_what_it_promised(tmp_path: Path, disk: Disk) -> None:
    async with opened(DataDir(tmp_path)) as (journal, _):
        journal.append(began(0))
        await eventually(lambda: not journal.failed)
        await journal.settled()
        disk.error, disk.write_most = OSError(errno.EIO, "Input/output error"), 3
        journal.append(began(1))
        with pytest.raises(JournalFailed):
            await journal.settled()
    assert branches(recover(DataDir(tmp_path), "p0", CONFIG)) == names(1)


async def test_full_segments_are_followed_by_others(tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    files = SegmentFiles(data, "p0", 1, 4096)
    write: Callable[[int], None] = lambda number: files.write(frame(encode(began(number))), 900.0)  # noqa: E731
    for number in range(200):
        write(number)
    files.close()
    assert len(data.segments()) > 2
    assert all(data.segment(number).stat().st_size < 2 * 4096 for number in data.segments())
    assert branches(recover(data, "p0", CONFIG)) == names(200)


async def test_a_compaction_that_fails_is_tried_again_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, start, starts = write_segments(tmp_path, 3, 2), asyncio.create_subprocess_exec, list[str]()

    async def start_badly(*command: str, **more: Any) -> asyncio.subprocess.Process:
        assert not list(tmp_path.glob("*.tmp"))
        starts.append(command[0])
        if len(starts) == 1:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        if len(starts) == 2:
            data.unfinished_snapshot().touch()
            return await start("false", **more)
        return await start(*command, **more)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_badly)
    async with opened(data, 3) as (journal, _):
        running = asyncio.create_task(Compactor(data, "p0", journal, 1, SystemClock()).run())
        await eventually(lambda: data.snapshots() == data.segments() == [3])
        running.cancel()
    assert len(starts) == 3
    assert branches(recover(data, "p0", CONFIG)) == names(5)
