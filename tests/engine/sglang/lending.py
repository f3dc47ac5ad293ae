"""Engines that one test after another borrows: a start takes seconds of both cores, emptying an engine a moment."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from evolving_node_agent.engines.port import EngineDown
from evolving_node_agent.engines.sglang import SglangConfig

from .driving import Node
from .factory import engine_config, make_engine

IDLE_MAX = 4  # engines that wait for a borrower; more would eat the machine's memory


@dataclass(eq=False)
class _Lent:
    config: SglangConfig
    node: Node
    listening: asyncio.Task[None]


class Lender:
    """Starts engines when none of the wanted kind is idle, and hands them out with nothing in them."""

    def __init__(self, directory: Path) -> None:
        """`directory`: for the engines' logs."""
        self._directory = directory
        self._numbers = count(1)
        self._idle: list[_Lent] = []

    @contextlib.asynccontextmanager
    async def lend(self, *names: str, **fields: Any) -> AsyncIterator[list[Node]]:
        """Engines that serve and hold nothing, for the block; `fields` are those of `SglangConfig`.

        At its end they must be at rest and hold what they announced, no token more. Those that the block killed or
        stopped are replaced when they are next asked for; after a block that failed, all of them.
        """
        config = engine_config(**fields)
        lent = [each for each in self._idle if each.config == config][: len(names)]
        self._idle = [each for each in self._idle if each not in lent]
        if missing := len(names) - len(lent):
            await self._end(*self._idle[: max(0, len(self._idle) + len(names) - IDLE_MAX)])
            lent += await asyncio.gather(*(self._start(fields) for _ in range(missing)))
        for name, each in zip(names, lent, strict=True):
            each.node.name = name
        kept: list[_Lent] = []
        try:
            yield [each.node for each in lent]
            for each in lent:
                with contextlib.suppress(EngineDown):
                    await empty(each.node)
                    kept.append(each)
        finally:
            self._idle += kept
            await self._end(*(each for each in lent if each not in kept))

    async def close(self) -> None:
        """End all that nobody borrows."""
        await self._end(*self._idle)

    async def _start(self, fields: dict[str, Any]) -> _Lent:
        engine = make_engine(self._directory, f"engine-{next(self._numbers)}", **fields)
        node = Node("", engine, await engine.start())
        return _Lent(engine_config(**fields), node, asyncio.create_task(node.listen()))

    async def _end(self, *ended: _Lent) -> None:
        self._idle = [each for each in self._idle if each not in ended]
        await asyncio.gather(*(each.node.engine.stop(0) for each in ended))
        await asyncio.gather(*(each.listening for each in ended))


async def empty(node: Node) -> None:
    """Forget all blocks and needs. Raises EngineDown when this life of the engine is over."""
    await node.engine.set_needs(dict.fromkeys(await node.engine.needs(), 0))
    await node.until_idle()
    await node.engine.clear()
    await node.until(lambda: not any(node.held.values()))
    await node.until_only_cache()
    node.parents.clear()
