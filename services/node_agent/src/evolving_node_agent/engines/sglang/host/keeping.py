"""What L2 keeps for legs that wait: blocks of their prompts that it holds, within bounds, until they are taken.

A block that a peer is asked for will be kept once it is here, or it isn't read yet: its leg would find it evicted. Of
the waiting legs the first in rank may go beyond the bounds, so that it always gets on, and then the next one is first.
Scheduler's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    chunk_tokens: int = 0  # that its fetch would read, were there room
    room: asyncio.Future[None] | None = None  # its fetch waits for this


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
        self._freed = False  # since room was last given away
        self.blocks_coming = 0  # host pages of reads that have not ended

    def enter(self, leg: PrefillLeg) -> None:
        """The leg is in the queue from now on."""
        waiting = self._waiting[leg.rid] = _Waiting(leg)
        self._keep(waiting)

    def leave(self, leg: PrefillLeg) -> None:
        """The leg was taken, or is gone."""
        waiting = self._waiting.pop(leg.rid, None)
        if waiting is not None:
            self._unlock(waiting)
            self._freed = True

    def expect(self, blocks: int) -> None:
        """Host pages are taken for blocks that a peer sends."""
        self.blocks_coming += blocks

    def settle(self, blocks: int) -> None:
        """They have come, or nothing more comes into them."""
        self.blocks_coming -= blocks
        self._freed = True

    def look(self, leg: PrefillLeg) -> None:
        """See what is cached of the leg's prompt, and keep that if there is room."""
        waiting = self._waiting.get(leg.rid)
        if waiting is not None:
            self._keep(waiting)

    def keep(self, leg: PrefillLeg) -> None:
        """Keep what is cached of the leg's prompt: it was let in before it was read."""
        waiting = self._waiting.get(leg.rid)
        if waiting is not None:
            self._keep(waiting, let_in=True)

    def lets_in(self, leg: PrefillLeg, blocks: int, room: asyncio.Future[None]) -> bool:
        """Whether a waiting leg's fetch may read that many more blocks now; if not, when `room` is resolved it may ask
        again."""
        waiting = self._waiting[leg.rid]
        waiting.chunk_tokens, waiting.room = blocks * self._block_tokens, None
        if self._keep(waiting):
            return True
        waiting.room = room
        return False

    def waits(self, leg: PrefillLeg) -> bool:
        """Whether the leg is in the queue."""
        return leg.rid in self._waiting

    def give_room(self) -> None:
        """Use what room came free: keep blocks that are not kept yet, and let fetches ask again, by rank."""
        if not self._freed:
            return
        self._freed = False
        given_tokens = 0
        for waiting in sorted(self._waiting.values(), key=lambda each: each.leg.fetch.rank):
            if waiting.room is None and waiting.kept_tokens >= waiting.leg.known_cached_tokens:
                continue
            if self._keep(waiting, given_tokens) and waiting.room is not None:
                self._resolve(waiting.room, None)
                waiting.room = None
                given_tokens += waiting.chunk_tokens

    def _keep(self, waiting: _Waiting, given_tokens: int = 0, let_in: bool = False) -> bool:
        """Keep what L2 holds of the leg's prompt, if there is room, of which `given_tokens` are not to be used; whether
        there is room for its chunk as well."""
        leg = waiting.leg
        match = self._blocks.match(leg.tokens[:-1], leg.root)
        leg.known_cached_tokens = int(match.device_prefix_len + match.host_hit_length)
        path = list(self._path(match.best_match_node))
        while path and not path[0].backuped:
            path.pop(0)
        kept = {node.id: len(node.key) for each in self._waiting.values() for node in self._path_kept(each)}
        used_tokens = sum((kept | {node.id: len(node.key) for node in path}).values())
        used_tokens += self.blocks_coming * self._block_tokens + given_tokens
        beyond = let_in or waiting is min(self._waiting.values(), key=lambda each: each.leg.fetch.rank)
        if path and (beyond or used_tokens <= self._tokens_max):
            self._lock(waiting, path)
        return beyond or used_tokens + waiting.chunk_tokens <= self._tokens_max

    def _path(self, node_id: int) -> Iterator[Any]:
        """A node of the tree and those before it."""
        node = self._tree.tree_core.node_by_id(node_id)
        while node.parent is not None:
            yield node
            node = node.parent

    def _path_kept(self, waiting: _Waiting) -> Iterator[Any]:
        return self._path(waiting.node) if waiting.receipt is not None else iter(())

    def _lock(self, waiting: _Waiting, path: list[Any]) -> None:
        """Keep these nodes and no others for the leg. None of them has a child the leg needs."""
        if waiting.receipt is None or waiting.node != path[0].id:
            receipt = self._tree.inc_host_lock_ref(path[0].id).to_dec_params()
            self._unlock(waiting)
            waiting.node, waiting.receipt = path[0].id, receipt
        waiting.kept_tokens = sum(len(node.key) for node in path)

    def _unlock(self, waiting: _Waiting) -> None:
        if waiting.receipt is not None:
            self._tree.dec_host_lock_ref(waiting.node, waiting.receipt)
        waiting.receipt, waiting.kept_tokens = None, 0
