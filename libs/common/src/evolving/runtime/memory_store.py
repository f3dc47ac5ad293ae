"""The store's fake: etcd's semantics in one process, with the faults etcd shows."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Self

from evolving.runtime.clock import Clock
from evolving.runtime.registration import Registration
from evolving.runtime.store import Conflict, Fenced, Guard, LeaseLost, Listing, StoreUnavailable, Versioned, WatchBatch


@dataclass(slots=True)
class _Lease:
    ttl_s: float
    expires_s: float
    keys: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Watcher:
    prefix: str
    revision: int = 0  # everything up to here was handed out
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    broken: bool = True  # the next batch is a snapshot


class MemoryStore:
    """All keys in a dict, time from the clock given. Several services of one test share one instance.

    `set_available(False)` is etcd away: calls raise StoreUnavailable and watches wait, leases run on.
    `compact()` is a compacted history or a lost connection: every watch goes on with a snapshot.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._revision = 1
        self._items: dict[str, Versioned] = {}
        self._key_lease: dict[str, int] = {}
        self._leases: dict[int, _Lease] = {}
        self._lease_ids = itertools.count(1)
        self._log: list[tuple[int, str, Versioned | None]] = []  # revision, key, None: deleted
        self._watchers: set[_Watcher] = set()
        self._available = True
        self._closed = False
        self._expiry: asyncio.Task[None] | None = None
        self._lease_added = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    @property
    def ready(self) -> bool:
        """Whether it answers."""
        return self._available and not self._closed

    def set_available(self, available: bool) -> None:
        """Take the store away, or bring it back; watches then start over with a snapshot."""
        self._available = available
        self.compact()

    def compact(self) -> None:
        """Forget history: every watch continues with a snapshot."""
        self._log.clear()
        for watcher in self._watchers:
            watcher.broken = True
            watcher.wake.set()

    async def get(self, key: str) -> Versioned | None:
        """See Store."""
        await self._enter()
        return self._items.get(key)

    async def list(self, prefix: str) -> Listing:
        """See Store."""
        await self._enter()
        return self._list(prefix)

    async def put(self, key: str, value: bytes, lease: int | None = None) -> Versioned:
        """See Store."""
        await self._enter()
        return self._put(key, value, lease)

    async def delete(self, key: str) -> bool:
        """See Store."""
        await self._enter()
        return self._delete((key,)) == 1

    async def compare_and_swap(
        self,
        key: str,
        expected_mod_revision: int,
        value: bytes,
        *,
        guards: Sequence[Guard] = (),
        lease: int | None = None,
    ) -> Versioned:
        """See Store."""
        await self._enter()
        for guard in guards:
            held = self._items.get(guard.key)
            if held is None or held.create_revision != guard.create_revision:
                raise Fenced(guard)
        current = self._items.get(key)
        if (current.mod_revision if current else 0) != expected_mod_revision:
            raise Conflict(key, current)
        return self._put(key, value, lease)

    async def grant_lease(self, ttl_s: float) -> int:
        """See Store."""
        await self._enter()
        lease = next(self._lease_ids)
        whole_s = float(math.ceil(ttl_s))
        self._leases[lease] = _Lease(whole_s, self._clock.now_s() + whole_s)
        if self._expiry is None:
            self._expiry = asyncio.create_task(self._expire_loop(), name="memory-store-leases")
        self._lease_added.set()
        return lease

    async def renew_lease(self, lease: int) -> float:
        """See Store."""
        await self._enter()
        held = self._lease(lease)
        held.expires_s = self._clock.now_s() + held.ttl_s
        return held.ttl_s

    async def revoke_lease(self, lease: int) -> None:
        """See Store."""
        await self._enter()
        self._end_lease(lease)

    def register(self, key: str, value: bytes, ttl_s: float) -> Registration:
        """See Store."""
        return Registration(self, key, value, ttl_s, self._clock)

    async def watch(self, prefix: str) -> AsyncGenerator[WatchBatch, None]:
        """See Store."""
        watcher = _Watcher(prefix)
        self._watchers.add(watcher)
        try:
            while not self._closed:
                watcher.wake.clear()
                self._expire()
                batch = self._next_batch(watcher)
                if batch is not None:
                    yield batch
                else:
                    await watcher.wake.wait()
        finally:
            self._watchers.discard(watcher)

    async def close(self) -> None:
        """See Store."""
        self._closed = True
        for watcher in self._watchers:
            watcher.wake.set()
        if self._expiry is not None:
            self._expiry.cancel()
            await asyncio.gather(self._expiry, return_exceptions=True)

    def _next_batch(self, watcher: _Watcher) -> WatchBatch | None:
        if not self._available:
            return None
        if watcher.broken:
            watcher.broken = False
            watcher.revision = self._revision
            return WatchBatch(True, self._revision, self._list(watcher.prefix).items)
        newest = {
            key: item
            for revision, key, item in self._log
            if revision > watcher.revision and key.startswith(watcher.prefix)
        }
        watcher.revision = self._revision
        if not newest:
            return None
        puts = tuple(item for item in newest.values() if item is not None)
        deletes = tuple(key for key, item in newest.items() if item is None)
        return WatchBatch(False, self._revision, puts, deletes)

    async def _enter(self) -> None:
        """What every call begins with: other tasks get a turn, as on a network, and leases that are over end."""
        await asyncio.sleep(0)
        if not self.ready:
            raise StoreUnavailable("the store does not answer")
        self._expire()

    def _list(self, prefix: str) -> Listing:
        items = tuple(item for key, item in sorted(self._items.items()) if key.startswith(prefix))
        return Listing(items, self._revision)

    def _put(self, key: str, value: bytes, lease: int | None) -> Versioned:
        held = self._lease(lease) if lease is not None else None
        self._detach(key)
        if held is not None and lease is not None:
            held.keys.add(key)
            self._key_lease[key] = lease
        before = self._items.get(key)
        self._revision += 1
        item = Versioned(
            key,
            value,
            self._revision,
            before.create_revision if before else self._revision,
            before.version + 1 if before else 1,
        )
        self._items[key] = item
        self._record(key, item)
        return item

    def _delete(self, keys: Sequence[str]) -> int:
        """Delete keys at one revision; how many there were."""
        present = [key for key in keys if key in self._items]
        if present:
            self._revision += 1
        for key in present:
            self._detach(key)
            del self._items[key]
            self._record(key, None)
        return len(present)

    def _record(self, key: str, item: Versioned | None) -> None:
        self._log.append((self._revision, key, item))
        for watcher in self._watchers:
            watcher.wake.set()

    def _detach(self, key: str) -> None:
        lease = self._key_lease.pop(key, None)
        if lease is not None and lease in self._leases:
            self._leases[lease].keys.discard(key)

    def _lease(self, lease: int) -> _Lease:
        if lease not in self._leases:
            raise LeaseLost(f"lease {lease} is gone")
        return self._leases[lease]

    def _end_lease(self, lease: int) -> None:
        held = self._leases.pop(lease, None)
        if held is not None:
            self._delete(sorted(held.keys))

    def _expire(self) -> None:
        now_s = self._clock.now_s()
        for lease in [lease for lease, held in self._leases.items() if held.expires_s <= now_s]:
            self._end_lease(lease)

    async def _expire_loop(self) -> None:
        while True:
            self._expire()
            if not self._leases:
                self._lease_added.clear()
                await self._lease_added.wait()
                continue
            next_s = min(held.expires_s for held in self._leases.values())
            # A lease granted meanwhile may end sooner; a shortest lease is a second, so look that often at least.
            await self._clock.sleep(min(1.0, next_s - self._clock.now_s()))
