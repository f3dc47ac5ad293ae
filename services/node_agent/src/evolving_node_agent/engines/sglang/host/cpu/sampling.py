"""The hash behind seeded sampling, which upstream has as a CUDA kernel only."""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF


def adapt() -> None:
    """Give SGLang's sampler the hash below."""
    from sglang.srt.layers import sampler

    sampler.murmur_hash32 = murmur_hash32


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 of (seed, position, column), as upstream's kernel computes it.

    seed, positions: (requests,); col_indices: (columns,). Returns int64 values below 2^32, (requests, columns).
    Products of int64 wrap around, which leaves their low 32 bits right.
    """
    seeds = seed.view(torch.int64)[:, None]
    state = torch.zeros_like(seeds)
    for word in (seeds & _MASK, (seeds >> 32) & _MASK, positions.to(torch.int64)[:, None], col_indices[None, :]):
        state = _mix(state, word)
    state = state ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _MASK
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _MASK
    return state ^ (state >> 16)


def _mix(state: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    mixed = _rotate((word * 0xCC9E2D51) & _MASK, 15)
    state = _rotate(state ^ ((mixed * 0x1B873593) & _MASK), 13)
    return (state * 5 + 0xE6546B64) & _MASK


def _rotate(value: torch.Tensor, bits: int) -> torch.Tensor:
    return ((value << bits) | (value >> (32 - bits))) & _MASK
