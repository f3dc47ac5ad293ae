"""The bytes of one tier, page by page."""

from __future__ import annotations


class Pool:
    """A slab of equal pages; page numbers are handed out and taken back."""

    def __init__(self, pages: int, page_bytes: int) -> None:
        self._memory = memoryview(bytearray(pages * page_bytes))
        self._page_bytes = page_bytes
        self._free = list(range(pages - 1, -1, -1))
        self.pages = pages

    @property
    def free(self) -> int:
        """Pages nobody has."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages somebody has."""
        return self.pages - len(self._free)

    def take(self) -> int:
        """A free page; there must be one."""
        return self._free.pop()

    def give_back(self, page: int) -> None:
        """Free a page."""
        self._free.append(page)

    def read(self, page: int) -> bytes:
        """A copy of a page, shape (page_bytes,)."""
        return bytes(self._slice(page))

    def write(self, page: int, data: bytes) -> None:
        """Overwrite a page from its start; `data` may be shorter than the page."""
        start = page * self._page_bytes
        self._memory[start : start + len(data)] = data

    def flip_bit(self, page: int) -> None:
        """Damage a page, as failing memory would."""
        self._slice(page)[0] ^= 1

    def _slice(self, page: int) -> memoryview:
        start = page * self._page_bytes
        return self._memory[start : start + self._page_bytes]
