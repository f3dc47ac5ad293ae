"""What can be made to go wrong in a mock engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from evolving_node_agent.engines.mock.config import FaultPlan


class Faults:
    """Switches a test flips while the engine runs. They outlive restarts of the engine."""

    def __init__(self, plan: FaultPlan) -> None:
        self.plan = plan
        self.transfer_delay_s = plan.transfer_delay_s  # before each page sent to another engine
        self.corrupt_pages = 0  # so many of the next pages sent get a flipped bit
        self.fail_starts = 0  # so many of the next starts fail
        self.on_crash: Callable[[int], None] | None = None  # set by the engine
        self._pages_sent = 0
        self._go = asyncio.Event()
        self._go.set()

    def crash(self, status: int = -9) -> None:
        """The engine process dies now: legs and L1 are gone, `exited` returns `status`."""
        assert self.on_crash is not None
        self.on_crash(status)

    def stall(self) -> None:
        """No iteration begins until `resume`; the engine still answers."""
        self._go.clear()

    def resume(self) -> None:
        """End a stall."""
        self._go.set()

    async def pass_stall(self) -> None:
        """Wait while a stall lasts."""
        await self._go.wait()

    def damages_next_page(self) -> bool:
        """Whether the page about to be sent gets a flipped bit."""
        self._pages_sent += 1
        if self.corrupt_pages > 0:
            self.corrupt_pages -= 1
            return True
        every = self.plan.corrupt_every_pages
        return every > 0 and self._pages_sent % every == 0
