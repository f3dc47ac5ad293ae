"""The planner in the loop: what a leading planner does with what is reported, on virtual time.

Measurements, the mix (ū), evaluation, gate, cooldown and decision are the product's own core. The loop knows the nodes'
coefficients as a perfect fit would, and t_fwd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from evolving.core.config import PlannerConfig
from evolving.core.iterations import IterationWindow
from evolving.core.modes import Mode
from evolving.core.planner import Decision, SplitShape
from evolving.core.replan import decide_by_throughput, evaluate, worth_repeating_at_s
from evolving.core.sharing import shared_mixes
from evolving.core.slices import DecodeDone, PrefillDone, WorkWindow
from evolving.core.terms import Role
from evolving.core.throughput import NodeModel
from evolving_sim.events import EventHeap, Priority
from evolving_sim.sim_cluster import Listeners, SimCluster

AUTHOR = "planner"
_GATEWAY = "gateway"


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """How the loop measures and decides."""

    planner: PlannerConfig = field(default_factory=PlannerConfig)
    mode: Mode = Mode.AUTO
    # Seconds between a gateway's reports of open requests.
    report_s: float = 5.0

    def __post_init__(self) -> None:
        if not self.report_s > 0:
            raise ValueError(f"report_s must be positive, got {self.report_s}")


@dataclass(frozen=True, slots=True)
class Switch:
    """A decision that changed the split."""

    at_s: float
    shape: str  # after it
    moves: int
    gain: float  # expected


@dataclass(slots=True, eq=False, repr=False)
class PlannerLoop:
    """One planner. `begin` once; `decisions` grows, "stay" included."""

    events: EventHeap
    cluster: SimCluster
    config: LoopConfig
    decisions: list[Decision] = field(init=False, default_factory=list)
    window: WorkWindow = field(init=False, default_factory=WorkWindow)
    _prefill_share: float = field(init=False, default=0.5)
    _reported_s: float = field(init=False, default=0.0)
    _reported_open_s: float = field(init=False, default=0.0)
    _totals: dict[str, IterationWindow] = field(init=False, default_factory=dict)  # at the window's start

    def begin(self) -> None:
        """Listen to the cluster, and decide at the end of every window."""
        self.cluster.listeners.append(Listeners(prefilled=self._prefilled, decoded=self._decoded))
        self._prefill_share = shape_of(self.cluster).prefill_share
        self._reported_s, self._reported_open_s = self.events.now_s, self.cluster.open_request_s()
        self._every(self.config.report_s, Priority.REPORT, self._report)
        self._every(self.config.planner.window_s, Priority.DECISION, self._window_ends)

    @property
    def switches(self) -> list[Switch]:
        """The decisions that changed the split."""
        return [_switch(decision) for decision in self.decisions if decision.changes_split]

    def _every(self, period_s: float, priority: Priority, action: Callable[[], None]) -> None:
        begun_s, count = self.events.now_s, 0

        def again() -> None:
            nonlocal count
            count += 1
            if count > 1:
                action()
            self.events.at(begun_s + count * period_s, priority, again)

        again()

    def _prefilled(self, done: PrefillDone) -> None:
        self.window.add_prefill(self.events.now_s, done)

    def _decoded(self, done: DecodeDone) -> None:
        self.window.add_decode(self.events.now_s, done)

    def _report(self) -> None:
        now_s, open_s = self.events.now_s, self.cluster.open_request_s()
        mean = (open_s - self._reported_open_s) / (now_s - self._reported_s)
        self.window.add_open(_GATEWAY, self._reported_s, now_s, mean)
        self._reported_s, self._reported_open_s = now_s, open_s

    def _window_ends(self) -> None:
        self._decide()
        self._totals = {node_id: node.meter.totals() for node_id, node in self.cluster.nodes.items()}

    def _decide(self) -> None:
        now_s, config = self.events.now_s, self.config.planner
        slices = self.window.slices(now_s, config.slices, config.slice_s)
        evaluation = evaluate(slices, self.cluster.roles, self.models(), config)
        decision = decide_by_throughput(
            self.cluster.split,
            self.cluster.nodes,
            evaluation,
            mode=self.config.mode,
            hold=None,
            prefill_share=self._prefill_share,
            author=AUTHOR,
            now_s=now_s,
        )
        self.decisions.append(decision)
        self._prefill_share = decision.prefill_share
        if decision.changes_split:
            self.cluster.change(decision.split())
        self.window.forget(now_s - config.window_s)
        again_s = worth_repeating_at_s(self.cluster.split, decision)
        if again_s is not None:
            self.events.at(again_s, Priority.DECISION, self._decide)

    def models(self) -> dict[str, NodeModel]:
        """The nodes as the planner knows them now, with the mix since the window began."""
        windows = {
            node_id: node.meter.totals().since(self._totals.get(node_id, IterationWindow()))
            for node_id, node in self.cluster.nodes.items()
        }
        mixes = shared_mixes(self.cluster.configs, windows)
        return {
            node_id: NodeModel(
                prefill=config.prefill,
                decode=config.decode,
                new_tokens_per_iteration=max(1.0, mixes[node_id].new_tokens_per_iteration or config.chunk_tokens),
                decode_slots=config.decode_slots,
                tokens_per_request=config.tokens_per_request,
            )
            for node_id, config in self.cluster.configs.items()
        }

    def check_invariants(self) -> None:
        """Assert that nothing was measured too late, and that the split's epochs grow."""
        self.window.check_invariants()
        assert self.window.late_samples == 0
        assert self.window.unreported_s == 0.0
        epochs = [decision.epoch_after for decision in self.decisions if decision.changes_split]
        assert epochs == sorted(set(epochs))


def _switch(decision: Decision) -> Switch:
    assert decision.evaluation is not None
    best = decision.evaluation.best
    assert best is not None
    return Switch(decision.decided_at_s, str(best.shape), len(best.moves), best.mean_gain)


def shape_of(cluster: SimCluster) -> SplitShape:
    """How many nodes of a cluster prefill and decode."""
    roles = list(cluster.roles.values())
    return SplitShape(roles.count(Role.PREFILL), roles.count(Role.DECODE))
