"""The gRPC face of a node."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import cast

from evolving.core.routing import exceeds_quote
from evolving.internal.v1 import node_agent_pb2, node_agent_pb2_grpc
from evolving.runtime.errors import InvalidRequest, WrongPartition
from evolving.wire.status import Context
from evolving_node_agent.engines.port import DecodeEvent, EngineError, PrefillEvent
from evolving_node_agent.errors import QueueFull, from_engine
from evolving_node_agent.legs import DecodeRun, PrefillRun
from evolving_node_agent.node import Node
from evolving_node_agent.reporter import DirectoryReporter
from evolving_node_agent.settings import NodeAgentSettings
from evolving_node_agent.translate import decode_job, names_and_tier, prefill_job
from evolving_node_agent.waits import LegSize
from evolving_node_agent.work import WorkReporter

_RETRY_MIN_S, _RETRY_MAX_S = 0.1, 5.0


class NodeAgentService(node_agent_pb2_grpc.NodeAgentServiceServicer):
    """Checks what comes and runs it on the engine. Failures are typed; see errors.py."""

    def __init__(
        self, settings: NodeAgentSettings, node: Node, directory: DirectoryReporter, work: WorkReporter
    ) -> None:
        self._settings = settings
        self._node = node
        self._directory = directory
        self._work = work

    async def Prefill(
        self, request: node_agent_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[node_agent_pb2.PrefillResponse]:
        """Queued, then what the engine says; or requote alone. Leaving the stream aborts the leg."""
        self._check(request.partition_id)
        node, settings = self._node, self._settings
        node.roles.heard(request.epoch)
        job = prefill_job(request, node.info, node.contexts, settings.fetch_deadline_s, settings.keep_s)
        if not 0 <= request.quoted_wait_s < math.inf:
            raise InvalidRequest(f"quoted_wait_s must be finite and not negative, got {request.quoted_wait_s}")
        if request.leg_id in node.waiting or request.leg_id in node.running:
            raise InvalidRequest(f"leg {request.leg_id} is running")
        wait_s = node.wait_s()
        if request.may_requote and exceeds_quote(wait_s, request.quoted_wait_s):
            yield self._answered(node_agent_pb2.PrefillResponse(requote=node_agent_pb2.PrefillRequote()))
            return
        if len(node.waiting) >= settings.max_queued_legs:
            retry_s = min(max(wait_s / 2, _RETRY_MIN_S), _RETRY_MAX_S)
            raise QueueFull(f"{len(node.waiting)} prefill legs wait here", retry_after_s=retry_s)
        run = PrefillRun(request, job, node, self._directory, self._work)
        size = LegSize(len(job.tokens), min(request.expected_cached_tokens, len(job.tokens) - 1))
        with node.prefill_leg(request.leg_id, size):
            yield self._answered(node_agent_pb2.PrefillResponse(queued=node_agent_pb2.PrefillQueued()))
            # The port promises an iterator that can be closed; closing it is how a leg is aborted.
            events = cast("AsyncGenerator[PrefillEvent, None]", node.engine.prefill(job))
            try:
                async with aclosing(events):
                    async for event in events:
                        yield self._answered(run.take(event))
            except EngineError as error:
                raise from_engine(error) from error

    async def Decode(
        self, request: node_agent_pb2.DecodeRequest, context: Context
    ) -> AsyncIterator[node_agent_pb2.DecodeResponse]:
        """What the engine says. Leaving the stream aborts the leg."""
        self._check(request.partition_id)
        node = self._node
        node.roles.heard(request.epoch)
        job = decode_job(request, node.info, node.contexts, self._settings.reserve_deadline_s)
        run = DecodeRun(request, job, node, self._directory, self._work)
        events = cast("AsyncGenerator[DecodeEvent, None]", node.engine.decode(job))
        try:
            async with aclosing(events):
                async for event in events:
                    response = run.take(event)
                    response.epoch = node.roles.newest_epoch
                    yield response
        except EngineError as error:
            raise from_engine(error) from error
        finally:
            run.over()

    async def Abort(self, request: node_agent_pb2.AbortRequest, context: Context) -> node_agent_pb2.AbortResponse:
        """End a leg in any stage."""
        self._check(request.partition_id)
        try:
            return node_agent_pb2.AbortResponse(found=await self._node.engine.abort(request.leg_id))
        except EngineError as error:
            raise from_engine(error) from error

    async def WatchStatus(
        self, request: node_agent_pb2.WatchStatusRequest, context: Context
    ) -> AsyncIterator[node_agent_pb2.WatchStatusResponse]:
        """The node's state, pushed; ends when the node drains."""
        self._check(request.partition_id)
        async with aclosing(self._node.watch()) as statuses:
            async for status in statuses:
                yield status

    async def ReadDigests(
        self, request: node_agent_pb2.ReadDigestsRequest, context: Context
    ) -> node_agent_pb2.ReadDigestsResponse:
        """SHA-256 of KV bytes; zeros where a block isn't held."""
        self._check(request.partition_id)
        names, tier = names_and_tier(request)
        try:
            digests = await self._node.engine.block_digests(names, tier)
        except EngineError as error:
            raise from_engine(error) from error
        return node_agent_pb2.ReadDigestsResponse(digests=_joined(names, digests))

    def _answered(self, response: node_agent_pb2.PrefillResponse) -> node_agent_pb2.PrefillResponse:
        response.wait_s = self._node.wait_s()
        response.epoch = self._node.roles.newest_epoch
        return response

    def _check(self, partition_id: str) -> None:
        if partition_id != self._settings.partition_id:
            raise WrongPartition(partition_id, self._settings.partition_id)


def _joined(names: Sequence[bytes], digests: Mapping[bytes, bytes]) -> bytes:
    return b"".join(digests.get(name, bytes(32)) for name in names)
