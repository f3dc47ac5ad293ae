"""What becomes of a node that gets another role, and how long that takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from evolving.core.planner import Split, effective_roles
from evolving.core.terms import Phase, Role, Tier
from evolving_sim.arms.arm import IN_PLACE
from evolving_sim.events import Priority
from evolving_sim.relief import relieve

if TYPE_CHECKING:
    from evolving_sim.sim_cluster import SimCluster

_PHASES = {Role.PREFILL: Phase.PREFILL, Role.DECODE: Phase.DECODE}


@dataclass(slots=True, eq=False)
class RoleChange:
    """One node gets another role."""

    node_id: str
    old: Role
    new: Role
    decided_s: float
    old_done_s: float = math.nan  # the last request of the old phase that ran there left (§5.2 counts up to then)
    in_service_s: float = math.nan  # requests of the new phase are sent there from then on
    new_begun_s: float = math.nan  # it first computed for the new phase

    @property
    def took_s(self) -> float:
        """Until what it ran is finished and it is in service; nan: that is yet to be."""
        if math.isnan(self.old_done_s) or math.isnan(self.in_service_s):
            return math.nan
        return max(self.old_done_s, self.in_service_s) - self.decided_s


@dataclass(slots=True, eq=False, repr=False)
class RoleChanges:
    """Carries out what the split says, at the cost that the cluster's arm has it."""

    cluster: SimCluster
    all: list[RoleChange] = field(init=False, default_factory=list)
    _open: dict[str, RoleChange] = field(init=False, default_factory=dict)  # those not over, by node
    _last: dict[str, RoleChange] = field(init=False, default_factory=dict)  # by node

    def carry_out(self, split: Split) -> None:
        """A split is in force: of nodes that changed, what waits goes elsewhere; what runs finishes where it is."""
        cluster, before = self.cluster, self.cluster.roles
        cluster.split = split
        roles = effective_roles(split, [node_id for node_id, node in cluster.nodes.items() if node.alive])
        begun: list[RoleChange] = []
        for node_id, role in roles.items():
            old = before.get(node_id, role)
            if old is Role.DRAINING and node_id in self._open:  # out of service; it comes back as what it is to be then
                self._open[node_id].new = role
                roles[node_id] = Role.DRAINING
            elif old is not role:
                begun.append(RoleChange(node_id, old, role, cluster.events.now_s))
                if cluster.arm.switching.out_of_service_s:
                    roles[node_id] = Role.DRAINING
        cluster.roles = roles
        for change in begun:
            self._begin(change)
        changed = [change.node_id for change in begun]
        self._move_on(changed)
        if cluster.arm.switching == IN_PLACE:
            relieve(cluster, changed)
        for node_id in changed:
            self.check(node_id)

    def _begin(self, change: RoleChange) -> None:
        cluster, switching, node_id = self.cluster, self.cluster.arm.switching, change.node_id
        earlier = self._open.pop(node_id, None)
        if earlier is not None:
            earlier.old_done_s = change.decided_s  # what it waited for is of the phase it serves again
            self._over(earlier)
        self._open[node_id] = self._last[node_id] = change
        self.all.append(change)
        if switching.out_of_service_s:
            cluster.events.after(switching.out_of_service_s, Priority.ARRIVAL, lambda: self.check(node_id))
            return
        change.in_service_s = change.decided_s
        cluster.nodes[node_id].watched = _PHASES.get(change.new)
        cluster.directory.role_switch(node_id, change.old, change.new)
        if switching.loses_kv:
            cluster.nodes[node_id].kv.pool.clear()

    def _move_on(self, node_ids: list[str]) -> None:
        """What waits at these nodes for a phase that they don't serve goes to others."""
        cluster = self.cluster
        nodes = [cluster.nodes[node_id] for node_id in node_ids]
        prompts = [leg for node in nodes if not self._serves(node.node_id, Role.PREFILL) for leg in node.queue]
        answers = [leg for node in nodes if not self._serves(node.node_id, Role.DECODE) for leg in node.waiting]
        for prompt in prompts:  # a choice may change the split again, and with it all that follows
            if not prompt.gone:
                cluster.reroute(prompt)
        for answer in answers:
            if answer in cluster.nodes[answer.node_id].waiting:
                cluster.move_answer(answer)

    def _serves(self, node_id: str, phase: Role) -> bool:
        return self.cluster.nodes[node_id] in self.cluster.candidates(phase)

    def begun(self, node_id: str) -> None:
        """A node that got a phase computes for it."""
        self._last[node_id].new_begun_s = self.cluster.events.now_s

    def check(self, node_id: str) -> None:
        """A request left a node, or it may be back."""
        change = self._open.get(node_id)
        if change is None:
            return
        node, now_s = self.cluster.nodes[node_id], self.cluster.events.now_s
        old = _PHASES.get(change.old)
        if math.isnan(change.old_done_s) and (old is None or not node.busy_with(old)):
            change.old_done_s = now_s
        away_s = self.cluster.arm.switching.out_of_service_s
        if math.isnan(change.in_service_s) and node.empty and now_s >= change.decided_s + away_s:
            self._return(change)
        if not math.isnan(change.took_s):
            del self._open[node_id]
            self._over(change)

    def _return(self, change: RoleChange) -> None:
        """A node was started anew."""
        node = self.cluster.nodes[change.node_id]
        if self.cluster.arm.switching.loses_kv:
            for tier in Tier:
                node.kv.pool.lose(tier)
        change.in_service_s = self.cluster.events.now_s
        node.watched = _PHASES.get(change.new)
        self.cluster.roles[change.node_id] = change.new

    def _over(self, change: RoleChange) -> None:
        for listener in self.cluster.listeners:
            listener.role_changed(change)

    def forget(self, node_id: str) -> None:
        """A node died: its change is never over."""
        self._open.pop(node_id, None)
