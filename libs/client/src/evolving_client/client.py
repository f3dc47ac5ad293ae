"""The client: connections to a cluster's gateways, and the branches on it."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Self, Unpack

import grpc

from evolving.v1 import common_pb2, gateway_pb2
from evolving_client.branch import Branch, new_id
from evolving_client.context import Message, WritesPrompt, chosen_context
from evolving_client.errors import InvalidRequest
from evolving_client.gateways import Gateways
from evolving_client.generation import Generation, Listener, Prepare
from evolving_client.options import GenerateOptions, write_options
from evolving_client.retry import Retries, RetryPolicy


class Client:
    """Talks to one cluster. Use it as `async with Client("host:port") as client`, in one event loop.

    addresses: host:port of the gateways; calls stay with one until it fails.
    token: names the tenant, where the cluster has credentials.
    credentials: of TLS channels; None: plaintext.
    model: for requests that don't name one; "": the only one served.
    timeout_s: seconds for each request that doesn't give its own; None: no limit.
    """

    def __init__(
        self,
        *addresses: str,
        token: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        model: str = "",
        timeout_s: float | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        self._gateways = Gateways(addresses, token, credentials)
        self._model = model
        self._timeout_s = timeout_s
        self._policy = retry or RetryPolicy()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; calls in flight are cancelled. Branches stay as they are."""
        await self._gateways.close()

    def branch(self, branch_id: str | None = None) -> Branch:
        """A new branch, or the one of this id, which the cluster may know already."""
        if branch_id is None:
            return Branch(self, new_id(), version=1)
        return Branch(self, branch_id, version=0)

    def generate(
        self,
        *,
        messages: Iterable[Message] | None = None,
        text: str | None = None,
        token_ids: Iterable[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """A request that belongs to no branch: its KV is kept only as long as there is room to spare.

        Give one of messages, text and token_ids.
        """
        context = chosen_context(messages, text, token_ids)
        if context is None:
            raise InvalidRequest("give messages, text or token_ids")
        return self.start_generation(context, options, None)

    async def end(self, branch_ids: Iterable[str], *, subtree: bool = False) -> tuple[str, ...]:
        """Tell that these contexts, with `subtree` their descendants' too, won't be continued.

        Returns the ids that were live until now. Unknown and ended ids are no error.
        """
        request = gateway_pb2.EndBranchesRequest(branch_ids=list(branch_ids), subtree=subtree)
        answer = await self._gateways.call("EndBranches", request, self._retries(), gateway_pb2.EndBranchesResponse)
        return tuple(answer.ended_branch_ids)

    async def models(self) -> tuple[gateway_pb2.Model, ...]:
        """What the live nodes serve."""
        request = gateway_pb2.ListModelsRequest()
        answer = await self._gateways.call("ListModels", request, self._retries(), gateway_pb2.ListModelsResponse)
        return tuple(answer.models)

    async def read_branch(self, branch_id: str, retries: Retries | None = None) -> common_pb2.Branch:
        """What the cluster knows of one branch. Raises UnknownBranch when it knows nothing."""
        request = gateway_pb2.GetBranchRequest(branch_id=branch_id)
        answer = await self._gateways.call(
            "GetBranch", request, retries or self._retries(), gateway_pb2.GetBranchResponse
        )
        return answer.branch

    def start_generation(
        self,
        context: WritesPrompt,
        options: GenerateOptions,
        branch: common_pb2.BranchMetadata | None,
        *,
        prepare: Prepare | None = None,
        listener: Listener | None = None,
    ) -> Generation:
        """What `generate` of client and branch share: the request, with an id that makes it repeatable."""
        request = gateway_pb2.GenerateRequest(request_id=new_id(), model=self._model, branch=branch)
        context.write_to(request)
        write_options(options, request)
        return Generation(
            self._gateways,
            request,
            policy=self._policy,
            timeout_s=options.get("timeout_s", self._timeout_s),
            prepare=prepare,
            listener=listener,
        )

    def _retries(self) -> Retries:
        return Retries(self._policy, self._timeout_s)
