"""What a fetch gives back when something of our own goes wrong in the middle of it. No engine, no peer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from evolving.core.config import FetchConfig
from evolving_node_agent.engines.port import Holder, PrefillJob, Sampling
from evolving_node_agent.engines.sglang.host.fetch import Fetcher, Reader
from evolving_node_agent.engines.sglang.host.landing import Claimed
from evolving_node_agent.engines.sglang.host.legs import prefill_leg
from evolving_node_agent.engines.sglang.host.pages import Layout, Range
from evolving_node_agent.engines.sglang.host.peers import Locate, Located
from evolving_node_agent.engines.sglang.host.stopwatch import Stopwatch
from evolving_node_agent.engines.sglang.translate import prefill_command

BLOCK = 4
LAYOUT = Layout((), 0, (0, 1 << 20), 64, 2 << 20)


class Landing:
    """Counts the pages that are taken."""

    def __init__(self) -> None:
        self.busy = Stopwatch()
        self.taken = 0

    def claim(self, leg: Any, first_block: int, blocks: int, room: object) -> Claimed:
        """Pages, whatever for."""
        self.taken += blocks
        return Claimed(first_block, torch.arange(blocks * BLOCK))

    def release(self, slots: torch.Tensor) -> None:
        """They are back."""
        self.taken -= len(slots) // BLOCK


class Inbox:
    """Calls run at once."""

    def post(self, call: Callable[[], None]) -> None:
        call()

    async def call(self, function: Callable[[], Any]) -> Any:
        return function()


class Peers:
    """One that has every block asked for, with checksums."""

    async def at(self, address: str) -> Any:
        return SimpleNamespace(welcome=SimpleNamespace(incarnation="x", session=address, layout=LAYOUT), ask=self._ask)

    async def _ask(self, locate: Locate, expect: object) -> Located:
        return Located([(page, -1, 0) for page in range(len(locate.names) // 16)])


class Transport:
    """Reads that are over at once, or fail to begin."""

    session = ""

    def __init__(self, begins: bool) -> None:
        self._begins = begins

    def register(self, address: int, size: int) -> None: ...

    def read(self, session: str, ranges: Sequence[Range], over: Callable[[bool], None]) -> None:
        if not self._begins:
            raise RuntimeError("no thread for this")
        over(True)


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.asyncio
async def test_pages_come_back_from_a_read_that_ends_in_an_error_of_ours(begins: bool) -> None:
    def intact(*_: object) -> int:
        raise RuntimeError("cannot check this")

    landing = Landing()
    blocks: Any = SimpleNamespace(
        pages=SimpleNamespace(layout=LAYOUT), checksums=SimpleNamespace(enabled=True, intact=intact)
    )
    inbox: Any = Inbox()
    peers: Any = Peers()
    fetcher = Fetcher(inbox, blocks, landing, peers, Reader(Transport(begins)), FetchConfig(readers=1), BLOCK)  # type: ignore[arg-type]
    holders = (Holder("peer", "127.0.0.1:1", "x", 0, 5),)
    tokens = np.arange(5 * BLOCK + 1, dtype=np.uint32)
    for attempt in range(2):  # the second one would wait for ever for a turn that was not given back
        job = PrefillJob(f"leg {attempt}", attempt, tokens, 0, bytes(32), Sampling(1), holders=holders)
        leg = prefill_leg(prefill_command(job))
        with pytest.raises(RuntimeError):
            await fetcher.fetch(leg)
        async with asyncio.timeout(30):
            while landing.taken:
                await asyncio.sleep(0)
