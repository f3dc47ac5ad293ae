"""How bytes of KV come from a peer's memory: the port that transports implement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from .pages import Range


class Transport(Protocol):
    """One-sided reads: the peer's scheduler and service take no part in them."""

    session: str  # what peers name this node by, in this life of its process

    def register(self, address: int, size: int) -> None:
        """Make memory readable by peers. It must stay mapped for as long as the process lives."""
        ...

    def read(self, session: str, ranges: Sequence[Range], over: Callable[[bool], None]) -> None:
        """Start reading from a peer. From one thread.

        `over(ok)` comes once, from another thread, when no byte can arrive any more. When it is not ok, the bytes are
        worth nothing.
        """
        ...
