"""How fast the directory core is: begin, match, landed, output and end at growing contexts, inserts, and memory.

python tests/bench/bench_directory.py [--blocks 4000000] [--json FILE]

Times are microseconds of CPU per call, medians and 99th percentiles over many calls, hashing excluded. Two kinds of
contexts: of *long* runs (copies are alike all along) and of *short* ones (who holds a context changes every 16 blocks).
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable
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


def elapsed_us(function: Callable[..., object], *arguments: object) -> float:
    """Microseconds of CPU that one call takes, so that what else runs on the machine shows less."""
    start = time.thread_time_ns()
    function(*arguments)
    return (time.thread_time_ns() - start) / 1_000


def middle_and_tail(samples: list[float]) -> tuple[float, float]:
    """Median and 99th percentile."""
    ordered = sorted(samples)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]


def load(pool: Pool, rng: random.Random, blocks: int) -> float:
    """Fill the pool with contexts nobody counts, in batches of 16. Returns blocks a second."""
    contexts = [rng.randbytes(2_048 * NAME_BYTES) for _ in range(blocks // 2_048)]
    start = time.thread_time()
    for number, names in enumerate(contexts):
        pool.store(number % NODES, Tier.L2, names, 0, 2_048)
    return len(contexts) * 2_048 / (time.thread_time() - start)


def bytes_per_block(rng: random.Random, short: bool) -> float:
    """Memory of the index for contexts of 2,048 blocks."""
    pool = Pool()
    tracemalloc.start()
    for _ in range(50):
        pool.store_context(rng, rng.randbytes(2_048 * NAME_BYTES), short)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return held / (50 * 2_048)


def begins(pool: Pool, rng: random.Random, tokens: int, short: bool) -> list[Row]:
    """Branches that grow by about 1k tokens a turn, each turn landing and putting out blocks; then their ends."""
    blocks = tokens // BLOCK_TOKENS
    samples = Samples({})
    directory = pool.directory
    for number in range(12):
        branch_id = f"{short}-{tokens}-{number}"
        names = rng.randbytes(blocks * NAME_BYTES)
        pool.store_context(rng, names, short)
        samples.add("begin first seen", directory.begin, pool.now_s, Begin("t", branch_id, "r0", new_names=names))
        for turn in range(1, 9):
            names += one_turn(pool, rng, samples, Turn(branch_id, turn, names))
        samples.add("end", directory.end, pool.now_s, "t", [branch_id])
    kind = "short" if short else "long"
    return [Row(what, tokens, kind, *middle_and_tail(times)) for what, times in samples.by_what.items()]


class Samples(NamedTuple):
    """Microseconds of calls, by what was called."""

    by_what: dict[str, list[float]]

    def add(self, what: str, function: Callable[..., object], *arguments: object) -> None:
        """Measure one call."""
        self.by_what.setdefault(what, []).append(elapsed_us(function, *arguments))


class Turn(NamedTuple):
    """A turn of a branch, and its context before."""

    branch_id: str
    number: int
    names: bytes


def one_turn(pool: Pool, rng: random.Random, samples: Samples, turn: Turn) -> bytes:
    """A request that adds blocks, which land on a node, and puts out two; returns the names of all of them. The next
    turn goes on from there."""
    directory, now_s = pool.directory, pool.now_s
    depth, grown = len(turn.names) // NAME_BYTES, rng.randbytes(STEP_BLOCKS * NAME_BYTES)
    end, request_id = depth + STEP_BLOCKS, f"r{turn.number}"
    begin = Begin("t", turn.branch_id, request_id, 0, "", depth, turn.names[-NAME_BYTES:], grown)
    samples.add("begin +1k", directory.begin, now_s, begin)
    node = rng.randrange(NODES) if turn.number == 4 else 0  # once, the branch moves to another prefill node
    pool.store(node, Tier.L2, turn.names + grown, depth, end)
    landed = Landed("t", turn.branch_id, request_id, 1, Phase.PREFILL, f"node-{node}", end)
    samples.add("landed", directory.landed, now_s, landed)
    made = rng.randbytes(2 * NAME_BYTES)
    pool.store(1, Tier.L2, turn.names + grown + made, end, end + 2)
    samples.add("output", directory.output, now_s, Output("t", turn.branch_id, request_id, 1, "node-1", end, made))
    directory.request_done(now_s, "t", turn.branch_id, request_id)
    return grown + made


def matches(pool: Pool, rng: random.Random, tokens: int, short: bool) -> Row:
    """A context without a branch, fully held."""
    blocks = tokens // BLOCK_TOKENS
    contexts = [rng.randbytes(blocks * NAME_BYTES) for _ in range(20)]
    for names in contexts:
        pool.store_context(rng, names, short)
    samples = [elapsed_us(pool.directory.match, pool.now_s, names) for names in contexts * 20]
    return Row("match", tokens, "short" if short else "long", *middle_and_tail(samples))


def hashing(rng: random.Random) -> dict[str, float]:
    """The chain alone: a whole 128k context and 1k tokens, microseconds."""
    root = root_digest("model", "", "")
    whole, step = rng.randbytes(131_072 * 4), rng.randbytes(1_024 * 4)
    return {
        "chain_128k_us": statistics.median(elapsed_us(chain, root, whole, BLOCK_TOKENS) for _ in range(20)),
        "chain_1k_us": statistics.median(elapsed_us(chain, root, step, BLOCK_TOKENS) for _ in range(200)),
    }


def main() -> None:
    """Run all of it and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=4_000_000, help="blocks in the pool beforehand")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    rng = random.Random(7)
    pool = Pool()
    insert_rate = load(pool, rng, arguments.blocks)
    gc.collect()
    gc.freeze()  # runs form no cycles; a service freezes them too
    print(f"{arguments.blocks:,} blocks loaded in batches of 16: {insert_rate / 1e6:.2f} M/s")
    memory = {kind: bytes_per_block(rng, kind == "short") for kind in ("long", "short")}
    print(f"bytes a block: {memory['long']:.0f} in long runs, {memory['short']:.0f} in short ones")
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
        figures = {"insert_blocks_per_s": insert_rate, "bytes_per_block": memory, **chain_us}
        arguments.json.write_text(json.dumps({**figures, "rows": [row._asdict() for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
