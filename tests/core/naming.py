"""Names of blocks nobody had before, and runs as nodes name them."""

from __future__ import annotations

import random

from evolving.core.directory_types import RunRef
from evolving.core.terms import ANCHOR_BLOCKS, NAME_BYTES


def fresh(rng: random.Random, blocks: int) -> bytes:
    """Names nobody had before."""
    return rng.randbytes(blocks * NAME_BYTES)


def ref(names: bytes, first: int, end: int) -> RunRef:
    """Blocks [first, end) of a context, as a node names them."""
    start = 0 if first == 0 else (first - 1) // ANCHOR_BLOCKS * ANCHOR_BLOCKS
    return RunRef(start, names[start * NAME_BYTES : end * NAME_BYTES], first - start)
