"""What etcd says that the directory must know: which nodes there are, their roles, and the newest term."""

from __future__ import annotations

import asyncio

from evolving.core.planner import Split, effective_roles, parse_role
from evolving.runtime import keys as records
from evolving.runtime.discovery import read_record
from evolving.runtime.keys import BadRecord, Keys
from evolving.runtime.log import get_logger
from evolving.runtime.store import Store, Versioned, WatchBatch
from evolving_directory.host import Host
from evolving_directory.term import ROLE, read_term

_log = get_logger(__name__)


class ClusterWatch:
    """Follows those keys alone: the planner's decisions beside them are megabytes."""

    def __init__(self, store: Store, keys: Keys, host: Host) -> None:
        self._store = store
        self._keys = keys
        self._host = host
        self._unread = {keys.nodes, keys.split, keys.term(ROLE)}
        self._nodes: set[str] = set()
        self._split = Split()
        self.loaded = asyncio.Event()  # everything there was at the start is known

    async def run(self) -> None:
        """For ever. While etcd is away the last knowledge holds."""
        async with asyncio.TaskGroup() as tasks:
            for prefix in tuple(self._unread):
                tasks.create_task(self._follow(prefix))

    async def _follow(self, prefix: str) -> None:
        async for batch in self._store.watch(prefix):
            self._apply(batch, prefix)
            self._unread.discard(prefix)
            if not self._unread:  # nodes without the split would seem to have lost their roles
                self._host.set_nodes(self._nodes, effective_roles(self._split, self._nodes))
                self.loaded.set()

    def _apply(self, batch: WatchBatch, prefix: str) -> None:
        if batch.snapshot and prefix == self._keys.nodes:
            self._nodes.clear()
        for key in batch.deletes:
            self._nodes.discard(key.removeprefix(self._keys.nodes))
        for found in batch.puts:
            if found.key.startswith(self._keys.nodes):
                self._nodes.add(found.key.removeprefix(self._keys.nodes))
            elif found.key == self._keys.split:
                self._read_split(found)
            elif found.key == self._keys.term(ROLE):
                self._read_term(found)

    def _read_split(self, found: Versioned) -> None:
        split = read_record(records.Split, found)
        if split is not None and split.epoch >= self._split.epoch:
            self._split = Split(split.epoch, {node: parse_role(role) for node, role in split.roles.items()})

    def _read_term(self, found: Versioned) -> None:
        try:
            self._host.meet_term(read_term(found.value))
        except BadRecord as error:
            _log.error("bad_record_ignored", key=found.key, error=str(error))
