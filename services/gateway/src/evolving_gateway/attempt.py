"""One attempt at a request: a prefill leg on P, a decode leg on D once P took the request, and the hand-off.

The two legs report on two streams; `run` merges them into one, in the order of the output. Leaving `run` (an error, a
stop text, a client that went away) cancels both streams, which ends both legs within one iteration of their engines.
"""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import AsyncGenerator, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from evolving.core.blocks import TOKEN_BYTES
from evolving.core.routing import Context, PrefillScore
from evolving.core.terms import Role
from evolving.internal.v1 import directory_pb2, node_agent_pb2
from evolving.runtime.log import get_logger
from evolving.runtime.tasks import end_tasks
from evolving.v1 import gateway_pb2
from evolving.wire.status import parse_error
from evolving_gateway.nodes import Arriving, Cluster, DecodeArriving, Node
from evolving_gateway.router import ModelFacts, Router
from evolving_gateway.token_ids import ids_from_node, to_wire

_LAST_WORD_S = 1.0
_EVENTS_MAX = 256  # beyond that a slow client slows the engine's stream, by HTTP/2 flow control
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """What all attempts at a request share."""

    partition_id: str
    tenant: str
    request_id: str
    model: ModelFacts
    prompt: bytes  # token ids as on the wire
    root: bytes  # 32 bytes: previous digest of block 0
    sampling: gateway_pb2.Sampling  # every default filled in; no stop texts
    priority: int
    branch_id: str
    version: int
    reserve_deadline_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What one attempt starts with."""

    node: Node
    score: PrefillScore
    match: directory_pb2.Match  # where the context's blocks lay
    holders: list[node_agent_pb2.Holder]
    generated: list[int]  # output of earlier attempts
    may_requote: bool
    excluded_decode: Mapping[str, str]
    timeout_s: float  # what is left of the request's deadline


@dataclass(slots=True)
class Report:
    """What is known of an attempt so far."""

    decode_node_id: str = ""
    cached: gateway_pb2.CachedTokens = field(default_factory=gateway_pb2.CachedTokens)
    queue_s: float = 0.0
    fetch_s: float = 0.0
    fetch_hidden_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Queued:
    """P has the request in its queue."""


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Output ids from position `index` of the request's whole output on."""

    index: int
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Ended:
    """The output is complete."""

    reason: gateway_pb2.FinishReason.ValueType


AttemptEvent = Queued | NewTokens | Ended


class Requoted(Exception):
    """P's queue is much longer than quoted; it did not take the request."""


class RoleSwitched(Exception):
    """P got another role while the request was queued there."""


class LegFailed(Exception):
    """A leg could not go on. `node_id` is whom to avoid next time; "" is nobody."""

    def __init__(
        self, node_id: str, status: grpc.StatusCode, reason: str, message: str, retry_after_s: float | None = None
    ) -> None:
        super().__init__(f"{node_id or 'a node'}: {reason}: {message}")
        self.node_id = node_id
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s


class _Events:
    """From both legs to the attempt; a role switch, or a bug, goes before what is queued."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[AttemptEvent | Exception | None] = asyncio.Queue(_EVENTS_MAX)
        self._interrupt: Exception | None = None

    async def put(self, event: AttemptEvent | Exception) -> None:
        """Add one, once there is room."""
        await self._queue.put(event)

    def interrupt(self, error: Exception) -> None:
        """Nothing but this is got from now on. The first one stays."""
        if self._interrupt is None:
            self._interrupt = error
            if self._queue.empty():
                self._queue.put_nowait(None)  # wakes who waits in `get`

    async def get(self) -> AttemptEvent | Exception:
        """The next event."""
        event = await self._queue.get() if self._interrupt is None else None
        if self._interrupt is not None:
            return self._interrupt
        assert event is not None, "only an interrupt wakes without an event"
        return event


class Attempt:
    """Runs once."""

    def __init__(self, job: Job, plan: Plan, cluster: Cluster, router: Router) -> None:
        self._job = job
        self._plan = plan
        self._cluster = cluster
        self._router = router
        self._events = _Events()
        self._tasks: list[asyncio.Task[None]] = []
        name = uuid.uuid4().hex
        self._prefill_leg, self._decode_leg = f"{name}-p", f"{name}-d"
        self._transfer_id = secrets.randbits(63)
        self._tokens = job.prompt + to_wire(plan.generated)
        self._taken = False
        self._prefilled = False
        self._landed = False
        self._finished = False
        self._held: list[AttemptEvent] = []  # of the decode leg, until the first token is known
        self.report = Report()

    async def run(self) -> AsyncGenerator[AttemptEvent, None]:
        """Queued, tokens, Ended. Raises Requoted, RoleSwitched or LegFailed."""
        stop_listening = self._cluster.on_change(self._check_role)
        self._start(self._plan.node, self._prefill())
        try:
            while True:
                event = await self._events.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if isinstance(event, Ended):
                    if self._finished:  # D has all KV; P's last word on it is a moment away: no reason to abort it
                        await asyncio.wait(self._tasks, timeout=_LAST_WORD_S)
                    return
        finally:
            stop_listening()
            await end_tasks(*self._tasks)

    def _start(self, node: Node, leg: Coroutine[Any, Any, None]) -> None:
        """Run a leg. From here on, not from its first step on, its node's channel must stay open."""
        node.legs += 1
        task = asyncio.create_task(leg)
        task.add_done_callback(lambda task: self._leg_ended(node, task))
        self._tasks.append(task)

    def _leg_ended(self, node: Node, task: asyncio.Task[None]) -> None:
        """A leg's failures are events. Anything else that ends it must end the attempt too, and not leave it waiting:
        a bug, or the cancellation of a call by its channel (once the attempt is over nobody looks at it)."""
        self._cluster.release(node)
        if task.cancelled():
            lost = LegFailed(node.node_id, grpc.StatusCode.UNAVAILABLE, "CALL_CANCELLED", "the call was cancelled")
            self._events.interrupt(lost)
        elif isinstance(error := task.exception(), Exception):
            self._events.interrupt(error)

    def _check_role(self) -> None:
        """A request in P's queue, or on its way there, leaves when P no longer prefills, if another node does."""
        if self._taken or self._serves_prefill(self._plan.node):
            return
        if any(self._serves_prefill(node) and node.ready for node in self._router.serving(self._job.model)):
            self._events.interrupt(RoleSwitched())

    def _serves_prefill(self, node: Node) -> bool:
        return self._cluster.role(node) in (Role.PREFILL, Role.MIXED)

    # -- prefill

    async def _prefill(self) -> None:
        node, leg, score = self._plan.node, self._prefill_leg, self._plan.score
        assert score.work is not None
        node.arriving[leg] = Arriving(score.work, score.fetched_blocks * self._job.model.block_tokens)
        call = node.stub.Prefill(self._prefill_request(), timeout=self._plan.timeout_s)
        try:
            async for response in call:
                await self._take_prefill(response)
            if not self._prefilled:
                await self._fail(node.node_id, grpc.StatusCode.INTERNAL, "STREAM_ENDED", "prefill ended early")
        except grpc.aio.AioRpcError as error:
            await self._prefill_broke(error)
        finally:
            call.cancel()
            node.arriving.pop(leg, None)

    def _prefill_request(self) -> node_agent_pb2.PrefillRequest:
        job, plan = self._job, self._plan
        return node_agent_pb2.PrefillRequest(
            partition_id=job.partition_id,
            tenant=job.tenant,
            request_id=job.request_id,
            leg_id=self._prefill_leg,
            transfer_id=self._transfer_id,
            token_ids=self._tokens,
            generated_tokens=len(plan.generated),
            root=job.root,
            sampling=job.sampling,
            priority=job.priority,
            quoted_wait_s=plan.score.wait_s,
            may_requote=plan.may_requote,
            holders=plan.holders,
            branch_id=job.branch_id,
            version=job.version,
            epoch=self._cluster.epoch,
            expected_cached_tokens=plan.score.cached_tokens,
        )

    async def _take_prefill(self, response: node_agent_pb2.PrefillResponse) -> None:
        node = self._plan.node
        self._cluster.see_epoch(response.epoch)
        node.acknowledge(self._prefill_leg, response.wait_s)
        match response.WhichOneof("event"):
            case "queued":
                await self._events.put(Queued())
            case "requote":
                await self._events.put(Requoted())
            case "taken":
                self._taken = True
                taken = response.taken
                self.report.queue_s, self.report.fetch_s = taken.queue_s, taken.fetch_s
                self.report.fetch_hidden_s = taken.fetch_hidden_s
                await self._hand_off()
            case "prefilled":
                await self._take_first(response.prefilled)
            case "sent":
                self._landed = True
                self.report.transfer_s = self.report.transfer_s or response.sent.transfer_s

    async def _take_first(self, prefilled: node_agent_pb2.Prefilled) -> None:
        self.report.cached = prefilled.cached
        self.report.prefill_s = prefilled.prefill_s
        await self._events.put(NewTokens(len(self._plan.generated), [prefilled.first_token]))
        if prefilled.finish:
            await self._events.put(Ended(prefilled.finish))
        while self._held:
            await self._events.put(self._held.pop(0))
        self._prefilled = True  # only now may the decode leg's events go straight through

    async def _prefill_broke(self, error: grpc.aio.AioRpcError) -> None:
        """Without P's stream the attempt fails, unless all KV has reached D already."""
        if self._landed:
            return
        detail = parse_error(error)
        blamed = self.report.decode_node_id if detail.reason == "DECODE_LOST" else self._plan.node.node_id
        await self._fail(blamed, detail.status, detail.reason, detail.message, detail.retry_after_s)

    # -- decode

    async def _hand_off(self) -> None:
        """P took the request: choose D now, not before, and let it reserve while P computes."""
        job, plan = self._job, self._plan
        context = Context(
            job.request_id,
            len(self._tokens) // TOKEN_BYTES,
            job.model.block_tokens,
            output_tokens_max=job.sampling.max_tokens - len(plan.generated),
        )
        decision = self._router.decode(job.model, context, plan.match, plan.node.node_id, plan.excluded_decode)
        if decision.chosen is None:
            await self._fail("", grpc.StatusCode.UNAVAILABLE, "NO_NODE", decision.reason)
            return
        node = self._cluster.nodes[decision.chosen.node_id]
        self.report.decode_node_id = node.node_id
        _log.debug("decode_chosen", node_id=node.node_id, reason=decision.reason, candidates=decision.candidates)
        self._start(node, self._decode(node, DecodeArriving(context.tokens, decision.chosen.stored_tokens)))

    async def _decode(self, node: Node, arriving: DecodeArriving) -> None:
        leg = self._decode_leg
        node.decode_arriving[leg] = arriving
        call = node.stub.Decode(self._decode_request(), timeout=self._plan.timeout_s)
        try:
            async for response in call:
                await self._take_decode(node, arriving, response)
            if not self._finished:
                await self._fail(node.node_id, grpc.StatusCode.INTERNAL, "STREAM_ENDED", "decode ended early")
        except grpc.aio.AioRpcError as error:
            detail = parse_error(error)
            blamed = self._plan.node.node_id if detail.reason == "SOURCE_LOST" else node.node_id
            await self._fail(blamed, detail.status, detail.reason, detail.message, detail.retry_after_s)
        finally:
            call.cancel()
            node.decode_arriving.pop(leg, None)

    def _decode_request(self) -> node_agent_pb2.DecodeRequest:
        job, plan = self._job, self._plan
        return node_agent_pb2.DecodeRequest(
            partition_id=job.partition_id,
            tenant=job.tenant,
            request_id=job.request_id,
            leg_id=self._decode_leg,
            transfer_id=self._transfer_id,
            token_ids=self._tokens,
            generated_tokens=len(plan.generated),
            root=job.root,
            sampling=job.sampling,
            source_node_id=plan.node.node_id,
            source_address=plan.node.registration.transfer_address,
            branch_id=job.branch_id,
            version=job.version,
            epoch=self._cluster.epoch,
            reserve_deadline_s=min(job.reserve_deadline_s, plan.timeout_s),
        )

    async def _take_decode(self, node: Node, arriving: DecodeArriving, response: node_agent_pb2.DecodeResponse) -> None:
        self._cluster.see_epoch(response.epoch)
        match response.WhichOneof("event"):
            case "reserved":
                arriving.reserved = True
            case "started":
                self._landed = arriving.reserved = arriving.started = True
                self.report.transfer_s = response.started.transfer_s
            case "tokens":
                await self._emit(NewTokens(response.tokens.index, ids_from_node(response.tokens.token_ids)))
            case "finished":
                await self._finish(node, response.finished)

    async def _finish(self, node: Node, finished: node_agent_pb2.DecodeFinished) -> None:
        self._finished = True
        if finished.reason:
            await self._emit(Ended(finished.reason))
        else:
            await self._fail(node.node_id, grpc.StatusCode.ABORTED, "ABORTED", "decode was aborted")

    async def _emit(self, event: AttemptEvent) -> None:
        """Pass on, but never before the first token."""
        if self._prefilled:
            await self._events.put(event)
        else:
            self._held.append(event)

    async def _fail(
        self, node_id: str, status: grpc.StatusCode, reason: str, message: str, retry_after_s: float | None = None
    ) -> None:
        await self._events.put(LegFailed(node_id, status, reason, message, retry_after_s))
