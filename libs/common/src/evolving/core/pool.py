"""What one node holds in its two tiers, who uses it, and what leaves first (§4.1, §4.4). No bytes: only names.

Both tiers are closed under prefixes: a block is in a tier only while its parent is. Legs take room in L1 at once and
turn it into blocks as they compute; a block that is used in L1 stays there. L1 is written through to L2. What is
evicted goes block by block from the ends of contexts, by (effective need, last use), both smallest first; the
effective need is the largest (`evolving.core.needs`) among a block and all below it on this node, so no parent goes
before a child.
A context is given as the names of its blocks from the first one on, and how many of them are meant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from evolving.core.config import EvictionPolicy
from evolving.core.eviction import EvictionOrder
from evolving.core.pool_events import PoolEvent, PoolEvents, PoolLog
from evolving.core.pool_needs import PoolNeeds
from evolving.core.pool_runs import Leaving, Run, RunTree, Use
from evolving.core.terms import Tier

_BOTH = Tier.L1 | Tier.L2


class NodePool:
    """Blocks by name. Costs go with the runs and the new blocks an operation concerns. `log` hears of each change as it
    happens, instead of `take_events`."""

    def __init__(
        self,
        l1_blocks: int,
        l2_blocks: int,
        policy: EvictionPolicy = EvictionPolicy.AGENT,
        log: PoolLog | None = None,
    ) -> None:
        self._capacity = {Tier.L1: l1_blocks, Tier.L2: l2_blocks}
        self._tree = RunTree(self._offer)
        self._order = EvictionOrder(policy, self._tree.runs)
        self._needs = PoolNeeds(self._tree, self._order)
        self._events = PoolEvents()
        self._log = log or self._events
        self._operation = 0
        self._blocks = {Tier.L1: 0, Tier.L2: 0}
        self._own = [0, 0]  # L1 room of legs that is no block yet, by Use
        self._used_by = [0, 0, 0]  # blocks in use, each once, by Use
        self._unused_l1 = 0  # blocks in L1 that no leg uses
        self._zero_l2 = 0  # blocks in L2 that no branch counts

    # -- reading

    def matched(self, names: Sequence[bytes], blocks: int, tier: Tier) -> int:
        """How many of the first `blocks` blocks lie in `tier`."""
        return self._tree.depth(names, blocks, tier)

    def held(self, names: Sequence[bytes], blocks: int) -> int:
        """How many of the first `blocks` blocks lie in either tier."""
        return self._tree.depth(names, blocks)

    def holds(self, name: bytes, tier: Tier) -> bool:
        """Whether a block lies in a tier."""
        run = self._tree.get(name)
        return run is not None and bool(run.tiers & tier)

    def capacity(self, tier: Tier) -> int:
        """Blocks a tier has room for."""
        return self._capacity[tier]

    def blocks(self, tier: Tier) -> int:
        """Blocks that lie in a tier."""
        return self._blocks[tier]

    def used(self, tier: Tier) -> int:
        """Blocks of a tier, and in L1 the room of legs."""
        return self._blocks[tier] + (sum(self._own) if tier is Tier.L1 else 0)

    def free(self, tier: Tier) -> int:
        """Room of a tier that nothing fills."""
        return self._capacity[tier] - self.used(tier)

    def used_by(self, use: Use) -> int:
        """Blocks that legs of a kind use, each once, and their own room."""
        return self._used_by[use] + (self._own[use] if use is not Use.QUEUED else 0)

    @property
    def room(self) -> int:
        """L1 room that could be had: free, or of blocks no leg uses."""
        return self.free(Tier.L1) + self._unused_l1

    def unused(self, names: Sequence[bytes], blocks: int, use: Use) -> tuple[int, int]:
        """Of the first `blocks` blocks, all in L1: how many no leg uses, and how many no leg of this kind uses."""
        by_none = by_kind = 0
        run = self._tree.get(names[blocks - 1]) if blocks else None
        while run is not None:
            size = min(run.size, blocks - run.start)
            by_none += size * (not run.used_in_l1)
            by_kind += size * (not run.locks[use])
            run = run.parent
        return by_none, by_kind

    def kept(self, names: Sequence[bytes], blocks: int, use: Use) -> int:
        """How many of the first `blocks` blocks legs of a kind keep: leading ones, of those that are here."""
        held = self._tree.depth(names, blocks)
        run = self._tree.get(names[held - 1]) if held else None
        while run is not None and not run.locks[use]:
            run = run.parent
        return min(run.end, held) if run is not None else 0

    @property
    def zero_l2(self) -> int:
        """Blocks in L2 that no branch counts."""
        return self._zero_l2

    def needs(self) -> dict[bytes, int]:
        """Nonzero needs of held blocks."""
        return self._needs.held()

    def snapshot(self) -> list[PoolEvent]:
        """All that is held, as events from nothing, parents before children."""
        held = PoolEvents()
        self.tell(held)
        return held.take()

    def tell(self, log: PoolLog) -> None:
        """Tell a log of all that is held as if it came now, parents before children."""
        for tier in Tier:
            for run in self._tree.parents_first():
                if run.tiers & tier:
                    log.stored(tier, run)

    def take_events(self) -> list[PoolEvent]:
        """Changes since the last call, in order."""
        return self._events.take()

    # -- use by legs

    def lock(self, names: Sequence[bytes], first: int, last: int, use: Use) -> None:
        """Keep blocks [first, last) where `use` needs them; the `first` before are kept by the same leg already.

        A leg that begins (first is 0) needs them after all where they were to leave.
        """
        for run in self._tree.path(names, first, last):
            self._lock(run, use, 1)
            if first == 0:
                run.leaving = Leaving.NOTHING
        self.touch(names, last)

    def unlock(self, names: Sequence[bytes], blocks: int, use: Use) -> None:
        """Give up the first `blocks` blocks; what was to leave after its last user leaves."""
        path = self._tree.path(names, 0, blocks)
        self._operation += 1
        for run in path:
            self._lock(run, use, -1)
            run.accessed = self._operation
            self._offer(run)
        for run in path:
            if run.leaving:
                self._leave_if_unused(run)
        self._tree.merge_path(next((run for run in path if run.names), None))

    def touch(self, names: Sequence[bytes], blocks: int) -> None:
        """Count a use of the first `blocks` blocks, all held, so that they go later."""
        path = self._tree.path(names, 0, blocks)
        self._operation += 1
        for run in path:
            run.accessed = self._operation
            self._offer(run)
        if path:
            self._tree.merge_path(path[0])

    def reserve(self, blocks: int, use: Use) -> None:
        """Take L1 room for a leg's own use, evicting as needed; there must be `room` for it."""
        assert blocks <= self.room
        self._evict(Tier.L1, blocks - self.free(Tier.L1))
        self._own[use] += blocks

    def give_back(self, blocks: int, use: Use) -> None:
        """Free room from `reserve` that never became blocks."""
        self._own[use] -= blocks
        assert self._own[use] >= 0

    def commit(self, names: Sequence[bytes], first: int, last: int, use: Use) -> None:
        """Turn a leg's own room into blocks [first, last), kept for the leg as those before, and write all through to
        L2 as far as that has room. Where another leg was first, its copy is used and the room is freed."""
        self.give_back(last - first, use)
        self._place(names, self._tree.depth(names, last, Tier.L1, known=first), last, Tier.L1)
        self._store(names, last, last)
        for run in self._tree.path(names, first, last):
            self._lock(run, use, 1)
        self.touch(names, last)

    # -- L2

    def store(self, names: Sequence[bytes], first: int, last: int) -> int:
        """Put the first `last` blocks into L2, evicting as needed; those before `first` are copied from L1, so they
        must be held. Returns how many of the first `last` are in L2 then."""
        have = self._store(names, first, last)
        self.touch(names, have)
        return have

    # -- needs

    def set_needs(self, needs: Mapping[bytes, int]) -> None:
        """Say how much blocks are needed; 0 forgets one. Of a block that isn't here it waits for it."""
        self._zero_l2 += self._needs.set_needs(needs)

    def set_stretches(self, needs: Iterable[tuple[bytes, int]]) -> None:
        """The same of consecutive blocks of contexts, their names joined; of a block that comes twice the last holds.

        Costs the runs concerned, not their blocks.
        """
        self._zero_l2 += self._needs.set_stretches(needs)

    def forget_needs(self) -> None:
        """All needs are zero, as of blocks that never come."""
        self._zero_l2 += self._needs.forget()

    # -- losing blocks

    def free_l1(self) -> int:
        """Drop from L1 what L2 has: at once where no leg uses it, else when its last leg gives it up.

        Returns the blocks dropped at once.
        """
        dropped = 0
        for run in reversed(list(self._tree.parents_first())):
            if run.tiers != _BOTH:
                continue
            if run.used_in_l1:
                run.leaving = max(run.leaving, Leaving.L1)
            elif not run.below[Tier.L1]:
                dropped += run.size
                self._leave(run, Tier.L1)
        self._merge_all()
        return dropped

    def clear(self) -> int:
        """Drop everything: at once where no leg uses it, else when its last leg gives it up.

        Returns the blocks dropped at once.
        """
        dropped = 0
        for run in reversed(list(self._tree.parents_first())):
            if any(run.locks):
                run.leaving = Leaving.BOTH
                continue
            dropped += run.size
            for tier in Tier:
                if run.tiers & tier:
                    self._leave(run, tier)
        self._merge_all()
        return dropped

    def lose(self, tier: Tier) -> None:
        """A tier is gone, as its process is. No leg may use anything."""
        assert not any(self._used_by)
        self._log.cleared(tier)
        for run in reversed(list(self._tree.parents_first())):
            if run.tiers & tier:
                self._leave(run, tier, announce=False)
        self._merge_all()

    # -- inside

    def _merge_all(self) -> None:
        for run in self._tree.parents_first():
            self._tree.merge_around(run)

    def _offer(self, run: Run) -> None:
        self._order.offer(run)

    def _lock(self, run: Run, use: Use, change: int) -> None:
        was_used = run.used_in_l1
        locks = list(run.locks)
        locks[use] += change
        assert locks[use] >= 0
        self._used_by[use] += run.size * ((locks[use] > 0) - (run.locks[use] > 0))
        run.locks = (locks[0], locks[1], locks[2])
        if use is not Use.QUEUED:
            assert run.tiers & Tier.L1
            self._unused_l1 += run.size * (was_used - run.used_in_l1)

    def _store(self, names: Sequence[bytes], first: int, last: int) -> int:
        have = self._tree.depth(names, last, Tier.L2)
        if have == last or self._tree.depth(names, first) < first:
            return have
        self._evict(Tier.L2, last - have - self.free(Tier.L2), self._tree.cut(names, have))
        fits = have + min(last - have, self.free(Tier.L2))
        self._place(names, have, fits, Tier.L2)
        return fits

    def _place(self, names: Sequence[bytes], have: int, last: int, tier: Tier) -> None:
        """Blocks [have, last) come into a tier: held ones as they are, then new ones."""
        held = self._tree.depth(names, last, known=have)
        for run in reversed(self._tree.path(names, have, held)):
            self._enter(run, tier)
        if last > held:
            above = self._tree.cut(names, held)
            run = self._tree.add(above, names[held:last])
            self._enter(run, tier)
            if above is not None and len(above.children) == 2:
                self._order.offer_all(above.children)
            self._zero_l2 += self._needs.came(run)

    def _enter(self, run: Run, tier: Tier) -> None:
        run.tiers |= tier
        self._blocks[tier] += run.size
        if run.parent is not None:
            run.parent.below[tier] += 1
        if tier is Tier.L1:
            self._unused_l1 += run.size
        elif run.need == 0:
            self._zero_l2 += run.size
        self._log.stored(tier, run)
        self._offer(run)

    def _leave(self, run: Run, tier: Tier, *, announce: bool = True) -> None:
        """A run nobody uses or stands on leaves a tier, and is forgotten with the last one."""
        run.tiers &= ~tier
        self._blocks[tier] -= run.size
        if tier is Tier.L1:
            self._unused_l1 -= run.size
        elif run.need == 0:
            self._zero_l2 -= run.size
        if announce:
            self._log.removed(tier, run)
        parent, effective = run.parent, run.effective
        if not run.tiers:
            self._needs.leaves(run)
            self._tree.remove(run)
            if parent is not None and len(parent.children) == 1:
                self._order.offer_all(parent.children)
        if parent is not None:
            parent.below[tier] -= 1
            self._offer(parent)
            if not run.tiers:
                self._needs.settle(parent, effective, 0)

    def _leave_if_unused(self, run: Run) -> None:
        if run.leaving is Leaving.L1 and not run.used_in_l1:
            run.leaving = Leaving.NOTHING
            if run.tiers == _BOTH and not run.below[Tier.L1]:
                self._leave(run, Tier.L1)
        elif run.leaving is Leaving.BOTH and not any(run.locks):
            run.leaving = Leaving.NOTHING
            for tier in Tier:
                if run.tiers & tier and not run.below[tier]:
                    self._leave(run, tier)

    def _evict(self, tier: Tier, blocks: int, keep: Run | None = None) -> None:
        """Let up to `blocks` blocks leave a tier, those that go first; `keep`, which is used next, stays."""
        shortened: list[Run] = []
        while blocks > 0 and (first := self._order.pop(tier)) is not None:
            run, most = first
            if run is keep:
                continue  # its use will offer it again
            most = min(most, blocks)
            if run.size > most:
                run = self._tree.split(run, run.size - most)[1]
            blocks -= run.size
            shortened += [run, run.parent] if run.parent is not None else [run]
            self._leave(run, tier)
        for run in shortened:
            self._tree.merge_around(run)

    # -- invariants

    def check_invariants(self) -> None:
        """Assert all bookkeeping against a recount; walks everything."""
        self._tree.check_invariants()
        self._needs.check_invariants()
        runs = list(self._tree.runs)
        for tier in Tier:
            assert self._blocks[tier] == sum(run.size for run in runs if run.tiers & tier)
            assert 0 <= self.used(tier) <= self._capacity[tier]
        for use in Use:
            assert self._used_by[use] == sum(run.size for run in runs if run.locks[use])
        assert self._unused_l1 == sum(run.size for run in runs if run.tiers & Tier.L1 and not run.used_in_l1)
        assert self._zero_l2 == sum(run.size for run in runs if run.tiers & Tier.L2 and not run.need)
        for run in runs:
            assert run.tiers & Tier.L1 or not run.used_in_l1
            assert run.tiers & Tier.L2 or not run.locks[Use.QUEUED]
