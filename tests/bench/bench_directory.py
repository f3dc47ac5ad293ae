"""How fast the directory core is: begin, match, landed, output and end at growing contexts, inserts, and memory.

python tests/bench/bench_directory.py [--blocks 4000000] [--json FILE]

Times are microseconds per call, medians and 99th percentiles over many calls, hashing excluded. Two pools: one of *long*
runs (a context's copies are alike all along) and one of *short* runs (what holds a context changes every 16 blocks).
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from evolving.core.blocks import chain, root_digest
from evolving.core.directory import Directory
from evolving.core.directory_types import Begin, Landed, Output, RunRef, Stored
from evolving.core.terms import NAME_BYTES, Phase, Tier

NODES = 16
BLOCK_TOKENS = 64
STEP_BLOCKS = 16  # about 1k tokens
CONTEXT_TOKENS = (1_024, 16_384, 65_536, 131_072)
BATCH_BLOCKS = 16


class Row(NamedTuple):
    """One figure: what, at which context, over which pool; microseconds."""

    what: str
    context_tokens: int
    pool: str
    p50_us: float
    p99_us: float


class Pool:
    """A directory with nodes, and a clock and sequence numbers to feed it."""

    def __init__(self) -> None:
        self.directory = Directory()
        self.now_s = 0.0
        self.sequences = [0] * NODES
        for node in range(NODES):
            self.directory.node_up(0.0, f"node-{node}", "1")

    def store(self, node: int, tier: Tier, names: bytes, first: int, end: int) -> None:
        """Blocks [first, end) of a context arrive on a node, in batches."""
        for at in range(first, end, BATCH_BLOCKS):
            self.sequences[node] += 1
            start = max(0, at - 1) // 16 * 16
            run = RunRef(start, names[start * NAME_BYTES : min(at + BATCH_BLOCKS, end) * NAME_BYTES], at - start)
            self.directory.node_events(self.now_s, f"node-{node}", "1", self.sequences[node], [Stored(tier, run)])

    def store_context(self, rng: random.Random, names: bytes, short: bool) -> None:
        """Copies of a whole context: on two nodes, or on ones that change every 16 blocks."""
        blocks = len(names) // NAME_BYTES
        nodes = rng.sample(range(NODES), 2)
        self.store(nodes[0], Tier.L2, names, 0, blocks)
        for at in range(0, blocks, STEP_BLOCKS):
            if not short or at // STEP_BLOCKS % 2:
                self.store(nodes[1], Tier.L1, names, at, min(blocks, at + STEP_BLOCKS))


def timed(calls: Iterable[Callable[[], object]]) -> tuple[float, float]:
    """Median and 99th percentile of calls, microseconds."""
    samples = []
    for call in calls:
        start = time.perf_counter_ns()
        call()
        samples.append((time.perf_counter_ns() - start) / 1_000)
    samples.sort()
    return statistics.median(samples), samples[min(len(samples) - 1, len(samples) * 99 // 100)]


def load(pool: Pool, rng: random.Random, blocks: int) -> tuple[float, float]:
    """Fill the pool with contexts nobody counts, in runs of 16. Returns blocks a second and bytes a block."""
    contexts = [rng.randbytes(2_048 * NAME_BYTES) for _ in range(blocks // 2_048)]
    start = time.perf_counter()
    for number, names in enumerate(contexts):
        pool.store(number % NODES, Tier.L2, names, 0, 2_048)
    rate = len(contexts) * 2_048 / (time.perf_counter() - start)
    small = Pool()
    tracemalloc.start()
    for number in range(50):
        small.store(number % NODES, Tier.L2, rng.randbytes(2_048 * NAME_BYTES), 0, 2_048)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return rate, held / (50 * 2_048)


def begins(pool: Pool, rng: random.Random, tokens: int, short: bool) -> list[Row]:
    """Branches that grow by about 1k tokens a turn, each turn landing and putting out blocks; then their ends."""
    kind = "short" if short else "long"
    blocks = tokens // BLOCK_TOKENS
    samples: dict[str, list[float]] = {"begin +1k": [], "begin first seen": [], "landed": [], "output": [], "end": []}

    def measure(what: str, call: Callable[[], object]) -> None:
        start = time.perf_counter_ns()
        call()
        samples[what].append((time.perf_counter_ns() - start) / 1_000)

    directory = pool.directory
    for branch in range(12):
        branch_id = f"{kind}-{tokens}-{branch}"
        names = rng.randbytes(blocks * NAME_BYTES)
        pool.store_context(rng, names, short)
        first = Begin("t", branch_id, "r0", new_names=names)
        measure("begin first seen", lambda first=first: directory.begin(pool.now_s, first))
        for turn in range(1, 9):
            depth = len(names) // NAME_BYTES
            grown = rng.randbytes(STEP_BLOCKS * NAME_BYTES)
            request_id = f"r{turn}"
            event = Begin("t", branch_id, request_id, base_blocks=depth, base_name=names[-NAME_BYTES:], new_names=grown)
            measure("begin +1k", lambda event=event: directory.begin(pool.now_s, event))
            names += grown
            node = rng.randrange(NODES) if turn == 4 else 0
            pool.store(node, Tier.L2, names, depth, depth + STEP_BLOCKS)
            landed = Landed("t", branch_id, request_id, 1, Phase.PREFILL, f"node-{node}", depth + STEP_BLOCKS)
            measure("landed", lambda landed=landed: directory.landed(pool.now_s, landed))
            made = Output("t", branch_id, request_id, 1, "node-1", depth + STEP_BLOCKS, rng.randbytes(2 * NAME_BYTES))
            measure("output", lambda made=made: directory.output(pool.now_s, made))
            directory.request_done(pool.now_s, "t", branch_id, request_id)
        measure("end", lambda branch_id=branch_id: directory.end(pool.now_s, "t", [branch_id]))
    rows = []
    for what, times in samples.items():
        times.sort()
        rows.append(
            Row(what, tokens, kind, statistics.median(times), times[min(len(times) - 1, len(times) * 99 // 100)])
        )
    return rows


def matches(pool: Pool, rng: random.Random, tokens: int, short: bool) -> Row:
    """A context without a branch, fully held."""
    blocks = tokens // BLOCK_TOKENS
    contexts = []
    for _ in range(20):
        names = rng.randbytes(blocks * NAME_BYTES)
        pool.store_context(rng, names, short)
        contexts.append(names)
    p50, p99 = timed(lambda n=n: pool.directory.match(pool.now_s, n) for n in contexts * 20)
    return Row("match", tokens, "short" if short else "long", p50, p99)


def hashing(rng: random.Random) -> dict[str, float]:
    """The chain alone: a whole 128k context and 1k tokens, microseconds."""
    root = root_digest("model", "", "")
    whole, step = rng.randbytes(131_072 * 4), rng.randbytes(1_024 * 4)
    return {
        "chain_128k_us": timed(lambda: chain(root, whole, BLOCK_TOKENS) for _ in range(20))[0],
        "chain_1k_us": timed(lambda: chain(root, step, BLOCK_TOKENS) for _ in range(200))[0],
    }


def main() -> None:
    """Run all of it and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=4_000_000, help="blocks in the pool beforehand")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    rng = random.Random(7)
    pool = Pool()
    insert_rate, block_bytes = load(pool, rng, arguments.blocks)
    gc.collect()
    gc.freeze()  # runs form no cycles; a service freezes them too
    print(f"{arguments.blocks:,} blocks loaded in batches of 16: {insert_rate / 1e6:.2f} M/s, {block_bytes:.0f} B each")
    rows = []
    for short in (False, True):
        for tokens in CONTEXT_TOKENS:
            rows += begins(pool, rng, tokens, short)
            rows.append(matches(pool, rng, tokens, short))
    print(f"{'what':<18}{'tokens':>9}  {'runs':<6}{'p50 us':>9}{'p99 us':>9}")
    for row in sorted(rows):
        print(f"{row.what:<18}{row.context_tokens:>9}  {row.pool:<6}{row.p50_us:>9.1f}{row.p99_us:>9.1f}")
    chain_us = hashing(rng)
    print(f"SHA-256 chain: 128k tokens {chain_us['chain_128k_us']:.0f} us, 1k {chain_us['chain_1k_us']:.1f} us")
    if arguments.json:
        figures = {"insert_blocks_per_s": insert_rate, "bytes_per_block": block_bytes, **chain_us}
        arguments.json.write_text(json.dumps({**figures, "rows": [row._asdict() for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
