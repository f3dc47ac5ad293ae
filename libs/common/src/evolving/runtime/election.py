"""Leader election over the store: one holder of a key at a time, who knows by its own clock when it no longer is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from evolving.runtime.clock import Clock
from evolving.runtime.errors import NotLeader, StoreUnavailable
from evolving.runtime.log import get_logger
from evolving.runtime.store import Conflict, Guard, LeaseLost, Store

# A leader steps down this share of the lease before the server could give the key to another. Covers clocks that
# run at different speeds and a server that counts from when the request arrived.
_SAFETY_SHARE = 0.2
_RENEW_SHARE = 1 / 3
_log = get_logger(__name__)


class Election:
    """Campaigns for `key` until closed. Use as `async with Election(...) as election`.

    Leadership lasts while the lease under the key is renewed. Its end is judged by the monotonic clock, counted from
    *before* the last successful renewal was sent, so a leader cut off from etcd stops before anyone else can start.
    Writes that must not come from a former leader carry `fence()`.
    """

    def __init__(self, store: Store, key: str, candidate_value: bytes, ttl_s: float, clock: Clock) -> None:
        """candidate_value: what the key holds while this candidate leads (its address). ttl_s: whole seconds, ≥ 1."""
        assert ttl_s >= 1, "a lease lasts at least one second"
        self.key = key
        self._store = store
        self._value = candidate_value
        self._ttl_s = ttl_s
        self._clock = clock
        self._fence: Guard | None = None
        self._deadline_s = 0.0
        self._lease: int | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name=f"election:{self.key}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def is_leader(self) -> bool:
        """Whether this candidate leads at this very moment."""
        return self._fence is not None and self._clock.now_s() < self._deadline_s

    def fence(self) -> Guard:
        """The guard for a leader's writes. Raises NotLeader."""
        if self._fence is None or not self.is_leader():
            raise NotLeader(f"another instance leads {self.key}")
        return self._fence

    async def leader(self) -> bytes | None:
        """The value of whoever leads by the store's account; None: nobody."""
        current = await self._store.get(self.key)
        return current.value if current else None

    async def leadership_changes(self) -> AsyncIterator[bool]:
        """Whether this candidate leads: now, then each change. A slow reader sees only the newest."""
        shown: bool | None = None
        while True:
            changed = self._changed
            leads = self.is_leader()
            if leads != shown:
                shown = leads
                yield leads
                continue
            await changed.wait()

    async def close(self) -> None:
        """Resign: stop campaigning and, when leading, give the key up at once."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        self._step_down("closed")
        await self._give_up_lease()
