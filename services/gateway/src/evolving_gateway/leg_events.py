"""What the legs of an attempt tell: how its output grows, and why it cannot go on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc

from evolving.core.routing import PrefillDecision
from evolving.v1 import gateway_pb2

_EVENTS_MAX = 256  # beyond that a slow client slows the engine's stream, by HTTP/2 flow control


@dataclass(frozen=True, slots=True)
class Queued:
    """P has the request in its queue."""


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Output ids from position `index` of the request's whole output on."""

    index: int
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Ended:
    """The output is complete."""

    reason: gateway_pb2.FinishReason.ValueType


AttemptEvent = Queued | NewTokens | Ended


class Requoted(Exception):
    """P's queue is much longer than quoted; it did not take the request."""


class RoleSwitched(Exception):
    """P got another role while the request was queued there; or D did, or another node got its phase, and the computed
    KV was lost in leaving D."""


class SoonerElsewhere(Exception):
    """While the request was queued at P another node got its phase, where it is prefilled much sooner."""

    def __init__(self, decision: PrefillDecision) -> None:
        """decision: for that node."""
        super().__init__(decision.reason)
        self.decision = decision


class LegFailed(Exception):
    """A leg could not go on. `node_id` is whom to avoid next time; "" is nobody."""

    def __init__(
        self, node_id: str, status: grpc.StatusCode, reason: str, message: str, retry_after_s: float | None = None
    ) -> None:
        super().__init__(f"{node_id or 'a node'}: {reason}: {message}")
        self.node_id = node_id
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s


class LegEvents:
    """From both legs to the attempt; a change of roles, or a bug, goes before what is queued."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[AttemptEvent | Exception | None] = asyncio.Queue(_EVENTS_MAX)
        self._interrupt: Exception | None = None

    async def put(self, event: AttemptEvent | Exception) -> None:
        """Add one, once there is room."""
        await self._queue.put(event)

    def interrupt(self, error: Exception) -> None:
        """Nothing but this is got from now on. The first one stays."""
        if self._interrupt is None:
            self._interrupt = error
            if self._queue.empty():
                self._queue.put_nowait(None)  # wakes who waits in `get`

    async def get(self) -> AttemptEvent | Exception:
        """The next event."""
        event = await self._queue.get() if self._interrupt is None else None
        if self._interrupt is not None:
            return self._interrupt
        assert event is not None, "only an interrupt wakes without an event"
        return event
