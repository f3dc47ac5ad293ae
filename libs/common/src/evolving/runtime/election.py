"""Leader election over the store: one holder of a key at a time, who knows by its own clock when it no longer is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from types import TracebackType
from typing import Self

from evolving.runtime.clock import Clock
from evolving.runtime.errors import NotLeader, StoreUnavailable
from evolving.runtime.log import get_logger
from evolving.runtime.store import Conflict, Guard, LeaseLost, Store
from evolving.runtime.tasks import end_tasks

# A leader steps down this share of the lease before the server could give the key to another. Covers clocks that
# run at different speeds and a server that counts from when the request arrived.
_SAFETY_SHARE = 0.2
_RENEW_SHARE = 1 / 3
_RETRY_S = 0.2
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
        self._task.add_done_callback(lambda _task: self._notify())
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
        """Whether this candidate leads: now, then each change. A slow reader sees only the newest; True twice in a row
        means that leadership was lost and won again, with a new fence. Raises what a bug made the campaign end with."""
        shown: Guard | bool | None = False  # False: nothing shown yet
        while True:
            changed = self._changed
            if self._task is not None and self._task.done() and not self._task.cancelled():
                self._task.result()
            term = self._fence if self.is_leader() else None
            if term != shown:
                shown = term
                yield term is not None
            else:
                await changed.wait()

    async def close(self) -> None:
        """Resign: stop campaigning and, when leading, give the key up at once."""
        if self._task is not None:
            await end_tasks(self._task)
            self._task = None
        self._step_down("closed")
        await self._give_up_lease()

    async def _run(self) -> None:
        while True:
            try:
                await self._campaign()
                await self._lead()
            except (StoreUnavailable, LeaseLost) as error:
                _log.warning("campaign_delayed", key=self.key, error=str(error))
                await self._clock.sleep(_RETRY_S)
            await self._give_up_lease()

    async def _campaign(self) -> None:
        """Return once this candidate leads."""
        while True:
            sent_s = self._clock.now_s()
            self._lease = await self._store.grant_lease(self._ttl_s)
            try:
                won = await self._store.compare_and_swap(self.key, 0, self._value, lease=self._lease)
            except Conflict:
                await self._give_up_lease()
                await self._wait_until_free()
                continue
            self._fence = Guard(self.key, won.create_revision)
            self._deadline_s = self._deadline_from(sent_s)
            _log.info("leading", key=self.key, create_revision=won.create_revision)
            self._notify()
            return

    async def _wait_until_free(self) -> None:
        async with contextlib.aclosing(self._store.watch(self.key)) as batches:
            async for batch in batches:
                held = any(item.key == self.key for item in batch.puts)
                if (batch.snapshot and not held) or self.key in batch.deletes:
                    return

    async def _lead(self) -> None:
        """Renew until the lease is lost or its time is over; not leading when it returns."""
        wait_s = self._ttl_s * _RENEW_SHARE
        while True:
            await self._clock.sleep(min(wait_s, self._deadline_s - self._clock.now_s()))
            if not self.is_leader():
                self._step_down("the lease could not be renewed in time")
                return
            try:
                renewed = await self._before_deadline(self._renew())
            except LeaseLost as error:
                self._step_down(str(error))
                return
            wait_s = self._ttl_s * _RENEW_SHARE if renewed else _RETRY_S

    async def _renew(self) -> bool:
        """Renew once; False when the store did not answer. Raises LeaseLost when the key is no longer ours."""
        assert self._lease is not None
        assert self._fence is not None
        sent_s = self._clock.now_s()
        try:
            await self._store.renew_lease(self._lease)
            current = await self._store.get(self.key)
        except StoreUnavailable as error:
            _log.warning("renewal_failed", key=self.key, error=str(error))
            return False
        if current is None or current.create_revision != self._fence.create_revision:
            raise LeaseLost(f"{self.key} is no longer held by this candidate")
        self._deadline_s = self._deadline_from(sent_s)
        return True

    async def _before_deadline(self, renewal: Coroutine[None, None, bool]) -> bool:
        """The renewal's result, or False when the deadline passes first: a call that hangs must not delay the end."""
        task = asyncio.ensure_future(renewal)
        timer = asyncio.ensure_future(self._clock.sleep(self._deadline_s - self._clock.now_s()))
        try:
            await asyncio.wait((task, timer), return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else False
        finally:
            task.cancel()
            timer.cancel()

    def _deadline_from(self, sent_s: float) -> float:
        return sent_s + self._ttl_s * (1 - _SAFETY_SHARE)

    def _step_down(self, why: str) -> None:
        if self._fence is not None:
            _log.warning("no_longer_leading", key=self.key, why=why)
            self._fence = None
            self._notify()

    async def _give_up_lease(self) -> None:
        """Let others campaign at once; where the store is away the lease runs out by itself."""
        if self._lease is not None:
            lease, self._lease = self._lease, None
            with contextlib.suppress(StoreUnavailable):
                await self._store.revoke_lease(lease)

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
