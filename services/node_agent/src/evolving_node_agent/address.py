"""An address that may change while somebody uses it."""

from __future__ import annotations

import asyncio


class Address:
    """Where somebody is now. Empty: nobody is there."""

    def __init__(self) -> None:
        self.value = ""
        self.changed = asyncio.Event()

    def set(self, value: str) -> None:
        """A new value; wakes who waits for `changed`."""
        if value != self.value:
            self.value = value
            self.changed.set()
