"""The life of one request: begin, route, attempt, go on elsewhere when a node is lost, finish."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass

import grpc

from evolving.core.blocks import TOKEN_BYTES, reusable_blocks, root_digest
from evolving.core.routing import Context, PrefillDecision, PrefillScore
from evolving.core.terms import Role
from evolving.runtime.clock import Clock
from evolving.runtime.errors import DeadlineExceeded
from evolving.runtime.log import get_logger
from evolving.runtime.tasks import first_of
from evolving.v1 import gateway_pb2
from evolving_gateway.attempt import Attempt
from evolving_gateway.beginning import Beginning
from evolving_gateway.errors import DirectoryRefused, QueueFull, TooLongToMove
from evolving_gateway.known import Claim
from evolving_gateway.leg_events import Ended, LegFailed, NewTokens, Queued, Requoted, RoleSwitched, SoonerElsewhere
from evolving_gateway.metrics import GatewayMetrics
from evolving_gateway.nodes import Cluster
from evolving_gateway.open_levels import OpenRequests
from evolving_gateway.output import Gap, Output, Step
from evolving_gateway.plan import Job, Plan, Report
from evolving_gateway.recovery import Recovery
from evolving_gateway.router import NOWHERE, ModelFacts, Router
from evolving_gateway.settings import GatewaySettings
from evolving_gateway.token_ids import to_wire
from evolving_gateway.tokens import Tokenizer
from evolving_gateway.validation import Prompt, fill_sampling

_LONGEST_RETRY_HINT_S = 30.0
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Desk:
    """What all requests of a gateway share."""

    settings: GatewaySettings
    clock: Clock
    cluster: Cluster
    router: Router
    beginning: Beginning
    tokenizer: Tokenizer | None
    metrics: GatewayMetrics
    open_requests: OpenRequests


class Request:
    """One call of Generate, once its prompt is read. `events` runs once."""

    def __init__(
        self,
        desk: Desk,
        request: gateway_pb2.GenerateRequest,
        tenant: str,
        model: ModelFacts,
        prompt: Prompt,
        arrived_s: float,
        deadline_s: float,
    ) -> None:
        """request: checked, with a request id. arrived_s, deadline_s: of the call, by the desk's clock."""
        self._desk = desk
        self._request = request
        self._tenant = tenant
        self._model = model
        self._prompt = prompt
        self._arrived_s = arrived_s
        self._deadline_s = deadline_s
        self._root = root_digest(model.kv_format, "", tenant)
        eos_ids = desk.tokenizer.eos_ids if desk.tokenizer else frozenset[int]()
        self._sampling = fill_sampling(request.sampling, prompt.length, model, eos_ids)
        decoder = desk.tokenizer.tokenizer if desk.tokenizer else None
        self._output = Output(decoder, request.sampling.stop)
        self._recovery = Recovery(desk.settings.attempts_max, desk.settings.recover_s)
        self._match = NOWHERE
        self._reuse = gateway_pb2.Reuse()
        self._version = 0
        self._begun_s = 0.0
        self._open = False
        self._requotes = 0
        self._prefill_node_id = ""
        self._report = Report()

    async def events(self, claim: Claim) -> AsyncGenerator[gateway_pb2.GenerateResponse, None]:
        """started, tokens…, finished; `started` again after each re-route.

        Raises ServiceError subclasses. However it ends, both legs are aborted, and the directory learns of the end
        unless a later call with the same request id goes on with it.
        """
        self._begun_s = self._desk.clock.now_s()
        owed = True  # the directory may have heard of the request
        try:
            try:
                self._version = await self._begin(self._prompt.tokens)
            except DirectoryRefused:
                owed = False
                raise
            stopped = self._output.resume(self._prompt.resumed)
            reason = self._over_already(stopped)
            if reason:
                yield gateway_pb2.GenerateResponse(started=self._started(None))
                yield self._finished(reason)
                return
            async with aclosing(self._attempts()) as events:
                async for event in events:
                    yield event
        finally:
            if self._open:
                self._desk.open_requests.ended(self._desk.clock.now_s())
            if owed and not claim.superseded:
                self._desk.beginning.finish(self._tenant, self._request.request_id, self._request.branch)

    async def _begin(self, tokens: bytes, rematch: bool = False) -> int:
        """Learn where the blocks of `tokens` are; the version. Raises DirectoryRefused."""
        begun = await self._desk.beginning.begin(
            self._tenant, self._request.request_id, self._request.branch, self._model, self._root, tokens, rematch
        )
        self._match = begun.match
        self._reuse.loss = begun.loss or self._reuse.loss
        return begun.version

    def _over_already(self, stopped: bool) -> gateway_pb2.FinishReason.ValueType:
        """Why nothing is left to generate after the ids there are; 0 when something is."""
        ids = self._output.ids
        if stopped or (ids and ids[-1] in self._sampling.stop_token_ids):
            return gateway_pb2.FINISH_REASON_STOP
        if len(ids) >= self._sampling.max_tokens:
            return gateway_pb2.FINISH_REASON_LENGTH
        return gateway_pb2.FINISH_REASON_UNSPECIFIED

    async def _attempts(self) -> AsyncGenerator[gateway_pb2.GenerateResponse, None]:
        """Attempt after attempt until the output is complete."""
        elsewhere: PrefillDecision | None = None
        while True:
            decision, elsewhere = elsewhere or self._route(), None
            if decision.chosen is None:
                await self._pause(self._recovery.nowhere(self._desk.clock.now_s()))
                continue
            try:
                async with aclosing(self._attempt(decision, decision.chosen)) as events:
                    async for event in events:
                        yield event
                return
            except Requoted:
                self._requotes += 1
                self._desk.metrics.requotes.inc()
            except RoleSwitched:
                self._left_queue(decision.chosen.node_id, "role switched")
                self._recovery.forgive()  # who had no place before may be where all of the phase go now
            except SoonerElsewhere as error:
                self._left_queue(decision.chosen.node_id, "sooner elsewhere")
                if self._serves_still(error.decision):
                    elsewhere = error.decision
            except LegFailed as error:
                reason = self._over_already(stopped=False)
                if reason:  # only the word that it ended was lost: no node would take a request with nothing left
                    for last in self._ending(reason):
                        yield last
                    return
                await self._recover(error)

    def _left_queue(self, node_id: str, reason: str) -> None:
        """Nodes or roles changed, and the request left its place for another one."""
        self._desk.metrics.reroutes.inc()
        self._recovery.queued()
        self._requotes = 0  # waits elsewhere grow by what leaves the node: no fault of the request's
        _log.info("left_queue", node_id=node_id, reason=reason)

    def _serves_still(self, decision: PrefillDecision) -> bool:
        """Whether the chosen node can be gone to as it was meant."""
        assert decision.chosen is not None
        return decision.chosen.node_id in self._desk.cluster.serving(Role.PREFILL)

    def _route(self) -> PrefillDecision:
        context = Context(
            self._request.request_id,
            self._prompt.length + len(self._output.ids),
            self._model.block_tokens,
            self._match.pool_blocks,
        )
        decision = self._desk.router.prefill(self._model, context, self._match, self._recovery.avoid_prefill)
        self._reuse.pool_tokens = min(context.pool_tokens, self._prompt.length)
        return decision

    async def _attempt(
        self, decision: PrefillDecision, score: PrefillScore
    ) -> AsyncGenerator[gateway_pb2.GenerateResponse, None]:
        """One attempt. Raises Requoted, RoleSwitched, SoonerElsewhere, LegFailed."""
        desk = self._desk
        attempt = Attempt(self._job(), self._plan(score), desk.cluster, desk.router, desk.metrics)
        self._desk.metrics.attempts.inc()
        if not self._open:  # nothing refused it
            now_s = self._desk.clock.now_s()
            self._open = True
            self._desk.open_requests.opened(now_s)
            self._desk.metrics.route.observe(now_s - self._begun_s)
        self._prefill_node_id, self._report = score.node_id, attempt.report
        self._reuse.planned_tokens = min(score.cached_tokens, self._reuse.pool_tokens)
        _log.debug("routed", node_id=score.node_id, reason=decision.reason, candidates=decision.candidates)
        async with aclosing(attempt.run()) as events:
            async for event in events:
                match event:
                    case Queued():
                        self._recovery.queued()
                        yield gateway_pb2.GenerateResponse(started=self._started(score))
                    case NewTokens(index, ids):
                        step = self._take(index, ids)
                        if step.message is not None:
                            yield gateway_pb2.GenerateResponse(tokens=step.message)
                        if step.stopped:
                            break
                    case Ended(reason):
                        for last in self._ending(reason):
                            yield last
                        return
        yield self._finished(gateway_pb2.FINISH_REASON_STOP)

    def _job(self) -> Job:
        return Job(
            partition_id=self._desk.settings.partition_id,
            tenant=self._tenant,
            request_id=self._request.request_id,
            model=self._model,
            prompt=self._prompt.tokens,
            root=self._root,
            sampling=self._sampling,
            priority=self._request.priority,
            branch_id=self._request.branch.branch_id,
            version=self._version,
            reserve_deadline_s=self._desk.settings.reserve_deadline_s,
        )

    def _plan(self, score: PrefillScore) -> Plan:
        """What to send. Raises QueueFull for a new request that would wait too long, DeadlineExceeded."""
        settings = self._desk.settings
        if score.wait_s > settings.max_wait_s and not self._recovery.admitted:
            hint_s = min(_LONGEST_RETRY_HINT_S, score.wait_s - settings.max_wait_s)
            raise QueueFull(f"the shortest queue is {score.wait_s:.0f} s long", retry_after_s=max(1.0, hint_s))
        node = self._desk.cluster.nodes[score.node_id]
        own = next((depth.any_blocks for depth in self._match.nodes if depth.node_id == score.node_id), 0)
        return Plan(
            node=node,
            score=score,
            match=self._match,
            holders=self._desk.router.holders(self._match, score, own),
            generated=list(self._output.ids),
            may_requote=self._requotes < settings.requotes_max,
            excluded_prefill=dict(self._recovery.avoid_prefill),
            excluded_decode=dict(self._recovery.avoid_decode),
            timeout_s=self._left_s(),
        )

    def _take(self, index: int, ids: list[int]) -> Step:
        now_s = self._desk.clock.now_s()
        first = self._output.first_s is None
        try:
            step = self._output.take(index, ids, now_s)
        except Gap as gap:
            assert self._report.decode_node_id, "the first token of an attempt never leaves a gap"
            raise _broken(self._report.decode_node_id, str(gap)) from gap
        if step.message is not None:
            self._recovery.progressed()
            if first:
                self._desk.metrics.ttft.observe(now_s - self._arrived_s)
        return step

    async def _recover(self, error: LegFailed) -> None:
        """Wait for the next try, with a fresh match: a lost node's copies are gone."""
        now_s = self._desk.clock.now_s()
        self._left_s()
        self._desk.metrics.moves.labels(error.reason).inc()
        _log.warning("leg_failed", node_id=error.node_id, reason=error.reason, error=error.message)
        await self._pause(self._recovery.failed(error, now_s))
        tokens = self._prompt.tokens + to_wire(self._output.ids)
        if len(tokens) // TOKEN_BYTES > self._model.max_prompt_tokens:
            raise TooLongToMove(f"{error}; {len(tokens) // TOKEN_BYTES} tokens are too many to compute anew")
        try:
            await self._begin(tokens, rematch=True)
        except DirectoryRefused as refusal:  # its branch ended meanwhile, which never stops a running request
            _log.info("not_rematched", reason=refusal.reason)
            self._match = NOWHERE

    async def _pause(self, wait_s: float) -> None:
        """Wait, at most until the nodes change or the deadline passes."""
        sleep_s = min(wait_s, self._left_s())
        await first_of(self._desk.cluster.changed(), self._desk.clock.sleep(sleep_s))

    def _left_s(self) -> float:
        """What is left of the deadline. Raises DeadlineExceeded."""
        left_s = self._deadline_s - self._desk.clock.now_s()
        if left_s <= 0:
            raise DeadlineExceeded("the request's deadline passed")
        return left_s

    # -- messages

    def _started(self, score: PrefillScore | None) -> gateway_pb2.GenerateStarted:
        """score: None when nothing is left to route."""
        return gateway_pb2.GenerateStarted(
            request_id=self._request.request_id,
            prompt_tokens=self._prompt.length,
            prefill_node_id=score.node_id if score else "",
            predicted_cached_tokens=min(score.cached_tokens, self._prompt.length) if score else 0,
            predicted_ttft_s=score.ttft_s if score else 0.0,
            version=self._version,
        )

    def _ending(self, reason: gateway_pb2.FinishReason.ValueType) -> Iterator[gateway_pb2.GenerateResponse]:
        """Text that was held back, and the result."""
        rest = self._output.flush()
        if rest is not None:
            yield gateway_pb2.GenerateResponse(tokens=rest)
        yield self._finished(reason)

    def _finished(self, reason: gateway_pb2.FinishReason.ValueType) -> gateway_pb2.GenerateResponse:
        now_s = self._desk.clock.now_s()
        output, report, prompt_tokens = self._output, self._report, self._prompt.length
        cached = _within_prompt(report.cached, prompt_tokens)
        cached_tokens = cached.own_l1 + cached.own_l2 + cached.peer_l2
        ttft_s = (output.first_s - self._arrived_s) if output.first_s is not None else 0.0
        self._observe(cached, ttft_s)
        finished = gateway_pb2.GenerateFinished(
            reason=reason,
            output_token_ids=to_wire(output.ids),
            text=output.text,
            prefill_node_id=self._prefill_node_id,
            decode_node_id=report.decode_node_id or self._prefill_node_id,
            cached=cached,
            usage=gateway_pb2.Usage(
                prompt_tokens=prompt_tokens,
                cached_tokens=cached_tokens,
                computed_tokens=prompt_tokens - cached_tokens,
                output_tokens=len(output.ids),
            ),
            timings=gateway_pb2.Timings(
                queue_s=report.queue_s,
                fetch_s=report.fetch_s,
                fetch_hidden_s=report.fetch_hidden_s,
                prefill_s=report.prefill_s,
                transfer_s=report.transfer_s,
                ttft_s=ttft_s,
                tpot_s=output.tpot_s(),
                total_s=now_s - self._arrived_s,
            ),
            attempts=self._recovery.moves,
            reusable_blocks=reusable_blocks(prompt_tokens, len(output.ids), self._model.block_tokens),
            reuse=self._reuse,
        )
        return gateway_pb2.GenerateResponse(finished=finished)

    def _observe(self, cached: gateway_pb2.CachedTokens, ttft_s: float) -> None:
        metrics = self._desk.metrics
        metrics.prompt_tokens.inc(self._prompt.length)
        metrics.output_tokens.inc(len(self._output.ids) - self._output.resumed)
        metrics.reused(self._reuse, cached)
        metrics.queue.observe(self._report.queue_s)
        metrics.fetch.inc(self._report.fetch_s)
        metrics.fetch_hidden.inc(self._report.fetch_hidden_s)
        if tpot_s := self._output.tpot_s():
            metrics.tpot.observe(tpot_s)
        _log.info(
            "finished",
            prefill_node_id=self._prefill_node_id,
            decode_node_id=self._report.decode_node_id,
            prompt_tokens=self._prompt.length,
            output_tokens=len(self._output.ids),
            ttft_s=round(ttft_s, 6),
            moves=self._recovery.moves,
            requotes=self._requotes,
        )


def _within_prompt(cached: gateway_pb2.CachedTokens, prompt_tokens: int) -> gateway_pb2.CachedTokens:
    """Cached tokens of the prompt alone: a later attempt may have reused output of an earlier one too."""
    own_l1 = min(cached.own_l1, prompt_tokens)
    own_l2 = min(cached.own_l2, prompt_tokens - own_l1)
    return gateway_pb2.CachedTokens(
        own_l1=own_l1, own_l2=own_l2, peer_l2=min(cached.peer_l2, prompt_tokens - own_l1 - own_l2)
    )


def _broken(node_id: str, message: str) -> LegFailed:
    return LegFailed(node_id, grpc.StatusCode.INTERNAL, "GAP", message)
