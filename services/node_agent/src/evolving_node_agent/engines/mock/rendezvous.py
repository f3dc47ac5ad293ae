"""Where decode legs find the prefill legs they pull from."""

from __future__ import annotations

import asyncio

from evolving.runtime.clock import Clock
from evolving.runtime.tasks import first_of
from evolving_node_agent.engines.mock.legs import PrefillLeg


class Rendezvous:
    """Prefill legs of one life by transfer id."""

    def __init__(self, clock: Clock, patience_s: float) -> None:
        self._clock = clock
        self._patience_s = patience_s
        self._legs: dict[int, PrefillLeg] = {}
        self._arrivals: dict[int, asyncio.Event] = {}  # ids that somebody waits for

    def offer(self, leg: PrefillLeg) -> None:
        """The leg can be found from now on."""
        self._legs[leg.job.transfer_id] = leg
        if leg.job.transfer_id in self._arrivals:
            self._arrivals[leg.job.transfer_id].set()

    def withdraw(self, leg: PrefillLeg) -> None:
        """The leg is over."""
        del self._legs[leg.job.transfer_id]

    def get(self, transfer_id: int) -> PrefillLeg | None:
        """The leg, if it is here."""
        return self._legs.get(transfer_id)

    async def find(self, transfer_id: int) -> PrefillLeg | None:
        """The leg; waits a moment for one that is still on its way here."""
        if transfer_id in self._legs:
            return self._legs[transfer_id]
        arrived = self._arrivals.setdefault(transfer_id, asyncio.Event())
        try:
            await first_of(arrived.wait(), self._clock.sleep(self._patience_s))
        finally:
            self._arrivals.pop(transfer_id, None)
        return self._legs.get(transfer_id)
