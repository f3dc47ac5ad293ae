"""A node's pool (§4.1, §4.4) beside a model that looks at every block, under random use."""

from __future__ import annotations

import hashlib
import random

import pytest
from core.pool_model import PoolModel
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from evolving.core.config import EvictionPolicy
from evolving.core.needs import need
from evolving.core.pool import NodePool
from evolving.core.pool_events import BlocksRemoved, BlocksStored, PoolEvent
from evolving.core.pool_runs import Use
from evolving.core.terms import Tier

LENGTH = 20
NEEDS = st.sampled_from([0, 1, 3, need(1, elsewhere=False), need(2, elsewhere=False)])
FORKS = [(1, 0, 8), (2, 0, 3), (4, 3, 12)]  # context, the one it shares leading blocks with, how many


def _context(which: int) -> list[bytes]:
    names = [hashlib.sha256(f"{which}/{depth}".encode()).digest()[:16] for depth in range(LENGTH)]
    for fork, origin, shared in FORKS:
        if fork == which:
            names[:shared] = _context(origin)[:shared]
    return names


CONTEXTS = [_context(which) for which in range(6)]
contexts = st.sampled_from(CONTEXTS)
depths = st.integers(1, LENGTH)
LEG_USES = [Use.PREFILL, Use.DECODE]


class PoolMachine(RuleBasedStateMachine):
    """Legs of all kinds come and go, needs change, memory is short; the model does the same."""

    pool: NodePool
    model: PoolModel

    def __init__(self) -> None:
        super().__init__()
        self.legs: list[tuple[Use, list[bytes], int, int]] = []  # use, context, blocks in use, own room
        self.seen: set[tuple[bytes, Tier]] = set()
        self.parents: dict[bytes, bytes | None] = {}

    @initialize(policy=st.sampled_from(EvictionPolicy))
    def begin(self, policy: EvictionPolicy) -> None:
        """An empty node."""
        self.pool, self.model = NodePool(20, 26, policy), PoolModel(20, 26, policy)

    @rule(names=contexts, blocks=depths, more=st.integers(0, 6), use=st.sampled_from(LEG_USES))
    def begin_leg(self, names: list[bytes], blocks: int, more: int, use: Use) -> None:
        """A leg takes room for its context and computes a first part, as far as it doesn't reuse it."""
        reused = self.pool.matched(names, blocks, Tier.L1)
        assert reused == self.model.depth(names[:blocks], Tier.L1)
        self.pool.lock(names, 0, reused, use)
        self.model.lock(names[:reused], 0, use)
        room = blocks - reused + more
        if self.pool.room < room:
            self.pool.unlock(names, reused, use)
            self.model.unlock(names[:reused], use)
            return
        self.pool.reserve(room, use)
        self.model.reserve(room, use)
        self.legs.append((use, names, reused, room))
        self._compute(len(self.legs) - 1, blocks - reused)

    @precondition(lambda self: any(use is not Use.QUEUED for use, *_ in self.legs))
    @rule(data=st.data(), blocks=st.integers(1, 6))
    def go_on(self, data: st.DataObject, blocks: int) -> None:
        """A leg computes more of its context."""
        running = [index for index, leg in enumerate(self.legs) if leg[0] is not Use.QUEUED]
        self._compute(data.draw(st.sampled_from(running)), blocks)

    def _compute(self, index: int, blocks: int) -> None:
        use, names, first, own = self.legs[index]
        last = min(first + min(blocks, own), LENGTH)
        self.pool.commit(names, first, last, use)
        self.model.commit(names[:last], first, use)
        self.legs[index] = (use, names, last, own - (last - first))

    @rule(names=contexts, first=st.integers(0, LENGTH), blocks=depths, keep=st.booleans())
    def fetch(self, names: list[bytes], first: int, blocks: int, keep: bool) -> None:
        """A chunk comes from a peer, and perhaps is kept for its leg."""
        last = min(first + blocks, LENGTH)
        reached = self.pool.store(names, first, last)
        assert reached == self.model.store(names[:last], first)
        if keep and reached:
            self.pool.lock(names, 0, reached, Use.QUEUED)
            self.model.lock(names[:reached], 0, Use.QUEUED)
            self.legs.append((Use.QUEUED, names, reached, 0))

    @precondition(lambda self: self.legs)
    @rule(data=st.data())
    def end_leg(self, data: st.DataObject) -> None:
        """A leg ends."""
        use, names, blocks, own = self.legs.pop(data.draw(st.integers(0, len(self.legs) - 1)))
        if use is not Use.QUEUED:
            self.pool.give_back(own, use)
            self.model.own[use] -= own
        self.pool.unlock(names, blocks, use)
        self.model.unlock(names[:blocks], use)

    @rule(names=contexts, blocks=depths)
    def touch(self, names: list[bytes], blocks: int) -> None:
        """A use without a leg."""
        held = self.pool.held(names, blocks)
        assert held == self.model.depth(names[:blocks])
        self.pool.touch(names, held)
        self.model.touch(names[:held])

    @rule(names=contexts, first=st.integers(0, LENGTH - 1), needs=st.lists(NEEDS, min_size=1, max_size=8))
    def need(self, names: list[bytes], first: int, needs: list[int]) -> None:
        """Branches come to need blocks, or no longer do."""
        pairs = dict(zip(names[first:], needs, strict=False))
        self.pool.set_needs(pairs)
        self.model.set_needs(pairs)

    @rule(names=contexts)
    def end_branch(self, names: list[bytes]) -> None:
        """No branch needs a context any more."""
        self.pool.set_needs(dict.fromkeys(names, 0))
        self.model.set_needs(dict.fromkeys(names, 0))

    @rule(what=st.sampled_from(["free", "free", "clear", Tier.L1, Tier.L2]))
    def drop(self, what: str | Tier) -> None:
        """The node's role went from decode to prefill, by either rule; or the process lost a tier."""
        if what == "free":
            assert self.pool.free_l1() == self.model.free_l1()
        elif what == "clear":
            assert self.pool.clear() == self.model.clear()
        elif isinstance(what, Tier) and not self.legs:
            self.pool.lose(what)
            self.model.lose(what)

    @invariant()
    def sound(self) -> None:
        """Both hold the same, for the same use; events and snapshot say so; the books agree with a recount."""
        if not hasattr(self, "pool"):
            return
        self.pool.check_invariants()
        model = self.model
        for event in self.pool.take_events():
            self._apply(event)
        snapshot = {
            (name, event.tier)
            for event in self.pool.snapshot()
            if isinstance(event, BlocksStored)
            for name in event.names
        }
        for tier in Tier:
            held = model.held(tier)
            assert {name for name, each in self.seen if each is tier} == held
            assert {name for name, each in snapshot if each is tier} == held
            assert all(self.pool.holds(name, tier) == (name in held) for names in CONTEXTS for name in names)
            assert self.pool.free(tier) == model.free(tier)
            assert self.pool.blocks(tier) == len(model.held(tier))
        assert self.pool.room == model.room()
        for use in Use:
            own = model.own[use] if use is not Use.QUEUED else 0
            assert self.pool.used_by(use) == own + sum(block.locks[use] > 0 for block in model.blocks.values())
        assert self.pool.zero_l2 == sum(not model.needs.get(name) for name in model.held(Tier.L2))
        assert self.pool.needs() == {name: model.needs[name] for name in model.blocks if model.needs.get(name)}

    def _apply(self, event: PoolEvent) -> None:
        if isinstance(event, BlocksStored):
            parent = event.parent
            for name in event.names:
                assert (name, event.tier) not in self.seen
                assert parent is None or (parent, event.tier) in self.seen
                assert self.parents.setdefault(name, parent) == parent
                self.seen.add((name, event.tier))
                parent = name
        elif isinstance(event, BlocksRemoved):
            assert self.seen >= {(name, event.tier) for name in event.names}
            self.seen -= {(name, event.tier) for name in event.names}
        else:
            self.seen = {each for each in self.seen if each[1] is not event.tier}


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=50)


def fill(pool: NodePool, names: list[bytes]) -> None:
    """A leg computes a context and ends."""
    reused = pool.matched(names, len(names), Tier.L1)
    pool.lock(names, 0, reused, Use.PREFILL)
    pool.reserve(len(names) - reused, Use.PREFILL)
    pool.commit(names, reused, len(names), Use.PREFILL)
    pool.unlock(names, len(names), Use.PREFILL)


def test_the_longest_unused_go_first_and_children_before_parents() -> None:
    pool = NodePool(30, 100)
    old, new, more = CONTEXTS[2][:10], CONTEXTS[3][:10], CONTEXTS[5][:10]
    for names in (old, new, more, old):
        fill(pool, names)
    fill(pool, _context(7)[:14])
    assert pool.matched(old, 10, Tier.L1) == 10
    assert pool.matched(new, 10, Tier.L1) == 0
    assert pool.matched(more, 10, Tier.L1) == 6, "from its end"


def test_a_need_below_keeps_an_ancestor_in_either_tier() -> None:
    """The effective need is the largest at or below a block on the node, whatever tier the needed one lies in."""
    pool = NodePool(20, 100)
    long, other = CONTEXTS[2][:10], CONTEXTS[3][:10]
    fill(pool, long)
    fill(pool, other)
    pool.free_l1()
    fill(pool, long[:9])
    fill(pool, other[:9])
    pool.set_needs({long[9]: 1})  # in L2 only; its parent is the last of its context in L1
    fill(pool, CONTEXTS[5][:6])
    assert pool.matched(long, 10, Tier.L1) == 9
    assert pool.matched(other, 10, Tier.L1) == 5


def test_what_a_later_leg_reuses_stays_when_the_rest_leaves() -> None:
    """Two legs use a context while the node is cleared; a third comes to use its beginning again."""
    pool = NodePool(40, 40)
    names = CONTEXTS[2][:12]
    fill(pool, names[:10])
    pool.lock(names, 0, 10, Use.DECODE)
    pool.reserve(2, Use.DECODE)
    assert pool.clear() == 0
    pool.lock(names, 0, 5, Use.PREFILL)
    pool.unlock(names, 5, Use.PREFILL)
    pool.commit(names, 10, 12, Use.DECODE)
    pool.unlock(names, 12, Use.DECODE)
    assert pool.held(names, 12) == 5


def test_what_came_for_a_leg_that_waits_is_not_evicted() -> None:
    pool = NodePool(20, 20)
    fetched = CONTEXTS[2][:8]
    assert pool.store(fetched, 0, 8) == 8
    pool.lock(fetched, 0, 8, Use.QUEUED)
    fill(pool, CONTEXTS[3])
    assert pool.matched(fetched, 8, Tier.L2) == 8
    assert pool.matched(CONTEXTS[3], 20, Tier.L2) == 12
    pool.unlock(fetched, 8, Use.QUEUED)
    pool.set_needs(dict.fromkeys(CONTEXTS[3], 1))
    assert pool.store(CONTEXTS[3], 20, 20) == 20
    assert pool.matched(fetched, 8, Tier.L2) == 0


def test_what_a_running_leg_computes_is_as_needed_as_what_branches_count() -> None:
    """Its branch's counts come later: until then its L2 copies go by last use, and not before all that is counted."""
    pool = NodePool(30, 20)
    counted, running = CONTEXTS[2][:14], CONTEXTS[3][:6]
    fill(pool, counted)
    pool.set_needs(dict.fromkeys(counted, need(1, elsewhere=False)))
    pool.reserve(6, Use.DECODE)
    pool.commit(running, 0, 6, Use.DECODE)
    assert pool.store(CONTEXTS[5], 0, 4) == 4
    assert pool.matched(running, 6, Tier.L2) == 6
    assert pool.matched(counted, 14, Tier.L2) == 10
    pool.unlock(running, 6, Use.DECODE)
    assert pool.store(_context(7), 0, 8) == 8
    assert pool.matched(running, 6, Tier.L2) == 2, "nobody ever counted it, and nobody uses it any more"
    assert pool.matched(CONTEXTS[5], 4, Tier.L2) == 0
    assert pool.matched(counted, 14, Tier.L2) == 10


@pytest.mark.parametrize("policy", EvictionPolicy)
def test_counts_come_before_use_unless_told_otherwise(policy: EvictionPolicy) -> None:
    """§4.4: (count, last access) in whole order: a block counted twice outlives one counted once, used however late."""
    pool = NodePool(20, 20, policy)
    twice, once = CONTEXTS[2][:10], CONTEXTS[3][:10]
    fill(pool, twice)
    fill(pool, once)
    pool.set_needs(dict.fromkeys(twice, 2) | dict.fromkeys(once, 1))
    fill(pool, CONTEXTS[5][:8])
    kept, gone = (twice, once) if policy is EvictionPolicy.AGENT else (once, twice)
    for tier in Tier:
        assert pool.matched(kept, 10, tier) == 10
        assert pool.matched(gone, 10, tier) == 2


def test_a_block_that_another_node_has_goes_before_one_the_pool_would_lose() -> None:
    """However many count the one and few the other, and whenever they were used; among equals the count decides."""
    pool = NodePool(20, 20)
    spare, last = CONTEXTS[2][:10], CONTEXTS[3][:10]
    fill(pool, last)
    fill(pool, spare)
    pool.set_needs(
        dict.fromkeys(spare, need(7, elsewhere=True))
        | dict.fromkeys(last[:5], need(2, elsewhere=False))
        | dict.fromkeys(last[5:], need(1, elsewhere=False))
    )
    fill(pool, CONTEXTS[5][:8])
    assert (pool.matched(last, 10, Tier.L2), pool.matched(spare, 10, Tier.L2)) == (10, 2)
    pool.set_needs(dict.fromkeys(CONTEXTS[5], need(9, elsewhere=False)))
    fill(pool, CONTEXTS[5][:12])
    assert (pool.matched(last, 10, Tier.L2), pool.matched(spare, 10, Tier.L2)) == (8, 0)


@pytest.mark.parametrize("seed", range(60))
def test_what_leaves_with_an_end_decides_and_not_the_end_alone(seed: int) -> None:
    """Contexts whose parts other nodes have, or not, come to a full L2 and go as in the model, block by block."""
    rng = random.Random(seed)
    l2_blocks = rng.choice([25, 30, 35, 45])
    pool, model = NodePool(20, l2_blocks), PoolModel(20, l2_blocks, EvictionPolicy.AGENT)
    for _ in range(80):
        names, cut = rng.choice(CONTEXTS), rng.choice([rng.randint(0, LENGTH), rng.randint(LENGTH - 3, LENGTH)])
        if rng.random() < 0.5:
            blocks = rng.randint(1, LENGTH)
            assert pool.store(names, 0, blocks) == model.store(names[:blocks], 0)
        else:
            parts = [names[:cut], names[cut:]] if rng.random() < 0.7 else [names[cut : cut + 3]]
            needs: dict[bytes, int] = {}
            for part in parts:
                needs |= dict.fromkeys(part, need(rng.choice([1, 1, 2]), elsewhere=rng.random() < 0.6))
            pool.set_needs(needs)
            model.set_needs(needs)
        held = {name for context in CONTEXTS for name in context if pool.holds(name, Tier.L2)}
        assert held == model.held(Tier.L2)
    pool.check_invariants()


def test_output_that_one_node_alone_has_does_not_keep_the_prompt_that_others_have() -> None:
    pool = NodePool(20, 20)
    decoded, last = CONTEXTS[2][:10], CONTEXTS[3][:10]
    fill(pool, last)
    fill(pool, decoded)
    pool.set_needs(
        dict.fromkeys(last, need(1, elsewhere=False))
        | dict.fromkeys(decoded[:9], need(1, elsewhere=True))
        | dict.fromkeys(decoded[9:], need(1, elsewhere=False))
    )
    fill(pool, CONTEXTS[5][:4])
    assert (pool.matched(last, 10, Tier.L2), pool.matched(decoded, 10, Tier.L2)) == (10, 6)
    pool.set_needs(dict.fromkeys(decoded[2:], need(1, elsewhere=False)))
    fill(pool, CONTEXTS[5][:6])
    assert (pool.matched(last, 10, Tier.L2), pool.matched(decoded, 10, Tier.L2)) == (8, 6)


def test_blocks_that_others_have_leave_only_while_few_others_leave_with_them() -> None:
    """Before them in L2 lies one that the pool would lose, and below in L1 some; an older context of such goes then."""
    pool = NodePool(20, 12)
    older, names = CONTEXTS[2][:3], CONTEXTS[3][:12]
    fill(pool, names)
    pool.lose(Tier.L2)
    assert pool.store(older, 0, 3) == 3
    assert pool.store(names, 9, 9) == 9
    pool.set_needs(
        dict.fromkeys([*older, *names], need(1, elsewhere=False)) | dict.fromkeys(names[1:9], need(1, elsewhere=True))
    )
    assert pool.store(CONTEXTS[5], 0, 3) == 3
    assert (pool.matched(names, 12, Tier.L2), pool.matched(older, 3, Tier.L2)) == (7, 2)
