"""The gateway's gRPC service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc.aio

from evolving.core.errors import CoreError
from evolving.runtime.channel import call_timeout_s
from evolving.runtime.errors import DeadlineExceeded, InvalidRequest, ServiceError
from evolving.runtime.guard import current_caller
from evolving.runtime.log import log_context
from evolving.runtime.tasks import end_tasks
from evolving.v1 import gateway_pb2, gateway_pb2_grpc
from evolving.wire.status import describe
from evolving_gateway.directory import DirectoryClient
from evolving_gateway.errors import QueueFull, Superseded
from evolving_gateway.known import Claim, KnownRequests
from evolving_gateway.request import Desk, Request
from evolving_gateway.validation import (
    MOST_ENDED_BRANCHES,
    body_digest,
    check_id,
    check_request,
    new_request_id,
    read_prompt,
)

_BUSY_RETRY_S = 0.5
_OUTBOX_MAX = 64  # messages a slow client may lag behind before its request is slowed
_DIRECTORY_CALL_S = 10.0

_Context = grpc.aio.ServicerContext[Any, Any]
_Message = gateway_pb2.GenerateResponse | None | BaseException  # None: complete


class GatewayService(gateway_pb2_grpc.GatewayServiceServicer):
    """Serves one partition."""

    def __init__(self, desk: Desk, directory: DirectoryClient, known: KnownRequests) -> None:
        self._desk = desk
        self._directory = directory
        self._known = known
        self._running = 0

    async def Generate(
        self, request: gateway_pb2.GenerateRequest, context: _Context
    ) -> AsyncGenerator[gateway_pb2.GenerateResponse, None]:
        """Stream one completion. The request runs in a task of its own, so that a later call of the same request can
        end this one with a status whatever it is waiting for."""
        arrived_s = self._desk.clock.now_s()
        deadline_s = arrived_s + call_timeout_s(context, self._desk.settings.request_deadline_s)
        if not request.request_id:
            request.request_id = new_request_id()
        outbox: asyncio.Queue[_Message] = asyncio.Queue(_OUTBOX_MAX)
        task = asyncio.create_task(self._fill(outbox, request, arrived_s, deadline_s))
        try:
            while (message := await outbox.get()) is not None:
                if isinstance(message, BaseException):
                    raise message
                yield message
        finally:
            await end_tasks(task)

    async def EndBranches(
        self, request: gateway_pb2.EndBranchesRequest, context: _Context
    ) -> gateway_pb2.EndBranchesResponse:
        """End branches of the caller's tenant."""
        if len(request.branch_ids) > MOST_ENDED_BRANCHES:
            raise InvalidRequest(f"{len(request.branch_ids)} branch ids; at most {MOST_ENDED_BRANCHES}")
        for branch_id in request.branch_ids:
            check_id(branch_id, "branch_ids")
        if not request.branch_ids:
            return gateway_pb2.EndBranchesResponse()
        ended = await self._directory.end(
            current_caller().tenant, request.branch_ids, request.subtree, call_timeout_s(context, _DIRECTORY_CALL_S)
        )
        return gateway_pb2.EndBranchesResponse(ended_branch_ids=ended)

    async def GetBranch(
        self, request: gateway_pb2.GetBranchRequest, context: _Context
    ) -> gateway_pb2.GetBranchResponse:
        """Read one branch of the caller's tenant."""
        check_id(request.branch_id, "branch_id")
        branch = await self._directory.read_branch(
            current_caller().tenant, request.branch_id, call_timeout_s(context, _DIRECTORY_CALL_S)
        )
        return gateway_pb2.GetBranchResponse(branch=branch)

    async def ListModels(
        self, request: gateway_pb2.ListModelsRequest, context: _Context
    ) -> gateway_pb2.ListModelsResponse:
        """What the live nodes serve; a model with several KV layouts is listed once for each."""
        models = [
            gateway_pb2.Model(
                model=facts.model,
                vocabulary_tokens=facts.vocabulary_tokens,
                max_prompt_tokens=facts.max_prompt_tokens,
                max_context_tokens=facts.max_context_tokens,
                block_tokens=facts.block_tokens,
                nodes=sum(node.ready for node in nodes),
            )
            for facts, nodes in self._desk.router.models().items()
        ]
        return gateway_pb2.ListModelsResponse(models=sorted(models, key=lambda model: (model.model, -model.nodes)))

    async def _fill(
        self, outbox: asyncio.Queue[_Message], request: gateway_pb2.GenerateRequest, arrived_s: float, deadline_s: float
    ) -> None:
        """Run the request; everything it says, then None or what ended it, goes into the outbox."""
        metrics = self._desk.metrics
        outcome = "ok"
        metrics.running.inc()
        self._running += 1
        try:
            with log_context(request_id=request.request_id, branch_id=request.branch.branch_id):
                await self._run(outbox, request, arrived_s, deadline_s)
            await outbox.put(None)
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except (ServiceError, CoreError) as error:
            outcome = describe(error).reason.lower()
            await outbox.put(error)
        except Exception as error:  # noqa: BLE001  a bug: the handler raises it, and the guard reports it
            outcome = "internal"
            await outbox.put(error)
        finally:
            self._running -= 1
            metrics.running.dec()
            metrics.requests.labels(outcome).inc()

    async def _run(
        self, outbox: asyncio.Queue[_Message], request: gateway_pb2.GenerateRequest, arrived_s: float, deadline_s: float
    ) -> None:
        if deadline_s <= arrived_s:
            raise DeadlineExceeded("the deadline had passed when the request came")
        if self._running > self._desk.settings.max_requests:
            raise QueueFull(f"{self._desk.settings.max_requests} requests are running", retry_after_s=_BUSY_RETRY_S)
        tenant = current_caller().tenant
        check_request(request)
        model = self._desk.router.model(request.model)
        prompt = await read_prompt(request, model, self._desk.tokenizer)
        task = _current_task()
        key = (tenant, request.request_id)
        claim = await self._known.claim(key, body_digest(request), task.cancel, self._desk.clock.now_s())
        try:
            run = Request(self._desk, request, tenant, model, prompt, arrived_s, deadline_s)
            await self._claimed(outbox, run, claim)
        finally:
            self._known.release(claim, self._desk.clock.now_s())

    async def _claimed(self, outbox: asyncio.Queue[_Message], run: Request, claim: Claim) -> None:
        """Run while this call holds the request id. Raises Superseded when another takes it."""
        try:
            async with aclosing(run.events(claim)) as events:
                async for event in events:
                    await outbox.put(event)
        except asyncio.CancelledError:
            if claim.superseded and _current_task().uncancel() == 0:
                raise Superseded("a later call with this request id goes on with it") from None
            raise


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task
