"""A planner, a directory and a node agent that answer what they are told to, for tests of tools."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from evolving.internal.v1 import node_agent_pb2, node_agent_pb2_grpc
from evolving.v1 import (
    common_pb2,
    directory_pb2,
    directory_pb2_grpc,
    gateway_pb2,
    gateway_pb2_grpc,
    planner_pb2,
    planner_pb2_grpc,
)
from evolving.wire.status import ErrorDetail, to_proto

Context = Any
Servicer = TypeVar("Servicer")


@dataclass
class Scripted:
    """What all have: errors to answer with first, the requests and the tokens they got."""

    errors: deque[ErrorDetail] = field(default_factory=deque)
    requests: list[Message] = field(default_factory=list)
    authorizations: list[str] = field(default_factory=list)

    def note(self, request: Message, context: Context) -> None:
        """Keep the request; fail if an error is due."""
        self.requests.append(request)
        self.authorizations.append(str(dict(context.invocation_metadata()).get("authorization", "")))
        if self.errors:
            context.abort_with_status(rpc_status.to_status(to_proto(self.errors.popleft())))

    def refuse(self, context: Context) -> NoReturn:
        """Of methods no test needs."""
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "not in the script")
        raise AssertionError("abort raises")


@dataclass
class ScriptedPlanner(Scripted, planner_pb2_grpc.PlannerServiceServicer):
    """Accepts any split: its epoch is one more, its roles the changes'. A shape it has no candidate for: nothing can be
    said of it."""

    split: planner_pb2.GetSplitResponse = field(default_factory=planner_pb2.GetSplitResponse)
    decisions: list[planner_pb2.Decision] = field(default_factory=list)
    evaluation: planner_pb2.Evaluation = field(default_factory=planner_pb2.Evaluation)
    models: list[planner_pb2.NodeModel] = field(default_factory=list)
    page: int = 1000

    def GetSplit(self, request: planner_pb2.GetSplitRequest, context: Context) -> planner_pb2.GetSplitResponse:
        self.note(request, context)
        return self.split

    def ProposeSplit(
        self, request: planner_pb2.ProposeSplitRequest, context: Context
    ) -> planner_pb2.ProposeSplitResponse:
        self.note(request, context)
        split = planner_pb2.Split()
        split.CopyFrom(self.split.split)
        split.epoch += 1
        split.roles.update(request.changes.roles)
        split.reason = request.reason
        return planner_pb2.ProposeSplitResponse(split=split)

    def ListDecisions(
        self, request: planner_pb2.ListDecisionsRequest, context: Context
    ) -> planner_pb2.ListDecisionsResponse:
        self.note(request, context)
        first = int(request.page_token or 0)
        last = first + min(request.page_size or 50, self.page)
        following = str(last) if last < len(self.decisions) else ""
        answer = planner_pb2.ListDecisionsResponse(decisions=self.decisions[first:last], next_page_token=following)
        if not request.with_evaluations:
            for decision in answer.decisions:
                decision.ClearField("evaluation")
        return answer

    def ReleaseSplit(
        self, request: planner_pb2.ReleaseSplitRequest, context: Context
    ) -> planner_pb2.ReleaseSplitResponse:
        self.note(request, context)
        return planner_pb2.ReleaseSplitResponse(split=self.split.split)

    def EvaluateSplit(
        self, request: planner_pb2.EvaluateSplitRequest, context: Context
    ) -> planner_pb2.EvaluateSplitResponse:
        self.note(request, context)
        answer = planner_pb2.EvaluateSplitResponse(evaluation=self.evaluation)
        for candidate in self.evaluation.candidates:
            if request.HasField("shape") and candidate.shape == request.shape:
                answer.candidate.CopyFrom(candidate)
        return answer

    def GetModel(self, request: planner_pb2.GetModelRequest, context: Context) -> planner_pb2.GetModelResponse:
        self.note(request, context)
        return planner_pb2.GetModelResponse(nodes=self.models)

    def RefitModel(self, request: planner_pb2.RefitModelRequest, context: Context) -> planner_pb2.RefitModelResponse:
        self.note(request, context)
        return planner_pb2.RefitModelResponse(nodes=self.models)


@dataclass
class ScriptedDirectory(Scripted, directory_pb2_grpc.DirectoryServiceServicer):
    """Knows `branches` and `blocks`."""

    branches: list[common_pb2.Branch] = field(default_factory=list)
    blocks: dict[bytes, directory_pb2.GetBlockResponse] = field(default_factory=dict)
    audit: directory_pb2.AuditResponse = field(default_factory=directory_pb2.AuditResponse)
    page: int = 1000

    def GetBlock(self, request: directory_pb2.GetBlockRequest, context: Context) -> directory_pb2.GetBlockResponse:
        self.note(request, context)
        if request.name not in self.blocks:
            context.abort(grpc.StatusCode.NOT_FOUND, "no copy and no count of this block")
        return self.blocks[request.name]

    def ReadBranch(
        self, request: directory_pb2.ReadBranchRequest, context: Context
    ) -> directory_pb2.ReadBranchResponse:
        self.note(request, context)
        for branch in self.branches:
            if (branch.tenant, branch.branch_id) == (request.tenant, request.branch_id):
                return directory_pb2.ReadBranchResponse(branch=branch)
        context.abort(grpc.StatusCode.NOT_FOUND, f"unknown branch {request.branch_id}")
        raise AssertionError("abort raises")

    def ListBranches(
        self, request: directory_pb2.ListBranchesRequest, context: Context
    ) -> directory_pb2.ListBranchesResponse:
        self.note(request, context)
        found = [branch for branch in self.branches if not request.tenant or branch.tenant == request.tenant]
        first = int(request.page_token or 0)
        last = first + min(request.page_size or 100, self.page)
        following = str(last) if last < len(found) else ""
        return directory_pb2.ListBranchesResponse(branches=found[first:last], next_page_token=following)

    def Audit(self, request: directory_pb2.AuditRequest, context: Context) -> directory_pb2.AuditResponse:
        self.note(request, context)
        return self.audit

    def GetStats(self, request: directory_pb2.GetStatsRequest, context: Context) -> directory_pb2.GetStatsResponse:
        self.note(request, context)
        return directory_pb2.GetStatsResponse(live_branches=len(self.branches))


@dataclass
class ScriptedNode(Scripted, node_agent_pb2_grpc.NodeAgentServiceServicer):
    """Says `status` once, then keeps the stream open; silent when it is None."""

    status: node_agent_pb2.WatchStatusResponse | None = None

    def WatchStatus(
        self, request: node_agent_pb2.WatchStatusRequest, context: Context
    ) -> Iterator[node_agent_pb2.WatchStatusResponse]:
        self.note(request, context)
        if self.status is not None:
            yield self.status
        ended = threading.Event()
        if context.add_callback(ended.set):
            ended.wait()

    def Prefill(
        self, request: node_agent_pb2.PrefillRequest, context: Context
    ) -> Iterator[node_agent_pb2.PrefillResponse]:
        self.refuse(context)

    def Decode(
        self, request: node_agent_pb2.DecodeRequest, context: Context
    ) -> Iterator[node_agent_pb2.DecodeResponse]:
        self.refuse(context)

    def Abort(self, request: node_agent_pb2.AbortRequest, context: Context) -> node_agent_pb2.AbortResponse:
        self.refuse(context)

    def ReadDigests(
        self, request: node_agent_pb2.ReadDigestsRequest, context: Context
    ) -> node_agent_pb2.ReadDigestsResponse:
        self.refuse(context)


@dataclass
class ScriptedModels(Scripted, gateway_pb2_grpc.GatewayServiceServicer):
    """A gateway that lists `models` and refuses everything else."""

    models: list[gateway_pb2.Model] = field(default_factory=list)

    def Generate(
        self, request: gateway_pb2.GenerateRequest, context: Context
    ) -> Iterator[gateway_pb2.GenerateResponse]:
        self.refuse(context)

    def EndBranches(self, request: gateway_pb2.EndBranchesRequest, context: Context) -> gateway_pb2.EndBranchesResponse:
        self.refuse(context)

    def GetBranch(self, request: gateway_pb2.GetBranchRequest, context: Context) -> gateway_pb2.GetBranchResponse:
        self.refuse(context)

    def ListModels(self, request: gateway_pb2.ListModelsRequest, context: Context) -> gateway_pb2.ListModelsResponse:
        self.note(request, context)
        return gateway_pb2.ListModelsResponse(models=self.models)


_ADD: dict[type[Scripted], Callable[[Any, Any], None]] = {
    ScriptedPlanner: planner_pb2_grpc.add_PlannerServiceServicer_to_server,
    ScriptedDirectory: directory_pb2_grpc.add_DirectoryServiceServicer_to_server,
    ScriptedNode: node_agent_pb2_grpc.add_NodeAgentServiceServicer_to_server,
    ScriptedModels: gateway_pb2_grpc.add_GatewayServiceServicer_to_server,
}


@contextmanager
def running(servicer: Scripted, *, serving: bool = True) -> Iterator[str]:
    """Serve in threads; the address. Health says `serving`."""
    server = grpc.server(ThreadPoolExecutor(4))
    _ADD[type(servicer)](servicer, server)
    checks = health.HealthServicer()
    states = health_pb2.HealthCheckResponse
    checks.set("", states.SERVING if serving else states.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def nobody() -> str:
    """An address where nobody listens."""
    with running(ScriptedPlanner()) as address:
        return address
