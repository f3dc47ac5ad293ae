"""evolving.internal.v1.DirectoryService: what gateways and node agents ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from evolving.core.errors import InvalidArgument, NeedFull
from evolving.internal.v1 import directory_pb2, directory_pb2_grpc
from evolving.runtime.errors import WrongPartition
from evolving.wire.directory import (
    begin_from_proto,
    begin_to_proto,
    branch_to_proto,
    check_id,
    check_names,
    match_to_proto,
    rematch_to_proto,
)
from evolving.wire.status import Context
from evolving_directory.audit import CountsQueries
from evolving_directory.errors import NodeTooSlow, NotFound
from evolving_directory.host import Host
from evolving_directory.node_stream import NodeStream
from evolving_directory.outbox import Outbox
from evolving_directory.settings import DirectorySettings

_HELLO_S = 10.0  # a stream that says nothing is nobody's


class InternalDirectoryService(directory_pb2_grpc.DirectoryServiceServicer):
    """Every method checks partition and term before anything else."""

    def __init__(self, host: Host, queries: CountsQueries, settings: DirectorySettings) -> None:
        self._host = host
        self._queries = queries
        self._settings = settings

    async def Begin(self, request: directory_pb2.BeginRequest, context: Context) -> directory_pb2.BeginResponse:
        """An unknown base is answered need_full, so that a directory that forgot is told anew."""
        self._check(request.partition_id)
        if not request.branch.branch_id:
            return self._match(request)
        event = begin_from_proto(request, request.tenant)
        started_s = self._host.now_s()
        try:
            if request.rematch:
                match = self._host.directory.rematch(started_s, event)
                return rematch_to_proto(event, match, self._host.connected)
            answer, effects = self._host.directory.begin(started_s, event)
        except NeedFull:
            return directory_pb2.BeginResponse(need_full=True)
        self._host.metrics.begin_seconds.observe(self._host.now_s() - started_s)
        self._host.carry_out(effects)
        await self._host.journal.settled()
        return begin_to_proto(answer, self._host.connected)

    async def Finish(self, request: directory_pb2.FinishRequest, context: Context) -> directory_pb2.FinishResponse:
        """The gateway's word that a request is over; the node's own comes too."""
        self._check(request.partition_id)
        effects = self._host.directory.request_done(
            self._host.now_s(), request.tenant, request.branch_id, request.request_id
        )
        self._host.carry_out(effects)
        await self._host.journal.settled()
        return directory_pb2.FinishResponse()

    async def End(self, request: directory_pb2.EndRequest, context: Context) -> directory_pb2.EndResponse:
        """Names the branches that ended by this call."""
        self._check(request.partition_id)
        for branch_id in request.branch_ids:
            check_id("branch_ids", branch_id)
        effects = self._host.directory.end(
            self._host.now_s(), request.tenant, list(request.branch_ids), request.subtree
        )
        ended = self._host.carry_out(effects)
        await self._host.journal.settled()
        return directory_pb2.EndResponse(ended_branch_ids=[branch.branch_id for branch in ended])

    async def ReadBranch(
        self, request: directory_pb2.ReadBranchRequest, context: Context
    ) -> directory_pb2.ReadBranchResponse:
        """One branch of a tenant."""
        self._check(request.partition_id)
        view = self._host.directory.branch(self._host.now_s(), request.tenant, request.branch_id)
        if view is None:
            raise NotFound(f"no branch {request.branch_id!r}")
        return directory_pb2.ReadBranchResponse(branch=branch_to_proto(view))

    async def ConnectNode(
        self, request_iterator: AsyncIterator[directory_pb2.ConnectNodeRequest], context: Context
    ) -> AsyncIterator[directory_pb2.ConnectNodeResponse]:
        """A node's stream: reading and sending go on side by side; either's end is the stream's."""
        hello = await self._hello(request_iterator)
        host, settings = self._host, self._settings
        outbox = Outbox(host.term, host.clock, settings.count_delay_s, settings.node_backlog_blocks)
        needs_counts = host.connect(hello, outbox)
        stream = NodeStream(host, self._queries, hello, outbox)
        reader = asyncio.create_task(_read(stream, request_iterator, outbox, needs_counts))
        try:
            async for message in outbox.messages():
                yield message
        except NodeTooSlow:
            host.metrics.cut_streams.labels("too_slow").inc()
            raise
        finally:
            reader.cancel()
            host.disconnect(hello.node_id, outbox)

    async def _hello(self, requests: AsyncIterator[directory_pb2.ConnectNodeRequest]) -> directory_pb2.NodeHello:
        try:
            async with asyncio.timeout(_HELLO_S):
                first = await anext(aiter(requests), None)
        except TimeoutError:
            raise InvalidArgument(f"no hello came within {_HELLO_S:g} s") from None
        if first is None or first.WhichOneof("event") != "hello":
            raise InvalidArgument("a node's stream begins with hello")
        hello = first.hello
        self._check(hello.partition_id)
        check_id("node_id", hello.node_id)
        check_id("incarnation", hello.incarnation)
        return hello

    def _match(self, request: directory_pb2.BeginRequest) -> directory_pb2.BeginResponse:
        """A request of no branch: nothing is kept of it, so there is no base either."""
        if request.base_blocks:
            return directory_pb2.BeginResponse(need_full=True)
        names = check_names("new_names", request.new_names)
        started_s = self._host.now_s()
        match = self._host.directory.match(started_s, names)
        self._host.metrics.match_seconds.observe(self._host.now_s() - started_s)
        return directory_pb2.BeginResponse(
            kind=directory_pb2.BEGIN_KIND_NO_BRANCH, match=match_to_proto(match, self._host.connected)
        )

    def _check(self, partition_id: str) -> None:
        if partition_id != self._settings.partition_id:
            raise WrongPartition(partition_id, self._settings.partition_id)
        self._host.check_serving()


async def _read(
    stream: NodeStream,
    requests: AsyncIterator[directory_pb2.ConnectNodeRequest],
    outbox: Outbox,
    needs_counts: bool,
) -> None:
    """Read to the end; whatever ended it ends the sending side too."""
    try:
        if needs_counts:
            await stream.send_all_counts()
        await stream.read(requests)
    except Exception as error:  # noqa: BLE001 - raised again by the sending side, where the call is answered
        outbox.close(error)
    else:
        outbox.close()
