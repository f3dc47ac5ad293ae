"""A gateway in front of one pool that keeps everything, or what a test lets it keep."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from scripted_gateway import Context, Play, ScriptedGateway, pack, serve

from evolving.v1 import common_pb2, gateway_pb2
from evolving.wire.status import abort_with

BLOCK_BYTES = 64 * 4
VOCABULARY = 5000


@dataclass(frozen=True, slots=True)
class Kept:
    """Of a prompt, tokens: in the pool, meant to be reused, reused."""

    pool: int
    planned: int
    cached: int
    loss: int = common_pb2.LOSS_CAUSE_UNSPECIFIED


def all_of_it(known_tokens: int) -> Kept:
    """Nothing is ever lost."""
    return Kept(known_tokens, known_tokens, known_tokens)


def answer_to(request: gateway_pb2.GenerateRequest) -> list[int]:
    """Output ids that no other prompt gets."""
    seed = hashlib.sha256(request.token_ids).digest()
    return [int.from_bytes(seed[at : at + 2], "little") % VOCABULARY for at in range(0, 30, 2)] * (
        request.sampling.max_tokens // 15
    ) + [7] * (request.sampling.max_tokens % 15)


def prefixes(token_ids: bytes) -> Iterator[int]:
    """One value for each full block, of it and all before it."""
    value = 0
    for at in range(0, len(token_ids) - BLOCK_BYTES + 1, BLOCK_BYTES):
        value = hash((value, token_ids[at : at + BLOCK_BYTES]))
        yield value


@dataclass(slots=True)
class PoolGateway(ScriptedGateway):
    """Answers with `answer_to`, and knows what all finished requests produced."""

    keeps: Callable[[int], Kept] = all_of_it
    max_prompt_tokens: int = 1_000_000
    running: int = 0
    most_running: int = 0
    known: set[int] = field(default_factory=set)
    moments: list[tuple[str, str]] = field(default_factory=list)  # (branch, "sent" or "answered"), in order

    async def _play(
        self, play: Play, request: gateway_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        if play.fail_at == 0:
            await abort_with(context, play.error)
        self.moments.append((request.branch.branch_id, "sent"))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            yield self._started(request)
            if play.hang_at is not None:
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            ids = answer_to(request)
            yield gateway_pb2.GenerateResponse(tokens=gateway_pb2.GenerateTokens(index=0, token_ids=pack(ids)))
            yield gateway_pb2.GenerateResponse(finished=self._result(request, ids))
        finally:
            self.running -= 1
        self.moments.append((request.branch.branch_id, "answered"))

    def _result(self, request: gateway_pb2.GenerateRequest, ids: list[int]) -> gateway_pb2.GenerateFinished:
        prompt_tokens = len(request.token_ids) // 4
        blocks = list(prefixes(request.token_ids[:-4]))  # the last token is always computed
        reusable = next((index for index, block in enumerate(blocks) if block not in self.known), len(blocks))
        kept = self.keeps(reusable * 64)
        self.known.update(prefixes(request.token_ids + pack(ids)[:-4]))  # the last sampled one has no KV
        return gateway_pb2.GenerateFinished(
            reason=gateway_pb2.FINISH_REASON_LENGTH,
            output_token_ids=pack(ids),
            prefill_node_id="node-a",
            decode_node_id="node-b",
            cached=gateway_pb2.CachedTokens(own_l2=kept.cached),
            reuse=gateway_pb2.Reuse(pool_tokens=kept.pool, planned_tokens=kept.planned, loss=kept.loss),  # type: ignore[arg-type]
            usage=gateway_pb2.Usage(
                prompt_tokens=prompt_tokens,
                cached_tokens=kept.cached,
                computed_tokens=prompt_tokens - kept.cached,
                output_tokens=len(ids),
            ),
            timings=gateway_pb2.Timings(fetch_s=0.5, fetch_hidden_s=0.25),
        )

    async def ListModels(
        self, request: gateway_pb2.ListModelsRequest, context: Context
    ) -> gateway_pb2.ListModelsResponse:
        self._note_token(context)
        model = gateway_pb2.Model(
            model="pool",
            vocabulary_tokens=VOCABULARY,
            max_prompt_tokens=self.max_prompt_tokens,
            max_context_tokens=self.max_prompt_tokens + 20_000,
            block_tokens=64,
            nodes=2,
        )
        return gateway_pb2.ListModelsResponse(models=[model])


@asynccontextmanager
async def serving(gateway: PoolGateway) -> AsyncIterator[str]:
    """Its address, while the block runs."""
    server, address = await serve(gateway)
    try:
        yield address
    finally:
        await server.stop(None)
