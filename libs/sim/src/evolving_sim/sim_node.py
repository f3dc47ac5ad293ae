"""One node in virtual time: a prefill queue, chunked prefill, a decode batch with slots, one iteration after another.

While there is nothing to compute and the batch stays as it is, its iterations are counted, not played: their ends are
where they would have been, to the rounding of floating point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from evolving.core.iterations import IterationMeter
from evolving.core.timemodel import PrefillSums, mixed_iteration_s
from evolving.core.work import PrefillWork, node_wait_s, query_key_pairs
from evolving_sim.events import Event, EventHeap, Priority
from evolving_sim.legs import DecodeLeg, PrefillLeg
from evolving_sim.node_config import BothPhases, NodeConfig
from evolving_sim.node_kv import NodeKv


@dataclass(frozen=True, slots=True)
class NodeCallbacks:
    """Whom a node tells. Each is called at the moment it says."""

    taken: Callable[[PrefillLeg], None]  # left the queue: its decode node is to be chosen
    prefilled: Callable[[PrefillLeg], None]  # the first token is there
    granted: Callable[[DecodeLeg], None]  # has a slot and room
    decoded: Callable[[DecodeLeg], None]  # has all its tokens


@dataclass(slots=True, eq=False)
class _Iterations:
    """Those under way: with `chunks` one, else as many as the batch does not change in."""

    began_s: float
    count: int
    batch: tuple[DecodeLeg, ...]
    first_s: float  # the first one
    growth_s: float  # each one takes so much longer than the one before, for the context grew
    chunks: tuple[tuple[PrefillLeg, int], ...] = ()
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


@dataclass(slots=True, eq=False, repr=False)
class SimNode:
    """One node's engine."""

    node_id: str
    config: NodeConfig
    events: EventHeap
    callbacks: NodeCallbacks
    kv: NodeKv
    meter: IterationMeter = field(init=False)  # of iterations that computed prompts; others have no use for it here
    queue: list[PrefillLeg] = field(init=False, default_factory=list)  # in order of arrival
    running: list[PrefillLeg] = field(init=False, default_factory=list)
    waiting: list[DecodeLeg] = field(init=False, default_factory=list)  # without a slot, in order of arrival
    granted: list[DecodeLeg] = field(init=False, default_factory=list)  # with a slot, their KV still to come
    batch: list[DecodeLeg] = field(init=False, default_factory=list)
    _joining: list[DecodeLeg] = field(init=False, default_factory=list)
    _now: _Iterations | None = field(init=False, default=None)
    _starting: bool = field(init=False, default=False)  # the next iteration begins at this moment
    _prefill_iterations: int = field(init=False, default=0)
    _prefill_tokens: int = field(init=False, default=0)
    _room_tokens: int = field(init=False, default=0)  # of device memory that granted legs take

    def __post_init__(self) -> None:
        decode = self.config.decode
        self.meter = IterationMeter(decode.experts, decode.experts_per_token)

    # -- what others see

    @property
    def new_tokens_per_iteration(self) -> float:
        """ū since the start; the chunk size where nothing was observed."""
        if not self._prefill_iterations:
            return float(self.config.chunk_tokens)
        return self._prefill_tokens / self._prefill_iterations

    @property
    def wait_s(self) -> float:
        """W_n: seconds until a leg queued now would be taken (equation 7)."""
        running = (PrefillWork(leg.left_tokens, leg.cached_tokens + leg.computed_tokens) for leg in self.running)
        queued = (PrefillWork(leg.uncached_tokens, leg.cached_tokens, leg.restored_tokens) for leg in self.queue)
        beside_s = self._decode_s(self.batch) if self.batch else 0.0
        return node_wait_s(running, queued, self.config.prefill, self.new_tokens_per_iteration, beside_s)

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
        legs = (*self.granted, *self._joining, *self.batch, *self.waiting)
        return round(sum(leg.context_tokens for leg in legs))

    @property
    def room_tokens(self) -> int:
        """Device memory left to another leg; below 0 where some wait for it."""
        return self.config.l1_tokens - self._room_tokens - sum(leg.room_tokens for leg in self.waiting)

    @property
    def idle(self) -> bool:
        """No iteration is under way."""
        return self._now is None

    # -- legs come and go

    def enqueue(self, leg: PrefillLeg) -> None:
        """Queue a prompt."""
        self.queue.append(leg)
        self.wake()

    def fetched(self, leg: PrefillLeg) -> None:
        """What peers had for a prompt is here."""
        self.kv.fetch(leg.request.branch, leg.fetch_until_blocks)
        leg.fetch_over = True
        self.wake()

    def give_up_queue(self) -> list[PrefillLeg]:
        """The prompts not taken yet leave: the node has another role."""
        given_up, self.queue = self.queue, []
        return given_up

    def reserve(self, leg: DecodeLeg) -> None:
        """Ask for a slot and room."""
        self.waiting.append(leg)
        self._grant()

    def give_up_waiting(self) -> list[DecodeLeg]:
        """The answers that have no slot yet leave."""
        given_up, self.waiting = self.waiting, []
        return given_up

    def join(self, leg: DecodeLeg) -> None:
        """A granted leg's KV is here: it decodes from the next iteration on."""
        self.granted.remove(leg)
        self._joining.append(leg)
        self.wake()

    def wake(self) -> None:
        """Something came: the next iteration takes it along, and is the next one there is."""
        if self._now is None:
            self._start()
        elif self._now.count > 1:
            self._now.count = self._now.ended_by(self.events.now_s)
            self._schedule_end(self._now)

    # -- iterations

    def _start(self) -> None:
        """Begin once all that comes at this moment is here."""
        if not self._starting:
            self._starting = True
            self.events.after(0.0, Priority.ITERATION, self._begin)

    def _begin(self) -> None:
        self._starting = False
        self.batch += self._joining
        self._joining = []
        self._admit()
        chunks, sums = self._plan()
        if not chunks and not self.batch:
            return
        batch = tuple(self.batch)
        if chunks:
            iteration_s = self._computing_s(sums, batch)
            self._now = _Iterations(self.events.now_s, 1, batch, iteration_s, 0.0, tuple(chunks), sums)
        else:
            count = min(leg.left_iterations for leg in batch)
            growth_s = self.config.decode.d3_s * sum(leg.growth_tokens for leg in batch)
            self._now = _Iterations(self.events.now_s, count, batch, self._decode_s(batch), growth_s)
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
        ended = []
        for leg in iterations.batch:
            count = iterations.count
            leg.context_sum += count * leg.context_tokens + leg.growth_tokens * count * (count - 1) / 2
            leg.context_tokens += count * leg.growth_tokens
            leg.left_iterations -= count
            if leg.left_iterations == 0:
                ended.append(leg)
        prefilled = self._computed(iterations)
        for decoded in ended:
            self.batch.remove(decoded)
            self._room_tokens -= decoded.room_tokens
        self._start()
        if ended:
            self._grant()
        for decoded in ended:
            self.callbacks.decoded(decoded)
        for complete in prefilled:
            self.callbacks.prefilled(complete)

    def _computed(self, iterations: _Iterations) -> list[PrefillLeg]:
        """Count the chunks of an iteration that ended; the prompts that are complete."""
        if not iterations.chunks:
            return []
        complete = []
        for leg, tokens in iterations.chunks:
            leg.computed_tokens += tokens
            if leg.left_tokens == 0:
                complete.append(leg)
                self.running.remove(leg)
                self.kv.store(leg.request.branch, leg.request.prompt_tokens // self.config.block_tokens)
        self._prefill_iterations += 1
        self._prefill_tokens += sum(tokens for _, tokens in iterations.chunks)
        contexts = round(sum(leg.context_tokens for leg in iterations.batch))
        self.meter.add(iterations.first_s, iterations.sums, len(iterations.batch), contexts)
        return complete

    def _admit(self) -> None:
        """Take prompts while an iteration's chunk has tokens left, passing over those whose fetch is not over."""
        left_tokens = self.config.chunk_tokens - sum(leg.left_tokens for leg in self.running)
        if left_tokens <= 0 or not self.queue:
            return
        taken = []
        for leg in self.queue:
            if left_tokens <= 0:
                break
            if leg.fetch_over:
                taken.append(leg)
                left_tokens -= leg.uncached_tokens
        for leg in taken:
            self.queue.remove(leg)
            size, prompt = self.config.block_tokens, leg.request.prompt_tokens
            depth = self.kv.depth(leg.request.branch, (prompt - 1) // size)
            leg.cached_tokens = depth.any_blocks * size
            leg.restored_tokens = leg.cached_tokens - depth.l1_blocks * size
            self.running.append(leg)
            self.callbacks.taken(leg)

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

    def _computing_s(self, sums: PrefillSums, batch: Sequence[DecodeLeg]) -> float:
        """Seconds of a chunk, and of an iteration of the batch there may be."""
        prefill, decode = self.config.prefill, self.config.decode
        if not batch:
            return prefill.prefill_iteration_s(sums)
        if self.config.both_phases is BothPhases.ALTERNATE:
            return prefill.prefill_iteration_s(sums) + self._decode_s(batch)
        contexts = sum(leg.context_tokens for leg in batch)
        return mixed_iteration_s(prefill, sums, decode, len(batch), contexts, self.config.tokens_per_request)

    def _decode_s(self, batch: Sequence[DecodeLeg]) -> float:
        contexts = sum(leg.context_tokens for leg in batch) if self.config.decode.d3_s else 0.0
        return self.config.decode.decode_iteration_s(len(batch), contexts, self.config.tokens_per_request)

    def _grant(self) -> None:
        """Slots and room in order of arrival."""
        while self.waiting and self.decoding < self.config.decode_slots:
            leg = self.waiting[0]
            if self._room_tokens + leg.room_tokens > self.config.l1_tokens and self.decoding:
                return
            del self.waiting[0]
            self._room_tokens += leg.room_tokens
            leg.granted = True
            self.granted.append(leg)
            self.callbacks.granted(leg)

    def check_invariants(self) -> None:
        """Assert the bookkeeping."""
        self.kv.check_invariants()
        assert len(self.granted) + len(self._joining) + len(self.batch) <= self.config.decode_slots
        with_room = (*self.granted, *self._joining, *self.batch)
        assert self._room_tokens == sum(leg.room_tokens for leg in with_room)
        assert all(leg.granted for leg in with_room)
        assert not any(leg.granted for leg in self.waiting)
        assert all(leg.prefilled and leg.left_iterations > 0 for leg in (*self._joining, *self.batch))
        assert all(leg.left_tokens > 0 for leg in self.running)
        if self._starting:
            assert self._now is None
        elif self._now is None:
            assert not self.batch
            assert not self._joining
            assert not self.running
            assert not any(leg.fetch_over for leg in self.queue)
        else:
            assert self._now.count >= 1
            assert self._now.began_s <= self.events.now_s
