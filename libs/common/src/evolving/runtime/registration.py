"""A key that is there while its owner lives: lease kept alive, granted and put anew whenever it was lost.

Who registers a key takes it over, so a process that was restarted need not wait for its old lease to end. The one that
had it sees that at its next renewal and gives up: two that fought for one name would disturb everybody.
"""

from __future__ import annotations

import asyncio

from evolving.runtime.clock import Clock
from evolving.runtime.errors import NameTaken
from evolving.runtime.log import get_logger
from evolving.runtime.store import LeaseLost, Store, StoreUnavailable
from evolving.runtime.tasks import end_tasks, first_of

_RETRY_S = 0.5
_log = get_logger(__name__)


class Registration:
    """Made by `Store.register`. The owner calls `close` when it leaves; a crash is noticed after `ttl_s`."""

    def __init__(self, store: Store, key: str, value: bytes, ttl_s: float, clock: Clock) -> None:
        assert ttl_s >= 1, "a lease lasts at least one second"
        self.key = key
        self._store = store
        self._value = value
        self._ttl_s = ttl_s
        self._clock = clock
        self._lease: int | None = None
        self._put_value: bytes | None = None  # what the store holds under our lease
        self._registered = asyncio.Event()
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"registration:{key}")

    @property
    def registered(self) -> bool:
        """Whether the newest value was put under a lease not known to be lost."""
        return self._registered.is_set()

    async def wait_registered(self) -> None:
        """Wait until the newest value is in the store."""
        await self._registered.wait()

    async def wait_closed(self) -> None:
        """Wait until `close`. Raises NameTaken when another process took the key over."""
        await asyncio.wait((self._task,))
        if not self._task.cancelled():
            self._task.result()

    async def update(self, value: bytes) -> None:
        """Replace the value and wait until the store has it."""
        if value != self._value:
            self._value = value
            self._registered.clear()
            self._changed.set()
        await self._registered.wait()

    async def close(self) -> None:
        """Delete the key at once. Only a key under this registration's lease goes: a successor's stays."""
        await end_tasks(self._task)
        self._registered.clear()
        if self._lease is not None:
            lease, self._lease = self._lease, None
            try:
                await self._store.revoke_lease(lease)
            except StoreUnavailable:
                _log.warning("registration_left_to_expire", key=self.key, ttl_s=self._ttl_s)

    async def _run(self) -> None:
        away = False
        while True:
            self._changed.clear()
            try:
                await self._hold()
                wait_s, away = self._ttl_s / 3, False
            except LeaseLost:
                _log.warning("registration_lease_lost", key=self.key)
                self._forget()
                continue
            except StoreUnavailable as error:
                if not away:  # an outage is told once
                    _log.warning("registration_delayed", key=self.key, error=str(error))
                wait_s, away = _RETRY_S, True
            await self._wait(wait_s)

    async def _hold(self) -> None:
        """One round: have a lease, renew it, and see that the newest value lies under it."""
        if self._lease is None:
            self._lease = await self._store.grant_lease(self._ttl_s)
        else:
            await self._store.renew_lease(self._lease)
        value = self._value
        there = await self._store.get(self.key) if self._put_value == value else None
        if there is not None and there.value != value:
            self._registered.clear()
            raise NameTaken(f"another process registered as {self.key}: give each one a name of its own")
        if there is None:
            await self._store.put(self.key, value, lease=self._lease)
            self._put_value = value
            _log.info("registered", key=self.key)
        if value == self._value:
            self._registered.set()

    def _forget(self) -> None:
        self._lease = None
        self._put_value = None
        self._registered.clear()

    async def _wait(self, wait_s: float) -> None:
        """Until the next round is due, or at once when `update` was called."""
        await first_of(self._clock.sleep(wait_s), self._changed.wait())
