"""The store port: what services ask of etcd. `EtcdStore` talks to etcd, `MemoryStore` is its fake; one conformance
suite runs on both."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from evolving.runtime.errors import StoreUnavailable

if TYPE_CHECKING:
    from evolving.runtime.registration import Registration

__all__ = [
    "Conflict",
    "Fenced",
    "Guard",
    "LeaseLost",
    "Listing",
    "Store",
    "StoreUnavailable",
    "Versioned",
    "WatchBatch",
]


@dataclass(frozen=True, slots=True)
class Versioned:
    """A key's value and where it stands in the store's history."""

    key: str
    value: bytes
    mod_revision: int  # store revision of the last write
    create_revision: int  # store revision at which the key came to be; a key deleted and put again has a new one
    version: int  # writes since it came to be, 1 for the first


@dataclass(frozen=True, slots=True)
class Listing:
    """All keys below a prefix at one revision, in key order."""

    items: tuple[Versioned, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class WatchBatch:
    """What changed below a prefix.

    snapshot: `puts` is everything there is at `revision`; whatever isn't in it is gone. Otherwise a change set: each
    key occurs once, in `puts` with its newest value or in `deletes`.
    """

    snapshot: bool
    revision: int
    puts: tuple[Versioned, ...]
    deletes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Guard:
    """A write goes through only while `key` exists with this create_revision: how a leader fences its writes."""

    key: str
    create_revision: int


class Conflict(Exception):
    """The key isn't at the expected revision; `current` is what is there (None: nothing)."""

    def __init__(self, key: str, current: Versioned | None) -> None:
        super().__init__(f"{key} is at revision {current.mod_revision if current else 0}")
        self.key = key
        self.current = current


class Fenced(Exception):
    """A guard no longer holds: whoever wrote has lost its leadership. Nothing was written."""

    def __init__(self, guard: Guard) -> None:
        super().__init__(f"{guard.key} no longer has create_revision {guard.create_revision}")
        self.guard = guard


class LeaseLost(Exception):
    """The lease expired or was revoked; the keys under it are gone."""


class Store(Protocol):
    """etcd as services see it. Every call is bounded by the store's own timeout and raises `StoreUnavailable` when
    it runs out; a write that raised it may or may not have been applied."""

    async def __aenter__(self) -> Self:
        """`async with` closes the store at its end."""
        ...

    async def __aexit__(self, *_error: object) -> None: ...

    @property
    def ready(self) -> bool:
        """Whether the last call or watch reached the store."""
        ...

    async def get(self, key: str) -> Versioned | None:
        """The key's newest value (linearizable); None when absent."""
        ...

    async def list(self, prefix: str) -> Listing:
        """All keys that start with `prefix` (linearizable)."""
        ...

    async def put(self, key: str, value: bytes, lease: int | None = None) -> Versioned:
        """Write without a condition. Raises LeaseLost when `lease` is gone."""
        ...

    async def delete(self, key: str) -> bool:
        """Remove the key; False when there was none."""
        ...

    async def compare_and_swap(
        self,
        key: str,
        expected_mod_revision: int,
        value: bytes,
        *,
        guards: Sequence[Guard] = (),
        lease: int | None = None,
    ) -> Versioned:
        """Write if the key is at `expected_mod_revision` (0: absent) and every guard holds, atomically.

        Raises Fenced when a guard fails, else Conflict with the current value; LeaseLost when `lease` is gone.
        """
        ...

    async def grant_lease(self, ttl_s: float) -> int:
        """A new lease id; keys put under it vanish when it is not renewed for `ttl_s` (rounded up to whole seconds)."""
        ...

    async def renew_lease(self, lease: int) -> float:
        """Start the lease's time anew; the seconds it now has. Raises LeaseLost."""
        ...

    async def revoke_lease(self, lease: int) -> None:
        """End the lease and delete its keys at once; no error when it is gone already."""
        ...

    def register(self, key: str, value: bytes, ttl_s: float) -> Registration:
        """Keep `key` present while this process lives. Returns at once; see `Registration.wait_registered`."""
        ...

    def watch(self, prefix: str) -> AsyncGenerator[WatchBatch, None]:
        """Everything below `prefix`, then each change, for ever.

        The first batch is a snapshot. Whenever changes might have been missed (compaction, lost connection, leader
        change, store restart) another snapshot follows; no change is ever skipped silently. While the store is away the
        iterator waits and retries. Close it with `aclose()` or by cancelling the task that reads it.
        """
        ...

    async def close(self) -> None:
        """Drop connections and end watches."""
        ...
