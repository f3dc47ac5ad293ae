"""Checksums of host pages, so that bytes altered at a peer or on the way are not taken for KV.

A page gets its checksum when its bytes are complete, from a thread of its own: hashing is one pass over the page, and
the scheduler has better things to do. A page that is given away and filled again is another one, by its generation.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import xxhash

_POLL_S = 0.001


class PageChecksums:
    """xxh3_64 over a page's K half, then its V half."""

    def __init__(self, host_buffer: torch.Tensor, generations: torch.Tensor, enabled: bool) -> None:
        """`host_buffer`: (2, pages, …), contiguous."""
        self.enabled = enabled
        pages = host_buffer.shape[1]
        self._bytes = host_buffer.view(torch.uint8).reshape(2, pages, -1).numpy()
        self._generations = generations.numpy()
        self._sums = np.zeros(pages, dtype=np.uint64)
        self._made_at = np.full(pages, -1, dtype=np.int64)  # the generation each sum is of
        self._noting = threading.Lock()  # a late checksum of former bytes must not replace that of present ones
        self._pages: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        if enabled:
            threading.Thread(target=self._work, name="checksums", daemon=True).start()

    def seal(self, pages: Sequence[int]) -> list[int]:
        """The bytes of these pages are complete: make their checksums soon. Returns the pages' generations."""
        generations: list[int] = self._generations[pages].tolist()
        if self.enabled:
            for page, generation in zip(pages, generations, strict=True):
                if self._made_at[page] != generation:
                    self._pages.put((page, generation))
        return generations

    def put(self, pages: Iterable[int], sums: Iterable[int | None]) -> None:
        """The checksums of pages just filled, where they are known."""
        for page, checksum in zip(pages, sums, strict=True):
            if checksum is not None:
                self._note(page, int(self._generations[page]), checksum)

    async def of(self, page: int, generation: int) -> int | None:
        """The checksum of a sealed page, once it is made; None when none are kept, or the page was given away."""
        if not self.enabled:
            return None
        while self._made_at[page] != generation:
            if self._generations[page] != generation:
                return None
            await asyncio.sleep(_POLL_S)
        return int(self._sums[page])

    def intact(self, pages: Sequence[int], sums: Sequence[int | None]) -> int:
        """How many leading pages have the bytes their checksums say; those without one count as intact."""
        if not self.enabled:
            return len(pages)
        for index, (page, checksum) in enumerate(zip(pages, sums, strict=True)):
            if checksum is not None and self._sum(page) != checksum:
                return index
        return len(pages)

    def _sum(self, page: int) -> int:
        digest = xxhash.xxh3_64()
        digest.update(self._bytes[0, page])
        digest.update(self._bytes[1, page])
        return digest.intdigest()

    def _work(self) -> None:
        while True:
            page, generation = self._pages.get()
            if self._generations[page] != generation or self._made_at[page] == generation:
                continue
            self._note(page, generation, self._sum(page))

    def _note(self, page: int, generation: int, checksum: int) -> None:
        with self._noting:
            if self._generations[page] == generation:
                self._sums[page] = checksum
                self._made_at[page] = generation
