"""The prompts on one node: in the queue, computed chunk by chunk, or complete with their KV not yet sent on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from evolving.core.pool_runs import Use
from evolving.core.timemodel import PrefillSums
from evolving.core.work import PrefillWork, query_key_pairs
from evolving_sim.kv import NodeKv
from evolving_sim.legs import PrefillLeg
from evolving_sim.node_config import NodeConfig


@dataclass(slots=True)
class QueueSums:
    """Sums over prompts that wait, kept as they change. All are whole numbers or halves: they stay exact."""

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


def summed(legs: Iterable[PrefillLeg]) -> QueueSums:
    """Sums over these."""
    sums = QueueSums()
    for leg in legs:
        sums.add(leg, 1)
    return sums


@dataclass(slots=True, eq=False, repr=False)
class Prompts:
    """Each is in one of `queue`, `running` and `holding`."""

    config: NodeConfig
    kv: NodeKv
    queue: list[PrefillLeg] = field(init=False, default_factory=list)  # in order of arrival
    running: list[PrefillLeg] = field(init=False, default_factory=list)
    holding: dict[PrefillLeg, None] = field(init=False, default_factory=dict)  # computed, their KV not yet sent on
    sent_work: dict[PrefillLeg, PrefillWork] = field(init=False, default_factory=dict)  # queue and running, as sent
    waiting_sums: QueueSums = field(init=False, default_factory=QueueSums)  # over the queue
    computed_tokens: int = field(init=False, default=0)  # since the start
    _iterations: int = field(init=False, default=0)  # that computed them

    @property
    def new_tokens_per_iteration(self) -> float:
        """ū since the start; the chunk size where nothing was observed."""
        if not self._iterations:
            return float(self.config.chunk_tokens)
        return self.computed_tokens / self._iterations

    # -- in the queue

    def enqueue(self, leg: PrefillLeg, sent: PrefillWork) -> None:
        """Queue a prompt."""
        self.queue.append(leg)
        self.sent_work[leg] = sent
        self.waiting_sums.add(leg, 1)
        leg.kept_blocks = self.kv.keep(leg.kv.names, 0, leg.fetch_until_blocks, first=self._is_first(leg))

    def came(self, leg: PrefillLeg, blocks: int) -> None:
        """Peers' KV for a prompt in the queue is here, up to so many leading blocks of it."""
        tokens = min(leg.coming_tokens, (blocks - leg.fetch_from_blocks) * self.config.block_tokens)
        leg.kept_blocks = self.kv.keep(leg.kv.names, leg.kept_blocks, blocks, first=self._is_first(leg))
        leg.fetch_from_blocks = max(leg.fetch_from_blocks, blocks)
        leg.coming_tokens -= max(0, tokens)
        self.waiting_sums.coming_tokens -= max(0, tokens)

    def fetched(self, leg: PrefillLeg) -> None:
        """All has come for a prompt in the queue that will."""
        self.waiting_sums.coming_tokens -= leg.coming_tokens
        leg.coming_tokens = 0
        leg.fetch_over = True

    def take(self, leg: PrefillLeg) -> bool:
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

    def _is_first(self, leg: PrefillLeg) -> bool:
        return self.queue[0] is leg

    def _leave_queue(self, leg: PrefillLeg) -> None:
        self.queue.remove(leg)
        self.waiting_sums.add(leg, -1)
        self.kv.pool.unlock(leg.kv.names, leg.kept_blocks, Use.QUEUED)
        leg.kept_blocks = 0

    # -- computed

    def next_chunks(self) -> tuple[list[tuple[PrefillLeg, int]], PrefillSums]:
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

    def computed(self, chunks: list[tuple[PrefillLeg, int]]) -> list[PrefillLeg]:
        """Count the chunks of an iteration that ended, one at least; the prompts that are complete."""
        complete = []
        for leg, tokens in chunks:
            if leg.gone:
                continue
            leg.computed_tokens += tokens
            leg.kv.reach((leg.cached_tokens + leg.computed_tokens) // self.config.block_tokens)
            if leg.left_tokens == 0:
                complete.append(leg)
                self.running.remove(leg)
                self.sent_work.pop(leg)
                self.holding[leg] = None
        self._iterations += 1
        self.computed_tokens += sum(tokens for _, tokens in chunks)
        return complete

    def left_sums(self) -> PrefillSums:
        """What is left of the prompts taken; what they reuse is restored and read."""
        tokens, pairs = 0, 0.0
        for leg in self.running:
            left = leg.left_tokens
            tokens += left
            pairs += query_key_pairs(left, leg.cached_tokens + leg.computed_tokens)
        return PrefillSums(tokens, pairs)

    def check_invariants(self) -> None:
        """Assert the bookkeeping."""
        assert all(leg.left_tokens > 0 for leg in self.running)
        assert all(leg.left_tokens == 0 for leg in self.holding)
        assert set(self.sent_work) == {*self.queue, *self.running}
        assert summed(self.queue) == self.waiting_sums
