"""Scripted nodes and a scripted directory that keep to the protos' contract, for gateways under test."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio
import numpy as np

from evolving.internal.v1 import directory_pb2, directory_pb2_grpc, node_agent_pb2, node_agent_pb2_grpc
from evolving.runtime.keys import NodeRegistration
from evolving.v1 import common_pb2, gateway_pb2
from evolving.wire.status import ErrorDetail, abort_with

VOCABULARY = 1_000
BLOCK_TOKENS = 16
MAX_PROMPT, MAX_CONTEXT = 4_000, 5_000


def ids_bytes(ids: Sequence[int]) -> bytes:
    """Ids as they travel."""
    return np.asarray(ids, dtype="<u4").tobytes()


def bytes_ids(data: bytes) -> list[int]:
    """The other way round."""
    return [int(value) for value in np.frombuffer(data, dtype="<u4")]


def next_id(context: Sequence[int]) -> int:
    """What every scripted node generates after a context: any gap, repeat or loss shows in all later ids."""
    digest = hashlib.sha256(ids_bytes(context)).digest()
    return int.from_bytes(digest[:4], "little") % (VOCABULARY - 10)


def expected_output(prompt: Sequence[int], tokens: int) -> list[int]:
    """Greedy output of `tokens` ids."""
    context = list(prompt)
    for _ in range(tokens):
        context.append(next_id(context))
    return context[len(prompt) :]


@dataclass
class Script:
    """How a scripted node behaves; tests change it while it runs."""

    hear: asyncio.Event = field(default_factory=asyncio.Event)  # set: prefill legs that came are answered
    take: asyncio.Event = field(default_factory=asyncio.Event)  # set: queued legs are taken
    send: asyncio.Event = field(default_factory=asyncio.Event)  # set: prefilled legs have sent their KV
    reserve: asyncio.Event = field(default_factory=asyncio.Event)  # set: decode legs reserve, or are refused
    start: asyncio.Event = field(default_factory=asyncio.Event)  # set: decode legs that have reserved start
    leg_s: float = 0.0  # what each leg that came adds to the wait that a queued one hears of
    requotes: int = 0  # legs answered with requote, where the gateway allows it
    requote_wait_s: float = 5.0
    refuse_prefill: ErrorDetail | None = None
    lose_prefilled: ErrorDetail | None = None  # how prefilled legs end, when they would send
    refuse_decode: ErrorDetail | None = None
    pause_at: int | None = None  # the decode leg stops before this output index until `resume` is set
    resume: asyncio.Event = field(default_factory=asyncio.Event)
    repeat_ids: bool = False  # say each id twice, as a node that was told to resume too early
    skip_at: int | None = None  # leave this output index out, once
    tokens_a_message: int = 1
    odd_ids: bool = False  # ids that are not whole, as only a bug sends them
    silent: bool = False  # its status stream stays up and says nothing
    output: list[int] | None = None  # what it generates, whatever the prompt; None: next_id of the context

    def next_id(self, ids: Sequence[int], prompt_tokens: int) -> int:
        """The id that follows."""
        return next_id(ids) if self.output is None else self.output[len(ids) - prompt_tokens]


class ScriptedNode(node_agent_pb2_grpc.NodeAgentServiceServicer):
    """A node agent without an engine. Keeps what it was asked and which legs were cut off."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.script = Script()
        self.script.hear.set()
        self.script.take.set()
        self.script.send.set()
        self.script.reserve.set()
        self.script.start.set()
        self.status = node_agent_pb2.WatchStatusResponse(
            node_id=node_id, incarnation=f"{node_id}-1", role=common_pb2.ROLE_MIXED, ready=True, decode_slots_free=8
        )
        self.prefills: list[node_agent_pb2.PrefillRequest] = []
        self.decodes: list[node_agent_pb2.DecodeRequest] = []
        self.cut_off: list[str] = []
        self.running: set[str] = set()
        self.first_ids: dict[int, asyncio.Future[None]] = {}  # transfer id -> prefilled
        self.address = ""
        self._server: grpc.aio.Server | None = None
        self._pushes: set[asyncio.Queue[None]] = set()

    async def start(self) -> None:
        """Serve on a free port."""
        self._server = grpc.aio.server()
        node_agent_pb2_grpc.add_NodeAgentServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    @property
    def started(self) -> bool:
        """Whether it has a server."""
        return self._server is not None

    async def die(self) -> None:
        """Cut every connection at once."""
        assert self._server is not None
        await self._server.stop(0)

    def registration(self, **changes: object) -> NodeRegistration:
        """What etcd says of it."""
        facts: dict[str, object] = {
            "node_id": self.node_id,
            "incarnation": self.status.incarnation,
            "address": self.address,
            "model": "tiny",
            "kv_format": "tiny/f32",
            "kv_bytes_per_token": 23_040,
            "block_tokens": BLOCK_TOKENS,
            "vocab_size": VOCABULARY,
            "max_prompt_tokens": MAX_PROMPT,
            "max_context_tokens": MAX_CONTEXT,
            "l1_tokens": 10_000,
            "reserve_tokens": 4_000,
            "l2_tokens": 40_000,
            "decode_slots": 8,
            "chunk_tokens": 256,
            "transfer_address": f"{self.node_id}:1",
            "pool_address": f"{self.node_id}:2",
            "prefill_coefficients": (0.01, 0.001, 0.0, 0.0, 0.0),
            "decode_coefficients": (0.02, 0.0, 0.001, 0.0),
        }
        return NodeRegistration(**{**facts, **changes})  # type: ignore[arg-type]

    def push(self, **changes: object) -> None:
        """Change the status and tell every watcher."""
        for name, value in changes.items():
            setattr(self.status, name, value)
        for queue in self._pushes:
            queue.put_nowait(None)

    async def WatchStatus(self, request, context):  # type: ignore[no-untyped-def]
        queue: asyncio.Queue[None] = asyncio.Queue()
        self._pushes.add(queue)
        try:
            while True:
                if not self.script.silent:
                    yield self.status
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(queue.get(), 0.5)
        finally:
            self._pushes.discard(queue)

    async def Prefill(self, request, context):  # type: ignore[no-untyped-def]
        self.prefills.append(request)
        script = self.script
        self.running.add(request.leg_id)
        try:
            await script.hear.wait()
            if script.refuse_prefill:
                await abort_with(context, script.refuse_prefill)
            if script.requotes and request.may_requote:
                script.requotes -= 1
                yield self._said(requote=node_agent_pb2.PrefillRequote(), wait_s=script.requote_wait_s)
                return
            yield self._said(queued=node_agent_pb2.PrefillQueued(), wait_s=len(self.running) * script.leg_s)
            await script.take.wait()
            prefilled = self.first_ids.setdefault(request.transfer_id, asyncio.get_running_loop().create_future())
            yield self._said(taken=node_agent_pb2.PrefillTaken(queue_s=0.25, fetch_s=0.125, fetch_hidden_s=0.1))
            context_ids = bytes_ids(request.token_ids)
            first = script.next_id(context_ids, len(context_ids) - request.generated_tokens)
            last = (
                request.generated_tokens + 1 == request.sampling.max_tokens or first in request.sampling.stop_token_ids
            )
            finish = common_finish(request, first) if last else gateway_pb2.FINISH_REASON_UNSPECIFIED
            cached = gateway_pb2.CachedTokens(own_l1=16, own_l2=32, peer_l2=0) if len(context_ids) > 64 else None
            yield self._said(
                prefilled=node_agent_pb2.Prefilled(first_token=first, cached=cached, prefill_s=0.5, finish=finish)
            )
            prefilled.set_result(None)
            if not last:
                await script.send.wait()
                if script.lose_prefilled:
                    await abort_with(context, script.lose_prefilled)
                yield self._said(sent=node_agent_pb2.PrefillSent(transfer_s=0.0625, bytes=1))
            self.running.discard(request.leg_id)
        finally:
            if request.leg_id in self.running:
                self.cut_off.append(request.leg_id)
                self.running.discard(request.leg_id)

    def _said(self, wait_s: float = 0.0, **event: object) -> node_agent_pb2.PrefillResponse:
        return node_agent_pb2.PrefillResponse(wait_s=wait_s, epoch=self.status.epoch, **event)  # type: ignore[arg-type]

    async def Abort(self, request, context):  # type: ignore[no-untyped-def]
        return node_agent_pb2.AbortResponse(found=request.leg_id in self.running)

    async def ReadDigests(self, request, context):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    async def Decode(self, request, context):  # type: ignore[no-untyped-def]
        self.decodes.append(request)
        script = self.script
        self.running.add(request.leg_id)
        try:
            await script.reserve.wait()
            if script.refuse_decode:
                await abort_with(context, script.refuse_decode)
            yield node_agent_pb2.DecodeResponse(reserved=node_agent_pb2.DecodeReserved(), epoch=self.status.epoch)
            await script.start.wait()
            yield node_agent_pb2.DecodeResponse(started=node_agent_pb2.DecodeStarted(transfer_s=0.0625))
            ids = bytes_ids(request.token_ids)
            prompt = len(ids) - request.generated_tokens
            ids.append(script.next_id(ids, prompt))
            reason = gateway_pb2.FINISH_REASON_LENGTH
            while len(ids) - prompt < request.sampling.max_tokens:
                index = len(ids) - prompt
                if script.pause_at is not None and index >= script.pause_at:
                    await script.resume.wait()
                new: list[int] = []
                while len(new) < script.tokens_a_message and len(ids) - prompt < request.sampling.max_tokens:
                    ids.append(script.next_id(ids, prompt))
                    new.append(ids[-1])
                if script.skip_at == index:
                    script.skip_at = None
                    continue
                said = node_agent_pb2.DecodeTokens(
                    index=index, token_ids=ids_bytes(new)[: 3 if script.odd_ids else None]
                )
                for _ in range(2 if script.repeat_ids else 1):
                    yield node_agent_pb2.DecodeResponse(tokens=said)
                if new[-1] in request.sampling.stop_token_ids:
                    reason = gateway_pb2.FINISH_REASON_STOP
                    break
            if script.pause_at is not None and len(ids) - prompt <= script.pause_at:
                await script.resume.wait()
            yield node_agent_pb2.DecodeResponse(finished=node_agent_pb2.DecodeFinished(reason=reason, iterations=1))
            self.running.discard(request.leg_id)
        finally:
            if request.leg_id in self.running:
                self.cut_off.append(request.leg_id)
                self.running.discard(request.leg_id)


def common_finish(request: node_agent_pb2.PrefillRequest, first: int) -> gateway_pb2.FinishReason.ValueType:
    """Why a request ends with its first token."""
    stops = first in request.sampling.stop_token_ids
    return gateway_pb2.FINISH_REASON_STOP if stops else gateway_pb2.FINISH_REASON_LENGTH


class ScriptedDirectory(directory_pb2_grpc.DirectoryServiceServicer):
    """Remembers what it is told; answers what it is set to."""

    def __init__(self) -> None:
        self.begins: list[directory_pb2.BeginRequest] = []
        self.finished: list[directory_pb2.FinishRequest] = []
        self.ended: list[directory_pb2.EndRequest] = []
        self.match = directory_pb2.Match()
        self.kind = directory_pb2.BEGIN_KIND_EXTEND
        self.loss = common_pb2.LOSS_CAUSE_UNSPECIFIED
        self.need_full = False  # answer bases with need_full
        self.refuse: ErrorDetail | None = None
        self.hang = False
        self.address = ""
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Serve on a free port."""
        self._server = grpc.aio.server()
        directory_pb2_grpc.add_DirectoryServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def stop(self) -> None:
        """Go away."""
        assert self._server is not None
        await self._server.stop(0)

    async def Begin(self, request, context):  # type: ignore[no-untyped-def]
        self.begins.append(request)
        if self.hang:
            await asyncio.Event().wait()
        if self.refuse:
            await abort_with(context, self.refuse)
        if self.need_full and request.base_blocks:
            return directory_pb2.BeginResponse(need_full=True)
        version = request.branch.version or (3 if request.branch.branch_id else 0)
        return directory_pb2.BeginResponse(version=version, kind=self.kind, match=self.match, loss=self.loss)

    async def Finish(self, request, context):  # type: ignore[no-untyped-def]
        self.finished.append(request)
        return directory_pb2.FinishResponse()

    async def End(self, request, context):  # type: ignore[no-untyped-def]
        self.ended.append(request)
        return directory_pb2.EndResponse(ended_branch_ids=request.branch_ids)

    async def ConnectNode(self, request_iterator, context):  # type: ignore[no-untyped-def, override]
        raise NotImplementedError

    async def ReadBranch(self, request, context):  # type: ignore[no-untyped-def]
        if request.branch_id == "none":
            await abort_with(context, ErrorDetail(grpc.StatusCode.NOT_FOUND, "NOT_FOUND", "no such branch"))
        return directory_pb2.ReadBranchResponse(branch=common_pb2.Branch(branch_id=request.branch_id, version=2))
