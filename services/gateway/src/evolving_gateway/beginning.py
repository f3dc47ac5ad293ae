"""A request's beginning and end at the directory: what it is told of the context, and the match that comes back."""

from __future__ import annotations

from dataclasses import dataclass

from evolving.core.blocks import HashedTokens, common_blocks, hash_tokens
from evolving.core.contexts import Contexts
from evolving.core.terms import NAME_BYTES
from evolving.internal.v1 import directory_pb2
from evolving.v1 import common_pb2
from evolving_gateway.directory import DirectoryClient
from evolving_gateway.router import NOWHERE, ModelFacts

_SETS_CONTEXT = (directory_pb2.BEGIN_KIND_NEW, directory_pb2.BEGIN_KIND_EXTEND, directory_pb2.BEGIN_KIND_REWRITE)


@dataclass(frozen=True, slots=True)
class Begun:
    """What is known of a request once it began."""

    version: int  # of its branch; 0 without one, or when the directory is away and the client named none
    match: directory_pb2.Match
    loss: common_pb2.LossCause.ValueType = common_pb2.LOSS_CAUSE_UNSPECIFIED  # why copies its branch counted are gone


class Beginning:
    """Begins requests and ends them again."""

    def __init__(self, directory: DirectoryClient, contexts: Contexts, partition_id: str) -> None:
        self._directory = directory
        self._contexts = contexts
        self._partition_id = partition_id

    async def begin(
        self,
        tenant: str,
        request_id: str,
        branch: common_pb2.BranchMetadata,
        model: ModelFacts,
        root: bytes,
        tokens: bytes,
        rematch: bool = False,
    ) -> Begun:
        """Tell the directory this context and learn where its blocks are.

        rematch: the request began before; `tokens` may then go on with output. Without an answer the match is empty.
        Raises DirectoryRefused.
        """
        near = self._contexts.get(tenant, branch.branch_id) if branch.branch_id else None
        if near is None and branch.parent_branch_id:  # the directory knows a fork's context by its parent's
            near = self._contexts.get(tenant, branch.parent_branch_id)
        if near is not None and (near.root, near.block_tokens) != (root, model.block_tokens):
            near = None  # another model's
        context = hash_tokens(root, tokens, model.block_tokens, near)
        base_blocks = common_blocks(near, tokens) if near else 0
        answer = await self._directory.begin(self._request(tenant, request_id, branch, context, base_blocks, rematch))
        if answer is not None and answer.need_full:
            self._contexts.forget(tenant, branch.branch_id)
            answer = await self._directory.begin(self._request(tenant, request_id, branch, context, 0, rematch))
        if answer is None or answer.need_full:
            return Begun(branch.version, NOWHERE)
        if branch.branch_id and not rematch and answer.kind in _SETS_CONTEXT:
            self._contexts.keep(tenant, branch.branch_id, context)
        return Begun(answer.version, answer.match, answer.loss)

    def finish(self, tenant: str, request_id: str, branch: common_pb2.BranchMetadata) -> None:
        """The request is over, whatever its outcome."""
        if not branch.branch_id:
            return
        if branch.end_after:
            self._contexts.forget(tenant, branch.branch_id)
        self._directory.finish_later(tenant, branch.branch_id, request_id)

    def _request(
        self,
        tenant: str,
        request_id: str,
        branch: common_pb2.BranchMetadata,
        context: HashedTokens,
        base_blocks: int,
        rematch: bool,
    ) -> directory_pb2.BeginRequest:
        base_bytes = base_blocks * NAME_BYTES
        return directory_pb2.BeginRequest(
            partition_id=self._partition_id,
            tenant=tenant,
            branch=branch if branch.branch_id else None,
            request_id=request_id,
            base_blocks=base_blocks,
            base_name=context.names[base_bytes - NAME_BYTES : base_bytes] if base_blocks else b"",
            new_names=context.names[base_bytes:],
            rematch=rematch,
        )
