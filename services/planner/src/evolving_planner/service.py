"""The planner's public gRPC methods. Any planner answers what etcd has; only the leading one has measurements, and
takes proposals."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from evolving.core.modes import Hold, Mode, hold_in_force
from evolving.core.planner import (
    Decision,
    SplitShape,
    effective_roles,
    propose_changes,
    propose_keep,
    propose_shape,
    release,
)
from evolving.core.terms import Role
from evolving.runtime.clock import Clock
from evolving.runtime.errors import InvalidRequest, NotLeader, NotReady
from evolving.runtime.guard import current_caller
from evolving.runtime.store import Fenced
from evolving.v1 import planner_pb2, planner_pb2_grpc
from evolving.wire.status import Context
from evolving_planner import wire
from evolving_planner.learning import Learning
from evolving_planner.measures import Measures
from evolving_planner.office import Decide, Office, Situation
from evolving_planner.replanner import Replanner
from evolving_planner.view import View

_PAGE_DEFAULT, _PAGE_MAX = 50, 1000
_PAGE_BYTES_MAX = 3_000_000  # gRPC clients take 4 MiB unless they are told otherwise
_LONGEST_REASON = 1000
_LONGEST_HOLD_S = 10 * 366 * 86_400.0
_NODES_MAX = 10_000


class PlannerService(planner_pb2_grpc.PlannerServiceServicer):
    """evolving.v1.PlannerService."""

    def __init__(
        self,
        view: View,
        office: Office,
        replanner: Replanner,
        learning: Learning,
        measures: Measures,
        mode: Mode,
        clock: Clock,
    ) -> None:
        self._view = view
        self._office = office
        self._replanner = replanner
        self._learning = learning
        self._measures = measures
        self._mode = mode
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
            mode=self._mode.value,
            hold=wire.hold_to_proto(self._view.hold),
        )

    async def ProposeSplit(
        self, request: planner_pb2.ProposeSplitRequest, context: Context
    ) -> planner_pb2.ProposeSplitResponse:
        """Decide and write; the answer is what is in force now."""
        author = f"operator:{current_caller().tenant}"
        decide = _proposal(request, author, self._hold_until(request))
        async with self._leading():
            split = await self._office.decide(decide)
        return planner_pb2.ProposeSplitResponse(split=wire.split_to_proto(split))

    async def ReleaseSplit(
        self, request: planner_pb2.ReleaseSplitRequest, context: Context
    ) -> planner_pb2.ReleaseSplitResponse:
        """End the hold; nothing is decided where there is none."""
        _require_reason(request.reason)
        author = f"operator:{current_caller().tenant}"

        def decide(now: Situation) -> Decision | None:
            if hold_in_force(now.hold, now.now_s) is None:
                return None
            return release(
                now.split, reason=request.reason, author=author, prefill_share=now.prefill_share, now_s=now.now_s
            )

        async with self._leading():
            split = await self._office.decide(decide)
        return planner_pb2.ReleaseSplitResponse(split=wire.split_to_proto(split))

    async def EvaluateSplit(
        self, request: planner_pb2.EvaluateSplitRequest, context: Context
    ) -> planner_pb2.EvaluateSplitResponse:
        """What every split would serve by the measurements up to now."""
        _require_loaded(self._view)
        wanted = _shape(request.shape) if request.HasField("shape") else None
        self._require_term()
        roles = effective_roles(self._view.split, self._view.nodes).values()
        serving = sum(role in (Role.PREFILL, Role.DECODE) for role in roles)
        if wanted is not None and wanted.total != serving:
            raise InvalidRequest(f"{wanted} asks for {wanted.total} nodes, {serving} serve one phase each")
        evaluation = await self._replanner.what_if()
        candidate = evaluation.candidate(wanted) if wanted is not None else None
        return planner_pb2.EvaluateSplitResponse(
            evaluation=wire.evaluation_to_proto(evaluation, self._measures.missing()),
            candidate=wire.candidate_to_proto(candidate) if candidate is not None else None,
        )

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
        found = self._view.history.before(before)
        answer = planner_pb2.ListDecisionsResponse()
        size_bytes = 0
        for kept in found[:size]:
            decision = wire.decision_to_proto(kept, with_evaluation=request.with_evaluations)
            size_bytes += decision.ByteSize()
            if answer.decisions and size_bytes > _PAGE_BYTES_MAX:
                break
            answer.decisions.append(decision)
            await asyncio.sleep(0)  # evaluations of large clusters take milliseconds each
        if len(answer.decisions) < len(found):
            answer.next_page_token = str(found[len(answer.decisions) - 1].number)
        return answer

    async def GetModel(self, request: planner_pb2.GetModelRequest, context: Context) -> planner_pb2.GetModelResponse:
        """How long work takes each node, and how well that is known."""
        _require_loaded(self._view)
        self._learning.follow()
        return planner_pb2.GetModelResponse(nodes=self._learning.models.views(self._view.nodes))

    async def RefitModel(
        self, request: planner_pb2.RefitModelRequest, context: Context
    ) -> planner_pb2.RefitModelResponse:
        """Fit nodes to what they reported lately, as far as that suffices."""
        _require_loaded(self._view)
        if len(request.node_ids) > _NODES_MAX:
            raise InvalidRequest(f"more than {_NODES_MAX} nodes are named")
        self._require_term()
        unknown = sorted(set(request.node_ids) - set(self._view.nodes))
        if unknown:
            raise InvalidRequest(f"no such node: {', '.join(unknown[:10])[:_LONGEST_REASON]}")
        async with self._leading():
            await self._learning.refit(set(request.node_ids or self._view.nodes))
        return planner_pb2.RefitModelResponse(nodes=self._learning.models.views(self._view.nodes))

    def _hold_until(self, request: planner_pb2.ProposeSplitRequest) -> float | None:
        """Unix time at which the hold asked for ends; None: it does not. Raises InvalidRequest."""
        if not (math.isfinite(request.hold_s) and 0 <= request.hold_s <= _LONGEST_HOLD_S):
            raise InvalidRequest(f"hold_s must be from 0 to {_LONGEST_HOLD_S:.0f}, got {request.hold_s}")
        if request.no_hold and request.hold_s > 0:
            raise InvalidRequest("hold_s and no_hold contradict each other")
        return self._clock.wall_s() + request.hold_s if request.hold_s > 0 else None

    def _require_term(self) -> None:
        """Raises NotLeader, NotReady."""
        if not self._office.is_leader():
            raise not_leader(self._view, self._office)
        if self._office.term is None:
            raise NotReady("what the last leader left is being read", retry_after_s=1.0)

    @asynccontextmanager
    async def _leading(self) -> AsyncIterator[None]:
        """Say who leads when it is not this planner."""
        try:
            yield
        except (NotLeader, Fenced):
            raise not_leader(self._view, self._office) from None


def _proposal(request: planner_pb2.ProposeSplitRequest, author: str, until_s: float | None) -> Decide:
    """The decision that an operator asks for. Raises InvalidRequest, SplitRefused."""
    _require_reason(request.reason)
    hold = None if request.no_hold else Hold(author, request.reason, until_s)
    wanted = request.WhichOneof("proposal")
    if wanted == "shape":
        return _to_shape(request, author, _shape(request.shape), hold)
    if wanted == "changes":
        return _to_roles(request, author, wire.roles_from_proto(request.changes.roles), hold)
    if wanted is None:
        raise InvalidRequest("give a shape, changes, or keep")
    if hold is None:
        raise InvalidRequest("keep with no_hold asks for nothing")
    return lambda now: propose_keep(
        now.split,
        expected_epoch=request.expected_epoch,
        reason=request.reason,
        author=author,
        prefill_share=now.prefill_share,
        now_s=now.now_s,
        hold=hold,
    )


def _to_shape(request: planner_pb2.ProposeSplitRequest, author: str, shape: SplitShape, hold: Hold | None) -> Decide:
    return lambda now: propose_shape(
        now.split,
        now.live,
        shape,
        expected_epoch=request.expected_epoch,
        reason=request.reason,
        author=author,
        now_s=now.now_s,
        hold=hold,
    )


def _to_roles(
    request: planner_pb2.ProposeSplitRequest, author: str, roles: dict[str, Role], hold: Hold | None
) -> Decide:
    return lambda now: propose_changes(
        now.split,
        now.live,
        roles,
        expected_epoch=request.expected_epoch,
        reason=request.reason,
        author=author,
        prefill_share=now.prefill_share,
        now_s=now.now_s,
        hold=hold,
    )


def _shape(shape: planner_pb2.SplitShape) -> SplitShape:
    """Raises SplitRefused."""
    return SplitShape(shape.prefill_nodes, shape.decode_nodes)


def _require_reason(reason: str) -> None:
    if len(reason) > _LONGEST_REASON:
        raise InvalidRequest(f"the reason is longer than {_LONGEST_REASON} characters")


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
