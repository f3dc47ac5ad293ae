"""Arrow: a node changes its phase as soon as requests are predicted to miss their targets (§2.1, §2.2).

Sections and algorithms named here are those of Arrow's paper (arXiv 2505.11916), as the implementation Narwhal refers
to them. Prefill is predicted from a prompt's whole length, as if nothing of it were cached (§3.1), decode from the
batch. A request for which no node of its phase meets the target moves one in from the other phase (§5.3), and so does,
towards decode, a look at the loads every second (§5.5). Where requests go is not Arrow's here: the paper that compares
routes all baselines alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from evolving.core.decode_routing import DecodeNode
from evolving.core.terms import Role
from evolving.core.timemodel import PrefillSums
from evolving.core.work import query_key_pairs
from evolving_sim.arms.arm import Asked, DecodePolicy, PrefillChoice, PrefillNode, PrefillPolicy, Switch
from evolving_sim.arms.loads import Controlled, NodeLoad, move, node_loads
from evolving_sim.arms.parameters import ArrowConfig
from evolving_sim.events import EventHeap, Priority
from evolving_sim.node_config import NodeConfig

AUTHOR = "arrow"


def profiled_prefill_s(tokens: int, config: NodeConfig) -> float:
    """T(r): seconds of a prompt by its length alone, as a profile without any cache has them (quadratic)."""
    iterations = math.ceil(tokens / config.chunk_tokens)
    return config.prefill.c0_s * iterations + config.prefill.marginal_s(PrefillSums(tokens, query_key_pairs(tokens, 0)))


def profiled_tpot_s(requests: int, context_tokens: int, config: NodeConfig) -> float:
    """Seconds per token of a batch; 0 without one."""
    if requests == 0:
        return 0.0
    iteration_s = config.decode.decode_iteration_s(requests, context_tokens, config.tokens_per_request)
    return iteration_s / config.accepted_tokens


@dataclass(slots=True)
class ArrowScheduler:
    """Which nodes prefill and which decode."""

    config: ArrowConfig
    switches: list[Switch] = field(init=False, default_factory=list)
    _events: EventHeap = field(init=False)
    _cluster: Controlled = field(init=False)
    _sustained: int = field(init=False, default=0)
    _to_decode_s: float = field(init=False)  # when a node last went there; the start counts

    def begin(self, events: EventHeap, cluster: Controlled) -> None:
        """As `Controller` has it."""
        self._events, self._cluster, self._to_decode_s = events, cluster, events.now_s
        self._look_again()

    # -- what moves nodes

    def prompt_comes(self, asked: Asked, nodes: Sequence[PrefillNode]) -> None:
        """Move a node in where none is predicted to give a first token in time (algorithm 1)."""
        if not any(self._ttft_s(asked, node) <= self.config.ttft_target_s for node in nodes):
            # Once this moment's arrivals are where they go: the node isn't there yet for the one that asked for it.
            self._events.after(0.0, Priority.DECISION, self._help_prefill)

    def answer_begins(self, asked: Asked, nodes: Sequence[DecodeNode]) -> None:
        """Move a node in where none is predicted to keep the time per token (algorithm 1)."""
        if not any(self._tpot_s(asked, node) <= self.config.tpot_target_s for node in nodes):
            self._events.after(0.0, Priority.DECISION, self._help_decode)

    def _ttft_s(self, asked: Asked, node: PrefillNode) -> float:
        config = self._cluster.configs[node.view.node_id]
        prompts = [work.uncached_tokens + work.cached_tokens for work in node.prefilling]
        return sum(profiled_prefill_s(tokens, config) for tokens in (*prompts, asked.context.tokens))

    def _tpot_s(self, asked: Asked, node: DecodeNode) -> float:
        config = self._cluster.configs[node.node.node_id]
        return profiled_tpot_s(node.decoding + 1, node.context_tokens + asked.context.tokens, config)

    def _help_prefill(self) -> None:
        if self._decode_load(node_loads(self._cluster)) < self.config.shrink:
            self._flip(Role.PREFILL, "no node meets the TTFT")

    def _help_decode(self) -> None:
        self._flip(Role.DECODE, "no node keeps the TPOT")

    def _look_again(self) -> None:
        self._events.after(self.config.interval_s, Priority.DECISION, self._look)

    def _look(self) -> None:
        """Algorithm 2: decode gets a node when it is loaded for a while, or more so than an idle prefill."""
        self._look_again()
        loads = node_loads(self._cluster)
        prefill, decode = self._prefill_load(loads), self._decode_load(loads)
        loaded = decode >= self.config.expand or prefill <= self.config.shrink <= decode
        self._sustained = self._sustained + 1 if loaded else 0
        if self._sustained >= self.config.sustained_intervals and self._flip(Role.DECODE, "decode is loaded"):
            self._sustained = 0

    # -- loads, relative to the targets

    def _prefill_load(self, loads: Sequence[NodeLoad]) -> float:
        queues_s = [self._queue_s(load) for load in loads if load.role is Role.PREFILL]
        return sum(queues_s) / len(queues_s) / self.config.ttft_target_s if queues_s else 0.0

    def _queue_s(self, load: NodeLoad) -> float:
        config = self._cluster.configs[load.node_id]
        return sum(profiled_prefill_s(tokens, config) for tokens in load.prompts_tokens)

    def _decode_load(self, loads: Sequence[NodeLoad]) -> float:
        tpots_s = [
            profiled_tpot_s(load.decoding, load.context_tokens, self._cluster.configs[load.node_id])
            for load in loads
            if load.role is Role.DECODE
        ]
        return sum(tpots_s) / len(tpots_s) / self.config.tpot_target_s if tpots_s else 0.0

    # -- a node changes its phase

    def _flip(self, target: Role, reason: str) -> bool:
        """Algorithm 3: the node of the other phase that gives up the least; the last one stays. Whether one moved."""
        now_s = self._events.now_s
        if target is Role.DECODE and now_s - self._to_decode_s < self.config.cooldown_s:
            return False
        source = Role.DECODE if target is Role.PREFILL else Role.PREFILL
        loads = [load for load in node_loads(self._cluster) if load.role is source]
        if len(loads) <= 1:
            return False
        chosen = min(loads, key=self._flip_cost)
        roles = {**self._cluster.roles, chosen.node_id: target}
        if target is Role.DECODE:
            self._to_decode_s = now_s
        self.switches.append(move(self._cluster, roles, AUTHOR, reason, now_s))
        return True

    def _flip_cost(self, load: NodeLoad) -> tuple[bool, float]:
        """Nodes with work of the phase they go to first, then the least work of the one they leave."""
        if load.role is Role.PREFILL:
            return not load.decoding, self._queue_s(load)
        return not load.prompts_tokens, load.context_tokens


@dataclass(frozen=True, slots=True)
class ArrowPrefill:
    """Another's choice of a prefill node; Arrow hears of the request."""

    inner: PrefillPolicy
    scheduler: ArrowScheduler

    def choose(self, asked: Asked, nodes: Sequence[PrefillNode], now_s: float) -> PrefillChoice:
        """As `PrefillPolicy` has it."""
        self.scheduler.prompt_comes(asked, nodes)
        return self.inner.choose(asked, nodes, now_s)


@dataclass(frozen=True, slots=True)
class ArrowDecode:
    """Another's choice of a decode node; Arrow hears of the request."""

    inner: DecodePolicy
    scheduler: ArrowScheduler

    def choose(self, asked: Asked, nodes: Sequence[DecodeNode], now_s: float) -> str:
        """As `DecodePolicy` has it."""
        self.scheduler.answer_begins(asked, nodes)
        return self.inner.choose(asked, nodes, now_s)
