"""Request ids: which are running here, which were, and with what body."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from evolving_gateway.errors import RequestConflict

Key = tuple[str, str]  # tenant, request id


class Claim:
    """One call's hold on a request id, until `KnownRequests.release`."""

    def __init__(self, key: Key, digest: bytes, interrupt: Callable[[], object]) -> None:
        self.key = key
        self.digest = digest
        self.superseded = False
        self.released = asyncio.Event()
        self._interrupt = interrupt

    def supersede(self) -> None:
        """A later call takes over: end this one."""
        self.superseded = True
        self._interrupt()


class KnownRequests:
    """Bounded by count and, for finished ones, by age. Forgetting an id only loses the check of its body."""

    def __init__(self, max_ids: int, max_age_s: float) -> None:
        self._max_ids = max_ids
        self._max_age_s = max_age_s
        self._running: dict[Key, Claim] = {}
        self._finished: OrderedDict[Key, tuple[bytes, float]] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self._running) + len(self._finished)

    async def claim(self, key: Key, digest: bytes, interrupt: Callable[[], object], now_s: float) -> Claim:
        """Hold the id. A running call of the same body is superseded and has ended when this returns.

        interrupt: ends the new call's work, should a still later one take over. Raises RequestConflict.
        """
        self._forget_old(now_s)
        finished = self._finished.get(key)
        if finished is not None and finished[0] != digest:
            raise _conflict(key)
        while (running := self._running.get(key)) is not None:
            if running.digest != digest:
                raise _conflict(key)
            running.supersede()
            await running.released.wait()
        claim = Claim(key, digest, interrupt)
        self._running[key] = claim
        self._finished.pop(key, None)
        return claim

    def release(self, claim: Claim, now_s: float) -> None:
        """The call has ended and holds nothing any more."""
        assert self._running.pop(claim.key) is claim
        self._finished[claim.key] = (claim.digest, now_s)
        self._forget_old(now_s)
        claim.released.set()

    def _forget_old(self, now_s: float) -> None:
        while self._finished:
            _, ended_s = next(iter(self._finished.values()))
            if len(self) <= self._max_ids and now_s - ended_s <= self._max_age_s:
                break
            self._finished.popitem(last=False)


def _conflict(key: Key) -> RequestConflict:
    return RequestConflict(f"request id {key[1]!r} was used with another body; choose a new id")
