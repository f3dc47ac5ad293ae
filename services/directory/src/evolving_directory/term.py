"""The term of a directory: each start takes the next one, so that nodes can tell a newer directory from an older."""

from __future__ import annotations

from evolving.runtime.clock import Clock
from evolving.runtime.errors import StoreUnavailable
from evolving.runtime.keys import BadRecord, Keys
from evolving.runtime.log import get_logger
from evolving.runtime.store import Conflict, Store

ROLE = "directory"
_RETRY_S = 0.5
_log = get_logger(__name__)


def read_term(value: bytes) -> int:
    """The number a term's key holds. Raises BadRecord."""
    if not value.isdigit() or len(value) > 18:
        raise BadRecord(f"not a term: {value[:40]!r}")
    return int(value)


async def take_term(store: Store, keys: Keys, clock: Clock) -> int:
    """Count the partition's term up and return it. Waits while etcd is away. Raises BadRecord."""
    key = keys.term(ROLE)
    while True:
        try:
            current = await store.get(key)
            term = (read_term(current.value) if current else 0) + 1
            await store.compare_and_swap(key, current.mod_revision if current else 0, str(term).encode())
            return term
        except Conflict:
            continue  # another directory started at the same moment
        except StoreUnavailable as error:
            _log.warning("term_delayed", error=str(error))
            await clock.sleep(_RETRY_S)
