"""What the arm's policies are shown of a request and of the nodes, as a gateway knows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from evolving.core.candidates import NodeView
from evolving.core.decode_routing import DecodeNode
from evolving.core.directory_types import Match, NodeDepth
from evolving.core.holders import HeldRun, HolderHint, fetchable_blocks, holder_hints, spare_share
from evolving.core.routing import Context
from evolving.core.terms import Role
from evolving_sim.arms.arm import Asked, PrefillNode
from evolving_sim.legs import PrefillLeg, Request
from evolving_sim.links import Links
from evolving_sim.sim_node import SimNode

NOTHING = NodeDepth()


@dataclass(slots=True, eq=False, repr=False)
class Views:
    """Of one cluster. `roles` are in effect; where there is no pool, nobody can fetch anything."""

    nodes: Mapping[str, SimNode]
    reads: Links
    pool: bool
    sent: Mapping[str, int]  # by prefill node, requests sent there that are not finished
    dead: set[str] = field(init=False, default_factory=set)  # nodes that others can't read from

    def readable(self, match: Match) -> Sequence[HeldRun]:
        """Who holds which blocks, as far as peers can read them now."""
        if not self.pool:
            return ()
        if not self.dead:
            return [HeldRun(run.first_block, run.blocks, run.l2_nodes) for run in match.holders]
        return [
            HeldRun(run.first_block, run.blocks, tuple(node_id for node_id in run.l2_nodes if node_id not in self.dead))
            for run in match.holders
        ]

    def asked(self, request: Request, match: Match, runs: Sequence[HeldRun], block_tokens: int) -> Asked:
        """The request; where nobody holds any of it, all blocks count as held twice: what is goes first."""
        tokens = request.context_tokens
        spare = spare_share(runs) if any(run.node_ids for run in runs) else 1.0
        context = Context(request.request_id, tokens, block_tokens, match.pool_blocks, spare)
        names = request.names[: tokens // block_tokens]
        return Asked(context, request.agent_id, request.branch_id, request.parent_branch_id, names)

    def prefill_nodes(
        self, match: Match, runs: Sequence[HeldRun], nodes: Sequence[SimNode], roles: Mapping[str, Role]
    ) -> list[PrefillNode]:
        """Those that could prefill."""
        views = []
        for node in nodes:
            depth = match.nodes.get(node.node_id, NOTHING)
            fetchable = fetchable_blocks(runs, node.node_id, depth.either_blocks) if self.pool else 0
            view = self._view(node, roles[node.node_id], depth, fetchable, node.wait_s)
            views.append(PrefillNode(view, list(node.sent_work.values()), self.sent.get(node.node_id, 0)))
        return views

    def decode_nodes(self, leg: PrefillLeg, nodes: Sequence[SimNode], roles: Mapping[str, Role]) -> list[DecodeNode]:
        """Those that could decode."""
        found = leg.match.nodes
        return [
            DecodeNode(
                node=self._view(node, roles[node.node_id], found.get(node.node_id, NOTHING), 0, 0.0),
                slots_free=node.slots_free,
                decoding=node.decoding,
                context_tokens=node.context_tokens,
                memory_tokens=node.memory_tokens,
                coefficients=node.config.decode,
                prefilled_here=node.node_id == leg.node_id,
            )
            for node in nodes
        ]

    def hints(self, runs: Sequence[HeldRun], node_id: str, own_blocks: int, end_block: int) -> Sequence[HolderHint]:
        """Whom a node fetches from: of several, whom the fewest read from now."""
        holders = {holder for run in runs for holder in run.node_ids}
        load = {holder: float(self.reads.reading_from(holder)) for holder in holders}
        return holder_hints(runs, node_id, own_blocks, end_block, load)

    def _view(self, node: SimNode, role: Role, depth: NodeDepth, fetchable_blocks: int, wait_s: float) -> NodeView:
        config = node.config
        return NodeView(
            node.node_id,
            role,
            True,
            wait_s,
            node.new_tokens_per_iteration,
            config.prefill,
            config.kv_bytes_per_token,
            (),
            depth.l1_blocks,
            depth.either_blocks,
            fetchable_blocks,
            config.fetch_tokens_per_s,
            node.fetch_backlog_tokens,
            node.room_tokens,
        )
