"""Which prefill legs leave the queue: the best rank first among those whose fetch doesn't hold them up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from evolving.core.config import FetchStart
from evolving_node_agent.engines.mock.cache import BlockCache
from evolving_node_agent.engines.mock.config import MockConfig
from evolving_node_agent.engines.mock.legs import PrefillLeg


class PrefillQueue:
    """Legs not taken yet, by rank. A leg whose fetch goes on is passed over, and held up for `fetch_deadline_s` of
    that at most. One there is no room for is not passed over, nor is any where fetches start at admission."""

    def __init__(self, config: MockConfig, cache: BlockCache, take: Callable[[PrefillLeg], bool]) -> None:
        """take: discard a leg here, give it its room and start it; False, and nothing done, where there is none."""
        self._config = config
        self._cache = cache
        self._take = take
        self._legs: list[PrefillLeg] = []

    def __iter__(self) -> Iterator[PrefillLeg]:
        return iter(self._legs)

    def add(self, leg: PrefillLeg) -> None:
        """A leg came."""
        self._legs.append(leg)
        self._legs.sort(key=lambda each: each.rank)

    def discard(self, leg: PrefillLeg) -> None:
        """A leg is over, if it was here."""
        if leg in self._legs:
            self._legs.remove(leg)

    def admit(self, running: Iterable[PrefillLeg], now_s: float) -> None:
        """Take what can be taken while an iteration's chunk has tokens left for it."""
        left_tokens = self._config.chunk_tokens - sum(leg.left for leg in running)
        blocked = False
        for leg in list(self._legs):
            if left_tokens <= 0 or blocked:
                leg.fetch.let_wait(now_s)
            elif self._ready(leg, now_s):
                if self._take(leg):
                    left_tokens -= leg.left
                else:
                    blocked = True
                    leg.fetch.let_wait(now_s)
            elif self._config.fetch_start is FetchStart.ADMISSION:
                blocked = True

    def next_deadline_s(self, now_s: float) -> float | None:
        """Seconds until a leg has been held up for long enough; None: none is held up."""
        return min((left for leg in self._legs if (left := leg.fetch.left_s(now_s)) is not None), default=None)

    def _ready(self, leg: PrefillLeg, now_s: float) -> bool:
        """Whether the fetch of a leg that is next doesn't hold it up: there is none, or there would be no room."""
        fetch = leg.fetch
        if fetch.over:
            return True
        if not leg.kv.fits(self._config.pages(len(leg.job.tokens)), leg.reusable_blocks):
            fetch.let_wait(now_s)
            # One that didn't begin to fetch waits for room as others do; one that fetches lets them pass.
            return not fetch.go.is_set()
        fetch.hold_up(now_s)
        fetch.go.set()  # where it was to start at admission: now is its turn
        left_s = fetch.left_s(now_s)
        if self._cache.pool.held(leg.kv.names, fetch.until) == fetch.until or (left_s is not None and left_s <= 0):
            fetch.over = True
            if leg.fetching is not None:
                leg.fetching.cancel()
        return fetch.over
