"""What L2 keeps for legs that wait: blocks of their prompts that it holds, within bounds, until they are taken.

A block that a peer is asked for will be kept once it is here, or it isn't read yet: its leg would find it evicted. Of
the waiting legs the first in rank may go beyond the bounds, so that it always gets on, and then the next one is first.
None gets room while one ahead of it waits for some. Scheduler's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import dropwhile
from typing import TYPE_CHECKING, Any

from evolving.core.fetching import Rank

from .legs import PrefillLeg

if TYPE_CHECKING:
    from .blocks import BlockStore

_KEPT_SHARE = 0.5  # of L2: what is kept for waiting legs never takes all of it from the rest


@dataclass(slots=True)
class _Waiting:
    """A leg in the queue, and the host lock on the last of its nodes that is kept: only what has no children leaves."""

    leg: PrefillLeg
    node: int = 0
    receipt: Any = None
    kept_tokens: int = 0
    wholly: bool = False  # all that L2 held of the prompt when it was last looked at is kept
    chunk_tokens: int = 0  # that its fetch would read, were there room
    room: asyncio.Future[None] | None = None  # its fetch waits for this


@dataclass(slots=True)
class _Use:
    """What the bounds are used for, as one pass over waiting legs finds and leaves it."""

    first: _Waiting | None  # in rank: no bounds for it
    used_tokens: int  # kept, coming, or let in by this pass
    nodes: set[int]  # those kept
    upto: Rank | None = None  # nobody behind that leg gets room, since it waits for some

    def takes(self, waiting: _Waiting, tokens: int, tokens_max: int) -> bool:
        """Use that many more for the leg, if it may have them."""
        if waiting is not self.first:
            behind = self.upto is not None and _rank(waiting) > self.upto
            if behind or self.used_tokens + tokens > tokens_max:
                return False
        self.used_tokens += tokens
        return True


class Keeping:
    """The legs in the queue, and what is kept for each."""

    def __init__(
        self,
        tree: Any,
        blocks: BlockStore,
        block_tokens: int,
        l2_tokens: int,
        resolve: Callable[[asyncio.Future[Any], None], None],
    ) -> None:
        self._tree = tree
        self._blocks = blocks
        self._block_tokens = block_tokens
        self._tokens_max = int(l2_tokens * _KEPT_SHARE)
        self._resolve = resolve
        self._waiting: dict[str, _Waiting] = {}  # by request id
        self._freed = False  # some room, since it was last given away
        self.blocks_coming = 0  # host pages of reads that have not ended

    def enter(self, leg: PrefillLeg) -> None:
        """The leg is in the queue from now on."""
        waiting = self._waiting[leg.rid] = _Waiting(leg)
        self._keep(waiting, self._use())

    def leave(self, leg: PrefillLeg) -> None:
        """The leg was taken, or is gone."""
        waiting = self._waiting.pop(leg.rid, None)
        if waiting is not None:
            self._unlock(waiting)
            self._freed = True

    def expect(self, blocks: int) -> None:
        """Host pages are taken for blocks that a peer sends."""
        self.blocks_coming += blocks

    def give_up(self, blocks: int) -> None:
        """Nothing more comes into these pages, and nothing is kept of them."""
        self.blocks_coming -= blocks
        self._freed = True

    def come(self, leg: PrefillLeg, blocks: int, taken_blocks: int) -> None:
        """Of so many blocks that were to come for the leg, the tree took these. They are kept: the leg was let in for
        them, so that only what it leaves is room for others."""
        self.blocks_coming -= blocks
        waiting = self._waiting.get(leg.rid)
        if waiting is not None:
            self._lock(waiting, self._see(waiting))
        self._freed |= waiting is None or taken_blocks < blocks

    def look(self, leg: PrefillLeg) -> None:
        """See what is cached of the leg's prompt, and keep that if there is room."""
        waiting = self._waiting.get(leg.rid)
        if waiting is not None:
            self._keep(waiting, self._use())

    def lets_in(self, leg: PrefillLeg, blocks: int, room: asyncio.Future[None]) -> bool:
        """Whether a waiting leg that was just looked at may read that many more blocks now; if not, when `room` is
        resolved it may ask again."""
        waiting = self._waiting[leg.rid]
        waiting.chunk_tokens, waiting.room = blocks * self._block_tokens, None
        if waiting.wholly and self._use().takes(waiting, waiting.chunk_tokens, self._tokens_max):
            return True
        waiting.room = room
        return False

    def waits(self, leg: PrefillLeg) -> bool:
        """Whether the leg is in the queue."""
        return leg.rid in self._waiting

    def give_room(self) -> None:
        """Use what room came free: keep blocks that are not kept yet, and let fetches ask again, by rank.

        The first leg that finds no room ends it, so that what it takes goes by what is given, not by how many wait.
        """
        if not self._freed:
            return
        self._freed = False
        use = self._use()
        use.upto = None  # in this pass they get it in order
        for waiting in sorted(self._waiting.values(), key=_rank):
            if waiting.room is None and waiting.kept_tokens >= waiting.leg.known_cached_tokens:
                continue
            if not self._keep(waiting, use):
                return
            if waiting.room is not None:
                if not use.takes(waiting, waiting.chunk_tokens, self._tokens_max):
                    return
                self._resolve(waiting.room, None)
                waiting.room = None

    def _use(self) -> _Use:
        """The use of the bounds now. Walks each node that is kept once, however many legs it is kept for."""
        nodes, used_tokens = set[int](), self.blocks_coming * self._block_tokens
        for waiting in self._waiting.values():
            for node in self._path_kept(waiting):
                if node.id in nodes:
                    break  # and so are those before it
                nodes.add(node.id)
                used_tokens += len(node.key)
        first = min(self._waiting.values(), key=_rank, default=None)
        wanting = (_rank(each) for each in self._waiting.values() if each.room is not None and not each.leg.fetch.over)
        return _Use(first, used_tokens, nodes, min(wanting, default=None))

    def _keep(self, waiting: _Waiting, use: _Use) -> bool:
        """Keep what L2 holds of the leg's prompt, if there is room; whether there was."""
        path = self._see(waiting)
        # What such a look splits of a node that is kept counts twice until the next pass: too much, never too little.
        new = [node for node in path if node.id not in use.nodes]
        waiting.wholly = use.takes(waiting, sum(len(node.key) for node in new), self._tokens_max)
        if waiting.wholly:
            use.nodes.update(node.id for node in new)
            self._lock(waiting, path)
        return waiting.wholly

    def _see(self, waiting: _Waiting) -> list[Any]:
        """Match the leg's prompt; the nodes of it that L2 holds, last first."""
        leg = waiting.leg
        match = self._blocks.match(leg.tokens[:-1], leg.root)
        leg.known_cached_tokens = int(match.device_prefix_len + match.host_hit_length)
        return list(dropwhile(lambda node: not node.backuped, self._path(match.best_match_node)))

    def _path(self, node_id: int) -> Iterator[Any]:
        """A node of the tree and those before it."""
        node = self._tree.tree_core.node_by_id(node_id)
        while node.parent is not None:
            yield node
            node = node.parent

    def _path_kept(self, waiting: _Waiting) -> Iterator[Any]:
        return self._path(waiting.node) if waiting.receipt is not None else iter(())

    def _lock(self, waiting: _Waiting, path: list[Any]) -> None:
        """Keep these nodes and no others for the leg, if there are any. None of them has a child the leg needs."""
        if not path:
            return
        if waiting.receipt is None or waiting.node != path[0].id:
            receipt = self._tree.inc_host_lock_ref(path[0].id).to_dec_params()
            self._unlock(waiting)
            waiting.node, waiting.receipt = path[0].id, receipt
        waiting.kept_tokens = sum(len(node.key) for node in path)

    def _unlock(self, waiting: _Waiting) -> None:
        if waiting.receipt is not None:
            self._tree.dec_host_lock_ref(waiting.node, waiting.receipt)
        waiting.receipt, waiting.kept_tokens = None, 0


def _rank(waiting: _Waiting) -> Rank:
    return waiting.leg.fetch.rank
