"""How a request goes on after an attempt failed: whom to avoid, how long to wait, when to give up."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import grpc

from evolving.runtime.errors import InvalidRequest, ServiceError
from evolving_gateway.errors import NoNode, QueueFull
from evolving_gateway.leg_events import LegFailed

_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.05, 2.0
_RETRY_AFTER_S = 1.0
_QUEUE_FULL = "QUEUE_FULL"
# The node says that the request itself is impossible: every other node would say the same.
_REJECTIONS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE)


@dataclass(slots=True)
class Recovery:
    """State of one request. Nodes are avoided for one round only: who failed once may be back."""

    attempts_max: int
    recover_s: float
    admitted: bool = False  # a node had it in its queue: from then on no queue is too long or too full for it
    lost_since_s: float | None = None  # the first failure since it was last queued, or got a token
    failures: int = 0  # in a row, without a token between
    full: int = 0  # times that all queues were full since it was last queued
    moves: int = 0  # in all
    avoid_prefill: dict[str, str] = field(default_factory=dict)
    avoid_decode: dict[str, str] = field(default_factory=dict)
    last: LegFailed | None = None  # since it was last queued

    def queued(self) -> None:
        """A node has it in its queue, or had, until its role switched."""
        self.admitted = True
        self.lost_since_s = None
        self.full = 0
        self.last = None

    def progressed(self) -> None:
        """A token came: what failed before is forgiven."""
        self.queued()
        if self.failures:
            self.failures = 0
            self.forgive()

    def forgive(self) -> None:
        """Let every node be tried again."""
        self.avoid_prefill.clear()
        self.avoid_decode.clear()

    def failed(self, error: LegFailed, now_s: float) -> float:
        """Note who failed; seconds to wait before the next try.

        Raises InvalidRequest when the node rejected the request as such, else what the client gets when there is no
        next try.
        """
        if error.status in _REJECTIONS:
            raise InvalidRequest(f"the engine refused the request: {error.message}") from error
        self.last = error
        if not error.node_id:
            self.forgive()
        elif error.reason != _QUEUE_FULL:
            self.avoid_decode[error.node_id] = error.reason
        if error.node_id and error.reason != "NO_ROOM":
            self.avoid_prefill[error.node_id] = error.reason
        if self._only_full():
            return 0.0
        self.failures += 1
        self.moves += 1
        if self._tired(now_s):
            raise self.surrender()
        return self._backoff_s(self.failures)

    def nowhere(self, now_s: float) -> float:
        """No node can be chosen: all are let in again; seconds to wait before the next look.

        Raises what the client gets when waiting is no use: nothing was there from the start, or all queues are full.
        """
        full = self.last is not None and self.last.status is grpc.StatusCode.RESOURCE_EXHAUSTED
        if (self.last is None or full) and not self.admitted:
            raise self.surrender()
        full_somewhere = bool(self.avoid_prefill)  # else nobody was there to ask since the last look
        self.forgive()
        if full_somewhere and self._only_full():
            self.full += 1
            return self._backoff_s(self.full)
        if self._tired(now_s):
            raise self.surrender()
        return self._backoff_s(self.failures)

    def _only_full(self) -> bool:
        """Whether it only has to wait for a place in a queue, having lost its own: a switch or a lost node may send
        more to the others than they have places."""
        return self.admitted and self.last is not None and self.last.reason == _QUEUE_FULL

    def _tired(self, now_s: float) -> bool:
        if self.lost_since_s is None:
            self.lost_since_s = now_s
        return self.failures >= self.attempts_max or now_s - self.lost_since_s > self.recover_s

    def _backoff_s(self, tries: int) -> float:
        backoff_s = min(_BACKOFF_MAX_S, _BACKOFF_FIRST_S * 2.0 ** min(tries, 10))
        return backoff_s * (0.5 + random.random() / 2)

    def surrender(self) -> ServiceError:
        """What to tell the client: full queues, or no node."""
        if self.last is None:
            return NoNode("no node serves this model now", retry_after_s=_RETRY_AFTER_S)
        if self.last.status is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return QueueFull(str(self.last), retry_after_s=self.last.retry_after_s or _RETRY_AFTER_S)
        return NoNode(
            f"given up after {self.moves} failed attempts; the last: {self.last}", retry_after_s=_RETRY_AFTER_S
        )
