"""Our own routing: the rules of the product's core, called as a gateway calls them (§4.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evolving.core.decode_routing import DecodeNode, choose_decode
from evolving.core.routing import RoutingConfig, choose_prefill
from evolving_sim.arms.arm import Asked, PrefillChoice, PrefillNode


@dataclass(frozen=True, slots=True)
class LeastPredictedTtft:
    """Equation 7: the node with the least predicted time to first token, and the fetch that makes it so."""

    routing: RoutingConfig

    def choose(self, asked: Asked, nodes: Sequence[PrefillNode], _now_s: float) -> PrefillChoice:
        """As `PrefillPolicy` has it."""
        chosen = choose_prefill(asked.context, [node.view for node in nodes], self.routing).chosen
        assert chosen is not None, "the nodes serve"
        return PrefillChoice(chosen.node_id, chosen.fetched_blocks)


@dataclass(frozen=True, slots=True)
class LeastDecodeCost:
    """The node with a free slot where decoding costs least."""

    routing: RoutingConfig

    def choose(self, asked: Asked, nodes: Sequence[DecodeNode], _now_s: float) -> str:
        """As `DecodePolicy` has it."""
        chosen = choose_decode(asked.context, nodes, self.routing).chosen
        assert chosen is not None, "the nodes serve"
        return chosen.node_id
