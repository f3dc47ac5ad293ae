"""Virtual time: a heap of what happens next.

Events are ordered by time, then priority, then the order they were made in, so a run is the same in every process.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field


class Priority(enum.IntEnum):
    """What goes first of things that happen at the same moment."""

    ARRIVAL = 0  # a request, KV that came: what an iteration that starts at this moment still takes along
    ITERATION = 1  # an engine's iteration ends
    REPORT = 2  # measurements are read
    DECISION = 3  # the planner decides on all of that moment


@dataclass(slots=True, eq=False)
class Event:
    """Something that will happen, unless it is cancelled."""

    at_s: float
    action: Callable[[], None] | None

    def cancel(self) -> None:
        """It does not happen; no-op once it did."""
        self.action = None


@dataclass(slots=True, eq=False, repr=False)
class EventHeap:
    """The clock of a simulation, and what will happen."""

    now_s: float = 0.0
    after_each: Callable[[], None] | None = None  # called after each event
    _heap: list[tuple[float, int, int, Event]] = field(init=False, default_factory=list)
    _made: int = field(init=False, default=0)

    def at(self, at_s: float, priority: Priority, action: Callable[[], None]) -> Event:
        """Have `action` called at `at_s`, which must not be in the past."""
        assert self.now_s <= at_s < math.inf, f"{at_s} s is not from {self.now_s} s on"
        event = Event(at_s, action)
        self._made += 1
        heapq.heappush(self._heap, (at_s, priority, self._made, event))
        return event

    def after(self, delay_s: float, priority: Priority, action: Callable[[], None]) -> Event:
        """Have `action` called in `delay_s`."""
        return self.at(self.now_s + delay_s, priority, action)

    def run_until(self, end_s: float) -> int:
        """Let everything up to and at `end_s` happen; the time is `end_s` then. Returns how many events happened."""
        happened = 0
        while self._heap and self._heap[0][0] <= end_s:
            at_s, _, _, event = heapq.heappop(self._heap)
            action, event.action = event.action, None
            if action is not None:
                self.now_s = at_s
                happened += 1
                action()
                if self.after_each is not None:
                    self.after_each()
        self.now_s = max(self.now_s, end_s)
        return happened

    def check_invariants(self) -> None:
        """Assert that time only goes on."""
        assert all(at_s >= self.now_s for at_s, _, _, event in self._heap if event.action is not None)
        assert all(event.at_s == at_s for at_s, _, _, event in self._heap)
