"""The answers on one node: waiting for a slot, waiting for their KV, or in the decode batch.

How far each answer of the batch is follows from the count of the node's decode iterations, so that an iteration costs
the same whatever the batch.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from evolving_sim.kv import NodeKv
from evolving_sim.legs import DecodeLeg
from evolving_sim.node_config import NodeConfig


@dataclass(slots=True, eq=False, repr=False)
class Answers:
    """Each is in one of `waiting`, `granted`, `joining` and `batch`, and goes from one to the next."""

    config: NodeConfig
    kv: NodeKv
    waiting: dict[DecodeLeg, None] = field(init=False, default_factory=dict)  # without a slot, in order of arrival
    granted: dict[DecodeLeg, None] = field(init=False, default_factory=dict)  # with a slot, their KV still to come
    joining: list[DecodeLeg] = field(init=False, default_factory=list)  # that decode from the next iteration on
    batch: dict[DecodeLeg, None] = field(init=False, default_factory=dict)
    iterations: int = field(init=False, default=0)  # of the batch, so far
    coming_stored_tokens: int = field(init=False, default=0)  # of KV that is still to come, what host memory lacks
    _coming_context: int = field(init=False, default=0)  # of legs that wait for a slot or for their KV
    _ends: list[tuple[int, int, DecodeLeg]] = field(init=False, default_factory=list)  # who ends after which iteration
    _joined: int = field(init=False, default=0)
    # Contexts of the batch: base + growth · iterations.
    _context_base: float = field(init=False, default=0.0)
    _context_growth: float = field(init=False, default=0.0)

    def legs(self) -> Iterator[DecodeLeg]:
        """All that decode or will."""
        yield from self.batch
        yield from self.joining
        yield from self.granted
        yield from self.waiting

    @property
    def with_slot(self) -> int:
        """Those with a slot."""
        return len(self.granted) + len(self.joining) + len(self.batch)

    @property
    def context_tokens(self) -> int:
        """Summed over all of them."""
        return round(self.batch_context + sum(leg.context_tokens for leg in self.joining)) + self._coming_context

    # -- they come and go

    def reserve(self, leg: DecodeLeg) -> None:
        """Let one wait for a slot and room."""
        self.waiting[leg] = None
        self._coming_context += leg.context_tokens
        self.coming_stored_tokens += leg.stored_tokens

    def grant(self) -> DecodeLeg | None:
        """Give the first that waits a slot and room; None: nobody waits, or there is none for it."""
        if not self.waiting or self.with_slot >= self.config.decode_slots:
            return None
        leg = next(iter(self.waiting))
        pages = self.kv.pages(leg.request.prompt_tokens + leg.request.output_tokens - 1)
        if leg.kv.take(pages, leg.prefill.context_tokens // self.config.block_tokens) is None:
            return None
        del self.waiting[leg]
        self.granted[leg] = None
        leg.granted = True
        return leg

    def join(self, leg: DecodeLeg) -> None:
        """A granted answer's KV is here: it decodes from the next iteration on."""
        del self.granted[leg]
        self._arrived(leg)
        leg.kv.reach(leg.prefill.context_tokens // self.config.block_tokens)
        self.joining.append(leg)

    def drop(self, leg: DecodeLeg) -> None:
        """An answer leaves before its end."""
        if leg in self.waiting:
            del self.waiting[leg]
            self._arrived(leg)
        elif leg in self.granted:
            del self.granted[leg]
            self._arrived(leg)
        elif leg in self.joining:
            self.joining.remove(leg)
        else:
            raise AssertionError("what decodes is not interrupted, but by its node's death")
        leg.gone = True
        leg.kv.release()

    def _arrived(self, leg: DecodeLeg) -> None:
        self._coming_context -= leg.context_tokens
        self.coming_stored_tokens -= leg.stored_tokens

    # -- the batch

    @property
    def batch_context(self) -> float:
        """Tokens of context in the next iteration, summed over the batch."""
        return self._context_base + self._context_growth * self.iterations

    @property
    def context_growth(self) -> float:
        """Tokens by which an iteration makes that more."""
        return self._context_growth

    @property
    def unchanged_iterations(self) -> int:
        """How many iterations the batch, not empty, does not change in, the one that somebody ends with included."""
        return self._ends[0][0] - self.iterations

    def form_batch(self) -> None:
        """An iteration begins: who joins is in the batch."""
        for leg in self.joining:
            leg.joined_iteration = self.iterations
            self.batch[leg] = None
            self._joined += 1
            heapq.heappush(self._ends, (leg.end_iteration, self._joined, leg))
            self._context_base += leg.context_tokens - leg.growth_tokens * self.iterations
            self._context_growth += leg.growth_tokens
        self.joining = []

    def decoded(self, iterations: int) -> list[DecodeLeg]:
        """So many iterations ended; who has all its tokens with that, and is to `complete`."""
        ended: list[DecodeLeg] = []
        if self.batch:
            self.iterations += iterations
            while self._ends and self._ends[0][0] == self.iterations:
                ended.append(heapq.heappop(self._ends)[2])
        return ended

    def complete(self, leg: DecodeLeg) -> None:
        """An answer that ended leaves; the last token has no KV yet."""
        del self.batch[leg]
        self._context_base -= leg.context_tokens - leg.growth_tokens * leg.joined_iteration
        self._context_growth -= leg.growth_tokens
        if not self.batch:
            self._context_base = self._context_growth = 0.0
        request = leg.request
        leg.kv.reach((request.prompt_tokens + request.output_tokens - 1) // self.config.block_tokens)
        leg.kv.release()
        leg.gone = True

    def check_invariants(self) -> None:
        """Assert the bookkeeping."""
        assert self.with_slot <= self.config.decode_slots
        assert all(leg.granted for leg in (*self.granted, *self.joining, *self.batch))
        assert not any(leg.granted or leg.kv.blocks for leg in self.waiting)
        assert all(leg.prefilled for leg in (*self.joining, *self.batch))
        assert all(leg.end_iteration > self.iterations for leg in self.batch)
        assert sorted(id(leg) for _, _, leg in self._ends) == sorted(map(id, self.batch))
        coming = [*self.granted, *self.waiting]
        assert self._coming_context == sum(leg.context_tokens for leg in coming)
        assert self.coming_stored_tokens == sum(leg.stored_tokens for leg in coming)
        contexts = sum(
            leg.context_tokens + leg.growth_tokens * (self.iterations - leg.joined_iteration) for leg in self.batch
        )
        assert math.isclose(self.batch_context, contexts, rel_tol=1e-6, abs_tol=1e-3)
