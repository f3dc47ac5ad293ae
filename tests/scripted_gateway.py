"""A gateway that plays a script: what each Generate call does is said beforehand, what was asked is kept."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field

import grpc
from grpc import aio

from evolving.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from evolving.wire.status import ErrorDetail, abort_with

Context = aio.ServicerContext[object, object]


def refusal(status: grpc.StatusCode, reason: str, *, retry_after_s: float | None = None, **facts: str) -> ErrorDetail:
    """An error as the services send it."""
    return ErrorDetail(status, reason, f"{reason.lower()} on purpose", facts, retry_after_s)


GONE = refusal(grpc.StatusCode.UNAVAILABLE, "NOT_READY")


def output_ids(tokens: int) -> list[int]:
    """What the scripted model always says."""
    return [1000 + index for index in range(tokens)]


def text_of(token_ids: Iterable[int]) -> str:
    """Text of output tokens."""
    return "".join(f"<{token_id}>" for token_id in token_ids)


@dataclass(frozen=True, slots=True)
class Play:
    """How one Generate call goes.

    fail_at: fail with `error` when this output index would be sent; None: run to the end. 0 fails before `started`.
    hang_at: say nothing from this index on until cancelled. per_message: tokens in a message.
    held_text: sent after the last token, without ids.
    shift: added to the indices sent. tail: added to the result's ids. silent_end: end without a result.
    """

    fail_at: int | None = None
    error: ErrorDetail = GONE
    hang_at: int | None = None
    per_message: int = 1
    shift: int = 0
    tail: tuple[int, ...] = ()
    silent_end: bool = False
    held_text: str = ""
    finish_reason: int = gateway_pb2.FINISH_REASON_LENGTH


@dataclass(slots=True)
class ScriptedGateway(gateway_pb2_grpc.GatewayServiceServicer):
    """Serves `max_tokens` (8 when not given) tokens a call, or the next of `plays`."""

    plays: deque[Play] = field(default_factory=deque)
    requests: list[gateway_pb2.GenerateRequest] = field(default_factory=list)
    ended: list[gateway_pb2.EndBranchesRequest] = field(default_factory=list)
    branches: dict[str, common_pb2.Branch] = field(default_factory=dict)
    tokens_seen: list[str] = field(default_factory=list)
    unary_errors: deque[ErrorDetail] = field(default_factory=deque)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def Generate(
        self, request: gateway_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        copy = gateway_pb2.GenerateRequest()
        copy.CopyFrom(request)
        self.requests.append(copy)
        self._note_token(context)
        play = self.plays.popleft() if self.plays else Play()
        try:
            async for message in self._play(play, request, context):
                yield message
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise

    async def _play(
        self, play: Play, request: gateway_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        if play.fail_at == 0:
            await abort_with(context, play.error)
        yield self._started(request)
        ids = output_ids(request.sampling.max_tokens or 8)
        for index in range(request.resume_from, len(ids), play.per_message):
            await self._interrupt(play, index, context)
            part = ids[index : index + play.per_message]
            yield gateway_pb2.GenerateResponse(
                tokens=gateway_pb2.GenerateTokens(index=index + play.shift, token_ids=pack(part), text=text_of(part))
            )
        if play.held_text:
            yield gateway_pb2.GenerateResponse(tokens=gateway_pb2.GenerateTokens(index=len(ids), text=play.held_text))
        await self._interrupt(play, len(ids), context)
        if not play.silent_end:
            yield gateway_pb2.GenerateResponse(finished=self._finished(request, [*ids, *play.tail], play))

    async def EndBranches(
        self, request: gateway_pb2.EndBranchesRequest, context: Context
    ) -> gateway_pb2.EndBranchesResponse:
        self._note_token(context)
        if self.unary_errors:
            await abort_with(context, self.unary_errors.popleft())
        self.ended.append(request)
        return gateway_pb2.EndBranchesResponse(ended_branch_ids=request.branch_ids)

    async def GetBranch(self, request: gateway_pb2.GetBranchRequest, context: Context) -> gateway_pb2.GetBranchResponse:
        if request.branch_id not in self.branches:
            await abort_with(context, refusal(grpc.StatusCode.NOT_FOUND, "NOT_FOUND"))
        return gateway_pb2.GetBranchResponse(branch=self.branches[request.branch_id])

    async def ListModels(
        self, request: gateway_pb2.ListModelsRequest, context: Context
    ) -> gateway_pb2.ListModelsResponse:
        if self.unary_errors:
            await abort_with(context, self.unary_errors.popleft())
        model = gateway_pb2.Model(
            model="scripted",
            vocabulary_tokens=5000,
            max_prompt_tokens=900,
            max_context_tokens=1000,
            block_tokens=64,
            nodes=3,
        )
        return gateway_pb2.ListModelsResponse(models=[model])

    def _note_token(self, context: Context) -> None:
        given = dict(context.invocation_metadata() or ()).get("authorization", "")
        self.tokens_seen.append(str(given))

    def _started(self, request: gateway_pb2.GenerateRequest) -> gateway_pb2.GenerateResponse:
        version = (request.branch.version or 1) if request.branch.branch_id else 0
        return gateway_pb2.GenerateResponse(
            started=gateway_pb2.GenerateStarted(
                request_id=request.request_id,
                prompt_tokens=5,
                prefill_node_id="node-a",
                predicted_cached_tokens=2,
                predicted_ttft_s=0.25,
                version=version,
            )
        )

    def _finished(
        self, request: gateway_pb2.GenerateRequest, ids: Sequence[int], play: Play
    ) -> gateway_pb2.GenerateFinished:
        return gateway_pb2.GenerateFinished(
            reason=play.finish_reason,  # type: ignore[arg-type]
            output_token_ids=pack(ids),
            text=text_of(ids),
            prefill_node_id="node-a",
            decode_node_id="node-b",
            cached=gateway_pb2.CachedTokens(own_l1=1, own_l2=2, peer_l2=0),
            usage=gateway_pb2.Usage(prompt_tokens=5, cached_tokens=3, computed_tokens=2, output_tokens=len(ids)),
            timings=gateway_pb2.Timings(
                queue_s=0.1,
                fetch_s=0.2,
                fetch_hidden_s=0.15,
                prefill_s=0.3,
                transfer_s=0.4,
                ttft_s=0.5,
                tpot_s=0.6,
                total_s=0.7,
            ),
            reuse=gateway_pb2.Reuse(pool_tokens=4, planned_tokens=3, loss=common_pb2.LOSS_CAUSE_NODE),
            attempts=0,
            reusable_blocks=4,
        )

    async def _interrupt(self, play: Play, index: int, context: Context) -> None:
        if play.hang_at is not None and index >= play.hang_at:
            await asyncio.Event().wait()
        if play.fail_at is not None and index >= play.fail_at:
            await abort_with(context, play.error)


def pack(token_ids: Iterable[int]) -> bytes:
    """Token ids as they travel."""
    return b"".join(token_id.to_bytes(4, "little") for token_id in token_ids)


async def serve(servicer: ScriptedGateway, listen: str = "127.0.0.1:0") -> tuple[aio.Server, str]:
    """A started server and its address. The caller stops it."""
    server = aio.server()
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port(listen)
    await server.start()
    return server, f"127.0.0.1:{port}"
