"""From the files back to the directory that wrote them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from evolving.core.config import DirectoryConfig
from evolving.core.directory import Directory
from evolving.core.directory_log import NodeLost
from evolving.core.errors import CoreError
from evolving.core.terms import Role
from evolving.runtime.log import get_logger
from evolving_directory.data_dir import DataDir, DataDirError
from evolving_directory.frames import BadFrame, goes_on_after, read_frames
from evolving_directory.records import FORMAT, BadRecord, FileEnd, FileHeader, Record, RoleTaken, decode

_log = get_logger(__name__)


@dataclass
class Recovered:
    """A directory that starts where another ended."""

    directory: Directory
    roles: dict[str, Role] = field(default_factory=dict)  # of nodes, as last seen
    next_segment: int = 1  # to be written
    first_segment: int = 1  # not in the snapshot
    now_s: float = 0.0  # unix seconds when it ended, at least
    records: int = 0  # read from segments


def recover(data: DataDir, partition_id: str, config: DirectoryConfig) -> Recovered:
    """Read everything; cut off what the last write left unfinished. What was read is durable. Raises DataDirError."""
    last = max(data.segments(), default=0)
    try:
        if last:
            _make_last_whole(data.segment(last))
        data.sync()
        found = read(data, partition_id, config)
        data.drop_before(found.first_segment)
    except OSError as error:
        raise DataDirError(f"{data.path} can't be used ({error})") from error
    return found


def read(data: DataDir, partition_id: str, config: DirectoryConfig, before: int | None = None) -> Recovered:
    """What the newest snapshot and the segments after it say; `before`: only segments before that one. Raises
    DataDirError."""
    snapshots, segments = data.snapshots(), data.segments()
    first = snapshots[-1] if snapshots else 1
    end = before or max((segments[-1] + 1) if segments else 1, first)
    if snapshots:
        header, records = _open(data.snapshot(first), partition_id, first)
        parts = _Parts(records)
        directory = Directory.restore(config, parts)
        found = Recovered(directory, parts.roles, now_s=header.now_s)
        if not parts.whole:
            raise _damaged(data.snapshot(first), "its end is missing")
    else:
        found = Recovered(Directory(config))
    found.first_segment, found.next_segment = first, end
    for number in range(first, end):
        path = data.segment(number)
        if number not in segments:
            raise DataDirError(
                f"{path} is missing, though there are segments around it; bring it back, or move all of {data.path} "
                "away: the directory then starts empty, and branches count again from their next request on"
            )
        header, records = _open(path, partition_id, number)
        found.now_s = max(found.now_s, header.now_s)
        _replay(path, records, found)
    found.now_s = max(found.now_s, found.directory.now_s)
    return found


class _Parts:
    """A snapshot's records, of which the service keeps its own."""

    def __init__(self, records: Iterator[tuple[int, Record]]) -> None:
        self._records = records
        self.roles: dict[str, Role] = {}
        self.whole = False

    def __iter__(self) -> Iterator[Any]:
        read = 1  # the header
        for _, record in self._records:
            if isinstance(record, FileEnd):
                self.whole = record.records == read
            elif isinstance(record, RoleTaken):
                self.roles[record.node_id] = record.role
            else:
                yield record
            read += 1


def _replay(path: Path, records: Iterator[tuple[int, Record]], found: Recovered) -> None:
    for offset, record in records:
        found.records += 1
        if isinstance(record, RoleTaken):
            found.roles[record.node_id] = record.role
            continue
        if isinstance(record, NodeLost):
            found.roles.pop(record.node_id, None)  # if it comes back, it comes as a new one
        try:
            found.directory.replay(cast("Any", record))
        except (CoreError, KeyError) as error:
            raise _damaged(path, f"the entry at byte {offset} does not follow from those before it: {error}") from error


def _open(path: Path, partition_id: str, number: int) -> tuple[FileHeader, Iterator[tuple[int, Record]]]:
    """A file's header and what follows it."""
    records = _records(path)
    _, header = next(records, (0, None))
    if not isinstance(header, FileHeader) or header.number != number:
        raise _damaged(path, "it does not begin with its own header")
    if header.format != FORMAT:
        raise DataDirError(
            f"{path} has format {header.format}, this version reads {FORMAT}; start the version that wrote it, or move "
            "the directory away"
        )
    if header.partition_id != partition_id:
        raise DataDirError(f"{path} is of partition {header.partition_id!r}, not {partition_id!r}; give another one")
    return header, records


def _records(path: Path) -> Iterator[tuple[int, Record]]:
    try:
        for offset, payload in read_frames(path):
            try:
                yield offset, decode(payload)
            except BadRecord as error:
                raise _damaged(path, f"at byte {offset}: {error}") from error
    except BadFrame as error:
        raise _damaged(path, str(error)) from error
    except OSError as error:
        raise DataDirError(f"{path} can't be read ({error})") from error


def _damaged(path: Path, why: str) -> DataDirError:
    return DataDirError(
        f"{path} is damaged: {why}; bring the file back from a copy, or move all of {path.parent} away: the directory "
        "then starts empty, and branches count again from their next request on"
    )


def _make_last_whole(path: Path) -> None:
    """Cut the last segment where its first bad frame begins: a write that a crash cut short was acknowledged to nobody.

    One without a whole header is removed. What is left is synced, for the process that wrote it may have died before it
    did, and what comes next builds on it. Where whole frames follow the bad one, a power loss that wrote the later part
    first looks like damage of acknowledged records: what is cut is kept beside. Raises OSError.
    """
    cut: int | None = 0
    why = "it is empty"
    try:
        for _ in read_frames(path):
            cut = None
    except BadFrame as error:
        cut, why = error.offset, str(error)
    if cut is not None:
        _keep_cut(path, cut, why)
        if cut == 0:
            path.unlink()
            return
    handle = os.open(path, os.O_WRONLY)
    try:
        if cut is not None:
            os.ftruncate(handle, cut)
        os.fsync(handle)
    finally:
        os.close(handle)


def _keep_cut(path: Path, cut: int, why: str) -> None:
    """Say what is cut and, where it may be more than an unfinished write, keep it. Raises OSError."""
    size = path.stat().st_size
    told = {"file": str(path), "reason": why, "kept_bytes": cut, "cut_bytes": size - cut}
    if not size or not goes_on_after(path, cut):
        _log.warning("journal_tail_cut", **told)
        return
    kept = path.with_name(f"cut-{path.name}-{cut}")
    kept.write_bytes(path.read_bytes()[cut:])
    _log.error("journal_tail_cut", **told, kept_in=str(kept))
