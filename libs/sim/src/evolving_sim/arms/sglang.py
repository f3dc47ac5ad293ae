"""SGLang Model Gateway's routing: by what went where, by session, in turn (§2.3, §5.1)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from evolving.core.decode_routing import DecodeNode
from evolving_sim.arms.arm import Asked, PrefillChoice, PrefillNode
from evolving_sim.arms.parameters import STICKY_NODES_MAX, CacheAffinityConfig
from evolving_sim.arms.seen_prefixes import SeenPrefixes


@dataclass(slots=True)
class CacheAffinity:
    """Policy `cache_aware`, as its source has it.

    A node's load is the requests sent there that haven't ended, in either phase. Where it is too uneven, the least
    loaded node is chosen; else the one to which the longest prefix of the prompt went, if that is a large enough share
    of the prompt; else the least loaded. The first of equals wins. Every choice is remembered but for one bound: the
    gateway forgets the longest unused beyond 67 million characters per node, here nothing is forgotten.
    """

    config: CacheAffinityConfig
    _seen: SeenPrefixes = field(init=False, default_factory=SeenPrefixes)

    def choose(self, asked: Asked, nodes: Sequence[PrefillNode], _now_s: float) -> PrefillChoice:
        """As `PrefillPolicy` has it."""
        self._seen.keep_only([node.view.node_id for node in nodes])
        node_id = self._match(asked) if self._balanced(nodes) else ""
        if not node_id:
            node_id = min(nodes, key=lambda node: node.open_requests).view.node_id
        self._seen.add(asked.names, node_id)
        return PrefillChoice(node_id)

    def _balanced(self, nodes: Sequence[PrefillNode]) -> bool:
        loads = [node.open_requests for node in nodes]
        most, least = max(loads), min(loads)
        far_apart = most - least > self.config.balance_abs_threshold
        return not (far_apart and most > least * self.config.balance_rel_threshold)

    def _match(self, asked: Asked) -> str:
        node_id, blocks = self._seen.match(asked.names)
        share = blocks * asked.context.block_tokens / max(1, asked.context.tokens)
        return node_id if share > self.config.cache_threshold else ""


@dataclass(slots=True)
class StickySession:
    """Policy `manual`: an agent, sub-agents included, stays on the node drawn for it while that node serves.

    When it doesn't, another is drawn; both are remembered, and the older one is preferred once it serves again.
    """

    seed: int
    _nodes: dict[str, list[str]] = field(init=False, default_factory=dict)  # by agent
    _draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._draw = random.Random(f"{self.seed} sticky sessions")

    def choose(self, asked: Asked, nodes: Sequence[PrefillNode], _now_s: float) -> PrefillChoice:
        """As `PrefillPolicy` has it."""
        serving = [node.view.node_id for node in nodes]
        known = self._nodes.setdefault(asked.agent_id, [])
        for node_id in known:
            if node_id in serving:
                return PrefillChoice(node_id)
        drawn = self._draw.choice(serving)
        self._nodes[asked.agent_id] = [*known, drawn][-STICKY_NODES_MAX:]
        return PrefillChoice(drawn)


@dataclass(slots=True)
class RoundRobin:
    """Policy `round_robin`: decode nodes in turn, as all baselines of the paper choose them (§5.1)."""

    _chosen: int = field(init=False, default=0)

    def choose(self, _asked: Asked, nodes: Sequence[DecodeNode], _now_s: float) -> str:
        """As `DecodePolicy` has it."""
        node = nodes[self._chosen % len(nodes)]
        self._chosen += 1
        return node.node.node_id
