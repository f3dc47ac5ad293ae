"""Which blocks a mock engine holds, who uses them, and which one goes next.

A leg takes its pages at once and they become blocks as they fill. Both tiers are closed under prefixes: a block is in
a tier only while its parent is, so a match is a walk. Locks keep blocks of running legs in L1. Eviction takes, leaf by
leaf, the block with the smallest (is anything at or below it counted, last access): the paper's order (section 4.4)
with a parent never before a counted child.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from evolving_node_agent.engines.mock.block import Block, User
from evolving_node_agent.engines.mock.events import EventLog
from evolving_node_agent.engines.mock.pool import Pool
from evolving_node_agent.engines.port import KvEvent, Tier

_Entry = tuple[bool, int, bytes]  # (effectively counted, last access, name): the eviction order


class BlockCache:
    """Blocks by name over an L1 and an L2 pool. Nothing here awaits; changes leave as events."""

    def __init__(self, l1: Pool, l2: Pool) -> None:
        self._pools = {Tier.L1: l1, Tier.L2: l2}
        self._blocks: dict[bytes, Block] = {}
        self._counts: dict[bytes, int] = {}
        self._heaps: dict[Tier, list[_Entry]] = {Tier.L1: [], Tier.L2: []}
        self._access = 0
        self._unlocked = 0  # blocks in L1 that no leg uses
        self._used = [0, 0]  # L1 pages in use by legs, by User: own ones and locked blocks, each block once
        self._events = EventLog()

    # -- reading

    def get(self, name: bytes) -> Block | None:
        """The block of that name, in whichever tier."""
        return self._blocks.get(name)

    def matched(self, names: Sequence[bytes], tier: Tier) -> int:
        """How many leading blocks lie in `tier`."""
        depth = 0
        for name in names:
            block = self._blocks.get(name)
            if block is None or tier not in block.pages:
                break
            depth += 1
        return depth

    def held(self, names: Sequence[bytes]) -> int:
        """How many leading blocks lie in either tier."""
        depth = 0
        for name in names:
            if name not in self._blocks:
                break
            depth += 1
        return depth

    def read(self, name: bytes, tier: Tier) -> bytes | None:
        """KV bytes of a block in a tier, shape (page_bytes,); None where it isn't."""
        block = self._blocks.get(name)
        page = block.pages.get(tier) if block is not None else None
        return None if page is None else self._pools[tier].read(page)

    @property
    def room(self) -> int:
        """L1 pages that could be had: free ones, and those of blocks no leg uses."""
        return self._pools[Tier.L1].free + self._unlocked

    def used(self, tier: Tier) -> int:
        """Pages of a tier that hold something."""
        return self._pools[tier].used

    def used_by(self, user: User) -> int:
        """L1 pages in use by legs of a kind; a block that several of them share counts once."""
        return self._used[user]

    def pages(self, tier: Tier) -> int:
        """Pages of a tier, used or not."""
        return self._pools[tier].pages

    def snapshot(self) -> list[KvEvent]:
        """All that is held, as events from nothing, parents before children."""
        held = EventLog()
        for tier in Tier:
            for block in self._blocks.values():
                if tier in block.pages:
                    held.stored(tier, _parent_name(block), block.name)
        return held.take()

    def take_events(self) -> list[KvEvent]:
        """Changes since the last call, in order."""
        return self._events.take()

    # -- use by legs

    def lock(self, names: Iterable[bytes], user: User) -> list[Block]:
        """Keep leading blocks, all in L1, from eviction; give them to `unlock` later."""
        blocks = []
        for name in names:
            block = self._blocks[name]
            assert Tier.L1 in block.pages
            self._add_lock(block, user)
            blocks.append(block)
        return blocks

    def unlock(self, blocks: Sequence[Block], user: User) -> None:
        """Give up blocks, root-most first as `lock` returned them."""
        for block in reversed(blocks):
            assert block.locks[user] > 0
            block.locks[user] -= 1
            self._used[user] -= block.locks[user] == 0
            self._touch(block)
            if not block.locked:
                self._unlocked += 1
                self._offer(block, Tier.L1)
                self._leave_l1(block)

    def touch(self, names: Sequence[bytes]) -> None:
        """Count a use of leading blocks, so that they go later."""
        for name in reversed(names):
            self._touch(self._blocks[name])

    def take_pages(self, pages: int, user: User) -> list[int]:
        """L1 pages for a leg's own use, evicting as needed; there must be `room` for them."""
        assert pages <= self.room
        pool = self._pools[Tier.L1]
        while pool.free < pages:
            evicted = self._evict(Tier.L1)
            assert evicted, "unlocked blocks are always evictable, leaf by leaf"
        self._used[user] += pages
        return [pool.take() for _ in range(pages)]

    def give_back_page(self, page: int, user: User) -> None:
        """Free a page from `take_pages` that never became a block."""
        self._used[user] -= 1
        self._pools[Tier.L1].give_back(page)

    def write_page(self, page: int, data: bytes) -> None:
        """Write the KV of a leg's own page."""
        self._pools[Tier.L1].write(page, data)

    def read_page(self, page: int) -> bytes:
        """Read a leg's own page."""
        return self._pools[Tier.L1].read(page)

    def commit(self, name: bytes, parent: Block | None, page: int, user: User) -> Block:
        """Turn a leg's own full page into a block, locked for the leg, and write it through to L2.

        Where another leg was first, its copy is used and `page` is freed.
        """
        block = self._blocks.get(name)
        if block is not None and Tier.L1 in block.pages:
            self.give_back_page(page, user)
            self._add_lock(block, user)
            return block
        block = block or self._create(name, parent)
        self._used[user] -= 1
        self._unlocked += 1
        self._put(block, Tier.L1, page)
        self._add_lock(block, user)
        self.write_through(block)
        return block

    # -- L2

    def write_through(self, block: Block) -> bool:
        """Copy a block of L1 to L2, its ancestors first; False where L2 has no room."""
        missing = []
        at: Block | None = block
        while at is not None and Tier.L2 not in at.pages:
            missing.append(at)
            at = at.parent
        l1 = self._pools[Tier.L1]
        return all(self._put_bytes(each, l1.read(each.pages[Tier.L1])) for each in reversed(missing))

    def store_fetched(self, name: bytes, parent: bytes | None, data: bytes) -> bool:
        """Put a block read from a peer into L2; False where its parent is gone or there is no room."""
        if parent is not None:
            above = self._blocks.get(parent)
            if above is None or not self.write_through(above):
                return False
        else:
            above = None
        block = self._blocks.get(name)
        if block is not None and Tier.L2 in block.pages:
            return True
        block = block or self._create(name, above)
        if self._put_bytes(block, data):
            return True
        self._forget_if_gone(block)
        return False

    # -- counts

    def set_counts(self, counts: Mapping[bytes, int]) -> None:
        """Set branch counts; 0 forgets. A count of a block that isn't here waits for it."""
        for name, count in counts.items():
            if count > 0:
                self._counts[name] = count
            else:
                self._counts.pop(name, None)
            block = self._blocks.get(name)
            if block is not None:
                self._set_count(block, count)

    def counts(self) -> dict[bytes, int]:
        """Nonzero counts of held blocks."""
        return {name: count for name, count in self._counts.items() if name in self._blocks}

    # -- losing things

    def clear(self, tier: Tier) -> None:
        """Empty a tier: the process lost it. No leg may hold locks."""
        assert not any(block.locked for block in self._blocks.values())
        for block in list(self._blocks.values()):
            page = block.pages.pop(tier, None)
            if page is not None:
                self._pools[tier].give_back(page)
                self._unlocked -= tier is Tier.L1
            block.children[tier] = 0
        for block in [block for block in reversed(self._blocks.values()) if not block.pages]:
            self._forget_if_gone(block)
        self._heaps[tier] = []
        self._events.cleared(tier)

    def free_l1(self) -> int:
        """Drop from L1 what L2 has: at once where no leg uses it, else when the last one gives it up.

        Returns the blocks dropped at once.
        """
        dropped = 0
        for block in list(reversed(self._blocks.values())):
            if Tier.L1 not in block.pages or not self.write_through(block):
                continue
            block.leaves_l1 = True
            dropped += self._leave_l1(block)
        return dropped

    def damage(self, name: bytes, tier: Tier) -> None:
        """Flip a bit of a copy, as failing memory would."""
        self._pools[tier].flip_bit(self._blocks[name].pages[tier])

    def check_invariants(self) -> None:
        """Assert all bookkeeping against a recount; O(blocks)."""
        unlocked = 0
        for tier, pool in self._pools.items():
            pages = [block.pages[tier] for block in self._blocks.values() if tier in block.pages]
            assert len(set(pages)) == len(pages) <= pool.used
        children: dict[tuple[bytes, Tier], int] = {}
        counted: dict[bytes, int] = {}
        for block in self._blocks.values():
            assert block.pages, "a block without a copy is forgotten"
            assert block.count == self._counts.get(block.name, 0)
            assert not block.locked or Tier.L1 in block.pages
            unlocked += Tier.L1 in block.pages and not block.locked
            if block.parent is None:
                continue
            assert block.parent is self._blocks.get(block.parent.name)
            assert all(above >= own for above, own in zip(block.parent.locks, block.locks, strict=True))
            for tier in block.pages:
                assert tier in block.parent.pages, "tiers are closed under prefixes"
                key = (block.parent.name, tier)
                children[key] = children.get(key, 0) + 1
            counted[block.parent.name] = counted.get(block.parent.name, 0) + block.effective
        for block in self._blocks.values():
            assert block.counted_children == counted.get(block.name, 0)
            for tier in Tier:
                assert block.children[tier] == children.get((block.name, tier), 0)
        assert unlocked == self._unlocked

    # -- inside

    def _create(self, name: bytes, parent: Block | None) -> Block:
        block = Block(name, parent)
        self._blocks[name] = block
        self._set_count(block, self._counts.get(name, 0))
        return block

    def _put_bytes(self, block: Block, data: bytes) -> bool:
        pool = self._pools[Tier.L2]
        if pool.free == 0 and not self._evict(Tier.L2, keep=block.parent):
            return False
        page = pool.take()
        pool.write(page, data)
        self._put(block, Tier.L2, page)
        return True

    def _put(self, block: Block, tier: Tier, page: int) -> None:
        block.pages[tier] = page
        if block.parent is not None:
            block.parent.children[tier] += 1
        self._events.stored(tier, _parent_name(block), block.name)
        self._touch(block)

    def _drop(self, block: Block, tier: Tier) -> None:
        self._pools[tier].give_back(block.pages.pop(tier))
        self._unlocked -= tier is Tier.L1
        self._events.removed(tier, block.name)
        if block.parent is not None:
            block.parent.children[tier] -= 1
            self._offer(block.parent, tier)
        self._forget_if_gone(block)

    def _forget_if_gone(self, block: Block) -> None:
        if block.pages:
            return
        del self._blocks[block.name]
        if block.parent is not None and block.effective:
            block.parent.counted_children -= 1
            self._changed(block.parent, before=True)

    def _evict(self, tier: Tier, keep: Block | None = None) -> bool:
        """Drop the copy that goes next; False where none may. `keep` stays: its child is about to come."""
        heap = self._heaps[tier]
        spared: _Entry | None = None
        evicted = False
        while heap and not evicted:
            entry = heapq.heappop(heap)
            block = self._blocks.get(entry[2])
            if block is None or not self._evictable(block, tier) or entry != _entry(block):
                continue
            if block is keep:
                spared = entry
                continue
            self._drop(block, tier)
            evicted = True
        if spared is not None:
            heapq.heappush(heap, spared)
        return evicted

    def _evictable(self, block: Block, tier: Tier) -> bool:
        return tier in block.pages and block.children[tier] == 0 and (tier is Tier.L2 or not block.locked)

    def _offer(self, block: Block, tier: Tier) -> None:
        """Note the block's present place in the eviction order; earlier notes are stale by their key."""
        if not self._evictable(block, tier):
            return
        heap = self._heaps[tier]
        heapq.heappush(heap, _entry(block))
        if len(heap) > 4 * len(self._blocks) + 64:
            heap[:] = [_entry(each) for each in self._blocks.values() if self._evictable(each, tier)]
            heapq.heapify(heap)

    def _touch(self, block: Block) -> None:
        self._access += 1
        block.accessed = self._access
        for tier in block.pages:
            self._offer(block, tier)

    def _add_lock(self, block: Block, user: User) -> None:
        self._unlocked -= not block.locked
        self._used[user] += block.locks[user] == 0
        block.locks[user] += 1
        block.leaves_l1 = False
        self._touch(block)

    def _leave_l1(self, block: Block) -> bool:
        if not block.leaves_l1 or Tier.L2 not in block.pages or not self._evictable(block, Tier.L1):
            return False
        block.leaves_l1 = False
        self._drop(block, Tier.L1)
        return True

    def _set_count(self, block: Block, count: int) -> None:
        before = block.effective
        block.count = count
        self._changed(block, before)

    def _changed(self, block: Block, before: bool) -> None:
        """Pass a change of `effective` (from `before`) up; stops at the first ancestor that stays as it is."""
        at: Block | None = block
        while at is not None and at.effective != before:
            after = at.effective
            for tier in at.pages:
                self._offer(at, tier)
            at = at.parent
            if at is None:
                return
            before = at.effective
            at.counted_children += 1 if after else -1


def _entry(block: Block) -> _Entry:
    return (block.effective, block.accessed, block.name)


def _parent_name(block: Block) -> bytes | None:
    return block.parent.name if block.parent is not None else None
