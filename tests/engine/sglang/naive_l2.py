"""A naive L2 for tests of what is kept in it: a tree of single blocks, no engine, no peer, reads that take no time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from evolving.core.config import FetchConfig
from evolving_node_agent.engines.port import Holder, PrefillJob, Sampling, TokenIds
from evolving_node_agent.engines.sglang.host.fetch import Fetcher, Reader
from evolving_node_agent.engines.sglang.host.keeping import Keeping
from evolving_node_agent.engines.sglang.host.landing import Claimed, Landing
from evolving_node_agent.engines.sglang.host.legs import PrefillLeg, prefill_leg
from evolving_node_agent.engines.sglang.host.pages import Layout, Range
from evolving_node_agent.engines.sglang.host.peers import Locate, Located
from evolving_node_agent.engines.sglang.translate import prefill_command

BLOCK = 4
CHUNK = 4
L2 = 64  # blocks
KEPT = L2 // 2
LONGEST = L2 // 4
LAYOUT = Layout((), 0, (0, 1 << 20), 64, 2 << 20)


class Block:
    """A node of the tree, of one block in L2."""

    backuped = True

    def __init__(
        self, number: int, parent: Block | None, key: tuple[int, ...], slots: torch.Tensor, cost: Counter[str]
    ) -> None:
        self.id, self._parent, self.key, self.slots, self._cost = number, parent, key, slots, cost
        self.children: dict[tuple[int, ...], Block] = {}
        self.locks = 0

    @property
    def parent(self) -> Block | None:
        self._cost["steps"] += 1
        return self._parent


class Store:
    """L2 with its tree: SGLang's and our `BlockStore`."""

    checksums = SimpleNamespace(enabled=False, put=lambda pages, sums: None)

    def __init__(self) -> None:
        self.cost = Counter[str]()  # of what was asked: matches of a prompt, steps from a node to its parent
        self.matched = Counter[int]()  # by the token that a prompt ends with
        self.root = Block(0, None, (), torch.arange(0), self.cost)
        self.pages = self.tree_core = self
        self.layout = LAYOUT
        self.blocks = {0: self.root}
        self.free = list(range(L2))
        self._numbers = count(1)

    def path(self, tokens: TokenIds) -> list[Block]:
        """Those of a prompt's blocks that are here, from the first on."""
        node, path = self.root, []
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            key = tuple(tokens[start : start + BLOCK].tolist())
            if key not in node.children:
                break
            node = node.children[key]
            path.append(node)
        return path

    def evict(self, pages: int) -> None:
        """Let go of up to so many blocks, oldest first."""
        for _ in range(pages):
            leaves = (each for each in self.blocks.values() if each.parent and not (each.children or each.locks))
            node = next(leaves, None)
            if node is None or node.parent is None:
                return
            del node.parent.children[node.key]
            del self.blocks[node.id]
            self.free_host(node.slots)

    def locked(self) -> int:
        """Blocks that can't leave."""
        kept = set[int]()
        for node in list(self.blocks.values()):
            at: Block | None = node if node.locks else None
            while at is not None and at.parent is not None:
                kept.add(at.id)
                at = at.parent
        return len(kept)

    # -- as others know it

    def match(self, tokens: TokenIds, root: bytes) -> Any:
        self.cost["matches"] += 1
        self.matched[int(tokens[-1])] += 1
        path = self.path(tokens)
        last = path[-1].id if path else 0
        return SimpleNamespace(device_prefix_len=0, host_hit_length=len(path) * BLOCK, best_match_node=last)

    def cached_tokens(self, tokens: TokenIds, root: bytes) -> int:
        return int(self.match(tokens[:-1], root).host_hit_length)

    def insert_host(
        self, tokens: TokenIds, root: bytes, first_block: int, digests: list[bytes], slots: torch.Tensor
    ) -> int:
        path = self.path(tokens)
        assert len(path) == first_block
        node = path[-1] if path else self.root
        for index in range(len(digests)):
            start = (first_block + index) * BLOCK
            key = tuple(tokens[start : start + BLOCK].tolist())
            own = slots[index * BLOCK : (index + 1) * BLOCK]
            child = node.children[key] = Block(next(self._numbers), node, key, own, self.cost)
            self.blocks[child.id] = node = child
        return len(slots)

    def allocate_host(self, pages: int, evict: Callable[[int], None]) -> torch.Tensor | None:
        if len(self.free) < pages:
            evict((pages - len(self.free)) * BLOCK)
        if len(self.free) < pages:
            return None
        taken, self.free = self.free[:pages], self.free[pages:]
        return torch.cat([torch.arange(page * BLOCK, (page + 1) * BLOCK) for page in taken])

    def free_host(self, slots: torch.Tensor) -> None:
        pages = (slots[::BLOCK] // BLOCK).tolist()
        assert not set(pages).intersection(self.free)
        self.free.extend(pages)

    def evict_host(self, tokens: int) -> None:
        self.evict(tokens // BLOCK)

    def node_by_id(self, number: int) -> Block:
        return self.blocks[number]

    def inc_host_lock_ref(self, number: int) -> Any:
        self.blocks[number].locks += 1
        return SimpleNamespace(to_dec_params=lambda: number)

    def dec_host_lock_ref(self, number: int, receipt: int) -> None:
        assert receipt == number
        self.blocks[number].locks -= 1
        assert self.blocks[number].locks >= 0


class Peers:
    """One that has every block asked for."""

    async def at(self, address: str) -> Any:
        return SimpleNamespace(welcome=SimpleNamespace(incarnation="x", session=address, layout=LAYOUT), ask=self._ask)

    async def _ask(self, locate: Locate, expect: object) -> Located:
        return Located([(page, -1, None) for page in range(len(locate.names) // 16)])


class Transport:
    """Reads that are over at once."""

    session = ""

    def register(self, address: int, size: int) -> None: ...

    def read(self, session: str, ranges: Sequence[Range], over: Callable[[bool], None]) -> None:
        over(True)


class Engine(Landing):
    """The parts of an engine that bring and keep blocks, on one thread."""

    def __init__(self) -> None:
        self.store = Store()
        store: Any = self.store
        self.keeping = Keeping(store, store, BLOCK, L2 * BLOCK, self._resolve)
        super().__init__(store, store, self.keeping, BLOCK)
        self.legs: dict[PrefillLeg, asyncio.Task[None]] = {}
        self.rooms: dict[PrefillLeg, asyncio.Future[None]] = {}
        inbox: Any = self
        peers: Any = Peers()
        config = FetchConfig(readers=2, chunk_blocks=CHUNK)
        self.fetcher = Fetcher(inbox, store, self, peers, Reader(Transport()), config, BLOCK)

    def _resolve(self, room: asyncio.Future[Any], result: None) -> None:
        if not room.done():
            room.set_result(result)

    def claim(self, leg: PrefillLeg, first_block: int, blocks: int, room: asyncio.Future[None]) -> Claimed:
        claimed = super().claim(leg, first_block, blocks, room)
        if claimed.waits:
            self.rooms[leg] = room
        if claimed.slots is not None and leg is not self.first():
            assert self.store.locked() + self.keeping.blocks_coming <= KEPT
        return claimed

    # -- the inbox: calls run at once, each in an iteration of its own

    def post(self, call: Callable[[], None]) -> None:
        call()
        self.keeping.give_room()

    async def call(self, function: Callable[[], Any]) -> Any:
        result = function()
        self.keeping.give_room()
        return result

    # -- legs

    def arrive(self, tokens: TokenIds, priority: int = 0) -> PrefillLeg:
        """A leg whose blocks a peer has."""
        blocks, number = (len(tokens) - 1) // BLOCK, len(self.legs)
        holders = (Holder("peer", "127.0.0.1:1", "x", 0, blocks),)
        job = PrefillJob(str(number), number, tokens, 0, bytes(32), Sampling(1), holders=holders, priority=priority)
        leg = prefill_leg(prefill_command(job))
        self.keeping.enter(leg)
        self.legs[leg] = asyncio.create_task(self.fetcher.fetch(leg))
        return leg

    async def settle(self) -> None:
        """Until every fetch is over, or waits for room."""
        while not all(task.done() or self.waits(leg) for leg, task in self.legs.items()):
            await asyncio.sleep(0)

    def waits(self, leg: PrefillLeg) -> bool:
        """Whether the leg's fetch waits for room."""
        return leg in self.rooms and not self.rooms[leg].done()

    async def leave(self, leg: PrefillLeg) -> None:
        """The leg is taken, or aborted. Its fetch hears of it a little later."""
        task = self.legs.pop(leg)
        self.keeping.leave(leg)
        self.keeping.give_room()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    def first(self) -> PrefillLeg:
        """Of the waiting legs the first in rank."""
        return min(self.legs, key=lambda leg: leg.fetch.rank)

    def whole(self, leg: PrefillLeg) -> bool:
        """Whether all of the leg's blocks that it can use are here."""
        return self.store.cached_tokens(leg.tokens, leg.root) == (len(leg.tokens) - 1) // BLOCK * BLOCK

    def put(self, tokens: TokenIds) -> TokenIds:
        """The prompt, whose blocks are here now."""
        held, blocks = len(self.store.path(tokens)), len(tokens) // BLOCK
        slots = self.store.allocate_host(blocks - held, self.store.evict_host)
        assert slots is not None
        self.store.insert_host(tokens, b"", held, [b""] * (blocks - held), slots)
        return tokens

    def check(self) -> None:
        """The fetch of the first leg is not stuck, nor is anything lost that a fetch brought."""
        assert not self.legs or self.legs[self.first()].done()
        assert all(self.whole(leg) for leg, task in self.legs.items() if task.done())

    async def check_nothing_stays(self) -> None:
        """Without legs all memory is plain cache, as soon as no read is under way."""
        async with asyncio.timeout(30):
            while self.keeping.blocks_coming:
                await asyncio.sleep(0)
        assert not any(node.locks for node in self.store.blocks.values())
        assert len(self.store.free) + len(self.store.blocks) - 1 == L2


_seeds = count()


def prompt(blocks: int, after: TokenIds | None = None) -> TokenIds:
    """So many blocks nobody else has, and a token; after those of another prompt."""
    new = np.full(blocks * BLOCK + 1, 1000 + next(_seeds), dtype=np.uint32)
    return new if after is None else np.concatenate([after[: len(after) // BLOCK * BLOCK], new])
