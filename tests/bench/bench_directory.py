"""How fast the directory's core is, beside NVIDIA Dynamo's radix tree in the same run, and how much memory it takes.

python tests/bench/bench_directory.py [--blocks 4000000] [--size] [--json FILE]

Hashing excluded. Two kinds of contexts: of *long* runs (copies are alike all along) and of *short* ones (who holds a
context changes every 16 blocks). A match answers how deep each node's copies reach, of a context no branch has a cursor
in, from the bytes that come over the wire: ours per tier, theirs for one tier, with holes in one node's copies. Both by
the wall, for theirs has a thread of its own, and of many calls the 10th percentile, for another thread is what a busy
machine delays most; `ratio` is our time over theirs, so smaller is better. All else is CPU time. With --size also 20
million copies over 64 nodes.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.directory_pool import (
    BATCH_BLOCKS,
    BLOCK_TOKENS,
    LOADED_CONTEXT_BLOCKS,
    NODES,
    STEP_BLOCKS,
    Pool,
    elapsed_us,
    loaded_contexts,
    middle,
    stored,
    tail,
    undisturbed,
)
from bench.directory_size import at_size
from bench.dynamo_tree import DynamoTree, wire_hashes

from evolving.core.directory_types import Begin, Landed, NodeEvent, Output, Removed, RunRef
from evolving.core.terms import NAME_BYTES, Phase, Tier
from evolving.internal.v1 import directory_pb2
from evolving.v1 import common_pb2
from evolving.wire.directory import node_events_from_proto

CONTEXT_TOKENS = (1_024, 16_384, 65_536, 131_072)
MATCH_BLOCKS = (512, 2_048, 8_192)
CONTEXTS = 20  # per size of a match
BRANCHES = 40  # per size of a begin
TURNS = 8
DYNAMO_INSERTS = 64  # contexts told to their tree batch by batch; the rest in one go
CHURN_BRANCHES = 600
CHURN_STEPS = 20_000
SEED = 7


class Bar(NamedTuple):
    """A figure and what it must be."""

    name: str
    value: float
    bar: float
    at_least: bool = False  # else at most

    @property
    def met(self) -> bool:
        """Whether it is."""
        return self.value >= self.bar if self.at_least else self.value <= self.bar


class Both(NamedTuple):
    """Our directory and their tree, fed alike."""

    pool: Pool
    tree: DynamoTree

    def hold(self, rng: random.Random, names: bytes, short: bool) -> None:
        """Copies of a context on two nodes; in short runs, every other stretch of the second node's is missing."""
        blocks, wire = len(names) // NAME_BYTES, wire_hashes(names)
        whole, other = rng.sample(range(NODES), 2)
        self.pool.store(whole, Tier.L2, names, 0, blocks)
        for worker in (whole, other):
            for event in self.tree.stored(wire, LOADED_CONTEXT_BLOCKS):
                self.tree.apply(worker, event)
        for at in _stretches(blocks, short):
            self.pool.store(other, Tier.L1, names, at, at + STEP_BLOCKS)
        if short:
            holes = set(range(0, blocks, STEP_BLOCKS)).difference(_stretches(blocks, short))
            self.tree.apply(other, self.tree.removed(wire, sorted(holes), STEP_BLOCKS))


def _stretches(blocks: int, short: bool) -> range:
    """Where what the second node holds of a context begins, 16 blocks each: every stretch, or every other one."""
    return range(0, blocks, 2 * STEP_BLOCKS if short else STEP_BLOCKS)


# -------------------------------------------------------------------------------------------------------------- inserts


def insert(both: Both, rng: random.Random, blocks: int) -> dict[str, float]:
    """Fill both with contexts nobody counts, told in batches of 16. Blocks a second, by CPU time for ours (theirs has a
    thread of its own, so by the wall); from events as the core takes them, and from the wire's bytes."""
    contexts = list(loaded_contexts(rng, blocks))
    spent = {"ours": 0.0, "wire": 0.0, "theirs": 0.0}
    for number, names in enumerate(contexts):
        node = number % NODES
        events = list(stored(Tier.L2, names, 0, LOADED_CONTEXT_BLOCKS))
        start = time.thread_time()
        if number % 2:
            _take(both.pool, node, [[event] for event in events])
            spent["ours"] += time.thread_time() - start
        else:
            batches = [_batch(event.run).SerializeToString() for event in events]
            start = time.thread_time()
            parsed = (node_events_from_proto(directory_pb2.KvBatch.FromString(batch).changes) for batch in batches)
            _take(both.pool, node, parsed)
            spent["wire"] += time.thread_time() - start
        sample = number < DYNAMO_INSERTS
        theirs = list(both.tree.stored(wire_hashes(names), BATCH_BLOCKS if sample else LOADED_CONTEXT_BLOCKS))
        start = time.perf_counter()
        for event in theirs:
            both.tree.apply(node, event)
        spent["theirs"] += time.perf_counter() - start if sample else 0.0
    half = len(contexts) * LOADED_CONTEXT_BLOCKS / 2
    return {
        "inserts_per_s": half / spent["ours"],
        "inserts_from_wire_per_s": half / spent["wire"],
        "inserts_per_s_dynamo": min(DYNAMO_INSERTS, len(contexts)) * LOADED_CONTEXT_BLOCKS / spent["theirs"],
    }


def _take(pool: Pool, node: int, batches: Iterable[list[NodeEvent]]) -> None:
    node_id, sequence = pool.nodes[node], pool.sequences[node]
    for events in batches:
        sequence += 1
        pool.directory.node_events(0.0, node_id, "1", sequence, events)
    pool.sequences[node] = sequence


def _batch(run: RunRef) -> directory_pb2.KvBatch:
    kind = directory_pb2.KvChange.KIND_STORED
    change = directory_pb2.KvChange(
        kind=kind, tier=common_pb2.TIER_L2, first_block=run.first_block, names=run.names, skip=run.skip
    )
    return directory_pb2.KvBatch(changes=[change])


def bytes_per_block(rng: random.Random) -> dict[str, float]:
    """Memory of the index for contexts of 2,048 blocks on two nodes."""
    found = {}
    for short in (False, True):
        pool = Pool()
        tracemalloc.start()
        for _ in range(50):
            _hold_ours(pool, rng, rng.randbytes(LOADED_CONTEXT_BLOCKS * NAME_BYTES), short)
        found["short" if short else "long"] = tracemalloc.get_traced_memory()[0] / (50 * LOADED_CONTEXT_BLOCKS)
        tracemalloc.stop()
    return found


def _hold_ours(pool: Pool, rng: random.Random, names: bytes, short: bool) -> None:
    blocks = len(names) // NAME_BYTES
    whole, other = rng.sample(range(NODES), 2)
    pool.store(whole, Tier.L2, names, 0, blocks)
    for at in _stretches(blocks, short):
        pool.store(other, Tier.L1, names, at, min(blocks, at + STEP_BLOCKS))


# -------------------------------------------------------------------------------------------------------------- matches


def matches(both: Both, rng: random.Random) -> list[dict[str, float | str]]:
    """A context without a branch: ours against theirs."""
    rows: list[dict[str, float | str]] = []
    for short in (False, True):
        for blocks in MATCH_BLOCKS:
            contexts = [rng.randbytes(blocks * NAME_BYTES) for _ in range(CONTEXTS)]
            for names in contexts:
                both.hold(rng, names, short)
            wires = [wire_hashes(names) for names in contexts]
            ours: list[float] = []
            theirs: list[float] = []
            for _ in range(CONTEXTS):
                for names, wire in zip(contexts, wires, strict=True):
                    ours.append(elapsed_us(both.pool.directory.match, 0.0, names, clock=time.perf_counter_ns))
                    theirs.append(elapsed_us(both.tree.match, wire, clock=time.perf_counter_ns))
            whole = both.pool.directory.match(0.0, contexts[0]).nodes.values()
            assert max(both.tree.match(wires[0]).values()) == max(node.either_blocks for node in whole) == blocks
            rows.append(
                {
                    "runs": "short" if short else "long",
                    "blocks": blocks,
                    "ours_us": undisturbed(ours),
                    "dynamo_us": undisturbed(theirs),
                    "ours_p50_us": middle(ours),
                    "dynamo_p50_us": middle(theirs),
                    "ratio": undisturbed(ours) / undisturbed(theirs),
                }
            )
    return rows


# ------------------------------------------------------------------------------------------------------------- branches


class Samples:
    """Microseconds of calls, by what was called."""

    def __init__(self) -> None:
        self.by_what: dict[str, list[float]] = {}

    def add(self, what: str, function: Callable[..., object], *arguments: object) -> None:
        """Measure one call."""
        self.by_what.setdefault(what, []).append(elapsed_us(function, *arguments))


class BranchOfPool:
    """A branch that grows by about 1k tokens a turn, each turn landing and putting out two blocks."""

    def __init__(self, pool: Pool, rng: random.Random, samples: Samples, branch_id: str, names: bytes) -> None:
        self.pool, self.rng, self.samples, self.branch_id, self.names = pool, rng, samples, branch_id, names
        self.turns = 0
        self.homes = rng.sample(range(NODES), 2)  # where it is prefilled, and decoded
        first = Begin("t", branch_id, "r0", new_names=names)
        samples.add("begin first seen", pool.directory.begin, 0.0, first)
        self.land("r0", len(names) // NAME_BYTES)

    def land(self, request_id: str, blocks: int) -> None:
        """A request's KV is on both its nodes."""
        for phase, node in zip(Phase, self.homes, strict=True):
            event = Landed("t", self.branch_id, request_id, 1, phase, self.pool.nodes[node], blocks)
            self.samples.add("landed", self.pool.directory.landed, 0.0, event)

    def turn(self) -> None:
        """The next request; once in four turns it is prefilled on another node than the last."""
        directory, depth = self.pool.directory, len(self.names) // NAME_BYTES
        self.turns += 1
        grown = self.rng.randbytes(STEP_BLOCKS * NAME_BYTES)
        request_id, end = f"r{self.turns}", depth + STEP_BLOCKS
        event = Begin("t", self.branch_id, request_id, 0, "", depth, self.names[-NAME_BYTES:], grown)
        self.samples.add("begin +1k", directory.begin, 0.0, event)
        if self.turns % 4 == 0:
            self.homes[0] = self.rng.randrange(NODES)
        self.names += grown
        for node in self.homes:
            self.pool.store(node, Tier.L2, self.names, depth, end)
        self.land(request_id, end)
        made = self.rng.randbytes(2 * NAME_BYTES)
        self.names += made
        self.pool.store(self.homes[1], Tier.L2, self.names, end, end + 2)
        output = Output("t", self.branch_id, request_id, 1, self.pool.nodes[self.homes[1]], end, made)
        self.samples.add("output", directory.output, 0.0, output)
        directory.request_done(0.0, "t", self.branch_id, request_id)

    def end(self) -> None:
        """It ends."""
        self.samples.add("end", self.pool.directory.end, 0.0, "t", [self.branch_id])


def branches(pool: Pool, rng: random.Random) -> list[dict[str, float | str]]:
    """Branches at growing contexts."""
    rows: list[dict[str, float | str]] = []
    for short in (False, True):
        kind = "short" if short else "long"
        for tokens in CONTEXT_TOKENS:
            samples = Samples()
            for number in range(BRANCHES):
                names = rng.randbytes(tokens // BLOCK_TOKENS * NAME_BYTES)
                _hold_ours(pool, rng, names, short)
                branch = BranchOfPool(pool, rng, samples, f"{kind}-{tokens}-{number}", names)
                for _ in range(TURNS):
                    branch.turn()
                branch.end()
            rows += [
                {"what": what, "tokens": tokens, "runs": kind, "p50_us": middle(times), "p99_us": tail(times)}
                for what, times in samples.by_what.items()
            ]
    return rows


def churn(pool: Pool, rng: random.Random) -> dict[str, float]:
    """Branches of all lengths that grow, fork and end in random order while nodes evict."""
    samples = Samples()
    alive: list[BranchOfPool] = []
    made = 0
    for _ in range(CHURN_STEPS):
        roll = rng.random()
        if len(alive) < CHURN_BRANCHES or roll < 0.03:
            made += 1
            base = rng.choice(alive).names if alive and rng.random() < 0.5 else b""
            base = base[: rng.randrange(len(base) // NAME_BYTES + 1) * NAME_BYTES]
            names = base + rng.randbytes(rng.choice([64, 256, 1_024]) * NAME_BYTES)
            _hold_ours(pool, rng, names, rng.random() < 0.3)
            alive.append(BranchOfPool(pool, rng, samples, f"churn-{made}", names))
        elif roll < 0.06:
            alive.pop(rng.randrange(len(alive))).end()
        elif roll < 0.2:
            _evict(pool, rng, rng.choice(alive))
        else:
            branch = rng.choice(alive)
            if len(branch.names) < 2_048 * NAME_BYTES:
                branch.turn()
    for branch in alive:
        branch.end()
    times = samples.by_what["begin +1k"]
    ends = samples.by_what["end"]
    return {
        "begin_p50_us": middle(times),
        "begin_p99_us": tail(times),
        "begin_max_us": max(times),
        "end_p50_us": middle(ends),
        "end_p99_us": tail(ends),
    }


def _evict(pool: Pool, rng: random.Random, branch: BranchOfPool) -> None:
    """A node drops a stretch of a branch's context from device memory."""
    blocks = len(branch.names) // NAME_BYTES
    start = rng.randrange(blocks) // 16 * 16
    run = RunRef(start, branch.names[start * NAME_BYTES : min(blocks, start + 32) * NAME_BYTES], 0 if start == 0 else 1)
    if len(run.names) > NAME_BYTES:
        node = rng.choice(branch.homes)
        _take(pool, node, [[Removed(rng.choice(list(Tier)), run)]])


# --------------------------------------------------------------------------------------------------------------- report


def bars(figures: dict[str, Any]) -> list[Bar]:
    """What has to hold."""
    match = {(row["runs"], row["blocks"]): row["ratio"] for row in figures["match"]}
    calls = {(row["what"], row["tokens"], row["runs"]): row["p50_us"] for row in figures["calls"]}
    return [
        Bar("match, long runs, 512 blocks: ours / Dynamo's", match["long", 512], 1 / 4),
        Bar("match, long runs, 8,192 blocks: ours / Dynamo's", match["long", 8_192], 1 / 8),
        *(Bar(f"match, runs of 16, {at:,} blocks: ours / Dynamo's", match["short", at], 1 / 2) for at in MATCH_BLOCKS),
        *(
            Bar(f"begin +1k at 16k, {kind} runs, p50 us", calls["begin +1k", 16_384, kind], 20)
            for kind in ("long", "short")
        ),
        *(
            Bar(f"begin +1k at 128k, {kind} runs, p50 us", calls["begin +1k", 131_072, kind], 60)
            for kind in ("long", "short")
        ),
        Bar("begin +1k under churn, p99 us", figures["churn"]["begin_p99_us"], 300),
        Bar("end at 128k, long runs, p50 us", calls["end", 131_072, "long"], 100),
        Bar("end at 128k, about 145 runs, p50 us (bar: 128)", calls["end", 131_072, "short"], 100),
        Bar("inserts in runs of 16, M blocks/s", figures["inserts_per_s"] / 1e6, 2, at_least=True),
        Bar("bytes a block", max(figures["bytes_per_block"].values()), 96),
    ]


def show(figures: dict[str, Any]) -> list[Bar]:
    """Print it all; returns the bars."""
    print(f"{'match':<10}{'blocks':>8}{'ours us':>10}{'Dynamo us':>11}{'faster':>8}")
    for row in figures["match"]:
        faster = 1 / row["ratio"]
        ours, theirs = row["ours_us"], row["dynamo_us"]
        print(f"{row['runs']:<10}{row['blocks']:>8}{ours:>10.1f}{theirs:>11.1f}{faster:>7.1f}x")
    print(f"\n{'call':<18}{'tokens':>9}  {'runs':<6}{'p50 us':>9}{'p99 us':>9}")
    for row in sorted(figures["calls"], key=lambda row: (row["what"], row["tokens"], row["runs"])):
        print(f"{row['what']:<18}{row['tokens']:>9}  {row['runs']:<6}{row['p50_us']:>9.1f}{row['p99_us']:>9.1f}")
    for name in ("inserts_per_s", "inserts_from_wire_per_s", "inserts_per_s_dynamo"):
        print(f"{name}: {figures[name] / 1e6:.2f} M")
    print("churn: " + ", ".join(f"{name} {value:.1f}" for name, value in figures["churn"].items()))
    checked = bars(figures)
    print(f"\n{'bar':<52}{'value':>9}  {'bar':>9}  met")
    for bar in checked:
        sign = ">=" if bar.at_least else "<="
        print(f"{bar.name:<52}{bar.value:>9.3f}  {sign}{bar.bar:>7.3f}  {'yes' if bar.met else 'NO'}")
    return checked


def main() -> None:
    """Run all of it and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=4_000_000, help="blocks in both trees beforehand")
    parser.add_argument("--size", action="store_true", help="also 20 M copies over 64 nodes: memory and stalls")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    rng = random.Random(SEED)
    both = Both(Pool(), DynamoTree())
    figures: dict[str, Any] = {"blocks_loaded": arguments.blocks, **insert(both, rng, arguments.blocks)}
    gc.collect()
    gc.freeze()  # runs form no cycles; a service freezes them too
    figures["match"] = matches(both, rng)
    figures["calls"] = branches(both.pool, rng)
    figures["churn"] = churn(both.pool, rng)
    figures["bytes_per_block"] = bytes_per_block(rng)
    for row in figures["match"]:
        suffix = "" if row["runs"] == "long" else "_runs_of_16"
        figures[f"match_ratio_{row['blocks']}{suffix}"] = row["ratio"]
    seconds = {(row["what"], row["runs"], row["tokens"]): row["p50_us"] / 1e6 for row in figures["calls"]}
    for what, name in (("begin +1k", "begin_append_p50_s"), ("end", "end_branch_s")):
        figures[name] = {kind: {at: seconds[what, kind, at] for at in CONTEXT_TOKENS} for kind in ("long", "short")}
    figures["begin_churn_p99_s"] = figures["churn"]["begin_p99_us"] / 1e6
    figures["bars"] = [{**bar._asdict(), "met": bar.met} for bar in show(figures)]
    del both
    if arguments.size:
        # In a process of its own: memory freed here would be taken for memory not needed.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            figures["size"] = fresh.submit(at_size).result()
    if arguments.json:
        figures["note"] = "match_ratio_N: our time over Dynamo's for a context of N blocks; smaller is better"
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
