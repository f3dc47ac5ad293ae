"""The planner's gRPC methods for operators. Any planner answers reads; only the leading one takes proposals."""

from __future__ import annotations

from evolving.core.planner import (
    Decision,
    Split,
    SplitShape,
    effective_roles,
    propose_changes,
    propose_shape,
)
from evolving.runtime.clock import Clock
from evolving.runtime.errors import InvalidRequest, NotLeader, NotReady
from evolving.runtime.guard import current_caller
from evolving.runtime.store import Fenced
from evolving.v1 import planner_pb2, planner_pb2_grpc
from evolving.wire.status import Context
from evolving_planner import wire
from evolving_planner.office import Office
from evolving_planner.view import View

_PAGE_DEFAULT, _PAGE_MAX = 50, 1000
_LONGEST_REASON = 1000


class PlannerService(planner_pb2_grpc.PlannerServiceServicer):
    """evolving.v1.PlannerService."""

    def __init__(self, view: View, office: Office, clock: Clock) -> None:
        self._view = view
        self._office = office
        self._clock = clock

    async def GetSplit(self, request: planner_pb2.GetSplitRequest, context: Context) -> planner_pb2.GetSplitResponse:
        """The split by this planner's newest knowledge; served while etcd is away."""
        _require_loaded(self._view)
        nodes = self._view.nodes
        return planner_pb2.GetSplitResponse(
            split=wire.split_to_proto(self._view.split),
            leader_address=leader_address(self._view, self._office),
            nodes=[
                planner_pb2.NodeView(
                    node_id=node_id,
                    role=wire.role_to_proto(role),
                    address=nodes[node_id].address,
                    incarnation=nodes[node_id].incarnation,
                )
                for node_id, role in effective_roles(self._view.split, nodes).items()
            ],
        )

    async def ProposeSplit(
        self, request: planner_pb2.ProposeSplitRequest, context: Context
    ) -> planner_pb2.ProposeSplitResponse:
        """Decide and write; the answer is what is in force now."""
        if len(request.reason) > _LONGEST_REASON:
            raise InvalidRequest(f"the reason is longer than {_LONGEST_REASON} characters")
        author = f"operator:{current_caller().tenant}"
        wanted = request.WhichOneof("proposal")
        shape = SplitShape(request.shape.prefill_nodes, request.shape.decode_nodes) if wanted == "shape" else None
        changes = wire.roles_from_proto(request.changes.roles)
        if wanted is None:
            raise InvalidRequest("give a shape or changes")

        def decide(split: Split, live: frozenset[str], prefill_share: float) -> Decision:
            if shape is not None:
                return propose_shape(
                    split,
                    live,
                    shape,
                    expected_epoch=request.expected_epoch,
                    reason=request.reason,
                    author=author,
                    now_s=self._clock.wall_s(),
                )
            return propose_changes(
                split,
                live,
                changes,
                expected_epoch=request.expected_epoch,
                reason=request.reason,
                author=author,
                prefill_share=prefill_share,
                now_s=self._clock.wall_s(),
            )

        try:
            split = await self._office.propose(decide)
        except (NotLeader, Fenced):
            raise not_leader(self._view, self._office) from None
        return planner_pb2.ProposeSplitResponse(split=wire.split_to_proto(split))

    async def ListDecisions(
        self, request: planner_pb2.ListDecisionsRequest, context: Context
    ) -> planner_pb2.ListDecisionsResponse:
        """Newest first. The page token is the number of the decision to go on below."""
        _require_loaded(self._view)
        size = min(request.page_size or _PAGE_DEFAULT, _PAGE_MAX)
        before = None
        if request.page_token:
            if not (request.page_token.isascii() and request.page_token.isdigit() and len(request.page_token) < 19):
                raise InvalidRequest("page_token is not one this service gave")
            before = int(request.page_token)
        decisions, following = self._view.history.page(size, before)
        return planner_pb2.ListDecisionsResponse(
            decisions=[wire.decision_to_proto(decision) for decision in decisions],
            next_page_token="" if following is None else str(following),
        )

    async def GetModel(self, request: planner_pb2.GetModelRequest, context: Context) -> planner_pb2.GetModelResponse:
        """What each node was configured with."""
        _require_loaded(self._view)
        nodes = sorted(self._view.nodes.values(), key=lambda node: node.node_id)
        return planner_pb2.GetModelResponse(nodes=[wire.model_to_proto(node) for node in nodes])


def _require_loaded(view: View) -> None:
    if not view.loaded.is_set():
        raise NotReady("etcd has not answered yet", retry_after_s=1.0)


def leader_address(view: View, office: Office) -> str:
    """Empty: nobody leads. While etcd is away the view may still name this planner, which knows better by its own
    clock."""
    return "" if view.leader_address == office.own_address and not office.is_leader() else view.leader_address


def not_leader(view: View, office: Office) -> NotLeader:
    """The refusal, naming who leads."""
    where = leader_address(view, office)
    message = f"the planner at {where} leads" if where else "no planner leads now"
    return NotLeader(message, metadata={"leader": where} if where else {})
