"""Who is where, by etcd: the address of a service, the address of a leader, and records read with care."""

from __future__ import annotations

from collections.abc import Callable

from evolving.runtime.keys import BadRecord, Keys, Record, ServiceKind, ServiceRegistration, decode
from evolving.runtime.log import get_logger
from evolving.runtime.store import Store, Versioned

_log = get_logger(__name__)


async def follow_service(store: Store, keys: Keys, kind: ServiceKind, tell: Callable[[str], object]) -> None:
    """Call `tell` with the address of a kind of service, "" while none is registered, for ever.

    Of several instances, the one registered last: a service that runs alone may meet the remains of its predecessor.
    """
    found: dict[str, tuple[int, str]] = {}
    async for batch in store.watch(keys.services(kind)):
        if batch.snapshot:
            found.clear()
        for key in batch.deletes:
            found.pop(key, None)
        for item in batch.puts:
            if (registration := read_record(ServiceRegistration, item)) is not None:
                found[item.key] = (item.mod_revision, registration.address)
        tell(max(found.values())[1] if found else "")


async def follow_leader(store: Store, keys: Keys, role: str, tell: Callable[[str], object]) -> None:
    """Call `tell` with the address of whoever leads in a role, "" while nobody does, for ever."""
    key = keys.leader(role)
    async for batch in store.watch(key):
        leaders = [item.value.decode(errors="replace") for item in batch.puts if item.key == key]
        if leaders or batch.snapshot or key in batch.deletes:
            tell(leaders[-1] if leaders else "")


def read_record(kind: type[Record], item: Versioned) -> Record | None:
    """The record under a key; None, and a line in the log, where there is something else."""
    try:
        return decode(kind, item.value)
    except BadRecord as error:
        _log.error("bad_record_ignored", key=item.key, error=str(error))
        return None
