"""Dynamo's KV router: the node where prompts not computed yet, this one included, are the fewest tokens (§2.3).

"Routing Concepts" of its documentation: cost = prefill_load_scale · max(active prefill blocks + the prompt's − overlap
credit, 0) + decode blocks, and the least wins. With disaggregated phases ("Disaggregated Serving") prefill nodes are
compared without decode blocks, decode nodes without prefill, overlap and sharing. What a node holds is known from its
events. Its queue and the decay of credit are off by default.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from evolving.core.decode_routing import DecodeNode
from evolving_sim.arms.arm import Asked, PrefillChoice, PrefillNode
from evolving_sim.arms.parameters import KvRouterConfig


@dataclass(slots=True)
class LeastPrefillCost:
    """Its choice of a prefill node. Of equals one is drawn."""

    config: KvRouterConfig
    seed: int
    _draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._draw = random.Random(f"{self.seed} least prefill cost")

    def choose(self, asked: Asked, nodes: Sequence[PrefillNode], _now_s: float) -> PrefillChoice:
        """As `PrefillPolicy` has it."""
        costs = [self.cost_blocks(asked, node) for node in nodes]
        least = [node for node, cost in zip(nodes, costs, strict=True) if cost == min(costs)]
        return PrefillChoice(self._draw.choice(least).view.node_id)

    def cost_blocks(self, asked: Asked, node: PrefillNode) -> float:
        """Cost of a prompt on a node, blocks.

        A prompt sent there counts with what was uncached of it until its first token is there.
        """
        config, view, size = self.config, node.view, asked.context.block_tokens
        active_blocks = sum(work.uncached_tokens for work in node.prefilling) / size
        in_host_blocks = view.any_blocks - view.l1_blocks
        in_pool_blocks = in_host_blocks + view.fetchable_blocks
        credit_blocks = (
            config.device_credit * view.l1_blocks
            + config.host_credit * in_host_blocks
            + config.pool_credit * in_pool_blocks
        )
        return config.prefill_load_scale * max(0.0, active_blocks + asked.context.tokens / size - credit_blocks)


@dataclass(slots=True)
class LeastActiveBlocks:
    """Its choice of a decode node: the fewest tokens of context among its requests. Of equals one is drawn."""

    seed: int
    _draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._draw = random.Random(f"{self.seed} least active blocks")

    def choose(self, _asked: Asked, nodes: Sequence[DecodeNode], _now_s: float) -> str:
        """As `DecodePolicy` has it."""
        fewest = min(node.context_tokens for node in nodes)
        return self._draw.choice([node for node in nodes if node.context_tokens == fewest]).node.node_id
