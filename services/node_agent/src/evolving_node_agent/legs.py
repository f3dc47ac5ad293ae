"""One leg on its way through the engine: what its events become for the caller, the directory and the planner.

A request is reported done when it has its whole output. A leg that fails or is cancelled is not the end of its
request: its gateway tries again elsewhere under the same id, or says itself that it is over.
"""

from __future__ import annotations

import numpy as np

from evolving.core.terms import NAME_BYTES, Phase
from evolving.internal.v1 import node_agent_pb2
from evolving_node_agent import reports
from evolving_node_agent.blocks import ContextBlocks
from evolving_node_agent.engines.port import (
    DecodeEvent,
    DecodeJob,
    FinishReason,
    Prefilled,
    PrefillEvent,
    PrefillJob,
    Reserved,
    Started,
    Taken,
    Tokens,
)
from evolving_node_agent.node import Node
from evolving_node_agent.reporter import DirectoryReporter
from evolving_node_agent.samples import decode_sample, prefill_sample
from evolving_node_agent.translate import FINISH_REASONS, cached_to_proto
from evolving_node_agent.work import WorkReporter


def _ref(request: node_agent_pb2.PrefillRequest | node_agent_pb2.DecodeRequest) -> reports.RequestRef | None:
    """None: the request belongs to no branch, and the directory isn't told of it."""
    if not request.branch_id:
        return None
    return reports.RequestRef(request.tenant, request.branch_id, request.version, request.request_id)


class PrefillRun:
    """A prefill leg."""

    def __init__(
        self,
        request: node_agent_pb2.PrefillRequest,
        job: PrefillJob,
        node: Node,
        directory: DirectoryReporter,
        work: WorkReporter,
    ) -> None:
        self._request = request
        self._job = job
        self._node = node
        self._directory = directory
        self._work = work

    def take(self, event: PrefillEvent) -> node_agent_pb2.PrefillResponse:
        """Report what the event means and say it to the caller."""
        if isinstance(event, Taken):
            self._node.leg_taken(self._job.leg_id, event)
            taken = node_agent_pb2.PrefillTaken(
                queue_s=event.queue_s, fetch_s=event.fetch_s, fetch_hidden_s=event.hidden_s
            )
            return node_agent_pb2.PrefillResponse(taken=taken)
        if isinstance(event, Prefilled):
            self._node.leg_prefilled(self._job.leg_id, event.cached)
            self._report(event)
            return node_agent_pb2.PrefillResponse(
                prefilled=node_agent_pb2.Prefilled(
                    first_token=event.first_token,
                    cached=cached_to_proto(event.cached),
                    prefill_s=event.prefill_s,
                    finish=FINISH_REASONS[event.finish or FinishReason.ABORTED],
                )
            )
        sent = node_agent_pb2.PrefillSent(transfer_s=event.transfer_s, bytes=event.bytes)
        return node_agent_pb2.PrefillResponse(sent=sent)

    def _report(self, event: Prefilled) -> None:
        job = self._job
        named = self._request.tenant, self._request.request_id
        self._work.add(prefill_sample(*named, len(job.tokens), event.cached))
        if event.finish is not None:  # nothing is left to decode, and no node will say so
            self._work.add(decode_sample(*named, 0, 0, 0.0))
        ref = _ref(self._request)
        if ref is None:
            return
        block_tokens = self._node.info.block_tokens
        blocks = (len(job.tokens) - job.generated) // block_tokens
        names = ContextBlocks(job.root, job.tokens, block_tokens, job.blocks).names[: blocks * NAME_BYTES]
        self._directory.tell(ref, reports.landed(ref, Phase.PREFILL, blocks), names[-NAME_BYTES:])
        if event.finish is not None:
            self._directory.tell(ref, reports.done(ref))


class DecodeRun:
    """A decode leg."""

    def __init__(
        self,
        request: node_agent_pb2.DecodeRequest,
        job: DecodeJob,
        node: Node,
        directory: DirectoryReporter,
        work: WorkReporter,
    ) -> None:
        self._request = request
        self._job = job
        self._directory = directory
        self._work = work
        self._ref = _ref(request)
        self._blocks = ContextBlocks(job.root, job.tokens, node.info.block_tokens, job.blocks)
        self._prompt_blocks = (len(job.tokens) - job.generated) // node.info.block_tokens
        self._prompt_tokens = len(job.tokens) - job.generated
        self._started = False
        self._output_tokens = 0
        self._iterations = 0
        self._context_tokens = 0  # summed over iterations

    def take(self, event: DecodeEvent) -> node_agent_pb2.DecodeResponse:
        """Report what the event means and say it to the caller."""
        if isinstance(event, Reserved):
            return node_agent_pb2.DecodeResponse(reserved=node_agent_pb2.DecodeReserved())
        if isinstance(event, Started):
            self._start(event)
            started = node_agent_pb2.DecodeStarted(transfer_s=event.transfer_s, cached_tokens=event.cached_tokens)
            return node_agent_pb2.DecodeResponse(started=started)
        if isinstance(event, Tokens):
            self._output_tokens += len(event.ids)
            self._iterations += 1
            self._context_tokens += self._prompt_tokens + event.index
            self._tell_output(*self._blocks.sampled(event.ids))
            ids = event.ids.astype("<u4", copy=False).tobytes()
            return node_agent_pb2.DecodeResponse(tokens=node_agent_pb2.DecodeTokens(index=event.index, token_ids=ids))
        if self._ref is not None and event.reason is not FinishReason.ABORTED:
            self._directory.tell(self._ref, reports.done(self._ref))
        finished = node_agent_pb2.DecodeFinished(reason=FINISH_REASONS[event.reason], iterations=event.iterations)
        return node_agent_pb2.DecodeResponse(finished=finished)

    def _start(self, event: Started) -> None:
        self._started = True
        if self._ref is not None:
            landed = reports.landed(self._ref, Phase.DECODE, self._prompt_blocks)
            self._directory.tell(
                self._ref, landed, self._blocks.names[: self._prompt_blocks * NAME_BYTES][-NAME_BYTES:]
            )
        # Output of earlier attempts came along as part of this leg's tokens.
        self._tell_output(self._prompt_blocks, self._blocks.names[self._prompt_blocks * NAME_BYTES :])
        self._tell_output(*self._blocks.sampled(np.array([event.first_token], dtype=np.uint32)))

    def _tell_output(self, first_block: int, names: bytes) -> None:
        if self._ref is not None and names:
            self._directory.tell(self._ref, reports.output(self._ref, first_block, names), names[-NAME_BYTES:])

    def over(self) -> None:
        """Nothing more comes. The node did the work of a leg that broke off too, as when the caller found a stop text:
        it is reported as far as it is known here, also where the first token had been enough."""
        if not self._started:
            return
        context_tokens = self._context_tokens / self._iterations if self._iterations else 0.0
        work = (self._output_tokens, self._iterations, context_tokens)
        self._work.add(decode_sample(self._request.tenant, self._request.request_id, *work))
