"""One node in virtual time: a prefill queue, chunked prefill, a decode batch with slots, one iteration after another.

While there is nothing to compute and the batch stays as it is, its iterations are counted, not played: their ends are
where they would have been, to the rounding of floating point. How far each answer is follows from the count of the
node's iterations, so that an iteration costs the same whatever the batch.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from evolving.core.iterations import IterationMeter
from evolving.core.pool_runs import Use
from evolving.core.terms import Phase
from evolving.core.timemodel import PrefillSums, mixed_iteration_s
from evolving.core.work import PrefillWork, query_key_pairs, summed_wait_s
from evolving_sim.events import Event, EventHeap, Priority
from evolving_sim.kv import NodeKv
from evolving_sim.legs import DecodeLeg, PrefillLeg
from evolving_sim.node_config import BothPhases, NodeConfig


@dataclass(frozen=True, slots=True)
class NodeCallbacks:
    """Whom a node tells. Each is called at the moment it says."""

    fetch: Callable[[PrefillLeg], None]  # its turn has come, and its fetch is to begin
    taken: Callable[[PrefillLeg], None]  # left the queue: its decode node is to be chosen
    prefilled: Callable[[PrefillLeg], None]  # the first token is there
    granted: Callable[[DecodeLeg], None]  # has a slot and room
    decoded: Callable[[DecodeLeg], None]  # has all its tokens
    begun: Callable[[Phase], None] = lambda _: None  # an iteration that does this began, while `watched` is it


@dataclass(slots=True, eq=False)
class _Iterations:
    """Those under way: with `chunks` one, else as many as the batch does not change in."""

    began_s: float
    count: int
    first_s: float  # the first one
    growth_s: float  # each one takes so much longer than the one before, for the context grew
    chunks: list[tuple[PrefillLeg, int]] = field(default_factory=list)
    sums: PrefillSums = field(default_factory=PrefillSums)
    end: Event | None = None

    def span_s(self, count: int) -> float:
        """Seconds that the first `count` of them take."""
        return count * self.first_s + self.growth_s * count * (count - 1) / 2

    def ended_by(self, now_s: float) -> int:
        """The first of them that ends at `now_s` or later, from 1."""
        passed_s = now_s - self.began_s
        if self.growth_s > 0:
            half = self.first_s - self.growth_s / 2
            count = math.ceil((math.sqrt(half * half + 2 * self.growth_s * passed_s) - half) / self.growth_s)
        else:
            count = math.ceil(passed_s / self.first_s)
        count = min(max(count, 1), self.count)
        while count > 1 and self.began_s + self.span_s(count - 1) >= now_s:
            count -= 1
        while count < self.count and self.began_s + self.span_s(count) < now_s:
            count += 1
        return count


@dataclass(slots=True)
class _Waiting:
    """Sums over the queue, kept as it changes. All are whole numbers or halves: they stay exact."""

    legs: int = 0
    uncached_tokens: int = 0
    query_key_pairs: float = 0.0
    restored_tokens: int = 0
    cached_tokens: int = 0
    coming_tokens: int = 0  # still to be brought from peers

    def add(self, leg: PrefillLeg, sign: int) -> None:
        """A leg came, or (-1) left."""
        self.legs += sign
        self.uncached_tokens += sign * leg.uncached_tokens
        self.query_key_pairs += sign * leg.query_key_pairs
        self.restored_tokens += sign * leg.restored_tokens
        self.cached_tokens += sign * leg.cached_tokens
        self.coming_tokens += sign * leg.coming_tokens

    def sums(self) -> PrefillSums:
        """As equation 1 takes them."""
        return PrefillSums(self.uncached_tokens, self.query_key_pairs, self.restored_tokens, self.cached_tokens)


@dataclass(slots=True, eq=False, repr=False)
class SimNode:
    """One node's engine."""

    node_id: str
    config: NodeConfig
    events: EventHeap
    callbacks: NodeCallbacks
    kv: NodeKv
    fetches_at_start: bool = False  # a prompt's fetch begins when its turn has come, and none behind it is taken before
    alive: bool = field(init=False, default=True)
    slowness: float = field(init=False, default=1.0)  # iterations take so many times longer than they should
    watched: Phase | None = field(init=False, default=None)  # `begun` is called once, at the first iteration of it
    meter: IterationMeter = field(init=False)  # of iterations that computed prompts; others have no use for it here
    queue: list[PrefillLeg] = field(init=False, default_factory=list)  # in order of arrival
    running: list[PrefillLeg] = field(init=False, default_factory=list)
    holding: dict[PrefillLeg, None] = field(init=False, default_factory=dict)  # computed, their KV not yet sent on
    waiting: dict[DecodeLeg, None] = field(init=False, default_factory=dict)  # without a slot, in order of arrival
    granted: dict[DecodeLeg, None] = field(init=False, default_factory=dict)  # with a slot, their KV still to come
    batch: dict[DecodeLeg, None] = field(init=False, default_factory=dict)
    sent_work: dict[PrefillLeg, PrefillWork] = field(init=False, default_factory=dict)  # queue and running, as sent
    computed_tokens: int = field(init=False, default=0)  # since the start
    _waiting_sums: _Waiting = field(init=False, default_factory=_Waiting)
    _joining: list[DecodeLeg] = field(init=False, default_factory=list)
    _now: _Iterations | None = field(init=False, default=None)
    _starting: bool = field(init=False, default=False)  # the next iteration begins at this moment
    _prefill_iterations: int = field(init=False, default=0)
    # The batch: decode iterations so far, who ends after which of them, and contexts as base + growth · iterations.
    _decoded: int = field(init=False, default=0)
    _ends: list[tuple[int, int, DecodeLeg]] = field(init=False, default_factory=list)
    _joined: int = field(init=False, default=0)
    _context_base: float = field(init=False, default=0.0)
    _context_growth: float = field(init=False, default=0.0)
    _coming_context: int = field(init=False, default=0)  # of legs that wait for a slot or for their KV
    _coming_stored: int = field(init=False, default=0)  # of their KV, what host memory lacks

    def __post_init__(self) -> None:
        decode = self.config.decode
        self.meter = IterationMeter(decode.experts, decode.experts_per_token)

    # -- what others see

    @property
    def new_tokens_per_iteration(self) -> float:
        """ū since the start; the chunk size where nothing was observed."""
        if not self._prefill_iterations:
            return float(self.config.chunk_tokens)
        return self.computed_tokens / self._prefill_iterations

    @property
    def wait_s(self) -> float:
        """W_n: seconds until a leg queued now would be taken (equation 7)."""
        return self._wait_s(self._waiting_sums)

    def wait_behind_s(self, legs: Iterable[PrefillLeg]) -> float:
        """The same for one behind these of the queue."""
        ahead = _Waiting()
        for leg in legs:
            ahead.add(leg, 1)
        return self._wait_s(ahead)

    def _wait_s(self, ahead: _Waiting) -> float:
        if not self.running and not ahead.legs:
            return 0.0
        running = self._running_sums() if self.running else None
        queued = ahead.sums() if ahead.legs else None
        beside_s = self._decode_s() if self.batch else 0.0
        return summed_wait_s(running, queued, self.config.prefill, self.new_tokens_per_iteration, beside_s)

    @property
    def decoding(self) -> int:
        """Requests with a slot."""
        return len(self.granted) + len(self._joining) + len(self.batch)

    @property
    def slots_free(self) -> int:
        """Requests that could be taken now; those that wait have the first."""
        return max(0, self.config.decode_slots - self.decoding - len(self.waiting))

    @property
    def context_tokens(self) -> int:
        """Summed over all that decode or will."""
        return round(self._batch_context + sum(leg.context_tokens for leg in self._joining)) + self._coming_context

    @property
    def memory_tokens(self) -> int:
        """Device memory that those leave to another one; below 0 where some wait for it."""
        return self.config.l1_tokens - self.config.reserve_tokens - self.context_tokens

    @property
    def kv_used_share(self) -> float:
        """Share of device memory that answers take, all they will need."""
        return self.kv.used_share(Use.DECODE)

    @property
    def room_tokens(self) -> float:
        """Host memory that is free or held for no branch, less what legs on their way will store."""
        coming = self._waiting_sums.uncached_tokens + self._waiting_sums.coming_tokens + self._coming_stored
        return max(0, self.kv.free_tokens() - coming)

    @property
    def fetch_backlog_tokens(self) -> int:
        """What prompts in the queue still have to get from peers."""
        return self._waiting_sums.coming_tokens

    @property
    def idle(self) -> bool:
        """No iteration is under way."""
        return self._now is None

    def busy_with(self, phase: Phase) -> bool:
        """Whether requests of a phase are here that left the queue."""
        if phase is Phase.PREFILL:
            return bool(self.running or self.holding)
        return bool(self.granted or self._joining or self.batch)

    @property
    def empty(self) -> bool:
        """Whether no request is here."""
        return not (self.queue or self.running or self.holding or any(True for _ in self.decode_legs()))

    def decode_legs(self) -> Iterator[DecodeLeg]:
        """All that decode or will."""
        yield from self.batch
        yield from self._joining
        yield from self.granted
        yield from self.waiting

    # -- prompts come and go

    def enqueue(self, leg: PrefillLeg, sent: PrefillWork) -> None:
        """Queue a prompt."""
        self.queue.append(leg)
        self.sent_work[leg] = sent
        self._waiting_sums.add(leg, 1)
        leg.kept_blocks = self.kv.keep(leg.kv.names, 0, leg.fetch_until_blocks, first=self._is_first(leg))
        self.wake()

    def came(self, leg: PrefillLeg, blocks: int) -> None:
        """Peers' KV for a prompt in the queue is here, up to so many leading blocks of it."""
        tokens = min(leg.coming_tokens, (blocks - leg.fetch_from_blocks) * self.config.block_tokens)
        leg.kept_blocks = self.kv.keep(leg.kv.names, leg.kept_blocks, blocks, first=self._is_first(leg))
        leg.fetch_from_blocks = max(leg.fetch_from_blocks, blocks)
        leg.coming_tokens -= max(0, tokens)
        self._waiting_sums.coming_tokens -= max(0, tokens)

    def fetched(self, leg: PrefillLeg) -> None:
        """All has come for a prompt in the queue that will."""
        self._waiting_sums.coming_tokens -= leg.coming_tokens
        leg.coming_tokens = 0
        leg.fetch_over = True
        self.wake()

    def drop(self, leg: PrefillLeg) -> None:
        """A prompt leaves, whatever stage it is in."""
        if leg in self.queue:
            self._leave_queue(leg)
            self.sent_work.pop(leg)
        elif leg in self.holding:
            del self.holding[leg]
        elif leg in self.running:
            self.running.remove(leg)
            self.sent_work.pop(leg)
        leg.gone = True
        leg.kv.release()
        self._room_came()

    def _is_first(self, leg: PrefillLeg) -> bool:
        return self.queue[0] is leg

    def _leave_queue(self, leg: PrefillLeg) -> None:
        self.queue.remove(leg)
        self._waiting_sums.add(leg, -1)
        self.kv.pool.unlock(leg.kv.names, leg.kept_blocks, Use.QUEUED)
        leg.kept_blocks = 0

    # -- answers come and go

    def reserve(self, leg: DecodeLeg) -> None:
        """Ask for a slot and room."""
        self.waiting[leg] = None
        self._coming_context += leg.context_tokens
        self._coming_stored += leg.stored_tokens
        self._grant()

    def join(self, leg: DecodeLeg) -> None:
        """A granted answer's KV is here: it decodes from the next iteration on."""
        del self.granted[leg]
        self._arrived(leg)
        leg.kv.reach(leg.prefill.context_tokens // self.config.block_tokens)
        self._joining.append(leg)
        self.wake()

    def drop_decode(self, leg: DecodeLeg) -> None:
        """An answer leaves before its end."""
        if leg in self.waiting:
            del self.waiting[leg]
            self._arrived(leg)
        elif leg in self.granted:
            del self.granted[leg]
            self._arrived(leg)
        elif leg in self._joining:
            self._joining.remove(leg)
        else:
            raise AssertionError("what decodes is not interrupted, but by its node's death")
        leg.gone = True
        leg.kv.release()
        self._room_came()

    def _arrived(self, leg: DecodeLeg) -> None:
        self._coming_context -= leg.context_tokens
        self._coming_stored -= leg.stored_tokens

    def iterations_of(self, leg: DecodeLeg) -> int:
        """Decode iterations that an answer has had."""
        if leg not in self.batch:
            return 0
        under_way = self._now.ended_by(self.events.now_s) - 1 if self._now is not None and not self._now.chunks else 0
        return self._decoded + under_way - leg.joined_iteration

    def die(self) -> None:
        """Nothing happens here any more."""
        self.alive = False
        if self._now is not None and self._now.end is not None:
            self._now.end.cancel()
        self._now = None

    # -- iterations

    def wake(self) -> None:
        """Something came: the next iteration takes it along, and is the next one there is."""
        if self._now is None:
            self._start()
        elif self._now.count > 1:
            self._now.count = self._now.ended_by(self.events.now_s)
            self._schedule_end(self._now)

    def _start(self) -> None:
        """Begin once all that comes at this moment is here."""
        if not self._starting:
            self._starting = True
            self.events.after(0.0, Priority.ITERATION, self._begin)

    def _begin(self) -> None:
        if not self.alive:
            return
        for leg in self._joining:
            self._add_to_batch(leg)
        self._joining = []
        self._admit()
        self._starting = False
        chunks, sums = self._plan()
        if not chunks and not self.batch:
            return
        if self.watched is not None and (chunks if self.watched is Phase.PREFILL else self.batch):
            watched, self.watched = self.watched, None
            self.callbacks.begun(watched)
        now_s = self.events.now_s
        if chunks:
            iteration_s = self.slowness * self._computing_s(sums)
            self._now = _Iterations(now_s, 1, iteration_s, 0.0, chunks, sums)
        else:
            count = self._ends[0][0] - self._decoded
            growth_s = self.slowness * self.config.decode.d3_s * self._context_growth
            self._now = _Iterations(now_s, count, self.slowness * self._decode_s(), growth_s)
        self._schedule_end(self._now)

    def _schedule_end(self, iterations: _Iterations) -> None:
        if iterations.end is not None:
            iterations.end.cancel()
        # Where rounding puts the end before now, it is now.
        end_s = max(self.events.now_s, iterations.began_s + iterations.span_s(iterations.count))
        iterations.end = self.events.at(end_s, Priority.ITERATION, self._end)

    def _end(self) -> None:
        iterations, self._now = self._now, None
        assert iterations is not None
        ended: list[DecodeLeg] = []
        if self.batch:
            self._decoded += iterations.count
            while self._ends and self._ends[0][0] == self._decoded:
                ended.append(heapq.heappop(self._ends)[2])
        prefilled = self._computed(iterations)
        for decoded in ended:
            self._leave_batch(decoded)
        self._start()
        if ended:
            self._grant()
        for decoded in ended:
            self.callbacks.decoded(decoded)
        for complete in prefilled:
            self.callbacks.prefilled(complete)

    def _add_to_batch(self, leg: DecodeLeg) -> None:
        leg.joined_iteration = self._decoded
        self.batch[leg] = None
        self._joined += 1
        heapq.heappush(self._ends, (leg.end_iteration, self._joined, leg))
        self._context_base += leg.context_tokens - leg.growth_tokens * self._decoded
        self._context_growth += leg.growth_tokens

    def _leave_batch(self, leg: DecodeLeg) -> None:
        """An answer is complete; the last token has no KV yet."""
        del self.batch[leg]
        self._context_base -= leg.context_tokens - leg.growth_tokens * leg.joined_iteration
        self._context_growth -= leg.growth_tokens
        if not self.batch:
            self._context_base = self._context_growth = 0.0
        request = leg.request
        leg.kv.reach((request.prompt_tokens + request.output_tokens - 1) // self.config.block_tokens)
        leg.kv.release()
        leg.gone = True

    @property
    def _batch_context(self) -> float:
        return self._context_base + self._context_growth * self._decoded

    def _computed(self, iterations: _Iterations) -> list[PrefillLeg]:
        """Count the chunks of an iteration that ended; the prompts that are complete."""
        if not iterations.chunks:
            return []
        complete = []
        for leg, tokens in iterations.chunks:
            if leg.gone:
                continue
            leg.computed_tokens += tokens
            leg.kv.reach((leg.cached_tokens + leg.computed_tokens) // self.config.block_tokens)
            if leg.left_tokens == 0:
                complete.append(leg)
                self.running.remove(leg)
                self.sent_work.pop(leg)
                self.holding[leg] = None
        self._prefill_iterations += 1
        self.computed_tokens += sum(tokens for _, tokens in iterations.chunks)
        contexts = round(self._batch_context) if self.batch else 0
        self.meter.add(iterations.first_s, iterations.sums, len(self.batch), contexts)
        return complete

    def _admit(self) -> None:
        """Take prompts while an iteration's chunk has tokens left, passing over those whose fetch is not over. Nobody
        passes one there is no room for, nor one whose fetch began with its turn."""
        if not self.queue:
            return
        left_tokens = self.config.chunk_tokens - sum(leg.left_tokens for leg in self.running)
        taken = []
        for leg in list(self.queue) if left_tokens > 0 else ():
            if left_tokens <= 0:
                break
            if not leg.fetch_over and self.fetches_at_start and not leg.fetch_begun:
                self.callbacks.fetch(leg)
            if not leg.fetch_over:
                if self.fetches_at_start:
                    break
                continue
            if not self._take(leg):
                break
            taken.append(leg)
            left_tokens -= leg.left_tokens
        for leg in taken:
            self.callbacks.taken(leg)

    def _take(self, leg: PrefillLeg) -> bool:
        """A prompt leaves the queue and gets its room; False: there is none."""
        size, kv = self.config.block_tokens, leg.kv
        pages, reusable = self.kv.pages(leg.context_tokens), (leg.context_tokens - 1) // size
        in_l1 = kv.take(pages, reusable)
        if in_l1 is None:
            return False
        held = self.kv.pool.held(kv.names, reusable)
        kv.reach(held)
        self._leave_queue(leg)
        leg.cached_tokens = held * size
        leg.restored_tokens = (held - in_l1) * size
        self.running.append(leg)
        return True

    def _plan(self) -> tuple[list[tuple[PrefillLeg, int]], PrefillSums]:
        """One chunk of the prompts taken, in order, and what equation 1 wants to know of it."""
        chunks: list[tuple[PrefillLeg, int]] = []
        room = self.config.chunk_tokens
        pairs = restored = cached = 0.0
        for leg in self.running:
            tokens = min(leg.left_tokens, room)
            if tokens == 0:
                break
            room -= tokens
            chunks.append((leg, tokens))
            pairs += query_key_pairs(tokens, leg.cached_tokens + leg.computed_tokens)
            if leg.computed_tokens == 0:  # what is reused counts once, in the iteration of the first chunk
                restored += leg.restored_tokens
                cached += leg.cached_tokens
        return chunks, PrefillSums(self.config.chunk_tokens - room, pairs, restored, cached)

    def _running_sums(self) -> PrefillSums:
        """What is left of the prompts taken; what they reuse is restored and read."""
        tokens, pairs = 0, 0.0
        for leg in self.running:
            left = leg.left_tokens
            tokens += left
            pairs += query_key_pairs(left, leg.cached_tokens + leg.computed_tokens)
        return PrefillSums(tokens, pairs)

    def _computing_s(self, sums: PrefillSums) -> float:
        """Seconds of a chunk, and of an iteration of the batch there may be."""
        prefill, decode = self.config.prefill, self.config.decode
        if not self.batch:
            return prefill.prefill_iteration_s(sums)
        if self.config.both_phases is BothPhases.ALTERNATE:
            return prefill.prefill_iteration_s(sums) + self._decode_s()
        batch, contexts = len(self.batch), self._batch_context
        return mixed_iteration_s(prefill, sums, decode, batch, contexts, self.config.tokens_per_request)

    def _decode_s(self) -> float:
        contexts = self._batch_context if self.config.decode.d3_s else 0.0
        return self.config.decode.decode_iteration_s(len(self.batch), contexts, self.config.tokens_per_request)

    # -- room

    def _room_came(self) -> None:
        self._grant()
        if self.queue:
            self.wake()

    def _grant(self) -> None:
        """Slots and room in order of arrival."""
        size = self.config.block_tokens
        while self.waiting and self.decoding < self.config.decode_slots:
            leg = next(iter(self.waiting))
            pages = self.kv.pages(leg.request.prompt_tokens + leg.request.output_tokens - 1)
            blocks = leg.prefill.context_tokens // size
            if leg.kv.take(pages, blocks) is None:
                return
            del self.waiting[leg]
            self.granted[leg] = None
            leg.granted = True
            self.callbacks.granted(leg)

    def check_invariants(self) -> None:
        """Assert the bookkeeping."""
        self.kv.check_invariants()
        assert self.decoding <= self.config.decode_slots
        assert all(leg.granted for leg in (*self.granted, *self._joining, *self.batch))
        assert not any(leg.granted or leg.kv.blocks for leg in self.waiting)
        assert all(leg.prefilled for leg in (*self._joining, *self.batch))
        assert all(leg.end_iteration > self._decoded for leg in self.batch)
        assert sorted(id(leg) for _, _, leg in self._ends) == sorted(map(id, self.batch))
        assert all(leg.left_tokens > 0 for leg in self.running)
        assert all(leg.left_tokens == 0 for leg in self.holding)
        assert set(self.sent_work) == {*self.queue, *self.running}
        sums = _Waiting()
        for prompt in self.queue:
            sums.add(prompt, 1)
        assert sums == self._waiting_sums
        coming = [*self.granted, *self.waiting]
        assert self._coming_context == sum(leg.context_tokens for leg in coming)
        contexts = sum(
            leg.context_tokens + leg.growth_tokens * (self._decoded - leg.joined_iteration) for leg in self.batch
        )
        assert math.isclose(self._batch_context, contexts, rel_tol=1e-6, abs_tol=1e-3)
        if self._starting:
            assert self._now is None
        elif self._now is None:
            assert not self.batch
            assert not self._joining
            assert not self.running
        else:
            assert self._now.count >= 1
            assert self._now.began_s <= self.events.now_s
