"""One life of a mock engine, from a start to a stop or crash: its legs and the iteration loop.

An iteration decodes one token for the whole batch, then computes at most one chunk of prompts. State changes between
awaits, never across them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace

import numpy as np

from evolving.core.config import FetchStart
from evolving.core.iterations import IterationMeter
from evolving.core.pool_runs import Use
from evolving.runtime.clock import Clock
from evolving.runtime.tasks import first_of
from evolving_node_agent.engines.mock.admission import PrefillQueue
from evolving_node_agent.engines.mock.cache import BlockCache
from evolving_node_agent.engines.mock.config import MockConfig
from evolving_node_agent.engines.mock.context import ContextKv
from evolving_node_agent.engines.mock.faults import Faults
from evolving_node_agent.engines.mock.fetching import LegFetch, ReadMeter
from evolving_node_agent.engines.mock.jobs import check_job, draw, finish, generated_tokens
from evolving_node_agent.engines.mock.keeping import Keeping
from evolving_node_agent.engines.mock.legs import DecodeLeg, DecodeStage, Leg, PrefillLeg, PrefillStage
from evolving_node_agent.engines.mock.plan import Chunk, plan_chunks, sums
from evolving_node_agent.engines.mock.readers import KvReaders, StatusReaders
from evolving_node_agent.engines.mock.rendezvous import Rendezvous
from evolving_node_agent.engines.mock.status import Progress, engine_status
from evolving_node_agent.engines.port import (
    CachedTokens,
    DecodeJob,
    DecodeLost,
    EngineDown,
    EngineError,
    EngineStatus,
    Finished,
    NoRoom,
    Prefilled,
    PrefillJob,
    Rejected,
    Reserved,
    Sent,
    SourceLost,
    Started,
    Taken,
    Tokens,
)
from evolving_node_agent.engines.turns import ReadTurns


class Life:
    """The state and loop of one incarnation. `fetch` and `pull` bring KV from elsewhere; see fetch.py, transfer.py."""

    def __init__(self, config: MockConfig, clock: Clock, faults: Faults, cache: BlockCache, incarnation: str) -> None:
        self.config = config
        self.clock = clock
        self.faults = faults
        self.cache = cache
        self.incarnation = incarnation
        self.address = ""  # host:port of this life's server, once it listens
        self.legs: dict[str, Leg] = {}
        self.transfers = Rendezvous(clock, config.rendezvous_s)
        self.kv_readers = KvReaders(cache)
        self.status_readers = StatusReaders(self.status)
        self._order = 0
        faster = replace(config.fetch, bytes_per_s=config.fetch.bytes_per_s * config.speed_up)
        self.turns = ReadTurns(faster, clock)
        self.reads = ReadMeter(clock)
        self._queue = PrefillQueue(config, cache, self._take)
        self.keeping = Keeping(cache.pool, self._queue, self.reads)
        self._running: list[PrefillLeg] = []
        self._reserving: list[DecodeLeg] = []
        self._batch: list[DecodeLeg] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._down: EngineDown | None = None
        self.progress = Progress(IterationMeter(config.decode.experts, config.decode.experts_per_token))

    # -- legs come

    def add_prefill(
        self,
        job: PrefillJob,
        offered: Callable[[PrefillJob, int, int], int],
        fetch: Callable[[PrefillLeg], Coroutine[None, None, None]],
    ) -> PrefillLeg:
        """Queue a prefill leg; `fetch` runs beside where more leading blocks are `offered` than are here.

        Raises Rejected, EngineDown.
        """
        self._check(job)
        if self.transfers.get(job.transfer_id) is not None:
            raise Rejected(f"transfer id {job.transfer_id} is in use")
        self._order += 1
        kv = ContextKv(self.cache, self.config, Use.PREFILL, job)
        reusable = (len(job.tokens) - 1) // self.config.block_tokens
        held = self.cache.pool.held(kv.names, reusable)
        fetching = LegFetch(offered(job, held, reusable), job.fetch_deadline_s)
        leg = PrefillLeg(job, kv, self._order, self.clock.now_s(), reusable, fetching)
        self.legs[job.leg_id] = leg
        self.transfers.offer(leg)
        self._queue.add(leg)
        self.keeping.keep_own(leg)
        fetching.over = fetching.until == held == fetching.kept
        if not fetching.over:
            leg.fetching = self._spawn(fetch(leg))
            leg.tasks.append(leg.fetching)
            if self.config.fetch_start is FetchStart.ENQUEUE:
                fetching.go.set()
        self.publish()
        self._wake.set()
        return leg

    def add_decode(
        self,
        job: DecodeJob,
        pull: Callable[[DecodeLeg], Coroutine[None, None, None]],
        dismiss: Callable[[DecodeJob], Coroutine[None, None, None]],
    ) -> DecodeLeg:
        """Take a decode leg. `pull` runs beside; `dismiss` if the leg has room and ends before its KV is here. Raises
        Rejected, EngineDown."""
        self._check(job)
        kv = ContextKv(self.cache, self.config, Use.DECODE, job)
        leg = DecodeLeg(job, kv, generated_tokens(job), dismiss)
        self.legs[job.leg_id] = leg
        self._reserving.append(leg)
        leg.tasks.append(self._spawn(self._expire_reservation(leg)))
        leg.tasks.append(self._spawn(pull(leg)))
        self._admit_decodes()
        self.publish()
        return leg

    def pair(self, source: PrefillLeg, leg: DecodeLeg) -> None:
        """Two legs of one request on this node: the end of one before the KV changed hands ends the other."""
        source.partner, leg.partner = leg, source

    def _check(self, job: PrefillJob | DecodeJob) -> None:
        if self._down is not None:
            raise self._down
        if job.leg_id in self.legs:
            raise Rejected(f"leg {job.leg_id} is running")
        check_job(job, self.config)

    # -- legs go

    def end(self, leg: Leg, error: EngineError | None = None) -> None:
        """The leg is over, well or with `error`; all its room is free. Repeats do nothing."""
        if self.legs.get(leg.job.leg_id) is not leg:
            return
        del self.legs[leg.job.leg_id]
        if isinstance(leg, PrefillLeg):
            leg.stage = PrefillStage.OVER
            self.transfers.withdraw(leg)
        else:
            if leg.stage is DecodeStage.PULLING and self._down is None and not isinstance(error, SourceLost):
                self._spawn(leg.dismiss(leg.job))
            leg.stage = DecodeStage.OVER
        for legs in (self._running, self._reserving, self._batch):
            if leg in legs:
                legs.remove(leg)  # type: ignore[arg-type]
        if isinstance(leg, PrefillLeg):
            self._queue.discard(leg)
            self.keeping.let_go(leg)
        leg.kv.release()
        leg.events.close(error)
        current = asyncio.current_task()
        for task in leg.tasks:
            if task is not current:
                task.cancel()
        self._end_partner(leg)
        self._admit_decodes()
        self.publish()
        self._wake.set()

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _end_partner(self, leg: Leg) -> None:
        partner, leg.partner = leg.partner, None
        if partner is None:
            return
        partner.partner = None
        lost = SourceLost if isinstance(partner, DecodeLeg) else DecodeLost
        self.end(partner, lost("the other leg of this request ended"))

    def sent(self, leg: PrefillLeg, transfer_s: float, size: int) -> None:
        """The decode leg has all KV."""
        if leg.stage is PrefillStage.HOLDING:
            leg.events.put(Sent(transfer_s, size))
            self.end(leg)

    def landed(
        self, leg: DecodeLeg, pages: Sequence[bytes], first_token: int, transfer_s: float, cached_tokens: int
    ) -> None:
        """The prompt's missing pages are here: decoding begins."""
        if leg.stage is not DecodeStage.PULLING:
            return
        if leg.partner is not None:
            leg.partner.partner = None
            leg.partner = None
        leg.kv.receive(pages)
        leg.output.append(first_token)
        leg.stage = DecodeStage.RUNNING
        leg.events.put(Started(transfer_s, cached_tokens, first_token))
        self._batch.append(leg)
        self.publish()
        self._wake.set()

    def shut(self, error: EngineDown) -> None:
        """Nothing is taken any more; running legs go on."""
        self._down = error
        self.status_readers.wake()

    def kill(self, error: EngineDown) -> None:
        """Every leg ends with `error` and all readers with the last they have."""
        self.shut(error)
        for leg in [*self._reserving, *self.legs.values()]:  # nobody gets the room that another one leaves
            self.end(leg, error)
        for task in self._tasks:
            task.cancel()
        self.turns.close()
        self.kv_readers.close()
        self.status_readers.close()

    async def wait_ended(self) -> None:
        """Wait until nothing of a killed life runs any more."""
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    # -- the loop

    async def run(self) -> None:
        """Iterate for ever; cancel to stop."""
        while True:
            await self.faults.pass_stall()
            self._queue.admit(self._running, self.clock.now_s())
            batch = list(self._batch)
            chunks = plan_chunks(self._running, self.config.chunk_tokens)
            if not batch and not chunks:
                self.publish()
                await self._wait_for_work()
                continue
            if batch:
                await self._run_decode(batch)
            if chunks:
                await self._run_prefill(chunks)
            self.progress.iterations += 1
            self.publish()
            await self._planned_faults()

    async def _wait_for_work(self) -> None:
        self._wake.clear()
        deadline_s = self._queue.next_deadline_s(self.clock.now_s())
        if deadline_s is None:
            await self._wake.wait()
        else:
            await first_of(self._wake.wait(), self.clock.sleep(deadline_s))

    async def _take_s(self, duration_s: float) -> None:
        await self.clock.sleep(duration_s / self.config.speed_up)

    async def _planned_faults(self) -> None:
        plan = self.faults.plan
        if self.progress.iterations == plan.stall_after_iterations:
            await self.clock.sleep(plan.stall_s)
        if self.progress.iterations == plan.crash_after_iterations:
            self.faults.crash(plan.crash_status)

    async def _run_decode(self, batch: Sequence[DecodeLeg]) -> None:
        began_s = self.clock.now_s()
        context_tokens = sum(leg.context_tokens for leg in batch)
        await self._take_s(self.config.decode.decode_iteration_s(len(batch), context_tokens))
        self._decode(batch)
        busy_s = self.clock.now_s() - began_s
        self.progress.meter.add(busy_s, requests=len(batch), context_tokens=context_tokens)

    async def _run_prefill(self, chunks: Sequence[Chunk]) -> None:
        began_s = self.clock.now_s()
        work = sums(chunks)
        await self._take_s(self.config.prefill.prefill_iteration_s(work))
        self._prefill(chunks)
        self.progress.meter.add(self.clock.now_s() - began_s, work)

    def _decode(self, batch: Sequence[DecodeLeg]) -> None:
        for leg in batch:
            if leg.stage is not DecodeStage.RUNNING:
                continue  # aborted meanwhile
            first = len(leg.output)
            reason = None
            while reason is None and len(leg.output) < first + self.config.tokens_per_iteration:
                leg.kv.append(leg.output[-1])
                leg.output.append(draw(leg.kv, leg.job, leg.output, self.config))
                reason = finish(leg.output[-1], leg.output, leg.job, self.config)
            leg.iterations += 1
            leg.events.put(Tokens(first, np.array(leg.output[first:], dtype=np.uint32)))
            if reason is not None:
                leg.events.put(Finished(reason, leg.iterations))
                self.end(leg)

    def _prefill(self, chunks: Sequence[Chunk]) -> None:
        self.progress.prefill_iterations += 1
        for chunk in chunks:
            leg = chunk.leg
            if leg.stage is not PrefillStage.RUNNING:
                continue
            leg.kv.compute(chunk.tokens)
            self.progress.prefill_tokens += chunk.tokens
            if leg.left == 0:
                self._complete(leg)

    def _complete(self, leg: PrefillLeg) -> None:
        output = generated_tokens(leg.job)
        leg.first_token = draw(leg.kv, leg.job, output, self.config)
        output.append(leg.first_token)
        reason = finish(leg.first_token, output, leg.job, self.config)
        self._running.remove(leg)
        leg.stage = PrefillStage.HOLDING
        leg.events.put(Prefilled(leg.first_token, leg.cached, self.clock.now_s() - leg.taken_s, reason))
        if reason is not None:
            self.end(leg)
            return
        leg.ready.set()
        leg.tasks.append(self._spawn(self._expire_holding(leg)))

    # -- room

    def _take(self, leg: PrefillLeg) -> bool:
        """A leg leaves the queue and gets its room; False: there is none."""
        reused = leg.kv.reserve(self.config.pages(len(leg.job.tokens)), leg.reusable_blocks)
        if reused is None:
            return False
        in_l1, from_l2 = reused
        self._queue.discard(leg)
        self.keeping.let_go(leg)
        self._running.append(leg)
        leg.stage = PrefillStage.RUNNING
        size = self.config.block_tokens
        from_peers = leg.fetch.blocks_from_peers(in_l1, in_l1 + from_l2)
        leg.cached = CachedTokens(in_l1 * size, (from_l2 - from_peers) * size, from_peers * size)
        leg.taken_s = now_s = self.clock.now_s()
        leg.events.put(Taken(now_s - leg.queued_s, leg.fetch.read_s(now_s), leg.fetch.hidden_s(now_s)))
        return True

    def _admit_decodes(self) -> None:
        """Give room to waiting decode legs, first come, first served."""
        while self._reserving:
            leg = self._reserving[0]
            config = self.config
            running = sum(isinstance(each, DecodeLeg) and each.reserved.is_set() for each in self.legs.values())
            if running >= config.decode_slots:
                return
            tokens = len(leg.job.tokens)
            # The last token drawn never gets KV.
            final = min(config.max_context_tokens, tokens + leg.job.sampling.max_tokens - leg.job.generated) - 1
            reused = leg.kv.reserve(config.pages(max(tokens, final)), tokens // config.block_tokens)
            if reused is None:
                return
            self._reserving.pop(0)
            leg.cached_blocks = sum(reused)
            leg.stage = DecodeStage.PULLING
            leg.events.put(Reserved())
            leg.reserved.set()

    # -- tasks of a leg

    def fetch_ended(self, leg: PrefillLeg) -> None:
        """All has come for the leg that will."""
        leg.fetch.over = True
        leg.fetch.let_wait(self.clock.now_s())
        self.keeping.room_came()  # no more is kept free for it
        self.publish()
        self._wake.set()

    async def _expire_holding(self, leg: PrefillLeg) -> None:
        await leg.claims.none_for(leg.job.keep_s, self.clock)
        if not leg.pulled:
            self.end(leg, DecodeLost(f"no decode leg came within {leg.job.keep_s} s"))

    async def _expire_reservation(self, leg: DecodeLeg) -> None:
        await self.clock.sleep(leg.job.reserve_deadline_s)
        if leg.stage is DecodeStage.RESERVING:
            self.end(leg, NoRoom(f"no room within {leg.job.reserve_deadline_s} s"))

    # -- what others see

    def publish(self) -> None:
        """Tell readers what changed."""
        self.kv_readers.publish()
        self.status_readers.wake()

    def status(self) -> EngineStatus:
        """The state now."""
        return engine_status(self.config, self.cache.pool, self.reads, self.progress, self._queue, self.legs.values())
