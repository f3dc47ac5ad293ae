"""The directory of files in which the service survives its restarts.

`log-<n>` are segments of the journal, `snapshot-<n>` is what all segments before n amount to; `lock` is held by the one
process that writes here. Segments are numbered from 1 without gaps.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

from evolving.runtime.settings import SettingsError

_NUMBERED = re.compile(r"(log|snapshot)-(\d{12})")


class DataDirError(SettingsError):
    """The files can't be used as they are; the message names the file and what to do."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"--data-dir: {problem}")


class DataDir:
    """Names and locks; knows nothing of what the files hold."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def lock(self) -> None:
        """Make the directory where there is none, and take it for this process. Raises DataDirError."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.unlock()
            raise DataDirError(
                f"another directory process uses {self.path}; stop it, or give this one a directory of its own"
            ) from None
        except OSError as error:
            self.unlock()
            raise DataDirError(f"{self.path} can't be used ({error}); give a directory that can be written") from error

    def unlock(self) -> None:
        """Let others have it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def segment(self, number: int) -> Path:
        """A segment of the journal."""
        return self.path / f"log-{number:012}"

    def snapshot(self, number: int) -> Path:
        """The snapshot of all segments before `number`."""
        return self.path / f"snapshot-{number:012}"

    def unfinished_snapshot(self) -> Path:
        """Where a process writes a snapshot until it is whole."""
        return self.path / f"snapshot.{os.getpid()}.tmp"

    def segments(self) -> list[int]:
        """Numbers of the segments there are, in order."""
        return self._numbers("log")

    def snapshots(self) -> list[int]:
        """Numbers of the snapshots there are, in order."""
        return self._numbers("snapshot")

    def _numbers(self, kind: str) -> list[int]:
        found = (_NUMBERED.fullmatch(entry.name) for entry in self.path.iterdir())
        return sorted(int(match[2]) for match in found if match is not None and match[1] == kind)

    def drop_before(self, number: int) -> None:
        """Remove what a snapshot of all segments before `number` makes superfluous, and what was never finished."""
        for old in self.snapshots():
            if old < number:
                self.snapshot(old).unlink()
        for old in self.segments():
            if old < number:
                self.segment(old).unlink()
        self.drop_unfinished()

    def drop_unfinished(self) -> None:
        """Remove snapshots that nobody finished. One still being written is lost with it. Raises OSError."""
        for left in self.path.glob("snapshot.*.tmp"):
            left.unlink()

    def sync(self) -> None:
        """Make the names of files durable. Raises OSError."""
        handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
