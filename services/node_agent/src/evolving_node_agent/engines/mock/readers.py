"""Those who follow an engine: its KV events, gapless, and its status, newest only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from evolving_node_agent.engines.mock.cache import BlockCache
from evolving_node_agent.engines.port import EngineStatus, KvEvent

_STATUS_PERIOD_S = 1.0
_STATUS_GAP_S = 0.05  # between two statuses at least: many iterations make one
_KV_GAP_S = 0.003  # between two batches of KV events, likewise


class KvReaders:
    """Copies each change to every reader; each begins with all that is held."""

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache
        self._queues: set[asyncio.Queue[Sequence[KvEvent] | None]] = set()
        self._closed = False

    def publish(self) -> None:
        """Hand on what changed since the last call."""
        events = self._cache.take_events()
        if events:
            for queue in self._queues:
                queue.put_nowait(events)

    def close(self) -> None:
        """Readers end after what they have."""
        self._closed = True
        for queue in self._queues:
            queue.put_nowait(None)

    async def read(self) -> AsyncIterator[Sequence[KvEvent]]:
        """All that is held, then each change; ends with the life."""
        if self._closed:
            return
        self.publish()
        queue: asyncio.Queue[Sequence[KvEvent] | None] = asyncio.Queue()
        queue.put_nowait(self._cache.snapshot())
        self._queues.add(queue)
        try:
            while True:
                waiting = [await queue.get()]
                while not queue.empty():
                    waiting.append(queue.get_nowait())
                ended = waiting[-1] is None
                batch = [event for events in waiting for event in events or ()]
                if batch or not ended:
                    yield batch
                if ended:
                    return
                await asyncio.sleep(_KV_GAP_S)
        finally:
            self._queues.discard(queue)


class StatusReaders:
    """Tells readers that the status changed; a slow one sees only the newest."""

    def __init__(self, status: Callable[[], EngineStatus]) -> None:
        self._status = status
        self._changed: set[asyncio.Event] = set()
        self._closed = False

    def wake(self) -> None:
        """The status may have changed."""
        for event in self._changed:
            event.set()

    def close(self) -> None:
        """Readers end."""
        self._closed = True
        self.wake()

    async def read(self) -> AsyncIterator[EngineStatus]:
        """The status now, on each change, and at least once a second; ends with the life."""
        changed = asyncio.Event()
        self._changed.add(changed)
        try:
            while not self._closed:
                changed.clear()
                yield self._status()
                await asyncio.sleep(_STATUS_GAP_S)
                try:
                    async with asyncio.timeout(_STATUS_PERIOD_S):
                        await changed.wait()
                except TimeoutError:
                    continue  # nothing changed: say the same again, as a sign of life
        finally:
            self._changed.discard(changed)
