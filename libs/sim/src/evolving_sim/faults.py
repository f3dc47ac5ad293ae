"""What goes wrong in a run, and when."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from evolving_sim.events import EventHeap, Priority
from evolving_sim.legs import DecodeLeg, PrefillLeg, Request
from evolving_sim.sim_cluster import SimCluster
from evolving_sim.sim_node import SimNode


@dataclass(frozen=True, slots=True)
class NodeDeath:
    """A node is gone with all it holds; its requests go on elsewhere. It comes back empty, or never."""

    at_s: float
    node_id: str
    back_after_s: float = math.inf


@dataclass(frozen=True, slots=True)
class SlowNode:
    """A node's iterations take `factor` times as long as its time model says."""

    at_s: float
    node_id: str
    factor: float
    for_s: float = math.inf

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf:
            raise ValueError(f"factor must be finite and above 0, got {self.factor}")


@dataclass(frozen=True, slots=True)
class LostEvents:
    """Batches of what a node holds, its next ones, do not reach the directory."""

    at_s: float
    node_id: str
    batches: int = 1


@dataclass(frozen=True, slots=True)
class PlannerFailover:
    """Another planner leads: it knows the decisions made so far, and measures anew."""

    at_s: float


Fault = NodeDeath | SlowNode | LostEvents | PlannerFailover


class UnknownNode(ValueError):
    """A fault of a node that the scenario hasn't."""


def plan_faults(
    faults: Sequence[Fault], events: EventHeap, cluster: SimCluster, fail_over: Callable[[], None] | None
) -> None:
    """Put faults into the events. fail_over: makes another planner lead; None: there is no planner. Raises UnknownNode,
    ValueError."""
    for fault in faults:
        if isinstance(fault, PlannerFailover):
            if fail_over is None:
                raise ValueError("the arm has no planner that could fail over: leave that fault out")
            events.at(fault.at_s, Priority.DECISION, fail_over)
            continue
        if fault.node_id not in cluster.nodes:
            raise UnknownNode(f"no node {fault.node_id!r}; there are {', '.join(cluster.nodes)}")
        events.at(fault.at_s, Priority.REPORT, partial(_happen, fault, events, cluster))


def _happen(fault: NodeDeath | SlowNode | LostEvents, events: EventHeap, cluster: SimCluster) -> None:
    if isinstance(fault, NodeDeath):
        if not cluster.nodes[fault.node_id].alive:
            return
        lose_node(cluster, fault.node_id)
        if fault.back_after_s < math.inf:
            events.after(fault.back_after_s, Priority.REPORT, partial(node_back, cluster, fault.node_id))
    elif isinstance(fault, SlowNode):
        cluster.nodes[fault.node_id].slowness = fault.factor
        if fault.for_s < math.inf:
            events.after(fault.for_s, Priority.REPORT, partial(_recover, cluster, fault.node_id))
    elif cluster.nodes[fault.node_id].alive:
        cluster.directory.lose(fault.node_id, fault.batches)


def lose_node(cluster: SimCluster, node_id: str) -> None:
    """A node dies. What it worked on goes on elsewhere, with the tokens that came until then (DESIGN §6)."""
    node = cluster.nodes[node_id]
    answers = list(node.decode_legs())
    here: list[PrefillLeg | DecodeLeg] = [*node.queue, *node.running, *node.holding, *answers]
    for leg in here:
        leg.gone = True
    generated = {leg.request.request_id: _generated_tokens(node, leg) for leg in answers}
    affected = {leg.request.request_id for leg in here}
    node.die()
    cluster.nodes[node_id] = cluster.make_node(node_id)
    cluster.nodes[node_id].alive = False
    cluster.views.dead.add(node_id)
    cluster.reads.cut_off(node_id)
    cluster.transfers.cut_off(node_id)
    cluster.changes.forget(node_id)
    del cluster.roles[node_id]
    cluster.directory.node_gone(node_id)
    lost = [request for request in cluster.requests.values() if request.request_id in affected]
    waiting = [leg for leg in answers if not leg.granted and not leg.prefill.gone]
    for leg in waiting:  # their prompts are elsewhere, and go to another node
        lost.remove(leg.request)
        leg.gone = False
    for request in lost:
        _let_go(cluster, request, generated.get(request.request_id, 0))
    for leg in waiting:
        cluster.choose_decode(leg)
    for request in lost:
        cluster.route_again(request)
    cluster.fetching.holder_lost(node_id)
    for listener in cluster.listeners:
        listener.members_changed()


def node_back(cluster: SimCluster, node_id: str) -> None:
    """A node that died is there again, empty."""
    node = cluster.nodes[node_id]
    node.alive = True
    cluster.views.dead.discard(node_id)
    cluster.directory.node_up(node_id, node.kv)
    cluster.changes.carry_out(cluster.split)
    for listener in cluster.listeners:
        listener.members_changed()


def _generated_tokens(node: SimNode, leg: DecodeLeg) -> int:
    """Tokens of the answer that this attempt gave."""
    if not leg.prefilled:
        return 0
    return 1 + int(node.iterations_of(leg) * leg.growth_tokens)


def _let_go(cluster: SimCluster, request: Request, generated_tokens: int) -> None:
    """End what other nodes do for a request."""
    prefill, decode = cluster.prefills.get(request.request_id), cluster.decodes.pop(request.request_id, None)
    if decode is not None and not decode.gone:
        cluster.nodes[decode.node_id].drop_decode(decode)
        cluster.changes.check(decode.node_id)
    if prefill is not None:
        if prefill.prefilled:
            generated_tokens = max(1, generated_tokens)
        cluster.withdraw(prefill)
    request.generated_tokens = min(request.generated_tokens + generated_tokens, request.output_tokens - 1)


def _recover(cluster: SimCluster, node_id: str) -> None:
    cluster.nodes[node_id].slowness = 1.0
