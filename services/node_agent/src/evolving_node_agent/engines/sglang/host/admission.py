"""Which queued legs may be taken: those whose fetch is over, or has held them up for long enough.

SGLang walks its queue, sorted by rank, once for every prefill step. A leg that still fetches is passed over there, so
it holds up none behind it, and one whose fetch is over doesn't wait for a slower one ahead. Where fetches start only
when a leg's turn has come, for comparison, none is taken before a leg that was passed over. A leg that there would have
been room for is *held up* by its fetch until a later walk says otherwise. Scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Callable

from evolving.core.config import FetchStart

from .legs import PrefillLeg


class Admission:
    """The gate in front of SGLang's own admission."""

    def __init__(self, on_turn: Callable[[PrefillLeg], None], fetch_start: FetchStart) -> None:
        self._on_turn = on_turn  # a leg's turn came while its fetch was not over
        self._in_turn = fetch_start is FetchStart.ADMISSION
        self._held: dict[PrefillLeg, None] = {}  # both in the queue's order, which is that in which turns come
        self._passed: dict[PrefillLeg, None] = {}

    def begin_walk(self) -> None:
        """SGLang is about to walk its queue."""
        self._passed = {}

    def lets(self, leg: PrefillLeg, has_room: Callable[[], bool]) -> bool:
        """Whether the leg that the walk has come to is runnable. `has_room` says whether it would be taken if so."""
        if self._in_turn and self._passed:
            return False
        if leg.fetch.over or leg.fetch.held_up.total_s >= leg.command.fetch_deadline_s:
            return True
        if has_room():
            self._passed[leg] = None
        return False

    def end_walk(self) -> None:
        """The walk is over; from now until the next one those it passed over are held up."""
        for leg in self._held:
            if leg not in self._passed:
                leg.fetch.held_up.stop()
        for leg in self._passed:
            if leg not in self._held:
                leg.fetch.held_up.start()
                self._on_turn(leg)
        self._held = self._passed

    def forget(self, leg: PrefillLeg) -> None:
        """The leg left the queue."""
        if leg in self._held:
            leg.fetch.held_up.stop()
            del self._held[leg]
