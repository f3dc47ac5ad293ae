"""What a node gets from the pool, where something else chose the node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from evolving.core.routing import RoutingConfig, score_prefill
from evolving_sim.arms.arm import Asked, PrefillChoice, PrefillNode, PrefillPolicy


@dataclass(frozen=True, slots=True)
class FetchesAll:
    """All that peers hold: what a pool below the engine does, which looks up what a prompt lacks (§2.3)."""

    inner: PrefillPolicy

    def choose(self, asked: Asked, nodes: Sequence[PrefillNode], now_s: float) -> PrefillChoice:
        """As `PrefillPolicy` has it."""
        choice = self.inner.choose(asked, nodes, now_s)
        return replace(choice, fetched_blocks=_node(nodes, choice).view.fetchable_blocks)


@dataclass(frozen=True, slots=True)
class FetchesSooner:
    """As much as makes the first token come soonest on that node: our data plane under another's routing (§5.3)."""

    inner: PrefillPolicy
    routing: RoutingConfig

    def choose(self, asked: Asked, nodes: Sequence[PrefillNode], now_s: float) -> PrefillChoice:
        """As `PrefillPolicy` has it."""
        choice = self.inner.choose(asked, nodes, now_s)
        score = score_prefill(asked.context, _node(nodes, choice).view, self.routing)
        return replace(choice, fetched_blocks=score.fetched_blocks)


def _node(nodes: Sequence[PrefillNode], choice: PrefillChoice) -> PrefillNode:
    return next(node for node in nodes if node.view.node_id == choice.node_id)
