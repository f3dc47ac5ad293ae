"""Legs driven in the background, for tests in which engines fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from engine.conftest import check_engine
from engine.sglang.driving import Node, prefill_only, prompt

from evolving_node_agent.engines.port import EngineError

LONG = 1500  # tokens: a dozen chunks
FOREVER = 400  # output tokens: longer than any test waits


class Leg:
    """A leg driven in the background; its events, and how it ended."""

    def __init__(self, events: AsyncIterator[Any]) -> None:
        self.events: list[Any] = []
        self._changed = asyncio.Event()
        self._source = events
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> EngineError | None:
        try:
            async for event in self._source:
                self.events.append(event)
                self._changed.set()
        except EngineError as error:
            return error
        finally:
            self._changed.set()
        return None

    async def until(self, kind: type) -> None:
        """Wait for an event of this kind."""
        async with asyncio.timeout(60):
            while not any(isinstance(event, kind) for event in self.events):
                assert not self.task.done(), f"ended with {self.task.result()!r} before {kind.__name__}"
                self._changed.clear()
                await self._changed.wait()

    async def error(self) -> EngineError | None:
        """How it ended; None: well."""
        async with asyncio.timeout(60):
            return await self.task


async def all_room_is_back(*nodes: Node) -> None:
    """No leg is left, and the longest prompt still fits each node."""
    async with asyncio.timeout(60):
        for node in nodes:
            await node.until_idle()
    for node in nodes:
        check_engine(node)
        await prefill_only(node, prompt(1, node.info.max_prompt_tokens))


async def until_status(node: Node, holds: Callable[[], bool]) -> None:
    """Wait for a status with which `holds`."""
    async with asyncio.timeout(60):
        async for _ in node.engine.status_changes():
            if holds():
                return
