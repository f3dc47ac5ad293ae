"""SGLang's scheduler with both phases of disaggregated serving in its one loop.

Upstream's plain scheduler already prefills and decodes in turn. What is added is the hand-over between nodes: a prefill
leg is a request for one token whose KV row is kept when it ends; a decode leg is a request that joins the running batch
with its KV in place, landed from elsewhere or taken over from the prefill leg on the same node. So a node has no role,
and upstream's role-bound queues, bootstrap and handshake are not used.

Everything here runs in the scheduler's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers import scheduler as upstream
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels
from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

from evolving_node_agent.engines.sglang.config import SglangConfig

from .blocks import BlockStore
from .desk import Desk
from .inbox import Inbox
from .measuring import batch_work
from .memory import Ledger, adder_class, charge_debt
from .pages import KvPages
from .requests import restore_penalties, seeded
from .statusboard import CHANGE_S

logger = logging.getLogger(__name__)
_IDLE_WAIT_S = 1.0
_STALLED_WAIT_S = 0.01  # something waits for memory that another node's step frees


class _Aborts:
    """Where SGLang says that a request ended outside the output stream."""

    def __init__(self, tell: Callable[[Any, str], None]) -> None:
        self._tell = tell

    def send_output(self, output: Any, receiver: Any = None) -> None:
        """`output` is an AbortReq, `receiver` its request; anything else has no reader here."""
        if isinstance(output, AbortReq) and receiver is not None:
            reason = output.finished_reason or {}
            self._tell(receiver, str(reason.get("message") or "aborted"))


def _outputs_to(scheduler: NodeScheduler) -> type[SchedulerOutputStreamer]:
    """Where SGLang says that requests have new output."""

    class Outputs(SchedulerOutputStreamer):  # type: ignore[misc]
        def stream_output(self, reqs: list[Any], return_logprob: bool, skip_req: Any = None) -> None:
            for request in reqs:
                if request is not skip_req:
                    scheduler.desk.on_output(request)

    return Outputs


class NodeScheduler(upstream.Scheduler):  # type: ignore[misc]
    """One rank, one loop, no overlap schedule."""

    # Set by the host before SGLang constructs the scheduler.
    config: SglangConfig
    inbox: Inbox
    # Upstream's, typed for those who read this file.
    running_batch: Any
    last_batch: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ledger = Ledger(self, self.config.reserve_tokens)
        charge_debt(self.token_to_kv_pool_allocator, self.ledger)
        kv_pool = self.token_to_kv_pool_allocator.get_kvcache()
        host_pool = self.tree_cache.cache_controller.mem_pool_host.anchor_entry.host_pool
        pages = KvPages(kv_pool, host_pool, self.page_size)
        blocks = BlockStore(self.tree_cache, pages, self.config.page_checksums)
        self.desk = Desk(self, self.config, self.ledger, blocks)
        self._adder = adder_class(self.ledger, self.desk.admission)
        self.tree_cache.claim_kv_row = self.desk.claim_row

    # -- what upstream asks for

    def init_ipc_channels(self, port_args: Any) -> None:
        """No other SGLang process exists: nothing to receive from, and outputs stay here."""
        self.ipc_channels = SchedulerIpcChannels(
            recv_from_tokenizer=None,
            recv_from_rpc=None,
            send_to_tokenizer=_Aborts(self._on_abort),
            send_to_detokenizer=SenderWrapper(None),
            send_metrics_from_scheduler=None,
        )
        self.load_snapshot_writer = None
        self.recv_from_tokenizer = None

    def _on_abort(self, request: Any, message: str) -> None:
        self.desk.on_abort(request, message)

    def init_idle_sleeper(self) -> None:
        """The loop below waits on its inbox."""
        self.idle_sleeper = None

    def get_output_streamer_class(self) -> type[SchedulerOutputStreamer]:
        """Outputs go to the desk."""
        return _outputs_to(self)

    def get_prefill_adder_class(self) -> Any:
        """Admission leaves decode its reserve, and legs that fetch where they are."""
        return self._adder

    def _get_new_batch_prefill_raw(self, *args: Any, **kwargs: Any) -> Any:
        self.desk.admission.begin_walk()
        try:
            return super()._get_new_batch_prefill_raw(*args, **kwargs)
        finally:
            self.desk.admission.end_walk()

    def is_fully_idle(self, *args: Any, **kwargs: Any) -> bool:
        """KV that waits for another node is work too."""
        return bool(super().is_fully_idle(*args, **kwargs)) and not self.desk.holds_memory()

    # -- the loop

    @torch.no_grad()
    def run_loop(self) -> None:
        """Serve until `gracefully_exit`."""
        wait_s = 0.0
        while not self.gracefully_exit:
            self.inbox.run(wait_s)
            began_s = time.monotonic()
            ran = self._iterate()
            told = self.desk.after_iteration()
            if ran:
                wait_s = 0.0
            elif self.is_fully_idle():
                self.on_idle()
                wait_s = _IDLE_WAIT_S if told else CHANGE_S
            else:
                # Walking a queue of long prompts takes a while; what they wait for comes in between.
                wait_s = max(_STALLED_WAIT_S, time.monotonic() - began_s)

    def _iterate(self) -> bool:
        began_s = time.monotonic()
        self.desk.reserve_waiting()
        self._join_landed()
        plan = self.get_next_batch_to_run(running_batch=self.running_batch, last_batch=self.last_batch)
        self.running_batch, batch = plan.running_batch, plan.batch_to_run
        self.cur_batch_for_debug = batch
        if batch:
            work = batch_work(batch)
            if batch.forward_mode.is_extend():
                restore_penalties(batch, earlier_only=False)
                self.desk.on_prefill_batch(batch)
            with seeded(batch):
                result = self.run_batch(batch)
            self.process_batch_result(batch, result)
            self.desk.board.meter.add(time.monotonic() - began_s, *work)
        self.last_batch = batch
        return bool(batch)

    def _join_landed(self) -> None:
        """Put requests whose KV is here into the running batch; they decode from the next step on."""
        requests = self.desk.take_landed()
        if not requests:
            return
        batch = ScheduleBatch.init_new(
            requests,
            self.req_to_token_pool,
            self.token_to_kv_pool_allocator,
            self.tree_cache,
            self.model_config,
            self.enable_overlap,
            self.spec_algorithm,
        )
        batch.prepare_for_prebuilt()
        batch.process_prebuilt(self.future_map)
        restore_penalties(batch, earlier_only=True)
        if self.running_batch.is_empty():
            self.running_batch = batch
        else:
            self.running_batch.merge_batch(batch)

    def update_running_batch(self, batch: ScheduleBatch) -> ScheduleBatch | None:
        """As upstream, except that a lone decode waits for memory that prefill will give back."""
        batch.filter_batch()
        waits_for_prefill = self.chunked_req is not None or self.ledger.prefill_owned_tokens() > 0
        if len(batch.reqs) == 1 and waits_for_prefill and not batch.check_decode_mem():
            return None
        return super().update_running_batch(batch)

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
        if is_retracted:
            self.desk.on_retracted(req)
        super()._add_request_to_queue(req, is_retracted=is_retracted)

    def end_request(self, rid: str) -> None:
        """Abort one request wherever it is in SGLang."""
        self.abort_request(AbortReq(rid=rid))
