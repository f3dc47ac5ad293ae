"""The TCP transport on a bad network: a read is whole and good, or it has failed; and nothing lands once it is over."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from engine.sglang.transporting import LIMITS, SECRET, UNTOUCHED, Memory, Outcome, port_of, read, through, transport
from hypothesis import given, settings
from hypothesis import strategies as st
from listening import listening
from tcp_proxy import At, Way, proxied
from waiting import eventually

SIZE = 20_000  # five frames
ANSWER_BYTES = SIZE + 300  # with what else the server says, a little more than that
REQUEST_BYTES = 130

places = st.one_of(
    st.builds(At, st.just(Way.ANSWER), st.integers(0, ANSWER_BYTES)),
    st.builds(At, st.just(Way.REQUEST), st.integers(0, REQUEST_BYTES)),
)


async def through_a_fault(flip: At | None, cut: At | None) -> None:
    """One read over a connection with that fault, then one without."""
    with transport(limits=replace(LIMITS, stall_s=0.5, handshake_s=2.0)) as reader, transport() as peer:
        theirs, ours, aside = Memory(SIZE, seed=1), Memory(SIZE), Memory(SIZE)
        peer.register(theirs.address, theirs.size)
        async with proxied(("127.0.0.1", port_of(peer.session))) as proxy:
            proxy.harm(flip, cut)
            session = through(peer.session, proxy.address)
            outcome = Outcome(reader, session, [(ours.address, theirs.address, SIZE)])
            if await outcome.ok():
                assert ours.bytes() == theirs.bytes()
            ours.fill(bytes([UNTOUCHED]) * SIZE)
            proxy.heal()
            again = Outcome(reader, session, [(aside.address, theirs.address, SIZE)])
            if not await again.ok():  # the connection of before, whose fault was found only now
                assert await read(reader, session, [(aside.address, theirs.address, SIZE)])
            assert aside.bytes() == theirs.bytes()
            assert len(outcome.told) == len(again.told) == 1
            assert ours.bytes() == bytes([UNTOUCHED]) * SIZE, "a byte landed after the read was over"


@settings(max_examples=60)
@given(places)
def test_a_flipped_byte_never_passes_as_good(flip: At) -> None:
    asyncio.run(through_a_fault(flip, None))


@settings(max_examples=60)
@given(places)
def test_a_cut_connection_is_a_failed_read(cut: At) -> None:
    asyncio.run(through_a_fault(None, cut))


REQUEST = range(80, 108)  # of the client's bytes; before it, it logs in


@pytest.mark.parametrize(
    ("way", "byte"), [(Way.REQUEST, at) for at in REQUEST] + [(Way.ANSWER, at) for at in (300, SIZE // 2, SIZE)]
)
async def test_where_it_matters_a_flipped_byte_fails_the_read(way: Way, byte: int) -> None:
    """So that the search above cannot pass by luck. What is asked for is a part of what may be read, so that a damaged
    address is a good one too."""
    with transport(limits=replace(LIMITS, stall_s=0.5)) as reader, transport() as peer:
        theirs, ours = Memory(1 << 20, seed=1), Memory(SIZE)
        peer.register(theirs.address, theirs.size)
        async with proxied(("127.0.0.1", port_of(peer.session))) as proxy:
            proxy.harm(flip=At(way, byte))
            session = through(peer.session, proxy.address)
            assert not await read(reader, session, [(ours.address, theirs.address + (1 << 19), SIZE)])


async def test_delays_only_delay() -> None:
    with transport() as reader, transport() as peer:
        theirs, ours = Memory(SIZE, seed=1), Memory(SIZE)
        peer.register(theirs.address, theirs.size)
        async with proxied(("127.0.0.1", port_of(peer.session))) as proxy:
            proxy.delay_s = 0.02
            assert await read(reader, through(peer.session, proxy.address), [(ours.address, theirs.address, SIZE)])
            assert ours.bytes() == theirs.bytes()


async def test_a_stalled_read_ends_and_what_comes_later_lands_nowhere() -> None:
    size = 4 << 20
    with transport(limits=replace(LIMITS, stall_s=1.0)) as reader, transport() as peer, transport() as other:
        theirs, ours = Memory(size, seed=1), Memory(size)
        for each in (peer, other):
            each.register(theirs.address, theirs.size)
        async with proxied(("127.0.0.1", port_of(peer.session))) as proxy:
            proxy.delay_s = 0.001
            session = through(peer.session, proxy.address)
            outcomes = [Outcome(reader, session, [(ours.address, theirs.address, size)]) for _ in range(3)]
            await eventually(lambda: proxy.forwarded[Way.ANSWER] > 100_000)
            proxy.open.clear()
            assert not any([await outcome.ok() for outcome in outcomes])
            ours.fill(bytes([UNTOUCHED]) * size)
            proxy.open.set()
            aside = Memory(100)
            assert await read(reader, other.session, [(aside.address, theirs.address, 100)])
            assert ours.bytes() == bytes([UNTOUCHED]) * size
            assert [outcome.told for outcome in outcomes] == [[False]] * 3


async def test_a_peer_that_accepts_and_says_nothing_fails_the_read() -> None:
    async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with listening(silence) as (host, port):
        with transport(limits=replace(LIMITS, handshake_s=0.2)) as reader:
            assert not await read(reader, f"{host}:{port}#{'00' * 16}", [(Memory(1).address, 1, 1)])


async def test_memory_that_changes_while_it_is_sent_is_no_damage() -> None:
    """The generation of a page tells that it changed; a checksum that failed would make a good peer a suspect."""
    with transport() as reader, transport() as peer:
        theirs, ours = Memory(1 << 20, seed=1), Memory(1 << 20)
        peer.register(theirs.address, theirs.size)
        outcomes = [Outcome(reader, peer.session, [(ours.address, theirs.address, 1 << 20)]) for _ in range(10)]
        flips = 0
        while not all(outcome.told for outcome in outcomes):
            theirs.fill(bytes([flips % 256]) * (1 << 20))
            flips += 1
            await asyncio.sleep(0)
        assert [outcome.told for outcome in outcomes] == [[True]] * 10


@pytest.mark.parametrize("secret", [SECRET, b""])
async def test_idle_connections_end_and_come_back(secret: bytes) -> None:
    limits = replace(LIMITS, idle_s=0.1)
    with transport(secret, limits) as reader, transport(secret) as peer:
        theirs, ours = Memory(100, seed=1), Memory(100)
        peer.register(theirs.address, theirs.size)
        for _ in range(2):
            assert await read(reader, peer.session, [(ours.address, theirs.address, 100)])
            await eventually(lambda: not peer.connections)
