"""The planner's metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from evolving.core.modes import Hold
from evolving.core.planner import Decision, Split, role_text
from evolving.core.replan import Evaluation
from evolving.core.terms import Phase, Role
from evolving.runtime.metrics import Metrics
from evolving.v1 import planner_pb2
from evolving_planner.measures import Missing
from evolving_planner.models import Outcome


class PlannerMetrics:
    """Registered once per process."""

    def __init__(self, metrics: Metrics) -> None:
        self._leader = metrics.gauge("planner_leader", "1 while this planner leads.")
        self._epoch = metrics.gauge("planner_split_epoch", "Epoch of the split in force.")
        self._nodes = metrics.gauge("planner_nodes", "Live nodes by the role in effect.", ("role",))
        self._hold = metrics.gauge("planner_hold", "1 while an operator holds the split.")
        self._decisions = metrics.counter("planner_decisions", "Decisions made while leading.", ("kind",))
        self._moves = metrics.counter("planner_role_switches", "Nodes given another role while leading.")
        self._refused = metrics.counter("planner_writes_refused", "Writes etcd refused: fenced or overtaken.")
        self._samples = metrics.counter("planner_work_samples", "Work samples taken.", ("phase",))
        self._lost = metrics.counter("planner_work_reports_lost", "Work reports that never came.")
        self._repeated = metrics.counter("planner_work_reports_repeated", "Work reports that came twice.")
        self._evaluations = metrics.counter(
            "planner_evaluations", "Evaluations of a window: a better split, none surely better, or none possible.",
            ("outcome",),
        )  # fmt: skip
        self._throughput = metrics.gauge(
            "planner_predicted_requests_per_s",
            "What a split would serve by the last evaluation: the present one, and the best.",
            ("split",),
        )
        self._gain = metrics.gauge("planner_best_gain", "Gain of the best other split, 0.02 being 2 %.")
        self._gain_error = metrics.gauge("planner_best_gain_error", "Standard error of that gain, as the gate has it.")
        self._missing = metrics.gauge(
            "planner_missing_measurements", "What measurements of this term of office lack.", ("what",)
        )
        self._unreported = metrics.gauge(
            "planner_unreported_seconds", "Time of gateways of which the open requests are not known."
        )
        self._model_error = metrics.gauge(
            "planner_model_error", "Largest recent mean relative error of the nodes' time models.", ("phase",)
        )
        self._fits = metrics.counter("planner_refits", "Time models fitted to a node's iterations.", ("phase",))

    def follow(self, is_leader: Callable[[], bool], hold: Callable[[], Hold | None]) -> None:
        """Ask at each scrape, so that an office lost by the clock, or a hold that is over, shows at once."""
        self._leader.set_function(is_leader)
        self._hold.set_function(lambda: hold() is not None)

    def saw(self, split: Split, effective: dict[str, Role]) -> None:
        """The split and the roles in effect, as they are now."""
        self._epoch.set(split.epoch)
        for role in Role:
            self._nodes.labels(role_text(role)).set(sum(have is role for have in effective.values()))

    def decided(self, decision: Decision) -> None:
        """A decision was written."""
        self._decisions.labels(decision.kind.value).inc()
        self._moves.inc(len(decision.moved_nodes))

    def evaluated(self, evaluation: Evaluation, missing: Missing) -> None:
        """A window was evaluated."""
        outcome = "problem" if evaluation.problem else "none_better" if evaluation.best is None else "better"
        self._evaluations.labels(outcome).inc()
        for what in ("late_samples", "lost_requests", "lost_reports", "dropped_samples"):
            self._missing.labels(what).set(getattr(missing, what))
        self._unreported.set(missing.unreported_s)
        present = next((candidate for candidate in evaluation.candidates if not candidate.moves), None)
        others = [candidate for candidate in evaluation.candidates if candidate.moves]
        if present is not None:
            best = max(evaluation.candidates, key=lambda candidate: candidate.throughput)
            self._throughput.labels("present").set(present.throughput)
            self._throughput.labels("best").set(best.throughput)
        if others:
            gains = max(others, key=lambda candidate: candidate.mean_gain)
            self._gain.set(gains.mean_gain)
            self._gain_error.set(gains.error)

    def knows(self, models: Iterable[planner_pb2.NodeModel]) -> None:
        """How well nodes are known now."""
        models = list(models)
        for phase, fits in (
            ("prefill", [model.prefill_fit for model in models]),
            ("decode", [model.decode_fit for model in models]),
        ):
            self._model_error.labels(phase).set(max((fit.recent_error for fit in fits), default=0.0))

    def refitted(self, outcomes: Iterable[Outcome]) -> None:
        """Fits that were due were tried."""
        for outcome in outcomes:
            self._fits.labels(outcome.phase).inc(outcome.fitted)

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
