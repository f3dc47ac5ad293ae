"""The planner's metrics."""

from __future__ import annotations

from collections.abc import Callable

from evolving.core.planner import Decision, Split, role_text
from evolving.core.terms import Phase, Role
from evolving.runtime.metrics import Metrics


class PlannerMetrics:
    """Registered once per process."""

    def __init__(self, metrics: Metrics) -> None:
        self._leader = metrics.gauge("planner_leader", "1 while this planner leads.")
        self._epoch = metrics.gauge("planner_split_epoch", "Epoch of the split in force.")
        self._nodes = metrics.gauge("planner_nodes", "Live nodes by the role in effect.", ("role",))
        self._decisions = metrics.counter("planner_decisions", "Decisions made while leading.", ("kind",))
        self._moves = metrics.counter("planner_role_switches", "Nodes given another role while leading.")
        self._refused = metrics.counter("planner_writes_refused", "Writes etcd refused: fenced or overtaken.")
        self._samples = metrics.counter("planner_work_samples", "Work samples taken.", ("phase",))
        self._lost = metrics.counter("planner_work_reports_lost", "Work reports that never came.")
        self._repeated = metrics.counter("planner_work_reports_repeated", "Work reports that came twice.")

    def follow_leadership(self, is_leader: Callable[[], bool]) -> None:
        """Ask at each scrape, so that an office lost by the clock shows at once."""
        self._leader.set_function(is_leader)

    def saw(self, split: Split, effective: dict[str, Role]) -> None:
        """The split and the roles in effect, as they are now."""
        self._epoch.set(split.epoch)
        for role in Role:
            self._nodes.labels(role_text(role)).set(sum(have is role for have in effective.values()))

    def decided(self, decision: Decision) -> None:
        """A decision was written."""
        self._decisions.labels(decision.kind.value).inc()
        self._moves.inc(len(decision.moved_nodes))

    def write_refused(self) -> None:
        """A write failed its conditions."""
        self._refused.inc()

    def work_taken(self, phase: Phase) -> None:
        """One sample was taken."""
        self._samples.labels(phase.name.lower()).inc()

    def work_report(self, repeated: bool, lost_reports: int) -> None:
        """One report came, after `lost_reports` that did not."""
        self._repeated.inc(repeated)
        self._lost.inc(lost_reports)
