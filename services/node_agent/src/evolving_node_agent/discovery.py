"""Where the directory and the leading planner are, by etcd."""

from __future__ import annotations

import asyncio

from evolving.runtime.keys import BadRecord, Keys, ServiceRegistration, decode
from evolving.runtime.log import get_logger
from evolving.runtime.store import Store

_log = get_logger(__name__)


class Address:
    """An address that may change. Empty: nobody is there."""

    def __init__(self) -> None:
        self.value = ""
        self.changed = asyncio.Event()

    def set(self, value: str) -> None:
        """A new value; wakes who waits for `changed`."""
        if value != self.value:
            self.value = value
            self.changed.set()


async def follow_directory(store: Store, keys: Keys, address: Address) -> None:
    """Keep `address` at the registered directory, for ever. Of several, the one registered last."""
    found: dict[str, tuple[int, str]] = {}
    async for batch in store.watch(keys.services("directory")):
        if batch.snapshot:
            found.clear()
        for key in batch.deletes:
            found.pop(key, None)
        for item in batch.puts:
            try:
                found[item.key] = (item.mod_revision, decode(ServiceRegistration, item.value).address)
            except BadRecord as error:
                _log.warning("bad_registration", key=item.key, error=str(error))
        address.set(max(found.values())[1] if found else "")


async def follow_planner(store: Store, keys: Keys, address: Address) -> None:
    """Keep `address` at the leading planner, for ever."""
    key = keys.leader("planner")
    async for batch in store.watch(key):
        leaders = [item.value.decode(errors="replace") for item in batch.puts if item.key == key]
        if leaders or batch.snapshot or key in batch.deletes:
            address.set(leaders[-1] if leaders else "")
