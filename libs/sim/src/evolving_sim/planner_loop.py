"""The planner in the loop: what a leading planner does with what is reported, on virtual time.

Measurements, the mix (ū), evaluation, gate, cooldown and decision are the product's own core, and so is what becomes of
the split when nodes go or come. The loop knows the nodes' coefficients as a perfect fit would, and t_fwd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from evolving.core.config import PlannerConfig
from evolving.core.evidence import Evidence
from evolving.core.iterations import IterationWindow
from evolving.core.membership import follow_membership
from evolving.core.modes import Mode
from evolving.core.planner import Decision, SplitShape
from evolving.core.replan import decide_by_throughput, evaluate, worth_repeating_at_s
from evolving.core.sharing import shared_mixes
from evolving.core.slices import DecodeDone, PrefillDone, WorkWindow
from evolving.core.terms import Role
from evolving.core.throughput import NodeModel
from evolving_sim.arms.arm import Switch
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


@dataclass(slots=True, eq=False, repr=False)
class PlannerLoop:
    """One planner. `begin` once; `decisions` grows, "stay" included."""

    config: LoopConfig = field(default_factory=LoopConfig)
    events: EventHeap = field(init=False)
    cluster: SimCluster = field(init=False)
    decisions: list[Decision] = field(init=False, default_factory=list)
    window: WorkWindow = field(init=False, default_factory=WorkWindow)
    _evidence: Evidence = field(init=False)
    _term: int = field(init=False, default=0)  # counts leaders: what an earlier one was about to do is not done
    _prefill_share: float = field(init=False, default=0.5)
    _reported_s: float = field(init=False, default=0.0)
    _reported_open_s: float = field(init=False, default=0.0)
    _totals: dict[str, IterationWindow] = field(init=False, default_factory=dict)  # at the window's start

    def begin(self, events: EventHeap, cluster: SimCluster) -> None:
        """Listen to the cluster, and decide at the end of every window."""
        self.events, self.cluster = events, cluster
        cluster.listeners.append(
            Listeners(prefilled=self._prefilled, decoded=self._decoded, members_changed=self._members_changed)
        )
        self._prefill_share = shape_of(cluster).prefill_share
        self._lead()

    def fail_over(self) -> None:
        """Another planner leads: decisions so far are known to it, and nothing is measured."""
        self.window = WorkWindow()
        self._lead()

    def _lead(self) -> None:
        self._term += 1
        self._evidence = Evidence(self.config.planner)
        self._reported_s, self._reported_open_s = self.events.now_s, self.cluster.open_request_s()
        self._totals = self._all_totals()
        self._every(self.config.report_s, Priority.REPORT, self._report)
        self._every(self.config.planner.window_s, Priority.DECISION, self._window_ends)

    @property
    def switches(self) -> list[Switch]:
        """The decisions that changed the split for throughput."""
        return [_switch(decision) for decision in self.decisions if decision.changes_split and decision.evaluation]

    def _every(self, period_s: float, priority: Priority, action: Callable[[], None]) -> None:
        begun_s, count, term = self.events.now_s, 0, self._term

        def again() -> None:
            nonlocal count
            if term != self._term:
                return
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
        self._totals = self._all_totals()

    def _all_totals(self) -> dict[str, IterationWindow]:
        return {node_id: node.meter.totals() for node_id, node in self.cluster.nodes.items()}

    def _decide(self) -> None:
        now_s, config = self.events.now_s, self.config.planner
        slices = self.window.slices(now_s, config.slices, config.slice_s)
        models = self.models()
        earlier = self._evidence.add(slices, self.cluster.split.written_at_s)
        evaluation = evaluate(slices, self.cluster.roles, models, config, earlier)
        decision = decide_by_throughput(
            self.cluster.split,
            models,
            evaluation,
            mode=self.config.mode,
            hold=None,
            prefill_share=self._prefill_share,
            author=AUTHOR,
            now_s=now_s,
        )
        self._carry_out(decision)
        self.window.forget(now_s - config.window_s)
        again_s = worth_repeating_at_s(self.cluster.split, decision)
        if again_s is not None:
            term = self._term
            self.events.at(again_s, Priority.DECISION, lambda: self._decide() if term == self._term else None)

    def _members_changed(self) -> None:
        """A node went or came: the split follows at once, whatever the cooldown (DESIGN §7)."""
        decision = follow_membership(
            self.cluster.split,
            self.cluster.roles,
            initial=None,
            prefill_share=self._prefill_share,
            author=AUTHOR,
            now_s=self.events.now_s,
        )
        if decision is not None:
            self._carry_out(decision)

    def _carry_out(self, decision: Decision) -> None:
        self.decisions.append(decision)
        self._prefill_share = decision.prefill_share
        if decision.changes_split:
            self.cluster.change(decision.split())

    def models(self) -> dict[str, NodeModel]:
        """The live nodes as the planner knows them now, with the mix since the window began."""
        cluster = self.cluster
        configs = {node_id: cluster.configs[node_id] for node_id in cluster.roles}
        windows = {}
        for node_id in configs:
            totals, earlier = cluster.nodes[node_id].meter.totals(), self._totals.get(node_id, IterationWindow())
            windows[node_id] = totals.since(earlier if totals.reaches(earlier) else IterationWindow())
        mixes = shared_mixes(configs, windows)
        return {
            node_id: NodeModel(
                prefill=config.prefill,
                decode=config.decode,
                new_tokens_per_iteration=max(1.0, mixes[node_id].new_tokens_per_iteration or config.chunk_tokens),
                decode_slots=config.decode_slots,
                tokens_per_request=config.tokens_per_request,
                decode_tokens=config.l1_tokens - config.reserve_tokens,
            )
            for node_id, config in configs.items()
        }

    def check_invariants(self) -> None:
        """Assert that nothing was measured too late, and that the split's epochs grow."""
        self.window.check_invariants()
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
