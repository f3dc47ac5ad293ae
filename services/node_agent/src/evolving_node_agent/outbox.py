"""What is to be told of requests, until the directory has it. Pure.

Entries of one request keep their order. An entry waits for the block it speaks of, so that the directory hears of the
copy first, but not for ever: the block may be gone again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from evolving.internal.v1 import directory_pb2


@dataclass(slots=True, eq=False)
class Entry:
    """One report."""

    request: tuple[str, str, str]  # tenant, branch, request id
    message: directory_pb2.ConnectNodeRequest
    needs: bytes  # name of the block that must be held first; empty: none
    since_s: float
    sent_s: float = 0.0


class Outbox:
    """Waiting entries, and sent ones not known to be taken. At most `limit` of each; the oldest go first.

    dropped: waiting entries given up because too many waited.
    """

    def __init__(self, limit: int, patience_s: float = 2.0, remember_s: float = 60.0) -> None:
        self._limit = limit
        self._patience_s = patience_s  # an entry waits so long for its block
        self._remember_s = remember_s  # an entry sent longer ago than this isn't sent again
        self._waiting: deque[Entry] = deque()
        self._sent: deque[Entry] = deque()
        self._forgotten = 0  # reports of this stream that are no longer in `_sent`
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, entry: Entry) -> None:
        """Add a report."""
        self._waiting.append(entry)
        self._trim(self._waiting)

    def take(self, held: Callable[[bytes], bool], now_s: float) -> list[Entry]:
        """The entries that may be sent now, in order."""
        ready: list[Entry] = []
        kept: deque[Entry] = deque()
        blocked: set[tuple[str, str, str]] = set()
        for entry in self._waiting:
            late = now_s - entry.since_s >= self._patience_s
            if entry.request not in blocked and (not entry.needs or late or held(entry.needs)):
                entry.sent_s = now_s
                ready.append(entry)
            else:
                blocked.add(entry.request)
                kept.append(entry)
        self._waiting = kept
        self._sent.extend(ready)
        while len(self._sent) > self._limit:
            self._forget()
        return ready

    def acknowledged(self, reports: int) -> None:
        """The directory took so many of the first entries sent on this stream."""
        while self._sent and self._forgotten < reports:
            self._forget()

    def reconnected(self, now_s: float) -> None:
        """A new stream: what was sent lately and not acknowledged is sent again.

        A report that came twice changes nothing while it is news. An old one would move a branch's home back to where
        it was long ago: hence `remember_s`.
        """
        again = [entry for entry in self._sent if now_s - entry.sent_s < self._remember_s]
        self._sent.clear()
        self._forgotten = 0
        self._waiting.extendleft(reversed(again))
        self._trim(self._waiting)

    def next_wakeup_s(self) -> float | None:
        """When to `take` again although nothing happened; None: not needed."""
        return min(entry.since_s for entry in self._waiting) + self._patience_s if self._waiting else None

    def _forget(self) -> None:
        self._sent.popleft()
        self._forgotten += 1

    def _trim(self, entries: deque[Entry]) -> None:
        while len(entries) > self._limit:
            entries.popleft()
            self.dropped += 1
