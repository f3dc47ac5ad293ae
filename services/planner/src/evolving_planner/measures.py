"""What the leader measures: which reports of nodes and gateways it took, and the work they tell of, slice by slice.

No I/O and no clock: times are of the planner's own monotonic clock, and callers give them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from evolving.core.config import PlannerConfig
from evolving.core.errors import UnknownNode
from evolving.core.evidence import Evidence
from evolving.core.slices import DecodeDone, PrefillDone, Slice, WorkWindow

_LIVES_MAX = 4  # of a node's engine, of which reports may still come
_COUNT_MAX = 2**63 - 1  # what a message holds, whatever nodes say
_GONE_MAX = 1000  # nodes that left, of which reports may still come


@dataclass(frozen=True, slots=True)
class WorkSample:
    """The work of one request's leg on the node that did it (the paper, section 4.2)."""

    done_s: float  # when the leg ended
    done: PrefillDone | DecodeDone


@dataclass(frozen=True, slots=True)
class OpenLevel:
    """Requests that a gateway had accepted and not finished, in the mean over a stretch of time."""

    from_s: float
    to_s: float
    requests: float


@dataclass(frozen=True, slots=True)
class ReportOutcome:
    """What became of one report."""

    repeated: bool  # seen before, nothing taken
    lost_reports: int  # reports between the last one taken and this one


@dataclass(frozen=True, slots=True)
class Measured:
    """A window in slices, oldest first, and earlier ones under the same split."""

    slices: tuple[Slice, ...]
    earlier: tuple[Slice, ...]


@dataclass(frozen=True, slots=True)
class Missing:
    """What the measurements of this term of office lack."""

    late_samples: int = 0  # came after their slice had been read
    lost_requests: int = 0  # one half never came, or there was no room to keep them
    lost_reports: int = 0  # of nodes; never came
    dropped_samples: int = 0  # samples and windows that nodes gave up, having no room
    unreported_s: float = 0.0  # time of gateways of which nobody said how many requests were open


@dataclass(slots=True)
class _Node:
    """What came of a node so far."""

    sequences: dict[str, int] = field(default_factory=dict)  # by life of its engine, newest last: the next report's
    dropped: int | None = None  # as the node last said it; None: it has not


class Measures:
    """Bounded: it forgets what no window will read, and the oldest where that is not enough (`WorkWindow`)."""

    def __init__(self, config: PlannerConfig, *, requests_max: int = 100_000) -> None:
        """`requests_max`: requests held at once."""
        self._config = config
        self._requests_max = requests_max
        self.clear()

    def clear(self) -> None:
        """Forget everything: a term of office begins."""
        self._window = WorkWindow(requests_max=self._requests_max)
        self._evidence = Evidence(self._config)
        self._nodes: dict[str, _Node] = {}
        self._gone: dict[str, None] = {}  # of these, the ones that left, the longest gone first
        self._lost_reports = 0
        self._dropped_samples = 0
        self._forgot_s = -math.inf

    def keep_only(self, node_ids: Collection[str]) -> None:
        """The nodes there are. What comes of others is taken only where they were there before: a sample tells of work
        done, whatever became of the node since."""
        for node_id in node_ids:
            self._nodes.setdefault(node_id, _Node())
            self._gone.pop(node_id, None)
        for node_id in self._nodes:
            if node_id not in node_ids:
                self._gone.setdefault(node_id)
        while len(self._gone) > _GONE_MAX:
            longest_gone = next(iter(self._gone))
            del self._gone[longest_gone], self._nodes[longest_gone]

    def report_work(
        self,
        node_id: str,
        incarnation: str,
        sequence: int,
        samples: Sequence[WorkSample],
        dropped: int,
        now_s: float,
    ) -> ReportOutcome:
        """Take a node's report, once. Sequences grow by one within a life of its engine, `incarnation`; the first one
        that a new leader sees may be any. `dropped`: what the node gave up since its start.

        Raises UnknownNode for one that never was there.
        """
        node = self._nodes.get(node_id)
        if node is None:
            raise UnknownNode(f"no such node: {node_id!r}")
        expected = node.sequences.get(incarnation)
        if expected is not None and sequence < expected:
            return ReportOutcome(repeated=True, lost_reports=0)
        lost = 0 if expected is None else sequence - expected
        node.sequences[incarnation] = sequence + 1
        if len(node.sequences) > _LIVES_MAX:
            del node.sequences[next(iter(node.sequences))]
        self._lost_reports += lost
        self._count_dropped(node, dropped)
        for sample in samples:
            if isinstance(sample.done, PrefillDone):
                self._window.add_prefill(sample.done_s, sample.done)
            else:
                self._window.add_decode(sample.done_s, sample.done)
        self._forget(now_s)
        return ReportOutcome(repeated=False, lost_reports=lost)

    def report_open(self, gateway_id: str, levels: Sequence[OpenLevel], now_s: float) -> None:
        """Take a gateway's levels, oldest first. What was said before of a moment stands, so a repeat does nothing."""
        for level in levels:
            self._window.add_open(gateway_id, level.from_s, level.to_s, level.requests)
        self._forget(now_s)

    def read(self, now_s: float, since_s: float, *, peek: bool = False) -> Measured:
        """The window up to now, and what may count with it since the split was written at `since_s`.

        What comes later for it is late; with `peek` it is only looked at, and nothing changes.
        """
        slices = self._window.slices(now_s, self._config.slices, self._config.slice_s, peek=peek)
        return Measured(slices, (self._evidence.before if peek else self._evidence.add)(slices, since_s))

    def missing(self) -> Missing:
        """What is known to be missing, since the term began."""
        return Missing(
            late_samples=self._window.late_samples,
            lost_requests=self._window.lost_requests,
            lost_reports=min(self._lost_reports, _COUNT_MAX),
            dropped_samples=min(self._dropped_samples, _COUNT_MAX),
            unreported_s=self._window.unreported_s,
        )

    def check_invariants(self) -> None:
        """Assert what must hold between any two calls."""
        self._window.check_invariants()
        assert set(self._gone) <= set(self._nodes)
        assert len(self._gone) <= _GONE_MAX
        assert all(len(node.sequences) <= _LIVES_MAX for node in self._nodes.values())

    def _count_dropped(self, node: _Node, dropped: int) -> None:
        """A node that says less than before has started anew. What it gave up before its first report here belongs to
        an earlier term, or to none."""
        if node.dropped is not None:
            self._dropped_samples += dropped - node.dropped if dropped >= node.dropped else dropped
        node.dropped = dropped

    def _forget(self, now_s: float) -> None:
        """Once a slice. Another window's length is kept, for a decision that looks back from some time ago."""
        if now_s - self._forgot_s >= self._config.slice_s:
            self._forgot_s = now_s
            self._window.forget(now_s - 2 * self._config.window_s)
