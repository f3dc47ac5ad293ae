"""The partition as etcd has it, followed by a watch: split, nodes, leader, decisions, fitted models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from evolving.core.modes import Hold, hold_in_force
from evolving.core.planner import Split
from evolving.runtime.clock import Clock
from evolving.runtime.keys import BadRecord, Keys, NodeRegistration, decode
from evolving.runtime.log import get_logger
from evolving.runtime.store import Store, Versioned, WatchBatch
from evolving_planner.history import History
from evolving_planner.records import decode_split

LEADER_ROLE = "planner"

_log = get_logger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Seen:
    incarnation: str
    since_s: float  # by the planner's monotonic clock


class View:
    """Every planner keeps one, leader or not. `changed` is set at each change; its one reader clears it."""

    def __init__(self, store: Store, keys: Keys, clock: Clock) -> None:
        self._store = store
        self._keys = keys
        self._clock = clock
        self._split = Split()
        self.split_revision = 0  # 0: there is none
        self.split_since_s = 0.0  # since when it has been this one, by the planner's monotonic clock
        self.history = History()
        self.model = b""  # the record of fitted models; empty: there is none
        self.model_revision = 0
        self.nodes: dict[str, NodeRegistration] = {}
        self._seen: dict[str, _Seen] = {}
        self.leader_address = ""  # empty: no leader now
        self.loaded = asyncio.Event()
        self.changed = asyncio.Event()

    @property
    def split(self) -> Split:
        """The split in force. Without one its epoch is the last one decided, so that epochs never fall."""
        last = self.history.epoch
        return self._split if self._split.epoch >= last else replace(self._split, epoch=last)

    @property
    def hold(self) -> Hold | None:
        """The operator's hold in force now."""
        return hold_in_force(self.history.hold, self._clock.wall_s())

    def nodes_there_for(self, least_s: float) -> set[str]:
        """Nodes that this planner has seen for so long, in one life of their engine."""
        now_s = self._clock.now_s()
        return {node_id for node_id, seen in self._seen.items() if now_s - seen.since_s >= least_s}

    async def run(self) -> None:
        """Follow etcd for ever."""
        async for batch in self._store.watch(self._keys.root + "/"):
            self._apply(batch)
            self.loaded.set()
            self.changed.set()

    async def reload(self) -> None:
        """Read split, history and models anew, for a leader that is about to write. Raises StoreUnavailable."""
        listing = await self._store.list(self._keys.decisions)
        present = {found.key for found in listing.items}
        self._forget({self._keys.decision(n) for n in self.history.numbers()} - present, listing.revision)
        for found in listing.items:
            self.adopt(found)
        for key in (self._keys.model, self._keys.split):
            single = await self._store.get(key)
            if single is not None:
                self.adopt(single)

    def adopt(self, found: Versioned) -> None:
        """Take a newer value of the split, a decision or the models; an older one, such as a late watch event, is
        ignored."""
        if found.key == self._keys.split and found.mod_revision > self.split_revision:
            split = self._read(decode_split, found)
            if split is not None:
                if split.epoch != self._split.epoch:
                    self.split_since_s = self._clock.now_s()
                self._split = split
            self.split_revision = found.mod_revision
        elif found.key == self._keys.model and found.mod_revision > self.model_revision:
            self.model, self.model_revision = found.value, found.mod_revision
        elif (number := self._number(found.key)) is not None:
            self._read(lambda value: self.history.put(number, value, found.mod_revision), found)

    def _apply(self, batch: WatchBatch) -> None:
        if batch.snapshot:
            present = {found.key for found in batch.puts}
            self._forget({*self._known_keys()} - present, batch.revision)
        self._forget(batch.deletes, batch.revision)
        for found in batch.puts:
            if found.key.startswith(self._keys.nodes):
                node = self._read(lambda value: decode(NodeRegistration, value), found)
                if node is not None:
                    self._saw_node(found.key.removeprefix(self._keys.nodes), node)
            elif found.key == self._keys.leader(LEADER_ROLE):
                self.leader_address = found.value.decode(errors="replace")
            else:
                self.adopt(found)

    def _saw_node(self, node_id: str, node: NodeRegistration) -> None:
        self.nodes[node_id] = node
        seen = self._seen.get(node_id)
        if seen is None or seen.incarnation != node.incarnation:
            self._seen[node_id] = _Seen(node.incarnation, self._clock.now_s())

    def _known_keys(self) -> list[str]:
        singles = [self._keys.split, self._keys.model, self._keys.leader(LEADER_ROLE)]
        nodes = (self._keys.node(node_id) for node_id in self.nodes)
        return [*nodes, *(self._keys.decision(number) for number in self.history.numbers()), *singles]

    def _forget(self, gone: Iterable[str], revision: int) -> None:
        for key in gone:
            if key.startswith(self._keys.nodes):
                node_id = key.removeprefix(self._keys.nodes)
                self.nodes.pop(node_id, None)
                self._seen.pop(node_id, None)
            elif key == self._keys.leader(LEADER_ROLE):
                self.leader_address = ""
            elif key == self._keys.split and 0 < self.split_revision <= revision:
                self._split, self.split_revision = Split(epoch=self._split.epoch), 0
            elif key == self._keys.model and 0 < self.model_revision <= revision:
                self.model, self.model_revision = b"", 0
            elif (number := self._number(key)) is not None:
                self.history.forget(number, revision)

    def _number(self, key: str) -> int | None:
        """Of the decision that lies under `key`; None: none does."""
        text = key.removeprefix(self._keys.decisions)
        is_number = text != key and len(text) == 10 and text.isascii() and text.isdigit()
        return int(text) if is_number else None

    def _read(self, read: Callable[[bytes], _T], found: Versioned) -> _T | None:
        try:
            return read(found.value)
        except BadRecord as error:
            _log.error("bad_record_ignored", key=found.key, error=str(error))
            return None
