"""Where KV lies in memory: addresses a transport can read, generations of host pages, digests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch

Range = tuple[int, int, int]  # (own address, peer's address, bytes)


class Layout(msgspec.Struct, frozen=True):
    """One node's KV memory, as its peers need to know it. Addresses are valid in its own process."""

    l1_layers: tuple[int, ...]  # K of every layer, then V of every layer; a page is page_bytes further each
    l1_page_bytes: int
    l2_blocks: tuple[int, int]  # the K block and the V block of the host pool
    l2_page_bytes: int  # of one page in one block, all layers
    generations: int  # int64 per host page


class KvPages:
    """This node's KV memory. Scheduler's thread, except for `layout` and the generations."""

    def __init__(self, device_pool: Any, host_pool: Any, block_tokens: int) -> None:
        self._device_layers: list[torch.Tensor] = [*device_pool.k_buffer, *device_pool.v_buffer]
        self._host_pool = host_pool
        self._block_tokens = block_tokens
        if host_pool.layout != "page_first_direct":
            raise ValueError(f"host pages of layout {host_pool.layout} cannot be read by peers")
        # A page's word changes before its slots are given away, so a reader that finds the word it was told knows
        # that the bytes it read before are those of the block it asked for.
        self.generations = torch.zeros(host_pool.page_num, dtype=torch.int64)
        self._bump_on_release(host_pool)
        first = self._device_layers[0]
        blocks = host_pool.kv_buffer  # (2, pages, layers, block_tokens, heads, dim)
        self.layout = Layout(
            l1_layers=tuple(layer.data_ptr() for layer in self._device_layers),
            l1_page_bytes=first[:block_tokens].numel() * first.element_size(),
            l2_blocks=(blocks[0].data_ptr(), blocks[1].data_ptr()),
            l2_page_bytes=blocks[0, 0].numel() * blocks.element_size(),
            generations=self.generations.data_ptr(),
        )

    def regions(self) -> Iterator[tuple[int, int]]:
        """(address, bytes) of all memory that peers read or that reads land in."""
        for tensor in (*self._device_layers, self._host_pool.kv_buffer, self.generations):
            yield tensor.data_ptr(), tensor.numel() * tensor.element_size()

    @property
    def host_buffer(self) -> torch.Tensor:
        """All host pages: (2, pages, layers, block_tokens, heads, dim)."""
        buffer: torch.Tensor = self._host_pool.kv_buffer
        return buffer

    def l1_digest(self, slots: torch.Tensor) -> bytes:
        """SHA-256 of a block in device memory, by its token slots."""
        layers = len(self._device_layers) // 2
        halves = (self._device_layers[half * layers + layer] for layer in range(layers) for half in (0, 1))
        return _digest(tensor[slots] for tensor in halves)

    def l2_digest(self, page: int) -> bytes:
        """SHA-256 of a block in host memory."""
        blocks = self._host_pool.kv_buffer
        return _digest(blocks[half, page, layer] for layer in range(blocks.shape[2]) for half in (0, 1))

    def allocate_host(self, pages: int, evict: Callable[[int], Any]) -> torch.Tensor | None:
        """Slots of host pages, evicting plain cache when the pool is full; None when even that is not enough."""
        tokens = pages * self._block_tokens
        slots = self._host_pool.alloc(tokens)
        if slots is None:
            evict(tokens)
            slots = self._host_pool.alloc(tokens)
        return None if slots is None else torch.as_tensor(slots)

    def free_host(self, slots: torch.Tensor) -> None:
        """Give host slots back."""
        self._host_pool.free(slots)

    def used_host_tokens(self) -> int:
        """Host slots in use."""
        return int(self._host_pool.size - self._host_pool.available_size())

    def _bump_on_release(self, host_pool: Any) -> None:
        free, clear = host_pool.free, host_pool.clear

        def free_pages(slots: torch.Tensor) -> int:
            self.generations[slots[:: self._block_tokens] // self._block_tokens] += 1
            return int(free(slots))

        def clear_pages() -> None:
            self.generations += 1
            clear()

        host_pool.free, host_pool.clear = free_pages, clear_pages


def l1_ranges(own: Layout, peer: Layout, pages: list[tuple[int, int]]) -> list[Range]:
    """What to read for device pages (own, peer's); one range a layer and stretch of neighbours."""
    size = own.l1_page_bytes
    stretches = _neighbours(pages)
    return [
        (mine + first * size, theirs + peer_first * size, count * size)
        for mine, theirs in zip(own.l1_layers, peer.l1_layers, strict=True)
        for first, peer_first, count in stretches
    ]


def l2_ranges(own: Layout, peer: Layout, pages: list[tuple[int, int]]) -> list[Range]:
    """What to read for host pages (own, peer's)."""
    size = own.l2_page_bytes
    return [
        (mine + first * size, theirs + peer_first * size, count * size)
        for mine, theirs in zip(own.l2_blocks, peer.l2_blocks, strict=True)
        for first, peer_first, count in _neighbours(pages)
    ]


def _neighbours(pages: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(first, first, count) of stretches that are consecutive on both sides."""
    stretches: list[tuple[int, int, int]] = []
    for own, peer in pages:
        if stretches:
            first, peer_first, count = stretches[-1]
            if own == first + count and peer == peer_first + count:
                stretches[-1] = (first, peer_first, count + 1)
                continue
        stretches.append((own, peer, 1))
    return stretches


def _digest(parts: Iterator[torch.Tensor]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.digest()
