"""How a request goes on after an attempt failed: whom to avoid, how long to wait, when to give up."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import grpc

from evolving.runtime.errors import InvalidRequest, ServiceError
from evolving_gateway.attempt import LegFailed
from evolving_gateway.errors import NoNode, QueueFull

_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.05, 2.0
_RETRY_AFTER_S = 1.0
# The node says that the request itself is impossible: every other node would say the same.
_REJECTIONS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE)


@dataclass(slots=True)
class Recovery:
    """State of one request. Nodes are avoided for one round only: who failed once may be back."""

    attempts_max: int
    recover_s: float
    progress_s: float  # when the request last got a token, or began
    delivered: bool = False  # the client has tokens of this request
    failures: int = 0  # in a row, without a token between
    moves: int = 0  # in all
    avoid_prefill: dict[str, str] = field(default_factory=dict)
    avoid_decode: dict[str, str] = field(default_factory=dict)
    last: LegFailed | None = None

    def progressed(self, now_s: float) -> None:
        """A token came: what failed before is forgiven."""
        self.progress_s = now_s
        self.delivered = True
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
        self.failures += 1
        self.moves += 1
        self.last = error
        if not error.node_id:
            self.forgive()
        elif error.reason != "QUEUE_FULL":
            self.avoid_decode[error.node_id] = error.reason
        if error.node_id and error.reason != "NO_ROOM":
            self.avoid_prefill[error.node_id] = error.reason
        if self._tired(now_s):
            raise self.surrender()
        return self._backoff_s()

    def nowhere(self, now_s: float) -> float:
        """No node can be chosen: all are let in again; seconds to wait before the next look.

        Raises what the client gets when waiting is no use: nothing was there from the start, or all queues are full.
        """
        full = self.last is not None and self.last.status is grpc.StatusCode.RESOURCE_EXHAUSTED
        if (self.last is None or full) and not self.delivered:
            raise self.surrender()
        if self._tired(now_s):
            raise self.surrender()
        self.forgive()
        return self._backoff_s()

    def _tired(self, now_s: float) -> bool:
        return self.failures >= self.attempts_max or now_s - self.progress_s > self.recover_s

    def _backoff_s(self) -> float:
        backoff_s = min(_BACKOFF_MAX_S, _BACKOFF_FIRST_S * 2.0 ** min(self.failures, 10))
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
