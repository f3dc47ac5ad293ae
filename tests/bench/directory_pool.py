"""What the directory's benchmarks share: a directory with nodes to feed, contexts, and how calls are timed."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator

from evolving.core.directory import Directory
from evolving.core.directory_types import RunRef, Stored
from evolving.core.terms import ANCHOR_BLOCKS, NAME_BYTES, Tier

NODES = 64
BLOCK_TOKENS = 64
BATCH_BLOCKS = 16  # what nodes tell at a time
STEP_BLOCKS = 16  # a turn: about 1k tokens; also where the holders of a context in short runs change
LOADED_CONTEXT_BLOCKS = 2_048


class Pool:
    """A directory with nodes, and sequence numbers to feed it."""

    def __init__(self, nodes: int = NODES) -> None:
        self.directory = Directory()
        self.nodes = [f"node-{node}" for node in range(nodes)]
        self.sequences = [0] * nodes
        for node_id in self.nodes:
            self.directory.node_up(0.0, node_id, "1")

    def store(self, node: int, tier: Tier, names: bytes, first: int, end: int) -> None:
        """Blocks [first, end) of a context arrive on a node, in batches."""
        for event in stored(tier, names, first, end):
            self.sequences[node] += 1
            self.directory.node_events(0.0, self.nodes[node], "1", self.sequences[node], [event])


def stored(tier: Tier, names: bytes, first: int, end: int) -> Iterator[Stored]:
    """What a node tells when blocks [first, end) of a context arrive: an event a batch."""
    for at in range(first, end, BATCH_BLOCKS):
        start = max(0, at - 1) // ANCHOR_BLOCKS * ANCHOR_BLOCKS
        run = names[start * NAME_BYTES : min(at + BATCH_BLOCKS, end) * NAME_BYTES]
        yield Stored(tier, RunRef(start, run, at - start))


def loaded_contexts(rng: random.Random, blocks: int) -> Iterator[bytes]:
    """Contexts that fill a pool with so many blocks."""
    for _ in range(math.ceil(blocks / LOADED_CONTEXT_BLOCKS)):
        yield rng.randbytes(LOADED_CONTEXT_BLOCKS * NAME_BYTES)


def elapsed_us(
    function: Callable[..., object], *arguments: object, clock: Callable[[], int] = time.thread_time_ns
) -> float:
    """Microseconds one call takes: of CPU, so that what else runs on the machine shows less, or by another clock."""
    start = clock()
    function(*arguments)
    return (clock() - start) / 1_000


def middle(samples: list[float]) -> float:
    """Median."""
    return statistics.median(samples)


def undisturbed(samples: list[float]) -> float:
    """The 10th percentile: as the median, where nothing else runs on the machine."""
    return sorted(samples)[len(samples) // 10]


def tail(samples: list[float]) -> float:
    """99th percentile."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
