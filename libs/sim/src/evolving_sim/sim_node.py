"""One node's engine in virtual time: one iteration after another, of the prompts and answers that are here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from evolving.core.iterations import IterationMeter
from evolving.core.pool_runs import Use
from evolving.core.terms import Phase
from evolving.core.timemodel import PrefillSums, mixed_iteration_s
from evolving.core.work import PrefillWork, summed_wait_s
from evolving_sim.answers import Answers
from evolving_sim.counted_iterations import CountedIterations
from evolving_sim.events import EventHeap, Priority
from evolving_sim.kv import NodeKv
from evolving_sim.legs import DecodeLeg, PrefillLeg
from evolving_sim.node_config import BothPhases, NodeConfig
from evolving_sim.prompts import Prompts, QueueSums, summed


@dataclass(frozen=True, slots=True)
class NodeCallbacks:
    """Whom a node tells. Each is called at the moment it says."""

    fetch: Callable[[PrefillLeg], None]  # its turn has come, and its fetch is to begin
    taken: Callable[[PrefillLeg], None]  # left the queue: its decode node is to be chosen
    prefilled: Callable[[PrefillLeg], None]  # the first token is there
    granted: Callable[[DecodeLeg], None]  # has a slot and room
    decoded: Callable[[DecodeLeg], None]  # has all its tokens
    begun: Callable[[Phase], None] = lambda _: None  # an iteration that does this began, while `watched` is it


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
    _prompts: Prompts = field(init=False)
    _answers: Answers = field(init=False)
    _now: CountedIterations | None = field(init=False, default=None)
    _starting: bool = field(init=False, default=False)  # the next iteration begins at this moment

    def __post_init__(self) -> None:
        decode = self.config.decode
        self.meter = IterationMeter(decode.experts, decode.experts_per_token)
        self._prompts = Prompts(self.config, self.kv)
        self._answers = Answers(self.config, self.kv)

    # -- what others see: prompts

    @property
    def queue(self) -> Sequence[PrefillLeg]:
        """Prompts that wait, in order of arrival."""
        return self._prompts.queue

    @property
    def running(self) -> Sequence[PrefillLeg]:
        """Prompts that were taken, in that order."""
        return self._prompts.running

    @property
    def holding(self) -> Mapping[PrefillLeg, None]:
        """Prompts that are computed, their KV not yet sent on."""
        return self._prompts.holding

    @property
    def sent_work(self) -> Mapping[PrefillLeg, PrefillWork]:
        """Of prompts in the queue and running, what they were when they were sent."""
        return self._prompts.sent_work

    @property
    def computed_tokens(self) -> int:
        """Of prompts, since the start."""
        return self._prompts.computed_tokens

    @property
    def new_tokens_per_iteration(self) -> float:
        """ū since the start; the chunk size where nothing was observed."""
        return self._prompts.new_tokens_per_iteration

    @property
    def fetch_backlog_tokens(self) -> int:
        """What prompts in the queue still have to get from peers."""
        return self._prompts.waiting_sums.coming_tokens

    @property
    def wait_s(self) -> float:
        """W_n: seconds until a leg queued now would be taken (equation 7)."""
        return self._wait_s(self._prompts.waiting_sums)

    def wait_behind_s(self, legs: Iterable[PrefillLeg]) -> float:
        """The same for one behind these of the queue."""
        return self._wait_s(summed(legs))

    def _wait_s(self, ahead: QueueSums) -> float:
        prompts = self._prompts
        if not prompts.running and not ahead.legs:
            return 0.0
        running = prompts.left_sums() if prompts.running else None
        queued = ahead.sums() if ahead.legs else None
        beside_s = self._decode_s() if self._answers.batch else 0.0
        return summed_wait_s(running, queued, self.config.prefill, prompts.new_tokens_per_iteration, beside_s)

    # -- what others see: answers

    @property
    def waiting(self) -> Mapping[DecodeLeg, None]:
        """Answers without a slot, in order of arrival."""
        return self._answers.waiting

    @property
    def granted(self) -> Mapping[DecodeLeg, None]:
        """Answers with a slot, their KV still to come."""
        return self._answers.granted

    @property
    def batch(self) -> Mapping[DecodeLeg, None]:
        """Answers that decode."""
        return self._answers.batch

    def decode_legs(self) -> Iterator[DecodeLeg]:
        """All that decode or will."""
        return self._answers.legs()

    def iterations_of(self, leg: DecodeLeg) -> int:
        """Decode iterations that an answer has had."""
        if leg not in self._answers.batch:
            return 0
        under_way = self._now.ended_by(self.events.now_s) - 1 if self._now is not None and not self._now.chunks else 0
        return self._answers.iterations + under_way - leg.joined_iteration

    @property
    def decoding(self) -> int:
        """Requests with a slot."""
        return self._answers.with_slot

    @property
    def slots_free(self) -> int:
        """Requests that could be taken now; those that wait have the first."""
        return max(0, self.config.decode_slots - self._answers.with_slot - len(self._answers.waiting))

    @property
    def context_tokens(self) -> int:
        """Summed over all that decode or will."""
        return self._answers.context_tokens

    @property
    def memory_tokens(self) -> int:
        """Device memory that those leave to another one; below 0 where some wait for it."""
        return self.config.l1_tokens - self.config.reserve_tokens - self._answers.context_tokens

    @property
    def kv_used_share(self) -> float:
        """Share of device memory that answers take, all they will need."""
        return self.kv.used_share(Use.DECODE)

    # -- what others see: both

    @property
    def room_tokens(self) -> float:
        """Host memory that is free or held for no branch, less what legs on their way will store."""
        waiting = self._prompts.waiting_sums
        coming = waiting.uncached_tokens + waiting.coming_tokens + self._answers.coming_stored_tokens
        return max(0, self.kv.free_tokens() - coming)

    @property
    def idle(self) -> bool:
        """No iteration is under way."""
        return self._now is None

    def busy_with(self, phase: Phase) -> bool:
        """Whether requests of a phase are here that left the queue."""
        if phase is Phase.PREFILL:
            return bool(self._prompts.running or self._prompts.holding)
        return self._answers.with_slot > 0

    @property
    def empty(self) -> bool:
        """Whether no request is here."""
        prompts = self._prompts
        return not (prompts.queue or prompts.running or prompts.holding or any(True for _ in self.decode_legs()))

    # -- requests come and go

    def enqueue(self, leg: PrefillLeg, sent: PrefillWork) -> None:
        """Queue a prompt."""
        self._prompts.enqueue(leg, sent)
        self.wake()

    def came(self, leg: PrefillLeg, blocks: int) -> None:
        """Peers' KV for a prompt in the queue is here, up to so many leading blocks of it."""
        self._prompts.came(leg, blocks)

    def fetched(self, leg: PrefillLeg) -> None:
        """All has come for a prompt in the queue that will."""
        self._prompts.fetched(leg)
        self.wake()

    def drop(self, leg: PrefillLeg) -> None:
        """A prompt leaves, whatever stage it is in."""
        self._prompts.drop(leg)
        self._room_came()

    def reserve(self, leg: DecodeLeg) -> None:
        """Ask for a slot and room."""
        self._answers.reserve(leg)
        self._grant()

    def join(self, leg: DecodeLeg) -> None:
        """A granted answer's KV is here: it decodes from the next iteration on."""
        self._answers.join(leg)
        self.wake()

    def drop_decode(self, leg: DecodeLeg) -> None:
        """An answer leaves before its end."""
        self._answers.drop(leg)
        self._room_came()

    def die(self) -> None:
        """Nothing happens here any more."""
        self.alive = False
        if self._now is not None and self._now.end is not None:
            self._now.end.cancel()
        self._now = None

    def _room_came(self) -> None:
        self._grant()
        if self._prompts.queue:
            self.wake()

    def _grant(self) -> None:
        """Slots and room in order of arrival."""
        while (leg := self._answers.grant()) is not None:
            self.callbacks.granted(leg)

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
        answers = self._answers
        answers.form_batch()
        self._admit()
        self._starting = False
        chunks, sums = self._prompts.next_chunks()
        if not chunks and not answers.batch:
            return
        if self.watched is not None and (chunks if self.watched is Phase.PREFILL else answers.batch):
            watched, self.watched = self.watched, None
            self.callbacks.begun(watched)
        now_s = self.events.now_s
        if chunks:
            iteration_s = self.slowness * self._computing_s(sums)
            self._now = CountedIterations(now_s, 1, iteration_s, 0.0, chunks, sums)
        else:
            growth_s = self.slowness * self.config.decode.d3_s * answers.context_growth
            first_s = self.slowness * self._decode_s()
            self._now = CountedIterations(now_s, answers.unchanged_iterations, first_s, growth_s)
        self._schedule_end(self._now)

    def _schedule_end(self, iterations: CountedIterations) -> None:
        if iterations.end is not None:
            iterations.end.cancel()
        # Where rounding puts the end before now, it is now.
        end_s = max(self.events.now_s, iterations.began_s + iterations.span_s(iterations.count))
        iterations.end = self.events.at(end_s, Priority.ITERATION, self._end)

    def _end(self) -> None:
        iterations, self._now = self._now, None
        assert iterations is not None
        answers = self._answers
        ended = answers.decoded(iterations.count)
        prefilled = self._computed(iterations) if iterations.chunks else []
        for decoded in ended:
            answers.complete(decoded)
        self._start()
        if ended:
            self._grant()
        for decoded in ended:
            self.callbacks.decoded(decoded)
        for complete in prefilled:
            self.callbacks.prefilled(complete)

    def _computed(self, iterations: CountedIterations) -> list[PrefillLeg]:
        """An iteration with chunks ended; the prompts that are complete."""
        complete = self._prompts.computed(iterations.chunks)
        batch = len(self._answers.batch)
        contexts = round(self._answers.batch_context) if batch else 0
        self.meter.add(iterations.first_s, iterations.sums, batch, contexts)
        return complete

    def _admit(self) -> None:
        """Take prompts while an iteration's chunk has tokens left, passing over those whose fetch is not over, or whose
        decode node has no room yet. Nobody passes one there is no room for here, nor one whose fetch began with its
        turn."""
        prompts = self._prompts
        if not prompts.queue:
            return
        left_tokens = self.config.chunk_tokens - sum(leg.left_tokens for leg in prompts.running)
        taken = []
        for leg in list(prompts.queue) if left_tokens > 0 else ():
            if left_tokens <= 0:
                break
            if leg.awaits_room:
                continue
            if not leg.fetch_over and self.fetches_at_start and not leg.fetch_begun:
                self.callbacks.fetch(leg)
            if not leg.fetch_over:
                if self.fetches_at_start:
                    break
                continue
            if not prompts.take(leg):
                break
            taken.append(leg)
            left_tokens -= leg.left_tokens
        for leg in taken:
            self.callbacks.taken(leg)

    def _computing_s(self, sums: PrefillSums) -> float:
        """Seconds of a chunk, and of an iteration of the batch there may be."""
        prefill, decode = self.config.prefill, self.config.decode
        if not self._answers.batch:
            return prefill.prefill_iteration_s(sums)
        if self.config.both_phases is BothPhases.ALTERNATE:
            return prefill.prefill_iteration_s(sums) + self._decode_s()
        batch, contexts = len(self._answers.batch), self._answers.batch_context
        return mixed_iteration_s(prefill, sums, decode, batch, contexts, self.config.tokens_per_request)

    def _decode_s(self) -> float:
        contexts = self._answers.batch_context if self.config.decode.d3_s else 0.0
        return self.config.decode.decode_iteration_s(len(self._answers.batch), contexts, self.config.tokens_per_request)

    def check_invariants(self) -> None:
        """Assert the bookkeeping."""
        self.kv.check_invariants()
        self._prompts.check_invariants()
        self._answers.check_invariants()
        if self._starting:
            assert self._now is None
        elif self._now is None:
            assert not self._answers.batch
            assert not self._answers.joining
            assert not self._prompts.running
        else:
            assert self._now.count >= 1
            assert self._now.began_s <= self.events.now_s
