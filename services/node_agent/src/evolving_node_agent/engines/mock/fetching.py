"""What a prefill leg gets from peers and how long it is held up for it; what all reads of an engine come to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from evolving.runtime.clock import Clock


@dataclass(slots=True)
class LegFetch:
    """The fetch of one leg. It is *held up* while the engine could take it but for its fetch."""

    until: int  # leading blocks that holders have, or this node
    deadline_s: float  # longest it is held up
    over: bool = False  # done, failed or given up: the leg can be taken
    go: asyncio.Event = field(default_factory=asyncio.Event)  # it may start
    fetched: list[range] = field(default_factory=list)  # blocks that came from peers
    kept: int = 0  # leading blocks kept in L2 for it
    _read_s: float = 0.0
    _reading_since_s: float | None = None
    _held_up_s: float = 0.0
    _held_up_since_s: float | None = None

    def begin_read(self, now_s: float) -> None:
        """A chunk is being read."""
        self._reading_since_s = now_s

    def end_read(self, now_s: float) -> None:
        """The read has ended."""
        self._read_s = self.read_s(now_s)
        self._reading_since_s = None

    def read_s(self, now_s: float) -> float:
        """Time in which chunks were read."""
        return self._read_s + (now_s - self._reading_since_s if self._reading_since_s is not None else 0.0)

    def hold_up(self, now_s: float) -> None:
        """From now on the engine could take the leg."""
        if self._held_up_since_s is None:
            self._held_up_since_s = now_s

    def let_wait(self, now_s: float) -> None:
        """From now on it has to wait anyway."""
        self._held_up_s = self.held_up_s(now_s)
        self._held_up_since_s = None

    def held_up_s(self, now_s: float) -> float:
        """How long it was held up."""
        return self._held_up_s + (now_s - self._held_up_since_s if self._held_up_since_s is not None else 0.0)

    def left_s(self, now_s: float) -> float | None:
        """How much longer it is held up at most; None: it is not held up."""
        if self.over or self._held_up_since_s is None:
            return None
        return self.deadline_s - self.held_up_s(now_s)

    def hidden_s(self, now_s: float) -> float:
        """What of `read_s` passed while the leg had to wait anyway."""
        return max(0.0, self.read_s(now_s) - self.held_up_s(now_s))

    def blocks_from_peers(self, first: int, last: int) -> int:
        """How many of blocks [first, last) came from peers for this leg."""
        return sum(len(range(max(first, each.start), min(last, each.stop))) for each in self.fetched)


class ReadMeter:
    """All reads of one life."""

    def __init__(self, clock: Clock) -> None:
        self.blocks_under_way = 0
        self.blocks_fetched = 0
        self._clock = clock
        self._reads = 0
        self._busy_s = 0.0
        self._busy_since_s = 0.0

    @contextmanager
    def read(self, fetch: LegFetch, blocks: int) -> Iterator[None]:
        """Count a read of a leg while the block runs."""
        now_s = self._clock.now_s()
        if self._reads == 0:
            self._busy_since_s = now_s
        self._reads += 1
        self.blocks_under_way += blocks
        fetch.begin_read(now_s)
        try:
            yield
        finally:
            now_s = self._clock.now_s()
            fetch.end_read(now_s)
            self.blocks_under_way -= blocks
            self._reads -= 1
            if self._reads == 0:
                self._busy_s += now_s - self._busy_since_s

    @property
    def busy_s(self) -> float:
        """Time in which something was read."""
        return self._busy_s + (self._clock.now_s() - self._busy_since_s if self._reads else 0.0)
