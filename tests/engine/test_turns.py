"""Turns to read from peers, as tasks see them."""

from __future__ import annotations

import asyncio

from evolving.core.config import FetchConfig
from evolving.core.fetching import Rank
from evolving.runtime.clock import ManualClock
from evolving_node_agent.engines.turns import ReadTurns


class Readers:
    """Tasks that take a turn and read until told to end."""

    def __init__(self, turns: ReadTurns) -> None:
        self.turns = turns
        self.began: list[str] = []
        self.finish: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, name: str, rank: Rank, size_bytes: int = 1) -> None:
        self.finish[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._read(name, rank, size_bytes))

    async def _read(self, name: str, rank: Rank, size_bytes: int) -> None:
        async with self.turns.turn(rank, size_bytes):
            self.began.append(name)
            await self.finish[name].wait()


async def test_turns_go_by_rank_and_a_cancelled_task_leaves_its_place() -> None:
    """One reader at a time; whoever is cancelled, waiting or reading, holds up nobody."""
    clock = ManualClock()
    readers = Readers(ReadTurns(FetchConfig(readers=1), clock))
    for name, rank in (("first", (0, 1)), ("late", (0, 9)), ("gone", (0, 2)), ("urgent", (-1, 5))):
        readers.start(name, rank)
        await clock.settle()
    assert readers.began == ["first"]
    readers.tasks["gone"].cancel()
    readers.tasks["first"].cancel()
    await clock.settle()
    assert readers.began == ["first", "urgent"]
    readers.finish["urgent"].set()
    await clock.settle()
    assert readers.began == ["first", "urgent", "late"]
    readers.finish["late"].set()
    await asyncio.gather(*readers.tasks.values(), return_exceptions=True)


async def test_bandwidth_gives_the_next_turn_when_its_time_has_come() -> None:
    """Nobody has to end or ask for it."""
    clock = ManualClock()
    turns = ReadTurns(FetchConfig(readers=4, bytes_per_s=10.0), clock)
    readers = Readers(turns)
    readers.start("a", (0, 1), 100)
    readers.start("b", (0, 2), 1)
    await clock.settle()
    assert readers.began == ["a"]
    await clock.advance(9.0)
    assert readers.began == ["a"]
    await clock.advance(1.0)
    assert readers.began == ["a", "b"]
    for event in readers.finish.values():
        event.set()
    await asyncio.gather(*readers.tasks.values())
    turns.close()
