"""How often, and for how long, a request is sent again."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception

from evolving_client.errors import DeadlineExceeded, EvolvingError, Overloaded, Unavailable

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits of one request's retries."""

    max_failures: int = 8
    """Failures in a row, without a new output token between them, after which `Unavailable` is raised."""
    initial_backoff_s: float = 0.1
    """Wait after the first failure; it doubles with each, and a random half of it is left out."""
    max_backoff_s: float = 5.0
    """Longest wait after a failure."""
    max_overload_wait_s: float = 60.0
    """Total time spent waiting because the cluster said it was overloaded; then `Overloaded` is raised."""

    def __post_init__(self) -> None:
        if self.max_failures < 1:
            raise ValueError("max_failures must be at least 1")
        if not 0 <= self.initial_backoff_s <= self.max_backoff_s:
            raise ValueError("initial_backoff_s must lie between 0 and max_backoff_s")
        if self.max_overload_wait_s < 0:
            raise ValueError("max_overload_wait_s must not be negative")


class Retries:
    """What one request has used up of its policy and of its time."""

    def __init__(
        self,
        policy: RetryPolicy,
        timeout_s: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._sleep = sleep
        self._deadline_s = None if timeout_s is None else clock() + timeout_s
        self._failures = 0
        self._overload_wait_s = 0.0

    def remaining_s(self) -> float | None:
        """Seconds left, or None for no limit. Raises DeadlineExceeded when none are left."""
        if self._deadline_s is None:
            return None
        left_s = self._deadline_s - self._clock()
        if left_s <= 0:
            raise DeadlineExceeded("the request's time was over before it finished")
        return left_s

    def note_progress(self) -> None:
        """Something new arrived: failures are counted afresh."""
        self._failures = 0

    def note_failure(self, error: EvolvingError) -> None:
        """Count a failure. Overload is counted by the time it costs, not here."""
        if isinstance(error, Unavailable):
            self._failures += 1

    async def run(self, attempt: Callable[[], Awaitable[Result]]) -> Result:
        """Call `attempt` until it succeeds, fails for good or the policy ends it; then its last error is raised."""
        try:
            return await attempt()  # nearly always this is all, and it is called for every output token
        except EvolvingError as error:
            if not may_retry(error):
                raise
            failures = [error]

        async def after_the_first() -> Result:
            if failures:
                raise failures.pop()
            return await attempt()

        retrying = AsyncRetrying(
            sleep=self._sleep,
            retry=retry_if_exception(may_retry),
            wait=self._wait_s,
            stop=self._is_over,
            reraise=True,
        )
        return await retrying(after_the_first)

    def _wait_s(self, state: RetryCallState) -> float:
        error = _error_of(state)
        doubled_s = self._policy.initial_backoff_s * 2.0 ** max(0, self._failures - 1)
        backoff_s = min(self._policy.max_backoff_s, doubled_s)
        backoff_s *= random.uniform(0.5, 1.0)  # so that clients don't come back together
        if error.retry_after_s is not None:
            return max(backoff_s, error.retry_after_s)
        return backoff_s

    def _is_over(self, state: RetryCallState) -> bool:
        error = _error_of(state)
        wait_s = state.upcoming_sleep
        if self._deadline_s is not None and self._clock() + wait_s >= self._deadline_s:
            raise DeadlineExceeded(f"the request's time ends before it can be tried again: {error}") from error
        if isinstance(error, Overloaded):
            self._overload_wait_s += wait_s
            return self._overload_wait_s > self._policy.max_overload_wait_s
        return self._failures >= self._policy.max_failures


def may_retry(error: BaseException) -> bool:
    """Whether the same request may succeed a little later. An overload must say when."""
    if isinstance(error, Overloaded):
        return error.retry_after_s is not None
    return isinstance(error, Unavailable)


def _error_of(state: RetryCallState) -> EvolvingError:
    assert state.outcome is not None
    error = state.outcome.exception()
    assert isinstance(error, EvolvingError)
    return error
