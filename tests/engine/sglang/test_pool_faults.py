"""Reads from peers that die, hang, restart, evict, or have lost their bytes, over networks that cut and corrupt.

Whatever happens, every request is served with the tokens, and every block held with the bytes, of a run that computed
them; and afterwards nothing is left taken. Prompts are whole blocks and a chunk is one block, so that a block has the
same bytes whether the ones before it were computed or fetched.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tcp_proxy import At, TcpProxy, Way, proxied

from evolving.core.config import FetchConfig
from evolving_node_agent.engines.port import Tier
from evolving_node_agent.engines.sglang.host.peers import Locate, Located, PeerLost, Peers

from .conftest import over_each_transport, running
from .driving import BLOCK, Node, names, prefill_only, prompt, serve
from .factory import SECRET
from .lending import Lender
from .test_faults import free_port

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(600)]
# Proxies can stand in its way. And where it does not matter who carries the bytes, one transport is enough.
over_tcp = pytest.mark.parametrize("transport", ["tcp"], indirect=True)
BLOCKS = 8
PROMPTS = 6
OUTPUT = 6
# Slow enough that six prompts take seconds, so that what happens to the peer happens in the middle of reads.
SLOW = FetchConfig(readers=3, chunk_blocks=2, bytes_per_s=4 << 20, suspect_s=1.0)
TINY: dict[str, Any] = {"l1_tokens": 20 * BLOCK, "l2_tokens": 40 * BLOCK}


@dataclass
class Truth:
    """What a run that computed everything gave."""

    digests: dict[bytes, bytes] = field(default_factory=dict)  # block name -> SHA-256 of its KV
    outputs: dict[int, list[int]] = field(default_factory=dict)  # prompt's seed -> output

    async def learn(self, node: Node, seeds: Sequence[int]) -> None:
        """Have a node compute these prompts, which it has not seen."""
        for seed in seeds:
            tokens = prompt(seed, BLOCKS * BLOCK)
            served = await serve(node, node, tokens, OUTPUT)
            assert served.cached.total == 0
            self.outputs[seed] = served.ids
            self.digests |= await node.engine.block_digests(names(tokens), Tier.L1)

    async def check(self, node: Node) -> None:
        """Every block the node holds is right."""
        for tier in Tier:
            held = await node.engine.block_digests(list(self.digests), tier)
            assert {name: self.digests[name] for name in held} == held


@dataclass
class Pool:
    """A node that reads, and a peer behind proxies that holds six prompts in its L2."""

    reader: Node
    peer: Node
    truth: Truth
    seeds: list[int]
    service: TcpProxy  # in front of the peer's service
    data: TcpProxy  # in front of its transport; nothing passes there with Mooncake

    async def request(self, seed: int) -> int:
        """One request to the reader; the prompt tokens that came from the peer. Its output must be right."""
        holders = (self.peer.holder(0, BLOCKS),)
        tokens = prompt(seed, BLOCKS * BLOCK)
        served = await serve(self.reader, self.reader, tokens, OUTPUT, holders=holders, fetch_deadline_s=60.0)
        assert served.ids == self.truth.outputs[seed]
        return served.cached.peer

    async def requests(self) -> int:
        """All of the peer's prompts at once; the tokens that came from the peer."""
        return sum(await asyncio.gather(*map(self.request, self.seeds)))

    async def forget(self) -> None:
        """The reader drops everything it holds."""
        await self.reader.until_idle()
        await self.reader.engine.clear()
        await self.reader.until(lambda: not any(self.reader.held.values()))

    async def until_reading(self) -> None:
        """Wait until something has come from the peer, of much that is to come."""
        before = self.reader.engine.status().fetched_tokens
        async for status in self.reader.engine.status_changes():
            if status.fetched_tokens > before:
                return

    async def until_used_again(self) -> None:
        """The peer is avoided for a while after a failed read, and then no more."""
        while True:
            await self.forget()
            if await self.request(self.seeds[0]) > 0:
                return

    async def check(self) -> None:
        """No wrong block, nothing left taken."""
        await at_rest(self.reader)
        await self.truth.check(self.reader)


async def at_rest(node: Node) -> None:
    """Wait until no leg and no read is left, and memory holds what was announced and not a token more."""
    async for status in node.engine.status_changes():
        legs = status.queued or status.prefilling or status.holding or status.decoding or status.reserved
        used = (status.l1_used_tokens, status.l2_used_tokens)
        if not (legs or status.fetching_blocks) and used == tuple(BLOCK * len(node.held[tier]) for tier in Tier):
            return


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engines(transport: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pool]:
    """Started once a transport."""
    port = free_port()
    shared: dict[str, Any] = {"transport": transport, "chunk_tokens": BLOCK}
    behind = {"bind_host": "127.0.0.1", "advertise_host": "127.0.0.2", "port": port}
    directory = tmp_path_factory.mktemp("pool")
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(proxied(("127.0.0.1", port), ("127.0.0.2", port)))
        data = await stack.enter_async_context(proxied(("127.0.0.1", port + 1), ("127.0.0.2", port + 1)))
        both = {"peer": shared | behind, "reader": shared | {"fetch": SLOW}}
        peer, reader = await stack.enter_async_context(running(directory, both))
        pool = Pool(reader, peer, Truth(), list(range(50_000, 50_000 + PROMPTS)), service, data)
        await pool.truth.learn(peer, pool.seeds)
        yield pool


@pytest_asyncio.fixture(loop_scope="session")
async def pool(engines: Pool) -> AsyncIterator[Pool]:
    """The reader holds nothing, the network is good; afterwards everything is at rest and right."""
    await engines.forget()
    yield engines
    for proxy in (engines.service, engines.data):
        proxy.heal()
    await engines.check()


@over_each_transport
async def test_without_faults_all_of_it_is_fetched(pool: Pool) -> None:
    assert await pool.requests() == PROMPTS * (BLOCKS - 1) * BLOCK
    await pool.check()
    held = await pool.reader.engine.block_digests(list(pool.truth.digests), Tier.L2)
    assert len(held) == PROMPTS * BLOCKS


@over_tcp
async def test_pages_altered_at_the_peer_are_computed(pool: Pool) -> None:
    """One byte of one page, in its K half or its V half: that block and those after it are not taken.

    The page's checksum tells, whoever read it; test_fetch has one altered under Mooncake.
    """
    peers = Peers(pool.peer.info.kv_format, SECRET)
    there = await peers.at(pool.peer.info.pool_address)
    assert there.welcome is not None
    layout = there.welcome.layout
    altered = {pool.seeds[0]: 0, pool.seeds[1]: 3, pool.seeds[2]: 6}
    addresses = []
    for seed, block in altered.items():
        places = (await there.ask(Locate(b"".join(names(prompt(seed, BLOCKS * BLOCK)))), Located)).places
        assert len(places) == BLOCKS
        start = layout.l2_blocks[block % 2] + places[block][0] * layout.l2_page_bytes
        addresses.append(start + (block * 1001) % layout.l2_page_bytes)
    await peers.close()
    flip_bytes(pool.peer.info.pid, addresses)
    try:
        fetched = dict(zip(pool.seeds, await asyncio.gather(*map(pool.request, pool.seeds)), strict=True))
        await pool.check()
    finally:
        flip_bytes(pool.peer.info.pid, addresses)
    for seed in pool.seeds:
        assert fetched[seed] == BLOCK * altered.get(seed, BLOCKS - 1)


def flip_bytes(pid: int, addresses: Sequence[int]) -> None:
    """Alter a byte at each of these addresses of a process."""
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        for address in addresses:
            memory.seek(address)
            (byte,) = memory.read(1)
            memory.seek(address)
            memory.write(bytes([byte ^ 1]))


async def test_a_peer_that_evicts_while_it_is_read(pool: Pool, lender: Lender) -> None:
    """Its L2 has room for five prompts, and it computes one after another while the reader asks for the last six: the
    oldest of them leaves while it is read, or has left.

    The page's generation tells, whoever read it. Mooncake's reads are those that know nothing of the peer's doings;
    test_transport_faults changes memory under those of TCP.
    """
    came, missed, done = 0, 0, False
    computed: list[int] = []
    async with lender.lend("tiny", **TINY, chunk_tokens=BLOCK) as (tiny,):

        async def churn() -> None:
            for seed in range(60_000, 70_000):
                await pool.truth.learn(tiny, [seed])
                computed.append(seed)
                if done:
                    return

        async def ask(seed: int) -> None:
            nonlocal came, missed
            tokens, holders = prompt(seed, BLOCKS * BLOCK), (tiny.holder(0, BLOCKS),)
            prefilled = await prefill_only(pool.reader, tokens, holders=holders)
            assert prefilled.first_token == pool.truth.outputs[seed][0]
            came += prefilled.cached.peer // BLOCK
            missed += BLOCKS - 1 - prefilled.cached.peer // BLOCK

        churning = asyncio.create_task(churn())
        rounds, asked = 0, 0
        while rounds < 5 or not (came and missed):
            while len(computed) < asked + 3 and not churning.done():
                await asyncio.sleep(0.01)
            asked = len(computed)
            await asyncio.gather(*map(ask, computed[-6:]))
            rounds += 1
        done = True
        await churning
        await pool.check()
        await at_rest(tiny)
        await pool.truth.check(tiny)


@over_each_transport
async def test_a_peer_that_hangs_in_the_middle_of_reads(pool: Pool) -> None:
    asking = asyncio.create_task(pool.requests())
    await pool.until_reading()
    os.killpg(pool.peer.info.pid, signal.SIGSTOP)
    try:
        fetched = await asking
    finally:
        os.killpg(pool.peer.info.pid, signal.SIGCONT)
    assert 0 < fetched < PROMPTS * (BLOCKS - 1) * BLOCK
    await pool.check()
    await pool.until_used_again()


@over_tcp
async def test_a_network_that_delays(pool: Pool) -> None:
    pool.service.delay_s = pool.data.delay_s = 0.005
    assert await pool.requests() > 0


@over_tcp
@pytest.mark.parametrize(
    ("where", "what", "at"),
    [
        ("data", "flip", At(Way.ANSWER, 50_000)),
        ("data", "flip", At(Way.REQUEST, 10)),
        ("data", "cut", At(Way.ANSWER, 100_000)),
        ("service", "flip", At(Way.ANSWER, 80)),
        ("service", "cut", At(Way.ANSWER, 80)),
    ],
)
async def test_a_network_that_cuts_and_corrupts(pool: Pool, where: str, what: str, at: At) -> None:
    """In the connections there are, and in new ones, until the network is good again."""
    proxy: TcpProxy = getattr(pool, where)
    proxy.harm(**{what: at})
    assert await pool.requests() < PROMPTS * (BLOCKS - 1) * BLOCK
    assert proxy.met
    await pool.check()
    proxy.heal()
    await pool.until_used_again()


@over_tcp
async def test_a_network_that_holds_bytes_back(pool: Pool) -> None:
    """They come when the reads are long over, and must land nowhere."""
    asking = asyncio.create_task(pool.requests())
    await pool.until_reading()
    pool.data.open.clear()
    await asking
    await pool.check()
    pool.data.open.set()
    await pool.until_used_again()


@over_tcp
async def test_who_has_no_token_learns_nothing(pool: Pool) -> None:
    """The service of peers does not depend on the transport. And the token is on no command line and in no
    environment."""
    stranger = Peers(pool.peer.info.kv_format, b"")
    with pytest.raises(PeerLost, match="token"):
        await stranger.at(pool.peer.info.pool_address)
    await stranger.close()
    for file in ("cmdline", "environ"):
        assert SECRET not in Path(f"/proc/{pool.peer.info.pid}/{file}").read_bytes()


@over_each_transport
async def test_a_peer_killed_in_the_middle_of_reads_and_restarted_on_its_port(pool: Pool) -> None:
    """What it held before is neither read nor taken for what it holds now."""
    former = pool.peer.info
    asking = asyncio.create_task(pool.requests())
    await pool.until_reading()
    exited = asyncio.create_task(pool.peer.engine.exited())
    os.killpg(former.pid, signal.SIGKILL)
    fetched = await asking
    assert 0 < fetched < PROMPTS * (BLOCKS - 1) * BLOCK
    assert await exited == -signal.SIGKILL
    await pool.check()

    started = await pool.peer.engine.start()
    assert started.pool_address == former.pool_address
    assert started.incarnation != former.incarnation
    await pool.forget()
    assert await pool.requests() == 0, "that life is over"
    await pool.forget()
    pool.peer.info = started
    pool.peer.held = {Tier.L1: set(), Tier.L2: set()}
    pool.peer.parents.clear()
    listening = asyncio.create_task(pool.peer.listen())
    await pool.truth.learn(pool.peer, pool.seeds)
    await pool.until_used_again()
    await pool.forget()
    assert await pool.requests() == PROMPTS * (BLOCKS - 1) * BLOCK
    await pool.check()
    listening.cancel()
