"""What the cluster was asked, slice by slice: the planner's measurements (paper, section 4.3).

A request's prefill work comes from the node that prefilled it, its decode work from the node that decoded it, how many
requests are open from each gateway. All of it comes in its own time and order; a `WorkWindow` puts it together by
request id and cuts it into slices by the time a request completed. Everything here is pure.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from evolving.core.throughput import MeanWork
from evolving.core.timemodel import PrefillSums


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """A prefill leg that ended. A request that lost its node has several, and asked for all of them."""

    request_id: str
    work: PrefillSums  # t_uc, A, t_rst and t_c of this leg


@dataclass(frozen=True, slots=True)
class DecodeDone:
    """A decode leg that ended, and with the last of them the request."""

    request_id: str
    iterations: int  # (t_out − 1)/t_acc
    context_tokens: float = 0.0  # the request's context, mean over those iterations


@dataclass(frozen=True, slots=True)
class Slice:
    """One slice of a planning window."""

    started_s: float
    ended_s: float
    completions: int  # requests whose decode work is known
    without_prefill: int  # of these, the ones whose prefill sample is missing: late, or lost
    open_requests: float  # q̄: time-mean of requests accepted and unfinished, wherever they are
    work: MeanWork | None  # None: no completion, or none whose prefill is known


@dataclass(slots=True)
class _Request:
    heard_s: float  # when its last leg ended
    completed_s: float = math.nan  # when its last decode leg ended; nan: none has
    prefill: PrefillSums | None = None
    iterations: int = 0
    context_sum: float = 0.0  # Σ over decode iterations of the context


@dataclass(frozen=True, slots=True)
class _Level:
    from_s: float
    to_s: float
    requests: float


@dataclass(slots=True)
class WorkWindow:
    """What was reported, until `forget`. Times are of the planner's clock. Each sample must be added once.

    `unfinished_s`: a request whose decode is not heard of for this long after its prefill never will be. `jitter_s`:
    reports take unlike times to come, which leaves gaps up to this between levels that had none. What it holds is
    bounded: beyond `requests_max` the one heard of longest ago goes for each that is new, beyond `levels_max` of a
    gateway its oldest, and beyond `gateways_max` the gateway whose newest level is the oldest.
    """

    unfinished_s: float = 3600.0
    jitter_s: float = 0.5
    requests_max: int = 100_000
    levels_max: int = 10_000
    gateways_max: int = 1000
    late_samples: int = field(init=False, default=0)  # came after a reading of the slice they belong to
    lost_requests: int = field(init=False, default=0)  # forgotten with a half missing, or unread for want of room
    # Gaps between levels of one gateway, and levels without room to keep them, summed over gateways.
    unreported_s: float = field(init=False, default=0.0)
    _requests: dict[str, _Request] = field(init=False, default_factory=dict)  # in the order they were last heard of
    _levels: dict[str, list[_Level]] = field(init=False, default_factory=dict)  # by gateway
    _read_until_s: float = field(init=False, default=-math.inf)
    _forgotten_until_s: float = field(init=False, default=-math.inf)

    def add_prefill(self, done_s: float, done: PrefillDone) -> None:
        """A prefill leg ended at `done_s`."""
        if done_s < self._forgotten_until_s and done.request_id not in self._requests:
            self.late_samples += 1  # its request was forgotten, and counted as lost then; or runs still, and will be
            return
        request = self._heard(done.request_id, done_s)
        self._count_late(request.completed_s)  # a prefill is late when the request it belongs to was already counted
        request.prefill = _plus(request.prefill, done.work)

    def add_decode(self, done_s: float, done: DecodeDone) -> None:
        """A decode leg ended at `done_s`."""
        known = self._requests.get(done.request_id)
        # A leg belongs where its request completed, which may be later: in a slice that is still to be read.
        completed_s = done_s if known is None or math.isnan(known.completed_s) else max(known.completed_s, done_s)
        self._count_late(completed_s)
        if completed_s < self._forgotten_until_s:
            self.lost_requests += 1
            self._requests.pop(done.request_id, None)
            return
        request = self._heard(done.request_id, done_s)
        request.completed_s = completed_s
        request.iterations += done.iterations
        request.context_sum += done.context_tokens * done.iterations

    def add_open(self, gateway: str, from_s: float, to_s: float, requests: float) -> None:
        """A gateway had `requests` open, in the time-mean from `from_s` to `to_s`. What it said before stands."""
        levels = self._levels.get(gateway, [])
        until_s = levels[-1].to_s if levels else from_s
        if to_s <= max(from_s, until_s):
            return
        gap_s = from_s - until_s
        if gap_s > self.jitter_s:
            self.unreported_s += gap_s
        else:
            from_s = until_s  # what overlaps was said before; what is missing is no silence
        if not levels and len(self._levels) >= self.gateways_max:
            longest_silent = min(self._levels, key=lambda known: self._levels[known][-1].to_s)
            self.unreported_s += sum(level.to_s - level.from_s for level in self._levels.pop(longest_silent))
        levels = self._levels.setdefault(gateway, levels)
        levels.append(_Level(from_s, to_s, requests))
        if len(levels) > self.levels_max:
            oldest = levels.pop(0)
            self.unreported_s += oldest.to_s - oldest.from_s

    def slices(self, end_s: float, count: int, slice_s: float, *, peek: bool = False) -> tuple[Slice, ...]:
        """The `count` slices of `slice_s` seconds up to `end_s`, oldest first. Each has its start, not its end.

        `peek`: they are read again, so what is still to come for them is not late.
        """
        if not peek:
            self._read_until_s = max(self._read_until_s, end_s)
        edges_s = [end_s - slice_s * back for back in range(count, -1, -1)]
        completed: list[list[_Request]] = [[] for _ in range(count)]
        for request in self._requests.values():
            if edges_s[0] <= request.completed_s < end_s:
                completed[bisect_right(edges_s, request.completed_s) - 1].append(request)
        return tuple(
            Slice(
                started_s=edges_s[place],
                ended_s=edges_s[place + 1],
                completions=len(completed[place]),
                without_prefill=sum(request.prefill is None for request in completed[place]),
                open_requests=self._open(edges_s[place], edges_s[place + 1]),
                work=_mean_work(completed[place]),
            )
            for place in range(count)
        )

    def forget(self, before_s: float) -> None:
        """Drop what completed before `before_s`: no slice will be read that starts earlier."""
        self._forgotten_until_s = max(self._forgotten_until_s, before_s)
        for request_id, request in list(self._requests.items()):
            unfinished = math.isnan(request.completed_s)
            last_s = request.heard_s + self.unfinished_s if unfinished else request.completed_s
            if last_s < before_s:
                self.lost_requests += unfinished or request.prefill is None
                del self._requests[request_id]
        for gateway, levels in list(self._levels.items()):
            kept = [level for level in levels if level.to_s > before_s]
            if kept:
                self._levels[gateway] = kept
            else:
                del self._levels[gateway]

    def check_invariants(self) -> None:
        """Assert what must hold between any two calls."""
        assert len(self._requests) <= self.requests_max
        assert len(self._levels) <= self.gateways_max
        for request in self._requests.values():
            assert request.prefill is not None or not math.isnan(request.completed_s), "a request nothing was heard of"
            assert not request.completed_s > request.heard_s
            assert not request.completed_s < self._forgotten_until_s
        for levels in self._levels.values():
            assert 0 < len(levels) <= self.levels_max, "a gateway that said nothing, or too much"
            assert all(level.from_s < level.to_s for level in levels)
            assert all(a.to_s <= b.from_s for a, b in itertools.pairwise(levels)), "a moment counted twice"

    def _heard(self, request_id: str, done_s: float) -> _Request:
        request = self._requests.pop(request_id, None)
        if request is None:
            request = _Request(done_s)
            if len(self._requests) >= self.requests_max:
                oldest = self._requests.pop(next(iter(self._requests)))
                was_read = oldest.prefill is not None and oldest.completed_s < self._read_until_s
                self.lost_requests += not was_read
        self._requests[request_id] = request
        request.heard_s = max(request.heard_s, done_s)
        return request

    def _count_late(self, completed_s: float) -> None:
        self.late_samples += completed_s < self._read_until_s

    def _open(self, from_s: float, to_s: float) -> float:
        overlaps = (
            level.requests * (min(level.to_s, to_s) - max(level.from_s, from_s))
            for levels in self._levels.values()
            for level in levels
            if level.from_s < to_s and level.to_s > from_s
        )
        return math.fsum(overlaps) / (to_s - from_s)


def _plus(so_far: PrefillSums | None, more: PrefillSums) -> PrefillSums:
    if so_far is None:
        return more
    return PrefillSums(
        so_far.uncached_tokens + more.uncached_tokens,
        so_far.query_key_pairs + more.query_key_pairs,
        so_far.restored_tokens + more.restored_tokens,
        so_far.cached_tokens + more.cached_tokens,
    )


def _mean_work(requests: Iterable[_Request]) -> MeanWork | None:
    """Means over requests; over iterations for the context, since a decode batch meets a request in each of them."""
    requests = list(requests)
    prefills = [request.prefill for request in requests if request.prefill is not None]
    if not prefills:
        return None
    # fsum is exact, so that the order in which samples came does not matter.
    iterations = sum(request.iterations for request in requests)
    return MeanWork(
        uncached_tokens=math.fsum(prefill.uncached_tokens for prefill in prefills) / len(prefills),
        query_key_pairs=math.fsum(prefill.query_key_pairs for prefill in prefills) / len(prefills),
        cached_tokens=math.fsum(prefill.cached_tokens for prefill in prefills) / len(prefills),
        restored_tokens=math.fsum(prefill.restored_tokens for prefill in prefills) / len(prefills),
        decode_iterations=iterations / len(requests),
        context_tokens=math.fsum(request.context_sum for request in requests) / iterations if iterations else 0.0,
    )
