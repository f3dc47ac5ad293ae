"""The directory at size: 20 million copies over 64 nodes in one process; its memory, and how long a Begin may wait.

The service's own host, node streams and outboxes in one event loop, without gRPC below. While a probe sends Begins all
the time, big things happen: their *stall* is the longest time between two Begins' turns, of the loop's CPU, so that
what else runs on the machine shows less.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import NamedTuple

from bench.directory_pool import NODES, Pool, elapsed_us, middle, stored, tail

from evolving.core.directory_types import Begin, Landed, NodeEvent, Output, Stored
from evolving.core.terms import NAME_BYTES, Phase, Role, Tier
from evolving.internal.v1 import directory_pb2
from evolving.runtime.clock import SystemClock
from evolving.runtime.log import configure
from evolving.runtime.metrics import Metrics
from evolving.v1 import common_pb2
from evolving_directory import collector
from evolving_directory.audit import CountsQueries, audit
from evolving_directory.host import Host
from evolving_directory.journal import NoJournal
from evolving_directory.metrics import DirectoryMetrics
from evolving_directory.node_stream import NodeStream
from evolving_directory.outbox import Outbox
from evolving_directory.slices import in_turns

COPIES = 20_000_000
BRANCHES = 8_000
CONTEXT_BLOCKS = 1_024  # 64k tokens
SHARED_BLOCKS = 128  # that eight branches begin with
OUTPUT_BLOCKS = 8
MESSAGE_BLOCKS = 4_096  # of a snapshot, as node agents send them
PROBES = 400


class Place(NamedTuple):
    """Where a context is: its branch's number (or that of a context nobody counts), and its nodes."""

    number: int
    prefill: int
    decode: int


def context(number: int) -> bytes:
    """Names of a context, made anew each time, so that they weigh nothing in the process."""
    shared = random.Random(f"shared {number // 8}").randbytes(SHARED_BLOCKS * NAME_BYTES)
    return shared + random.Random(number).randbytes((CONTEXT_BLOCKS - SHARED_BLOCKS) * NAME_BYTES)


def place(number: int) -> Place:
    """Half of the nodes prefill, half decode."""
    rng = random.Random(number)
    return Place(number, rng.randrange(NODES // 2), NODES // 2 + rng.randrange(NODES // 2))


def copies_of(at: Place, names: bytes) -> Iterator[tuple[int, Stored]]:
    """What is where of a context, batch by batch: prompt on the prefill node, all on the decode node, the last quarter
    in its device memory too; and of every fourth context, every other stretch of 16 blocks on one more node."""
    prompt = CONTEXT_BLOCKS - OUTPUT_BLOCKS
    for event in stored(Tier.L2, names, 0, prompt):
        yield at.prefill, event
    for event in stored(Tier.L2, names, 0, CONTEXT_BLOCKS):
        yield at.decode, event
    for event in stored(Tier.L1, names, CONTEXT_BLOCKS * 3 // 4, CONTEXT_BLOCKS):
        yield at.decode, event
    if at.number % 4 == 0:
        for first in range(0, CONTEXT_BLOCKS, 32):
            for event in stored(Tier.L2, names, first, first + 16):
                yield (at.prefill + 1) % (NODES // 2), event


class Sized:
    """The directory, loaded."""

    def __init__(self) -> None:
        self.pool = Pool()
        self.places: list[Place] = []

    def load(self) -> None:
        """Branches first, then contexts nobody counts until there are copies enough."""
        number = 0
        while self.copies() < COPIES:
            for _ in range(100):
                at, names = place(number), context(number)
                if number < BRANCHES:
                    self.pool.directory.begin(0.0, Begin("t", f"b{number}", "r0", new_names=self._prompt(names)))
                for node, event in copies_of(at, names):
                    self._tell(node, [event])
                if number < BRANCHES:
                    self._land(at, names)
                self.places.append(at)
                number += 1

    def copies(self) -> int:
        """Copies the directory keeps, a block in two tiers of a node being one or two."""
        return sum(node.l1_blocks + node.l2_blocks for node in self.pool.directory.stats().nodes)

    def _tell(self, node: int, events: list[NodeEvent]) -> None:
        self.pool.sequences[node] += 1
        self.pool.directory.node_events(0.0, self.pool.nodes[node], "1", self.pool.sequences[node], events)

    @staticmethod
    def _prompt(names: bytes) -> bytes:
        return names[: (CONTEXT_BLOCKS - OUTPUT_BLOCKS) * NAME_BYTES]

    def _land(self, at: Place, names: bytes) -> None:
        directory, nodes, blocks = self.pool.directory, self.pool.nodes, CONTEXT_BLOCKS - OUTPUT_BLOCKS
        key = ("t", f"b{at.number}", "r0", 1)
        directory.landed(0.0, Landed(*key, Phase.PREFILL, nodes[at.prefill], blocks))
        directory.landed(0.0, Landed(*key, Phase.DECODE, nodes[at.decode], blocks))
        directory.output(0.0, Output(*key, nodes[at.decode], blocks, names[blocks * NAME_BYTES :]))
        directory.request_done(0.0, *key[:3])

    def snapshot(self, node: int) -> Iterator[directory_pb2.KvBatch]:
        """What a node sends when it is asked for everything it holds."""
        batch, blocks = directory_pb2.KvBatch(snapshot=True), 0
        for at in self.places:
            if node not in (at.prefill, at.decode, (at.prefill + 1) % (NODES // 2)):
                continue
            for holder, event in copies_of(at, context(at.number)):
                if holder == node:
                    run = event.run
                    batch.changes.add(
                        kind=directory_pb2.KvChange.KIND_STORED,
                        tier=common_pb2.Tier.ValueType(event.tier),
                        first_block=run.first_block,
                        names=run.names,
                        skip=run.skip,
                    )
                    blocks += len(run.names) // NAME_BYTES - run.skip
            if blocks >= MESSAGE_BLOCKS:
                yield batch
                batch, blocks = directory_pb2.KvBatch(snapshot=True), 0
        batch.snapshot_end = True
        yield batch


class Probe:
    """Begins, one after the other, with everybody else's turn in between."""

    _names = itertools.count()

    def __init__(self, host: Host) -> None:
        self._host = host
        self._bases = {number: context(number)[-NAME_BYTES:] for number in range(0, BRANCHES, BRANCHES // 50)}
        self.longest_s = self.longest_cpu_s = 0.0

    async def run(self) -> None:
        """Until cancelled."""
        host, rng = self._host, random.Random("stall")
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        for asked in self._names:
            number = rng.choice(list(self._bases))
            branch, grown = f"stall-{asked}", rng.randbytes(16 * NAME_BYTES)
            event = Begin("t", branch, "r", 0, f"b{number}", CONTEXT_BLOCKS, self._bases[number], grown)
            host.carry_out(host.directory.begin(host.now_s(), event)[1])
            host.carry_out(host.directory.end(host.now_s(), "t", [branch]))
            wall_before_s, cpu_before_s = wall_s, cpu_s
            wall_s, cpu_s = time.perf_counter(), time.thread_time()
            self.longest_s = max(self.longest_s, wall_s - wall_before_s)
            self.longest_cpu_s = max(self.longest_cpu_s, cpu_s - cpu_before_s)
            await asyncio.sleep(0)


class Served:
    """The loaded directory in the service's own shell."""

    def __init__(self, sized: Sized) -> None:
        clock = SystemClock()
        self.sized = sized
        self.queries = CountsQueries()
        self.host = Host(sized.pool.directory, clock, DirectoryMetrics(Metrics()), NoJournal())
        self.host.term = 1
        self._clock = clock

    @asynccontextmanager
    async def stream(self, node: int) -> AsyncIterator[NodeStream]:
        """A node's stream is open, and read at the other end."""
        hello = directory_pb2.NodeHello(
            node_id=self.sized.pool.nodes[node], incarnation="1", next_sequence=self.sized.pool.sequences[node] + 1
        )
        outbox = Outbox(1, self._clock, 0.02, 4_000_000)
        self.host.connect(hello, outbox)
        reader = asyncio.create_task(_read(outbox))
        try:
            yield NodeStream(self.host, self.queries, hello, outbox)
        finally:
            self.host.disconnect(hello.node_id, outbox)
            await reader

    async def settle(self) -> None:
        """Until time alone has nothing left to do."""
        while (due_s := self.host.directory.next_wakeup_s()) is not None and due_s <= self.host.now_s():
            await asyncio.sleep(0)

    async def stall_s(self, happens: Callable[[], Awaitable[None]]) -> dict[str, float]:
        """The longest a Begin waits while something happens, and how long that takes."""
        probe = Probe(self.host)
        probing = asyncio.create_task(probe.run())
        for _ in range(100):
            await asyncio.sleep(0)
        quiet_s, probe.longest_s, probe.longest_cpu_s = probe.longest_cpu_s, 0.0, 0.0
        start = time.perf_counter()
        await happens()
        await self.settle()
        took_s = time.perf_counter() - start
        probing.cancel()
        with suppress(asyncio.CancelledError):
            await probing
        return {"stall_s": probe.longest_cpu_s, "wall_s": probe.longest_s, "quiet_s": quiet_s, "took_s": took_s}


async def _read(outbox: Outbox) -> None:
    async for message in outbox.messages():
        message.SerializeToString()
        await asyncio.sleep(0)  # as gRPC's write does


async def _requests(batches: Iterator[directory_pb2.KvBatch]) -> AsyncIterator[directory_pb2.ConnectNodeRequest]:
    for batch in batches:
        yield directory_pb2.ConnectNodeRequest(kv=batch)


async def stalls(sized: Sized) -> dict[str, dict[str, float]]:
    """Each thing that touches all of a node, or everything."""
    served = Served(sized)
    host, pool, found = served.host, sized.pool, {}
    ticking = asyncio.create_task(host.let_time_pass())
    every_node = dict.fromkeys(pool.nodes, Role.DECODE)
    prefill, decode, other = 0, NODES // 2, NODES // 2 + 1

    batches = list(sized.snapshot(prefill))

    async def resync() -> None:
        async with served.stream(prefill) as stream:
            for batch in batches:
                pool.sequences[prefill] += 1
                batch.sequence = pool.sequences[prefill]
            await stream.read(_requests(iter(batches)))

    async def reconnect() -> None:
        async with served.stream(decode) as stream:
            await stream.send_all_counts()

    async def switch() -> None:
        async with served.stream(decode):
            host.set_nodes(pool.nodes, every_node)
            host.set_nodes(pool.nodes, {**every_node, pool.nodes[decode]: Role.PREFILL})
            await served.settle()

    async def clear() -> None:
        async with served.stream(other) as stream:
            pool.sequences[other] += 1
            kind = directory_pb2.KvChange.KIND_CLEARED
            batch = directory_pb2.KvBatch(sequence=pool.sequences[other])
            batch.changes.add(kind=kind, tier=common_pb2.TIER_L2)
            await stream.read(_requests(iter([batch])))

    async def gone() -> None:
        host.carry_out(host.directory.node_gone(host.now_s(), pool.nodes[other + 1]))

    async def block() -> None:
        name = context(sized.places[-1].number)[(CONTEXT_BLOCKS - 3) * NAME_BYTES :][:NAME_BYTES]
        parts = host.directory.block_in_parts(name)
        with closing(parts):
            assert await in_turns(parts) is not None

    async def audited() -> None:
        report, _ = await audit(host, served.queries, 0.0)
        assert report.mismatch_count == 0, report

    for name, happens in (
        ("reconnect, all counts sent", reconnect),
        ("snapshot of one node", resync),
        ("switch from decode to prefill", switch),
        ("a tier cleared", clear),
        ("node gone", gone),
        ("a block searched for", block),
        ("audit", audited),
    ):
        found[name] = await served.stall_s(happens)
    ticking.cancel()
    return found


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def probes(sized: Sized) -> dict[str, float]:
    """Begin and match among all that."""
    rng = random.Random("probe")
    directory = sized.pool.directory
    begins: list[float] = []
    matches: list[float] = []
    for number in range(PROBES):
        branch = rng.randrange(BRANCHES)
        names = context(branch)
        matches.append(elapsed_us(directory.match, 0.0, names))
        grown = rng.randbytes(16 * NAME_BYTES)
        event = Begin("t", f"probe-{number}", "r", 0, f"b{branch}", CONTEXT_BLOCKS, names[-NAME_BYTES:], grown)
        begins.append(elapsed_us(directory.begin, 0.0, event))
        directory.end(0.0, "t", [event.branch_id])
    return {
        "begin_p50_us": middle(begins),
        "begin_p99_us": tail(begins),
        "match_p50_us": middle(matches),
        "match_p99_us": tail(matches),
    }


def at_size() -> dict[str, object]:
    """Load it, ask it, and let big things happen; prints a table."""
    configure("bench", level="warning")
    gc.collect()
    before_bytes = _resident_bytes()
    sized = Sized()
    start = time.perf_counter()
    sized.load()
    loaded_s = time.perf_counter() - start
    gc.collect()
    memory_bytes = _resident_bytes() - before_bytes
    collector.begin(SystemClock())
    stats = sized.pool.directory.stats()
    asked = probes(sized)
    print(
        f"\n{sized.copies():,} copies of {stats.blocks:,} blocks in {stats.runs:,} runs over {NODES} nodes, "
        f"{stats.live_branches:,} branches, loaded in {loaded_s:.0f} s: {memory_bytes / 2**20:,.0f} MiB"
    )
    print(", ".join(f"{name} {value:.1f}" for name, value in asked.items()))
    found = asyncio.run(stalls(sized))
    print(f"{'while':<32}{'a Begin waits, ms':>18}{'by the wall':>13}{'took, s':>9}")
    for name, row in found.items():
        print(f"{name:<32}{row['stall_s'] * 1e3:>18.1f}{row['wall_s'] * 1e3:>13.1f}{row['took_s']:>9.2f}")
    return {
        "copies": sized.copies(),
        "blocks": stats.blocks,
        "runs": stats.runs,
        "branches": stats.live_branches,
        "resident_bytes": memory_bytes,
        **asked,
        "stalls": found,
    }
