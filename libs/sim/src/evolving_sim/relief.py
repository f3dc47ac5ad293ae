"""A node that gets a phase takes its share of what waits for it at the others, as our gateways see to."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from evolving.core.routing import exceeds_quote, score_prefill
from evolving.core.terms import Role
from evolving_sim.legs import PrefillLeg

if TYPE_CHECKING:
    from evolving_sim.sim_cluster import SimCluster


def relieve(cluster: SimCluster, node_ids: Collection[str]) -> None:
    """Have prompts and answers leave the nodes they wait at for these, where that is much sooner.

    Those that came first are asked first, so that all queues keep their order.
    """
    if any(cluster.roles[node_id] is Role.PREFILL for node_id in node_ids):
        _relieve_queues(cluster, {node_id for node_id in node_ids if cluster.roles[node_id] is Role.PREFILL})
    if any(cluster.roles[node_id] is Role.DECODE for node_id in node_ids):
        _relieve_waiting(cluster, {node_id for node_id in node_ids if cluster.roles[node_id] is Role.DECODE})


def _relieve_queues(cluster: SimCluster, new: set[str]) -> None:
    others = [node for node in cluster.candidates(Role.PREFILL) if node.node_id not in new]
    legs = sorted((leg for node in others for leg in node.queue), key=lambda leg: leg.number)
    stay: dict[str, list[PrefillLeg]] = {node.node_id: [] for node in others}
    for leg in legs:
        left_s = cluster.nodes[leg.node_id].wait_behind_s(stay[leg.node_id])
        if exceeds_quote(left_s, _soonest_s(cluster, leg, new)):
            cluster.reroute(leg)
        else:
            stay[leg.node_id].append(leg)


def _soonest_s(cluster: SimCluster, leg: PrefillLeg, new: set[str]) -> float:
    """Predicted until the first token at the best of the new nodes."""
    nodes = [cluster.nodes[node_id] for node_id in sorted(new)]
    asked = cluster.views.asked(leg.request, leg.match, leg.runs, cluster.block_tokens)
    views = cluster.views.prefill_nodes(leg.match, leg.runs, nodes, cluster.roles)
    return min(score_prefill(asked.context, each.view, cluster.routing).ttft_s for each in views)


def _relieve_waiting(cluster: SimCluster, new: set[str]) -> None:
    others = [node for node in cluster.candidates(Role.DECODE) if node.node_id not in new]
    legs = sorted((leg for node in others for leg in node.waiting), key=lambda leg: leg.prefill.number)
    for leg in legs:
        if leg.granted:  # it was next where another one left
            continue
        views = cluster.views.decode_nodes(leg.prefill, cluster.candidates(Role.DECODE), cluster.roles)
        asked = cluster.views.asked(leg.request, leg.prefill.match, leg.prefill.runs, cluster.block_tokens)
        chosen = cluster.policies.decode.choose(asked, views, cluster.events.now_s)
        if chosen in new and cluster.nodes[chosen].slots_free:
            cluster.move_answer(leg)
