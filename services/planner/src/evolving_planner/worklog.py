"""What nodes report of finished work: the newest samples of each node, and which reports were lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from evolving.core.terms import Phase


@dataclass(frozen=True, slots=True)
class WorkSample:
    """The work of one request's leg on the node that did it (the paper, section 4.2)."""

    request_id: str
    phase: Phase
    uncached_tokens: int
    cached_tokens: int
    restored_tokens: int
    query_key_pairs: float
    output_tokens: int
    iterations: int
    service_s: float
    completed_at_s: float  # by the planner's own monotonic clock


@dataclass(frozen=True, slots=True)
class ReportOutcome:
    """What became of one report."""

    repeated: bool  # seen before, nothing taken
    lost_reports: int  # reports between the last one taken and this one


@dataclass(slots=True)
class _NodeLog:
    incarnation: str
    samples: deque[WorkSample]
    next_sequence: int | None = None  # None: no report of this incarnation yet


@dataclass(slots=True)
class WorkLog:
    """Bounded: the newest `samples_per_node` samples of each node there is."""

    samples_per_node: int
    _nodes: dict[str, _NodeLog] = field(default_factory=dict)

    def report(self, node_id: str, incarnation: str, sequence: int, samples: Sequence[WorkSample]) -> ReportOutcome:
        """Take one report. Sequences grow by one within an incarnation; the first one a new leader sees may be any."""
        log = self._nodes.get(node_id)
        if log is None:
            log = self._nodes[node_id] = _NodeLog(incarnation, deque(maxlen=self.samples_per_node))
        if log.incarnation != incarnation:
            log.incarnation, log.next_sequence = incarnation, None
        if log.next_sequence is not None and sequence < log.next_sequence:
            return ReportOutcome(repeated=True, lost_reports=0)
        lost = 0 if log.next_sequence is None else sequence - log.next_sequence
        log.next_sequence = sequence + 1
        log.samples.extend(samples)
        return ReportOutcome(repeated=False, lost_reports=lost)

    def samples(self, node_id: str) -> tuple[WorkSample, ...]:
        """The samples kept of a node, oldest first."""
        log = self._nodes.get(node_id)
        return tuple(log.samples) if log else ()

    def keep_only(self, node_ids: Collection[str]) -> None:
        """Forget nodes that are gone."""
        for node_id in [n for n in self._nodes if n not in node_ids]:
            del self._nodes[node_id]

    def clear(self) -> None:
        """Forget everything: another planner leads now and gets the reports."""
        self._nodes.clear()
