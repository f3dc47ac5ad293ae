"""The partition as etcd has it, followed by a watch: split, nodes, leader, decisions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from evolving.core.planner import Split
from evolving.runtime.keys import BadRecord, Keys, NodeRegistration, decode
from evolving.runtime.log import get_logger
from evolving.runtime.store import Store, Versioned, WatchBatch
from evolving_planner.records import History, decode_history, decode_split

LEADER_ROLE = "planner"

_log = get_logger(__name__)
_T = TypeVar("_T")


class View:
    """Every planner keeps one, leader or not. `changed` is set at each change; its one reader clears it."""

    def __init__(self, store: Store, keys: Keys) -> None:
        self._store = store
        self._keys = keys
        self._split = Split()
        self.split_revision = 0  # 0: there is none
        self.history = History()
        self.history_revision = 0
        self.nodes: dict[str, NodeRegistration] = {}
        self.leader_address = ""  # empty: no leader now
        self.loaded = asyncio.Event()
        self.changed = asyncio.Event()

    @property
    def split(self) -> Split:
        """The split in force. Without one its epoch is the last one decided, so that epochs never fall."""
        last = self.history.decisions[-1].epoch_after if self.history.decisions else 0
        return self._split if self._split.epoch >= last else replace(self._split, epoch=last)

    async def run(self) -> None:
        """Follow etcd for ever."""
        async for batch in self._store.watch(self._keys.root + "/"):
            self._apply(batch)
            self.loaded.set()
            self.changed.set()

    async def reload(self) -> None:
        """Read split and history anew, for a leader that is about to write. Raises StoreUnavailable."""
        for key in (self._keys.decisions, self._keys.split):
            found = await self._store.get(key)
            if found is not None:
                self.adopt(found)

    def adopt(self, found: Versioned) -> None:
        """Take a newer value of the split or the history; an older one, such as a late watch event, is ignored."""
        if found.key == self._keys.split and found.mod_revision > self.split_revision:
            split = self._read(decode_split, found)
            if split is not None:
                self._split = split
            self.split_revision = found.mod_revision
        elif found.key == self._keys.decisions and found.mod_revision > self.history_revision:
            self.history = self._read(decode_history, found) or self.history
            self.history_revision = found.mod_revision

    def _apply(self, batch: WatchBatch) -> None:
        if batch.snapshot:
            present = {found.key for found in batch.puts}
            self._forget({*self._known_keys()} - present, batch.revision)
        self._forget(batch.deletes, batch.revision)
        for found in batch.puts:
            if found.key.startswith(self._keys.nodes):
                node = self._read(lambda value: decode(NodeRegistration, value), found)
                if node is not None:
                    self.nodes[found.key.removeprefix(self._keys.nodes)] = node
            elif found.key == self._keys.leader(LEADER_ROLE):
                self.leader_address = found.value.decode(errors="replace")
            else:
                self.adopt(found)

    def _known_keys(self) -> list[str]:
        singles = [self._keys.split, self._keys.decisions, self._keys.leader(LEADER_ROLE)]
        return [*(self._keys.node(node_id) for node_id in self.nodes), *singles]

    def _forget(self, gone: set[str] | tuple[str, ...], revision: int) -> None:
        for key in gone:
            if key.startswith(self._keys.nodes):
                self.nodes.pop(key.removeprefix(self._keys.nodes), None)
            elif key == self._keys.leader(LEADER_ROLE):
                self.leader_address = ""
            elif key == self._keys.split and 0 < self.split_revision <= revision:
                self._split, self.split_revision = Split(epoch=self._split.epoch), 0
            elif key == self._keys.decisions and 0 < self.history_revision <= revision:
                self.history_revision = 0

    def _read(self, read: Callable[[bytes], _T], found: Versioned) -> _T | None:
        try:
            return read(found.value)
        except BadRecord as error:
            _log.error("bad_record_ignored", key=found.key, error=str(error))
            return None
