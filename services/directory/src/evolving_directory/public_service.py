"""evolving.v1.DirectoryService: reads for operators."""

from __future__ import annotations

import base64
import json

from evolving.core.terms import NAME_BYTES
from evolving.runtime.credentials import DEFAULT_TENANT
from evolving.runtime.errors import InvalidRequest
from evolving.v1 import directory_pb2, directory_pb2_grpc
from evolving.wire.directory import audit_to_proto, block_to_proto, branch_to_proto, stats_to_proto
from evolving.wire.status import Context
from evolving_directory.audit import CountsQueries, audit
from evolving_directory.errors import NotFound
from evolving_directory.host import Host
from evolving_directory.slices import in_turns

_PAGE_DEFAULT, _PAGE_MAX = 100, 1000


class PublicDirectoryService(directory_pb2_grpc.DirectoryServiceServicer):
    """Answers from this directory's state, also once it is superseded."""

    def __init__(self, host: Host, queries: CountsQueries, audit_timeout_s: float) -> None:
        self._host = host
        self._queries = queries
        self._audit_timeout_s = audit_timeout_s

    async def GetBlock(
        self, request: directory_pb2.GetBlockRequest, context: Context
    ) -> directory_pb2.GetBlockResponse:
        """Where a block is; see Directory.block for what it costs."""
        if len(request.name) != NAME_BYTES:
            raise InvalidRequest(f"a block's name has {NAME_BYTES} bytes, not {len(request.name)}")
        view = await in_turns(self._host.directory.block_in_parts(request.name))
        if view is None:
            raise NotFound(f"no copy of block {request.name.hex()} and no branch with it")
        return block_to_proto(view)

    async def ReadBranch(
        self, request: directory_pb2.ReadBranchRequest, context: Context
    ) -> directory_pb2.ReadBranchResponse:
        """One branch of any tenant."""
        tenant = request.tenant or DEFAULT_TENANT
        view = self._host.directory.branch(self._host.now_s(), tenant, request.branch_id)
        if view is None:
            raise NotFound(f"tenant {tenant!r} has no branch {request.branch_id!r}")
        return directory_pb2.ReadBranchResponse(branch=branch_to_proto(view))

    async def ListBranches(
        self, request: directory_pb2.ListBranchesRequest, context: Context
    ) -> directory_pb2.ListBranchesResponse:
        """The page token holds the last tenant and id given, so a page stays right while branches come and go."""
        size = min(request.page_size or _PAGE_DEFAULT, _PAGE_MAX)
        after = _read_token(request.page_token) if request.page_token else None
        views = self._host.directory.branches(
            self._host.now_s(), after, size + 1, request.tenant or None, request.include_ended
        )
        page = views[:size]
        return directory_pb2.ListBranchesResponse(
            branches=[branch_to_proto(view) for view in page],
            next_page_token=_write_token(page[-1].tenant, page[-1].branch_id) if len(views) > size else "",
        )

    async def GetStats(
        self, request: directory_pb2.GetStatsRequest, context: Context
    ) -> directory_pb2.GetStatsResponse:
        """Sizes and counters."""
        return stats_to_proto(self._host.directory.stats(), self._host.term, self._host.connected)

    async def Audit(self, request: directory_pb2.AuditRequest, context: Context) -> directory_pb2.AuditResponse:
        """Nodes have as long as the caller leaves, at most the configured time."""
        left_s: float | None = context.time_remaining()
        timeout_s = self._audit_timeout_s if left_s is None else max(0.0, min(self._audit_timeout_s, left_s * 0.8))
        report, unreachable = await audit(self._host, self._queries, timeout_s)
        return audit_to_proto(report, unreachable)


def _write_token(tenant: str, branch_id: str) -> str:
    return base64.urlsafe_b64encode(json.dumps([tenant, branch_id]).encode()).decode()


def _read_token(token: str) -> tuple[str, str]:
    try:
        tenant, branch_id = json.loads(base64.b64decode(token, altchars=b"-_", validate=True))
    except ValueError:
        tenant = branch_id = None
    if not isinstance(tenant, str) or not isinstance(branch_id, str):
        raise InvalidRequest("page_token is not one this service gave")
    return tenant, branch_id
