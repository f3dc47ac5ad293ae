"""Dynamo's planner: nodes change phases by queue depth and KV utilisation (§2.2).

Its default target is `throughput` ("Planner Guide"): every few seconds each phase is looked at for itself. Prefill asks
for a node more when the queue of any node holds as many prompt tokens as the longest context has, cached or not, and
for one less when no queue holds a tenth of that. Decode asks for one more when the contexts that any node decodes or
has queued are more than its device memory holds, and for one less when those of no node are 0.6 of that.

What is queued it hears from the engines, SGLang's (`_build_queued_request_metrics` of its forward pass metrics):
prefill nodes tell of prompts that wait for room on their decode node, and of no others; decode nodes of all that wait
for room or for their KV. So a prompt that has room and waits to be computed counts for decode, and prefill seems idle:
"long agent contexts keep KV utilization on decode nodes persistently high" (§2.2).

The number of nodes is fixed ("pins the total and only redistributes", `min_gpu_budget`). What both phases ask for
together is brought to it in proportion, prefill's share rounded down where it is too much, up where it is too little
(planner/core/budget.py of 1.5): so a node more for decode comes from prefill, and a node more for prefill comes from
nowhere unless decode asks for one less. One node too few is within its tolerance, and would be left without a phase;
the paper's cluster never is, so that here nothing moves then. A node that moves is started anew; until it is up the
planner only observes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from evolving.core.planner import SplitShape
from evolving.core.terms import Role
from evolving_sim.arms.arm import Switch
from evolving_sim.arms.loads import Controlled, NodeLoad, move, node_loads, reshaped, shape_of
from evolving_sim.arms.parameters import DynamoPlannerConfig
from evolving_sim.events import EventHeap, Priority

AUTHOR = "dynamo"


@dataclass(slots=True)
class DynamoPlanner:
    """One run's."""

    config: DynamoPlannerConfig
    switches: list[Switch] = field(init=False, default_factory=list)
    _events: EventHeap = field(init=False)
    _cluster: Controlled = field(init=False)

    def begin(self, events: EventHeap, cluster: Controlled) -> None:
        """As `Controller` has it."""
        self._events, self._cluster = events, cluster
        events.after(self.config.first_look_s, Priority.DECISION, self._look)

    def _look(self) -> None:
        self._events.after(self.config.interval_s, Priority.DECISION, self._look)
        cluster = self._cluster
        if set(cluster.roles.values()) != {Role.PREFILL, Role.DECODE}:
            return  # a node restarts, or a phase has lost its last one
        before, loads = shape_of(cluster.roles), node_loads(cluster)
        wanted = self.wanted(loads)
        if wanted != before:
            asks = f"prefill asks for {self._prefill_asks(loads):+}, decode for {self._decode_asks(loads):+}"
            roles = reshaped(cluster.roles, wanted)
            self.switches.append(move(cluster, roles, AUTHOR, asks, self._events.now_s))

    def wanted(self, loads: Sequence[NodeLoad]) -> SplitShape:
        """The split of as many nodes that it goes to."""
        before = shape_of({load.node_id: load.role for load in loads})
        prefill, decode = before.prefill + self._prefill_asks(loads), before.decode + self._decode_asks(loads)
        nodes, asked_for = before.total, prefill + decode
        if asked_for == nodes - 1:
            return before
        share = prefill * nodes / asked_for
        prefill = math.floor(share) if asked_for > nodes else math.ceil(share)
        least = self.config.min_nodes
        prefill = max(least, min(prefill, nodes - least))
        return SplitShape(prefill, nodes - prefill)

    def _prefill_asks(self, loads: Sequence[NodeLoad]) -> int:
        depths = [load.awaiting_tokens / self.config.context_tokens for load in loads if load.role is Role.PREFILL]
        return self._asks(
            len(depths),
            any(depth >= self.config.prefill_up for depth in depths),
            all(depth < self.config.prefill_down for depth in depths),
        )

    def _decode_asks(self, loads: Sequence[NodeLoad]) -> int:
        used = [load.context_tokens / load.l1_tokens for load in loads if load.role is Role.DECODE]
        return self._asks(
            len(used),
            any(share > self.config.decode_up for share in used),
            all(share < self.config.decode_down for share in used),
        )

    def _asks(self, nodes: int, more: bool, fewer: bool) -> int:
        if more:
            return 1
        return -1 if fewer and nodes > self.config.min_nodes else 0
