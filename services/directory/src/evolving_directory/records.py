"""What the journal's files hold, record by record: the entries of the core's log, what its snapshots are made of, and
the little the service adds. A record is one byte that says its kind, then msgpack."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import msgspec

from evolving.core import directory_log, directory_snapshot
from evolving.core.directory_log import LogEntry
from evolving.core.directory_snapshot import SnapshotPart
from evolving.core.terms import Role

FORMAT = 1


class FileHeader(NamedTuple):
    """First in every file. number: of the segment, or of the first segment a snapshot does not cover."""

    format: int
    partition_id: str
    number: int
    now_s: float  # the directory's clock when the file was begun, unix seconds


class RoleTaken(NamedTuple):
    """The role in effect that a known node was last seen with, and what follows from the change was done."""

    node_id: str
    role: Role


class FileEnd(NamedTuple):
    """Last in a snapshot, which without it is not whole."""

    records: int


class BadRecord(ValueError):
    """Bytes that are no record of this format."""


Record = FileHeader | RoleTaken | FileEnd | LogEntry | SnapshotPart

# A kind's place here is its byte in the files: only ever append.
_KINDS: tuple[type[Any], ...] = (
    FileHeader,
    RoleTaken,
    FileEnd,
    directory_log.Began,
    directory_log.Heard,
    directory_log.KvLanded,
    directory_log.OutputMade,
    directory_log.RequestDone,
    directory_log.BranchesEnded,
    directory_log.TimePassed,
    directory_log.NodeCame,
    directory_log.NodeLost,
    directory_log.Turned,
    directory_snapshot.KnownNodes,
    directory_snapshot.Runs,
    directory_snapshot.Branches,
    directory_snapshot.Tombstones,
    directory_snapshot.Families,
)
_bytes_of = {kind: bytes([number]) for number, kind in enumerate(_KINDS)}
_decoders = [msgspec.msgpack.Decoder(kind) for kind in _KINDS]
_encoder = msgspec.msgpack.Encoder()


def encode(record: Record) -> bytes:
    """A record's bytes."""
    return _bytes_of[type(record)] + _encoder.encode(record)


def decode(payload: bytes) -> Record:
    """The record that `encode` made these of. Raises BadRecord."""
    if not payload or payload[0] >= len(_decoders):
        raise BadRecord("a record of no known kind; a newer version of the directory may have written it")
    try:
        return cast("Record", _decoders[payload[0]].decode(memoryview(payload)[1:]))
    except msgspec.MsgspecError as error:
        raise BadRecord(f"not a {_KINDS[payload[0]].__name__}: {error}") from error
