"""The desk between legs and SGLang: takes legs in, keeps the KV of finished prefills, hands out results.

Scheduler's thread only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from sglang.srt.mem_cache.common import release_kv_cache

from evolving.core.config import FetchStart
from evolving_node_agent.engines.port import Aborted, EngineError, FinishReason, NoRoom
from evolving_node_agent.engines.sglang import messages as m
from evolving_node_agent.engines.sglang.config import SglangConfig
from evolving_node_agent.engines.sglang.translate import token_bytes

from .admission import Admission
from .blocks import BlockStore
from .keeping import Keeping
from .landing import Landing
from .leaving import Leaving
from .legs import DecodeLeg, FirstToken, Leg, Phase, PrefillLeg
from .memory import Ledger
from .requests import finish_reason, is_abort, make_request
from .reservations import Reservations
from .statusboard import StatusBoard

Outgoing = m.Report | tuple["asyncio.Future[Any]", Any]
_RETRACTED_PRIORITY = 1 << 40  # a decode that lost its place goes before any new prompt


class Desk:
    """All legs that SGLang has something to do with."""

    def __init__(self, scheduler: Any, config: SglangConfig, ledger: Ledger, blocks: BlockStore) -> None:
        self._scheduler = scheduler
        self._ledger = ledger
        self._claim_upstream = scheduler.tree_cache.claim_kv_row
        self._fetch_start = config.fetch_start
        self.blocks = blocks
        self.admission = Admission(self._on_turn, config.fetch_start)
        self.keeping = Keeping(scheduler.tree_cache, blocks, config.block_tokens, config.l2_tokens, self.resolve)
        self.landing = Landing(scheduler.tree_cache, blocks, self.keeping, config.block_tokens)
        self.leaving = Leaving(scheduler.tree_cache, blocks.residency)
        self.prefills: dict[str, PrefillLeg] = {}  # queued, computing or holding, by request id
        self.decodes: dict[str, DecodeLeg] = {}  # with a slot, by request id
        self.reservations = Reservations(scheduler, ledger, self.decodes, config.decode_slots)
        self.board = StatusBoard(scheduler, self)
        self._landed: list[Any] = []
        self._outbox: list[Outgoing] = []
        # Set by the service when it serves; called from this thread.
        self.deliver: Callable[[list[Outgoing]], None] | None = None
        ledger.prefills, ledger.decodes = self.prefills, self.decodes

    # -- prefill legs

    def start_prefill(self, leg: PrefillLeg) -> None:
        """Put the leg into SGLang's queue."""
        sampling = leg.command.sampling
        request = make_request(leg, sampling, leg.generated + 1, leg.command.priority, self._scheduler.model_config)
        leg.request = request
        leg.phase = Phase.QUEUED
        self.prefills[leg.rid] = leg
        self.keeping.enter(leg)
        self._plan_fetch(leg)
        self._scheduler._add_request_to_queue(request)

    def _plan_fetch(self, leg: PrefillLeg) -> None:
        """Decide whether there is anything to fetch, and let it begin unless that waits for the leg's turn."""
        width = self._scheduler.page_size
        usable = (len(leg.tokens) - 1) // width
        offered = max((holder.first_block + holder.blocks for holder in leg.command.holders), default=0)
        leg.fetch.missing_tokens = max(0, min(usable, offered) * width - leg.known_cached_tokens)
        if not leg.fetch.missing_tokens:
            leg.fetch.over = True
        elif self._fetch_start is FetchStart.ENQUEUE:
            self.resolve(leg.fetch.due, None)

    def _on_turn(self, leg: PrefillLeg) -> None:
        """The leg could be computed now, were it not for its fetch."""
        if self._fetch_start is FetchStart.ADMISSION:
            self.resolve(leg.fetch.due, None)
            self.flush()

    def end_fetch(self, leg: PrefillLeg) -> None:
        """Nothing more comes from peers for this leg."""
        leg.fetch.over = True
        leg.fetch.missing_tokens = 0

    def on_prefill_batch(self, batch: Any) -> None:
        """Prompt tokens are about to be computed; legs among them leave the queue now."""
        self.board.on_prefill_batch(batch)
        now_s = time.monotonic()
        for request in batch.reqs:
            leg = request.leg
            if isinstance(leg, PrefillLeg) and leg.phase is Phase.QUEUED:
                self._leave_queue(leg, Phase.COMPUTING)
                leg.taken_s = now_s
                leg.owned_tokens = self._ledger.in_blocks(len(leg.tokens)) - request.prefix_len
                fetch_s, hidden_s = leg.fetch.reading.total_s, leg.fetch.hidden_s
                self.report(m.LegTaken(leg.leg_id, now_s - leg.arrived_s, fetch_s=fetch_s, hidden_s=hidden_s))
                self.resolve(leg.taken, None)
        self.keeping.give_room()
        self.flush()

    def _leave_queue(self, leg: PrefillLeg, phase: Phase) -> None:
        leg.phase = phase
        self.admission.forget(leg)
        self.keeping.leave(leg)

    def claim_row(self, request: Any) -> bool:
        """SGLang gives back a request's KV row; keep it when a decode leg is to come for it."""
        leg = request.leg
        if not isinstance(leg, PrefillLeg) or leg.phase is not Phase.COMPUTING or leg.aborted:
            return bool(self._claim_upstream(request))
        if is_abort(request) or request.finished_reason is None or self._finish(leg) is not None:
            return bool(self._claim_upstream(request))
        request.refresh_fill_ids()
        self._scheduler.tree_cache.checkpoint(request, up_to=request.owned_kv_len())
        leg.held_kv = request.detach_kv()
        leg.phase = Phase.HOLDING
        return True

    def release_held(self, leg: PrefillLeg) -> None:
        """The KV of a computed prompt becomes plain cache; nothing when it already is."""
        if leg.phase is not Phase.HOLDING:
            return
        leg.phase = Phase.OVER
        self.prefills.pop(leg.rid, None)
        if leg.held_kv is not None:
            leg.request.kv, leg.held_kv = leg.held_kv, None
            release_kv_cache(leg.request, self._scheduler.tree_cache, checkpoint=False)

    def held_pages(self, leg: PrefillLeg, from_block: int) -> list[int] | None:
        """Device pages of a computed prompt from a block on, with the partly filled last one; None when it is gone."""
        if leg.phase is not Phase.HOLDING or leg.held_kv is None:
            return None
        width = self._scheduler.page_size
        row = self._scheduler.req_to_token_pool.req_to_token[leg.held_kv.req_pool_idx]
        slots = row[from_block * width : len(leg.tokens) : width]
        return [int(slot) // width for slot in slots.tolist()]

    def _finish(self, leg: PrefillLeg) -> FinishReason | None:
        """Why the first token is also the last, if it is."""
        if finish_reason(leg.request) is FinishReason.STOP:
            return FinishReason.STOP
        used_up = leg.generated + 1 >= leg.command.sampling.max_tokens
        full = len(leg.tokens) + 2 >= self._scheduler.max_req_len
        return FinishReason.LENGTH if used_up or full else None

    # -- decode legs

    def reserve_waiting(self) -> None:
        """Give slots to waiting decode legs, oldest first."""
        for leg, cached_tokens in self.reservations.admit():
            self.resolve(leg.reserved, cached_tokens)
        self.flush()

    def start_decode(self, leg: DecodeLeg, started: m.LegStarted) -> bool:
        """All prompt KV is here: join the running batch. False: the leg, or its KV, is gone."""
        if leg.rid not in self.decodes or leg.aborted:
            return False
        if leg.local is not None:
            if not self.reservations.take_over(leg):
                return False
            self.prefills.pop(leg.local.rid, None)
            self.resolve(leg.local.handed_over, (0.0, 0))
        request = leg.request
        request.output_ids.append(started.first_token)
        request.refresh_fill_ids()
        request.extend_end = request.kv.kv_committed_len
        leg.running = True
        self._landed.append(request)
        self.report(started)
        return True

    def take_landed(self) -> list[Any]:
        """Requests that can decode from now on."""
        landed, self._landed = self._landed, []
        return landed

    # -- what SGLang reports

    def on_output(self, request: Any) -> None:
        """A request has output, or ended."""
        leg = request.leg
        if is_abort(request):
            self.on_abort(request, request.finished_reason.message or "aborted")
        elif isinstance(leg, PrefillLeg):
            if request.finished() and leg.rid in self.prefills:
                self._prefilled(leg)
        elif leg.rid in self.decodes:
            self._decoded(leg)

    def on_abort(self, request: Any, message: str) -> None:
        """A request ended without a result, by our wish or SGLang's."""
        leg: Leg = request.leg
        self.prefills.pop(leg.rid, None)
        self.decodes.pop(leg.rid, None)
        if isinstance(leg, PrefillLeg):
            self._leave_queue(leg, Phase.OVER)
        error: EngineError = NoRoom(message) if "memory" in message.lower() else EngineError(message)
        self.resolve(leg.ended, Aborted("aborted") if leg.aborted else error)

    def on_retracted(self, request: Any) -> None:
        """A decode lost its memory and waits to be computed again."""
        request.priority = _RETRACTED_PRIORITY
        self.board.retractions += 1

    def _prefilled(self, leg: PrefillLeg) -> None:
        request = leg.request
        now_s = time.monotonic()
        finish = self._finish(leg)
        if finish is None and leg.phase is not Phase.HOLDING:  # aborted just before its KV could be kept
            self.on_abort(request, "aborted")
            return
        token = int(request.output_ids[-1])
        cached = leg.cached(int(request.cached_tokens_device), int(request.cached_tokens_host))
        self.report(m.LegPrefilled(leg.leg_id, token, cached=cached, prefill_s=now_s - leg.taken_s, finish=finish))
        self.resolve(leg.first, FirstToken(token=token, finish=finish))
        if finish is not None:
            leg.phase = Phase.OVER
            self.prefills.pop(leg.rid, None)
            self.resolve(leg.ended, None)

    def _decoded(self, leg: DecodeLeg) -> None:
        request = leg.request
        output = request.output_ids
        if len(output) > leg.sent:
            leg.iterations += 1
            new = np.array(output[leg.sent :], dtype=np.uint32)
            self.report(m.LegTokens(leg.leg_id, leg.sent, token_bytes(new)))
            leg.sent = len(output)
        reason = finish_reason(request)
        if reason is not None:
            self.decodes.pop(leg.rid, None)
            self.report(m.LegFinished(leg.leg_id, reason, leg.iterations))
            self.resolve(leg.ended, None)

    # -- ending

    def end_leg(self, leg: Leg) -> None:
        """End a leg by wish of the node agent. The service drops a reservation whose transfer may still be running."""
        if isinstance(leg, PrefillLeg):
            if leg.phase is Phase.HOLDING:
                self.release_held(leg)
            elif leg.phase in (Phase.QUEUED, Phase.COMPUTING):
                self._scheduler.end_request(leg.rid)
        elif isinstance(leg, DecodeLeg):
            if leg.request in self._landed:
                self._landed.remove(leg.request)
                self.reservations.drop(leg)
            elif not leg.running:
                self.reservations.forget(leg)
            elif leg.rid in self.decodes:
                self._scheduler.end_request(leg.rid)

    def holds_memory(self) -> bool:
        """Whether KV is locked by legs that are in no SGLang queue."""
        return bool(self.prefills or self.decodes or self._landed)

    # -- every iteration

    def after_iteration(self) -> bool:
        """Write completed output blocks through to L2, and say what changed; False: there may be more to say."""
        for request in self._scheduler.running_batch.reqs:
            self.blocks.publish_output(request)
        self.leaving.drop()
        self.keeping.give_room()
        changes = self.blocks.residency.take_changes()
        if changes:
            self.report(m.KvChanged(changes))
        told = self.board.publish(self.report)
        self.flush()
        return told

    # -- to the service, in order

    def report(self, report: m.Report) -> None:
        """Tell the node agent."""
        self._outbox.append(report)

    def resolve(self, future: asyncio.Future[Any], result: Any) -> None:
        """Give one of the service's futures its result, or its exception."""
        self._outbox.append((future, result))

    def flush(self) -> None:
        """Hand everything over that was said since the last time."""
        if self._outbox and self.deliver is not None:
            outgoing, self._outbox = self._outbox, []
            self.deliver(outgoing)
