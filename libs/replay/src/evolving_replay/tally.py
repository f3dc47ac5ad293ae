"""Adds up what requests cost while a replay runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from evolving_client import EvolvingError, Finished
from evolving_replay.report import CAUSES, SOURCES, Latency, NodeLoad, Report


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a replay is. total_requests: of all its sessions. Tokens are of finished requests."""

    total_requests: int
    finished_requests: int
    failed_requests: int
    running_requests: int
    total_sessions: int
    finished_sessions: int
    running_sessions: int
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Answered:
    """A request that was answered: the `request`-th of the `agent`-th agent of the `session`-th session, from 0."""

    session: int
    agent: int
    request: int
    sent_s: float  # since the replay's start
    ttft_s: float  # since it was sent, as seen here, as is the next
    e2e_s: float
    ideal_tokens: int  # prompt tokens whose KV requests finished before it was sent had produced
    finished: Finished


@dataclass(frozen=True, slots=True)
class Lost:
    """Prompt tokens of one request that some earlier request had produced, and why they were computed again."""

    ideal: int
    by: dict[str, int]
    beyond: int
    """Reused although no finished request had produced them."""


def lost(ideal_tokens: int, finished: Finished) -> Lost:
    """Go down from the ideal to what was reused and say at which step tokens were lost; no step is negative.

    A pool that held more than finished requests had produced, or a node that found more than was planned, lost nothing
    there.
    """
    cached = min(finished.cached.total, ideal_tokens)
    pool = max(cached, min(finished.reuse.pool_tokens, ideal_tokens))
    planned = max(cached, min(finished.reuse.planned_tokens, pool))
    by = dict.fromkeys(CAUSES, 0)
    by[finished.reuse.loss.value if finished.reuse.loss else "eviction"] += ideal_tokens - pool
    by["routing"] += pool - planned
    by["fetch_failed"] += planned - cached
    assert sum(by.values()) == ideal_tokens - cached
    return Lost(ideal_tokens, by, finished.cached.total - cached)


@dataclass(slots=True)
class Tally:
    """Everything a report is made of."""

    total_requests: int
    total_sessions: int
    on_progress: Callable[[Progress], None] | None = None
    on_answer: Callable[[Answered], None] | None = None
    running_requests: int = 0
    running_sessions: int = 0
    finished_sessions: int = 0
    unfinished_requests: int = 0
    branches_not_ended: int = 0
    resent: int = 0
    moved: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    ideal_tokens: int = 0
    beyond_tokens: int = 0
    fetch_s: float = 0.0
    fetch_hidden_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    lost_by: Counter[str] = field(default_factory=Counter)
    cached_by: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    nodes: dict[str, NodeLoad] = field(default_factory=dict)

    def session_started(self) -> None:
        """A session's first request is due."""
        self.running_sessions += 1
        self._tell()

    def session_over(self, *, played: bool) -> None:
        """It ended; played: to its end."""
        self.running_sessions -= 1
        self.finished_sessions += played
        self._tell()

    def request_sent(self) -> None:
        """One more is running."""
        self.running_requests += 1
        self._tell()

    def request_left(self) -> None:
        """The replay was interrupted before its outcome was known."""
        self.running_requests -= 1
        self.unfinished_requests += 1

    def request_failed(self, error: EvolvingError) -> None:
        """The client gave it up."""
        self.running_requests -= 1
        self.failures[error.reason or (error.code.name if error.code else type(error).__name__)] += 1
        self._tell()

    def request_answered(self, answered: Answered) -> None:
        """It has its result."""
        finished = answered.finished
        self.running_requests -= 1
        self.ttft_s.append(answered.ttft_s)
        self.e2e_s.append(answered.e2e_s)
        self.resent += finished.reconnects
        self.moved += finished.attempts
        self.prompt_tokens += finished.usage.prompt_tokens
        self.output_tokens += finished.usage.output_tokens
        self.fetch_s += finished.timings.fetch_s
        self.fetch_hidden_s += finished.timings.fetch_hidden_s
        for source in SOURCES:
            self.cached_by[source] += getattr(finished.cached, source)
        losses = lost(answered.ideal_tokens, finished)
        self.ideal_tokens += losses.ideal
        self.beyond_tokens += losses.beyond
        self.lost_by.update(losses.by)
        prefill = self.nodes.setdefault(finished.prefill_node_id, NodeLoad())
        prefill.prefills += 1
        prefill.computed_tokens += finished.usage.computed_tokens
        prefill.cached_tokens += finished.cached.total
        self.nodes.setdefault(finished.decode_node_id, NodeLoad()).decodes += 1
        if self.on_answer is not None:
            self.on_answer(answered)
        self._tell()

    def report(self, *, complete: bool, wall_s: float) -> Report:
        """The figures until now, a request still running being an unfinished one. wall_s: since the first session
        started."""
        requests = len(self.e2e_s)
        prompt_tokens = max(self.prompt_tokens, 1)  # shares of nothing are 0
        lost_by = {cause: self.lost_by[cause] / prompt_tokens for cause in CAUSES}
        computed = [load.computed_tokens for load in self.nodes.values() if load.prefills]
        return Report(
            complete=complete,
            wall_s=wall_s,
            sessions=self.finished_sessions,
            requests=requests,
            failed=self.failures.total(),
            failures=dict(self.failures),
            unfinished=self.unfinished_requests + self.running_requests,
            resent=self.resent,
            moved=self.moved,
            branches_not_ended=self.branches_not_ended,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            ttft=Latency.of(self.ttft_s),
            e2e=Latency.of(self.e2e_s),
            requests_per_s=requests / wall_s if wall_s else 0.0,
            prompt_tokens_per_s=self.prompt_tokens / wall_s if wall_s else 0.0,
            output_tokens_per_s=self.output_tokens / wall_s if wall_s else 0.0,
            hit_rate=self.cached_by.total() / prompt_tokens,
            ideal_hit_rate=self.ideal_tokens / prompt_tokens,
            lost_reuse=self.lost_by.total() / prompt_tokens,
            beyond_ideal=self.beyond_tokens / prompt_tokens,
            lost_by=lost_by,
            cached_by={source: self.cached_by[source] / prompt_tokens for source in SOURCES},
            fetch_s=self.fetch_s,
            hidden_share=self.fetch_hidden_s / self.fetch_s if self.fetch_s else None,
            most_loaded_prefill=max(computed) * len(computed) / total if (total := sum(computed)) else 0.0,
            nodes=dict(sorted(self.nodes.items())),
        )

    def _tell(self) -> None:
        if self.on_progress is not None:
            self.on_progress(
                Progress(
                    total_requests=self.total_requests,
                    finished_requests=len(self.e2e_s),
                    failed_requests=self.failures.total(),
                    running_requests=self.running_requests,
                    total_sessions=self.total_sessions,
                    finished_sessions=self.finished_sessions,
                    running_sessions=self.running_sessions,
                    prompt_tokens=self.prompt_tokens,
                    cached_tokens=self.cached_by.total(),
                )
            )
