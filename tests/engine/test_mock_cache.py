"""The mock's block cache under random use: bookkeeping, eviction order, events."""

from __future__ import annotations

import hashlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from evolving_node_agent.engines.mock.block import Block, User
from evolving_node_agent.engines.mock.cache import BlockCache
from evolving_node_agent.engines.mock.model import block_kv
from evolving_node_agent.engines.mock.pool import Pool
from evolving_node_agent.engines.port import Cleared, Stored, Tier

PAGE = 16
TRUNK = 8  # blocks two contexts share


def _names(which: int, blocks: int = 20) -> list[bytes]:
    """Names of a context; contexts 0 and 1 share their trunk."""
    names: list[bytes] = []
    for depth in range(blocks):
        kind = 0 if which == 1 and depth < TRUNK else which
        names.append(hashlib.sha256(f"{kind}/{depth}".encode()).digest()[:16])
    return names


CONTEXTS = [_names(which) for which in range(5)]


class CacheMachine(RuleBasedStateMachine):
    """Legs come and go; peers' blocks arrive; counts change; memory is short."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = BlockCache(Pool(24, PAGE), Pool(32, PAGE))
        self.legs: list[tuple[User, list[Block], list[int]]] = []  # blocks, own pages
        self.seen: set[tuple[bytes, Tier]] = set()

    @rule(which=st.integers(0, 4), blocks=st.integers(1, 20), user=st.sampled_from(User))
    def compute(self, which: int, blocks: int, user: User) -> None:
        """A leg takes room for its context and computes it, keeping a page of its own."""
        names = CONTEXTS[which][:blocks]
        reused = self.cache.matched(names, Tier.L1)
        held = self.cache.lock(names[:reused], user)
        if self.cache.room < blocks - reused + 1:
            self.cache.unlock(held, user)
            return
        pages = self.cache.take_pages(blocks - reused + 1, user)
        for name in names[reused:]:
            page = pages.pop()
            self.cache.write_page(page, block_kv(name, PAGE))
            held.append(self.cache.commit(name, held[-1] if held else None, page, user))
        self.legs.append((user, held, pages))

    @precondition(lambda self: self.legs)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """A leg ends."""
        user, blocks, pages = self.legs.pop(data.draw(st.integers(0, len(self.legs) - 1)))
        for page in pages:
            self.cache.give_back_page(page, user)
        self.cache.unlock(blocks, user)

    @rule(which=st.integers(0, 4), blocks=st.integers(1, 20))
    def fetch(self, which: int, blocks: int) -> None:
        """Blocks come from a peer, behind those that are here."""
        names = CONTEXTS[which][:blocks]
        start = self.cache.held(names)
        for at in range(start, blocks):
            parent = names[at - 1] if at else None
            if not self.cache.store_fetched(names[at], parent, block_kv(names[at], PAGE)):
                return

    @rule(which=st.integers(0, 4), first=st.integers(0, 19), blocks=st.integers(1, 20), count=st.integers(0, 2))
    def count(self, which: int, first: int, blocks: int, count: int) -> None:
        """Branches come to need blocks, or no longer do."""
        self.cache.set_counts(dict.fromkeys(CONTEXTS[which][first : first + blocks], count))

    @rule()
    def free(self) -> None:
        """The node's role went from decode to prefill."""
        self.cache.free_l1()
        for user, blocks, _ in self.legs:
            assert all(Tier.L1 in block.pages and block.locks[user] for block in blocks)

    @precondition(lambda self: not self.legs)
    @rule(tier=st.sampled_from(Tier))
    def lose(self, tier: Tier) -> None:
        """The process lost a tier; L2 alone cannot be lost while L1 lives on, as L1 is written through to it."""
        self.cache.clear(Tier.L1)
        if tier is Tier.L2:
            self.cache.clear(Tier.L2)

    @invariant()
    def sound(self) -> None:
        """Bookkeeping agrees with a recount, events with what is held, bytes with names."""
        self.cache.check_invariants()
        for event in self.cache.take_events():
            if isinstance(event, Stored):
                assert not self.seen & {(name, event.tier) for name in event.names}
                self.seen |= {(name, event.tier) for name in event.names}
            elif isinstance(event, Cleared):
                self.seen = {each for each in self.seen if each[1] is not event.tier}
            else:
                gone = {(name, event.tier) for name in event.names}
                assert gone <= self.seen
                self.seen -= gone
        for names in CONTEXTS:
            for name in names:
                for tier in Tier:
                    data = self.cache.read(name, tier)
                    assert (data is not None) == ((name, tier) in self.seen)
                    assert data is None or data == block_kv(name, PAGE)
        own = [sum(len(pages) for user, _, pages in self.legs if user is kind) for kind in User]
        for kind in User:
            locked = {block.name for user, blocks, _ in self.legs if user is kind for block in blocks}
            assert self.cache.used_by(kind) == len(locked) + own[kind]


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def fill(cache: BlockCache, names: list[bytes]) -> None:
    """A leg computes a context and ends."""
    reused = cache.matched(names, Tier.L1)
    blocks = cache.lock(names[:reused], User.PREFILL)
    for name in names[reused:]:
        (page,) = cache.take_pages(1, User.PREFILL)
        blocks.append(cache.commit(name, blocks[-1] if blocks else None, page, User.PREFILL))
    cache.unlock(blocks, User.PREFILL)


def test_the_least_recently_used_go_first_and_children_before_parents() -> None:
    cache = BlockCache(Pool(30, PAGE), Pool(100, PAGE))
    old, new, more = CONTEXTS[2][:10], CONTEXTS[3][:10], CONTEXTS[4][:10]
    for names in (old, new, more, old):
        fill(cache, names)
    fill(cache, CONTEXTS[0][:14])
    assert cache.matched(old, Tier.L1) == 10
    assert cache.matched(new, Tier.L1) == 0
    assert cache.matched(more, Tier.L1) == 6, "from its end"


def test_a_count_below_keeps_an_ancestor_in_either_tier() -> None:
    """The effective count is the largest at or below a block on the node, whatever tier the counted one lies in."""
    cache = BlockCache(Pool(20, PAGE), Pool(100, PAGE))
    long, other = CONTEXTS[2][:10], CONTEXTS[3][:10]
    fill(cache, long)
    fill(cache, other)
    cache.free_l1()
    fill(cache, long[:9])
    fill(cache, other[:9])
    cache.set_counts({long[9]: 1})  # in L2 only; its parent is the last of its context in L1
    fill(cache, CONTEXTS[4][:6])
    assert cache.matched(long, Tier.L1) == 9
    assert cache.matched(other, Tier.L1) == 5
