"""One attempt at a request: a prefill leg on P, a decode leg on D once P took the request, and the hand-off.

Until D has reserved room, another D can take its place: P's KV waits for whichever comes.

The two legs report on two streams; `run` merges them into one, in the order of the output. Leaving `run` (an error, a
stop text, a client that went away) cancels both streams, which ends both legs within one iteration of their engines.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Collection, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from evolving.core.decode_routing import DecodeDecision
from evolving.core.routing import Context, PrefillScore, exceeds_quote
from evolving.core.terms import Role
from evolving.internal.v1 import node_agent_pb2
from evolving.runtime.log import get_logger
from evolving.runtime.tasks import end_tasks
from evolving.wire.status import parse_error
from evolving_gateway.leg_events import (
    AttemptEvent,
    Ended,
    LegEvents,
    LegFailed,
    NewTokens,
    Queued,
    Requoted,
    RoleSwitched,
    SoonerElsewhere,
)
from evolving_gateway.leg_requests import LegRequests
from evolving_gateway.metrics import GatewayMetrics
from evolving_gateway.node import Arriving, DecodeArriving, Node
from evolving_gateway.nodes import Cluster, Newcomers
from evolving_gateway.plan import Job, Plan, Report
from evolving_gateway.router import Router
from evolving_gateway.token_ids import ids_from_node

# What no other decode node would change: the request itself is impossible, or has no time left.
_FINAL = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.DEADLINE_EXCEEDED)
_log = get_logger(__name__)


@dataclass(eq=False, slots=True)
class _DecodeLeg:
    """A decode leg, the attempt's newest or one that it left."""

    node: Node
    leg_id: str
    arriving: DecodeArriving
    task: asyncio.Task[None] | None = None
    left: bool = False

    @property
    def waits(self) -> bool:
        """It has no room yet, as far as is known here."""
        return not self.arriving.reserved


class Attempt:
    """Runs once."""

    def __init__(self, job: Job, plan: Plan, cluster: Cluster, router: Router, metrics: GatewayMetrics) -> None:
        self._job = job
        self._plan = plan
        self._cluster = cluster
        self._router = router
        self._metrics = metrics
        self._events = LegEvents()
        self._tasks: list[asyncio.Task[None]] = []
        self._left: set[asyncio.Task[None]] = set()  # of decode legs that another one took the place of
        self._name = uuid.uuid4().hex
        self._prefill_leg = f"{self._name}-p"
        self._requests = LegRequests(job, plan)
        self._taken = False
        self._prefilled = False
        self._landed = False
        self._finished = False
        self._queued = False
        self._due_s = cluster.now_s() + plan.score.ttft_s  # when P has it prefilled: as predicted, then as P said
        self._reserved_at: Node | None = None  # the node that it leaves P's queue for
        self._held: list[AttemptEvent] = []  # of the decode leg, until the first token is known
        self._decoding: _DecodeLeg | None = None
        self._decode_legs = 0
        self._avoid_decode = dict(plan.excluded_decode)
        self._why_left: LegFailed | RoleSwitched | None = None  # the last decode leg that was left
        self.report = Report()

    async def run(self) -> AsyncGenerator[AttemptEvent, None]:
        """Queued, tokens, Ended. Raises Requoted, RoleSwitched, SoonerElsewhere or LegFailed."""
        stop_listening = self._cluster.on_change(self._check_role)
        stop_waiting = self._cluster.on_newcomers(self._check_newcomers)
        self._start_prefill()
        try:
            while True:
                event = await self._events.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if isinstance(event, Ended):
                    return
        finally:
            stop_listening()
            stop_waiting()
            await end_tasks(*self._tasks)
            if self._reserved_at is not None:
                self._reserved_at.arriving.pop(self._prefill_leg, None)

    def _start(self, node: Node, leg: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a leg. From here on, not from its first step on, its node's channel must stay open."""
        node.legs += 1
        task = asyncio.create_task(leg)
        task.add_done_callback(lambda task: self._leg_ended(node, task))
        self._tasks.append(task)
        return task

    def _leg_ended(self, node: Node, task: asyncio.Task[None]) -> None:
        """A leg's failures are events. Anything else that ends it must end the attempt too, and not leave it waiting:
        a bug, or the cancellation of a call by its channel (once the attempt is over nobody looks at it)."""
        self._cluster.release(node)
        if task in self._left:
            return
        if task.cancelled():
            lost = LegFailed(node.node_id, grpc.StatusCode.UNAVAILABLE, "CALL_CANCELLED", "the call was cancelled")
            self._events.interrupt(lost)
        elif isinstance(error := task.exception(), Exception):
            self._events.interrupt(error)

    def _check_role(self) -> None:
        """A request in P's queue, or on its way there, leaves when P no longer prefills, if another node does; one that
        waits for room in D, when D no longer decodes."""
        if self._taken:
            self._check_decode_role()
            return
        if self._cluster.serves(self._plan.node, Role.PREFILL):
            return
        if any(self._router.serving(self._job.model, self._cluster.serving(Role.PREFILL))):
            self._events.interrupt(RoleSwitched())

    def _check_newcomers(self, newcomers: Newcomers) -> None:
        """One that waits is let go to a node that gets the phase it waits for."""
        if self._taken:
            self._check_room(newcomers)
        elif newcomers.prefill and self._reserved_at is None and self._cluster.serves(self._plan.node, Role.PREFILL):
            self._check_sooner(newcomers)

    def _check_sooner(self, newcomers: Newcomers) -> None:
        """Leave P's queue for a node that prefills from now on, where equation 7 is much less, as for a requote.

        Those that came first are asked first, so both queues keep their order, and share the work evenly. Whose
        turn is after one that leaves is sooner where it is.
        """
        plan, node = self._plan, self._plan.node
        relieved_s, waits_s = newcomers.relieved_s.get(node.node_id, 0.0), newcomers.waits_s
        self._due_s -= relieved_s
        left_s = self._due_s - self._cluster.now_s()
        if self._queued:
            left_s = min(left_s, node.wait_s)  # until the whole queue is done, by the node's newest word
        stay_s = left_s + plan.score.duplicate_s
        others = (newcomers.prefill & self._cluster.serving(Role.PREFILL)) - {node.node_id}
        near = [node_id for node_id in others if exceeds_quote(stay_s, waits_s.get(node_id, 0.0))]
        if not near:
            return
        context = self._context(plan.match.pool_blocks)
        decision = self._router.prefill_at(self._job.model, context, plan.match, plan.excluded_prefill, near)
        waits_s.update({score.node_id: score.wait_s for score in decision.candidates if score.eligible})
        if decision.chosen is None or not exceeds_quote(stay_s, decision.chosen.total_s):
            return
        newcomers.relieved_s[node.node_id] = relieved_s + plan.score.service_s
        self._reserved_at = self._cluster.nodes[decision.chosen.node_id]
        self._announce(self._reserved_at, decision.chosen)
        self._events.interrupt(SoonerElsewhere(decision))

    def _announce(self, node: Node, score: PrefillScore) -> None:
        """Let the prefill leg count at a node before the node's own word covers it."""
        assert score.work is not None, "it was eligible"
        fetched_tokens = score.fetched_blocks * self._job.model.block_tokens
        node.arriving[self._prefill_leg] = Arriving(score.work, fetched_tokens)

    def _context(self, pool_blocks: int = 0) -> Context:
        job, plan = self._job, self._plan
        return Context(
            job.request_id,
            self._requests.context_tokens,
            job.model.block_tokens,
            pool_blocks,
            output_tokens_max=job.sampling.max_tokens - len(plan.generated),
        )

    # -- prefill

    def _start_prefill(self) -> None:
        node = self._plan.node
        self._announce(node, self._plan.score)
        task = self._start(node, self._prefill())
        task.add_done_callback(lambda _: node.arriving.pop(self._prefill_leg, None))

    async def _prefill(self) -> None:
        node = self._plan.node
        call = node.stub.Prefill(
            self._requests.prefill(self._prefill_leg, self._cluster.epoch), timeout=self._plan.timeout_s
        )
        try:
            async for response in call:
                await self._take_prefill(response)
            if not self._prefilled:
                await self._fail(node.node_id, grpc.StatusCode.INTERNAL, "STREAM_ENDED", "prefill ended early")
        except grpc.aio.AioRpcError as error:
            await self._prefill_broke(error)
        finally:
            call.cancel()

    async def _take_prefill(self, response: node_agent_pb2.PrefillResponse) -> None:
        node = self._plan.node
        self._cluster.see_epoch(response.epoch)
        node.acknowledge(self._prefill_leg, response.wait_s)
        match response.WhichOneof("event"):
            case "queued":
                self._queued = True
                self._due_s = self._cluster.now_s() + response.wait_s  # which is W_n of a leg behind this one
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
        lost = detail.reason == "DECODE_LOST"
        if lost and self._lost_in_leaving():
            return
        blamed = self.report.decode_node_id if lost else self._plan.node.node_id
        await self._fail(blamed, detail.status, detail.reason, detail.message, detail.retry_after_s)

    # -- decode

    async def _hand_off(self) -> None:
        """P took the request: choose D now, not before, and let it reserve while P computes."""
        decision = self._choose_decode()
        if decision.chosen is None:
            await self._fail("", grpc.StatusCode.UNAVAILABLE, "NO_NODE", decision.reason)
        else:
            self._start_decode(decision)

    def _choose_decode(self, among: Collection[str] | None = None) -> DecodeDecision:
        plan, model = self._plan, self._job.model
        return self._router.decode(model, self._context(), plan.match, plan.node.node_id, self._avoid_decode, among)

    def _start_decode(self, decision: DecodeDecision) -> None:
        """Send a decode leg to the node that was chosen. What the prefill leg holds goes to whichever leg reserves."""
        assert decision.chosen is not None
        node = self._cluster.nodes[decision.chosen.node_id]
        self.report.decode_node_id = node.node_id
        _log.debug("decode_chosen", node_id=node.node_id, reason=decision.reason, candidates=decision.candidates)
        self._decode_legs += 1
        arriving = DecodeArriving(self._requests.context_tokens, decision.chosen.stored_tokens)
        leg = self._decoding = _DecodeLeg(node, f"{self._name}-d{self._decode_legs}", arriving)
        node.decode_arriving[leg.leg_id] = arriving
        leg.task = self._start(node, self._decode(leg))
        leg.task.add_done_callback(lambda _: node.decode_arriving.pop(leg.leg_id, None))

    async def _decode(self, leg: _DecodeLeg) -> None:
        node = leg.node
        call = node.stub.Decode(self._requests.decode(leg.leg_id, self._cluster.epoch), timeout=self._plan.timeout_s)
        try:
            async for response in call:
                await self._take_decode(leg, response)
            if not self._finished:
                await self._fail(node.node_id, grpc.StatusCode.INTERNAL, "STREAM_ENDED", "decode ended early")
        except grpc.aio.AioRpcError as error:
            await self._decode_broke(leg, error)
        finally:
            call.cancel()

    async def _decode_broke(self, leg: _DecodeLeg, error: grpc.aio.AioRpcError) -> None:
        """The attempt fails with a decode leg that had room. For one that had none there may be another node."""
        if leg.left:
            return
        detail = parse_error(error)
        source_lost = detail.reason == "SOURCE_LOST"
        if source_lost and self._lost_in_leaving():
            return
        blamed = self._plan.node.node_id if source_lost else leg.node.node_id
        failure = LegFailed(blamed, detail.status, detail.reason, detail.message, detail.retry_after_s)
        if leg.waits and not source_lost and detail.status not in _FINAL:
            self._avoid_decode[leg.node.node_id] = detail.reason
            decision = self._choose_decode()
            if decision.chosen is not None:
                self._metrics.moves.labels(detail.reason).inc()
                self._leave(leg, failure, decision)
                return
        await self._events.put(failure)

    # -- leaving a decode node

    def _check_decode_role(self) -> None:
        leg = self._decoding
        if leg is not None and leg.waits and not self._cluster.serves(leg.node, Role.DECODE):
            self._reroute_decode(leg, self._cluster.serving(Role.DECODE))

    def _check_room(self, newcomers: Newcomers) -> None:
        """Leave a full D for a node that decodes from now on, where it would not wait."""
        leg, nodes = self._decoding, self._cluster.nodes
        if leg is None or not leg.waits or not newcomers.decode or not leg.node.full:
            return
        others = (newcomers.decode & self._cluster.serving(Role.DECODE)) - {leg.node.node_id}
        self._reroute_decode(leg, {each for each in others if nodes[each].has_room(leg.arriving.context_tokens)})

    def _reroute_decode(self, leg: _DecodeLeg, others: Collection[str]) -> None:
        decision = self._choose_decode(others) if others else None
        if decision is not None and decision.chosen is not None:
            self._metrics.reroutes.inc()
            self._leave(leg, RoleSwitched(), decision)

    def _leave(self, leg: _DecodeLeg, why: LegFailed | RoleSwitched, decision: DecodeDecision) -> None:
        """End a decode leg that waits, or failed as it did; another takes its place."""
        assert leg.task is not None, "it runs"
        reason = why.reason if isinstance(why, LegFailed) else "role switched"
        _log.info("left_decode_node", node_id=leg.node.node_id, reason=reason)
        leg.left = True
        leg.node.decode_arriving.pop(leg.leg_id, None)
        self._why_left = why
        self._left.add(leg.task)
        if leg.task is not asyncio.current_task():
            leg.task.cancel()
        self._start_decode(decision)

    def _lost_in_leaving(self) -> bool:
        """Whether the prefill leg went with a decode leg that was left: it had just reserved, and its word of that was
        still on the way. The attempt is over then, for the reason it was left for."""
        if self._why_left is None or self._decoding is None or not self._decoding.waits:
            return False
        self._events.interrupt(self._why_left)
        return True

    async def _take_decode(self, leg: _DecodeLeg, response: node_agent_pb2.DecodeResponse) -> None:
        arriving = leg.arriving
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
                await self._finish(leg.node, response.finished)

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
