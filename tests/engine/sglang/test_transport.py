"""The TCP transport: exact bytes, of registered memory only, for those who know the secret only."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from dataclasses import replace

import pytest
from engine.sglang.transporting import (
    LIMITS,
    SECRET,
    UNTOUCHED,
    Memory,
    Outcome,
    port_of,
    read,
    through,
    transport,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from listening import listening
from waiting import eventually

from evolving_node_agent.engines.sglang import SglangConfig, SglangEngine
from evolving_node_agent.engines.sglang.host import tcp_wire as wire
from evolving_node_agent.engines.sglang.host.tcp_transport import TcpTransport

SIZE = 64 << 10
Pair = tuple[TcpTransport, TcpTransport, Memory]  # reader, peer, the peer's registered memory


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A reader, and a peer with memory to read."""
    with transport() as reader, transport() as peer:
        theirs = Memory(SIZE, seed=1)
        peer.register(theirs.address, theirs.size)
        yield reader, peer, theirs


@settings(max_examples=60)
@given(
    pieces=st.lists(st.tuples(st.integers(0, SIZE - 1), st.integers(0, 20_000), st.integers(0, 300)), max_size=30),
    frame_bytes=st.sampled_from([1, 7, 4096, 1 << 20]),
)
def test_every_range_lands_in_its_place_and_nothing_beside(
    pieces: list[tuple[int, int, int]], frame_bytes: int
) -> None:
    """Ranges of any size (none, too), in any order of the peer's addresses, with gaps between their places here."""
    if frame_bytes < 100:
        pieces = [(start, size % 500, gap) for start, size, gap in pieces]
    with transport() as reader, transport(limits=replace(LIMITS, frame_bytes=frame_bytes)) as peer:
        theirs = Memory(SIZE, seed=1)
        peer.register(theirs.address, theirs.size)
        source, wanted, ranges = theirs.bytes(), bytearray(), []
        for start, size, gap in pieces:
            wanted += bytes([UNTOUCHED]) * gap
            taken = source[start : start + size]
            ranges.append((len(wanted), theirs.address + start, len(taken)))
            wanted += taken
        ours = Memory(max(1, len(wanted)))
        absolute = [(ours.address + place, there, size) for place, there, size in ranges]
        assert asyncio.run(read(reader, peer.session, absolute))
        assert ours.bytes()[: len(wanted)] == bytes(wanted)


async def test_more_ranges_than_a_request_takes(pair: Pair) -> None:
    reader, peer, theirs = pair
    count = 2 * wire.RANGES_MAX + 5
    ours = Memory(count)
    ranges = [(ours.address + n, theirs.address + (7 * n) % SIZE, 1) for n in range(count)]
    assert await read(reader, peer.session, ranges)
    assert ours.bytes() == bytes(theirs.bytes()[(7 * n) % SIZE] for n in range(count))


async def test_many_reads_at_once_each_end_once(pair: Pair) -> None:
    reader, peer, theirs = pair
    with transport() as other:
        more = Memory(SIZE, seed=2)
        other.register(more.address, more.size)
        sources = [(peer, theirs), (other, more)] * 20
        places = [Memory(SIZE) for _ in sources]
        outcomes = [
            Outcome(reader, source.session, [(place.address, memory.address, SIZE)])
            for (source, memory), place in zip(sources, places, strict=True)
        ]
        assert all([await outcome.ok() for outcome in outcomes])
        assert [place.bytes() for place in places] == [memory.bytes() for _, memory in sources]
        assert [outcome.told for outcome in outcomes] == [[True]] * len(outcomes)
        assert len(peer.connections) == len(other.connections) == 1, "one connection a peer"


@pytest.mark.parametrize("offset", [-1, 1, SIZE, -SIZE, 1 << 40])
async def test_only_registered_memory_is_read(pair: Pair, offset: int, caplog: pytest.LogCaptureFixture) -> None:
    """One byte outside of it is enough; the reader is told why, and goes on with good reads afterwards."""
    reader, peer, theirs = pair
    ours = Memory(2 * SIZE)
    good = (ours.address, theirs.address, SIZE)
    assert not await read(reader, peer.session, [good, (ours.address + SIZE, theirs.address + offset, SIZE)])
    assert ours.bytes() == bytes([UNTOUCHED]) * (2 * SIZE), "nothing of a refused request is sent"
    assert any("not readable" in message and "it says" in message for message in caplog.messages)
    assert await read(reader, peer.session, [good])


async def test_a_range_may_not_span_two_regions(pair: Pair) -> None:
    reader, _, theirs = pair
    half = SIZE // 2
    with transport() as cautious:
        cautious.register(theirs.address, half)
        cautious.register(theirs.address + half, half)
        ours = Memory(SIZE)
        assert await read(reader, cautious.session, [(ours.address, theirs.address + half, half)])
        assert not await read(reader, cautious.session, [(ours.address, theirs.address + half - 1, 2)])


@pytest.mark.parametrize("other", [b"", b"another token"])
@pytest.mark.parametrize("theirs_is_set", [True, False])
async def test_both_must_know_the_secret(other: bytes, theirs_is_set: bool) -> None:
    secrets = (SECRET, other) if theirs_is_set else (other, SECRET)
    memory, ours = Memory(100, seed=1), Memory(100)
    with transport(secrets[0]) as peer, transport(secrets[1]) as reader:
        peer.register(memory.address, memory.size)
        assert not await read(reader, peer.session, [(ours.address, memory.address, 100)])
        assert ours.bytes() == bytes([UNTOUCHED]) * 100


async def test_without_a_token_loopback_only() -> None:
    for host in ("0.0.0.0", "::"):
        with pytest.raises(ValueError, match="--token-file"):
            TcpTransport(host, "127.0.0.1", 0, b"")
        with pytest.raises(ValueError, match="--token-file"):
            SglangEngine(SglangConfig("/model", transport="tcp", bind_host=host))
    with transport(b"") as reader, transport(b"") as peer, transport(SECRET, host="0.0.0.0") as reachable:
        memory, ours = Memory(100, seed=1), Memory(100)
        peer.register(memory.address, memory.size)
        assert await read(reader, peer.session, [(ours.address, memory.address, 100)])
        assert reachable.session


async def test_a_server_that_does_not_know_the_secret_gives_no_byte() -> None:
    """It lets everybody in and answers everything, with a right checksum even."""

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(wire.frame(wire.HELLO, wire.GREETING.pack(wire.MAGIC, bytes(32))))
        await reader.readexactly(wire.LOGIN.size)
        writer.write(wire.frame(wire.ACCEPTED, bytes(32)) + wire.frame(wire.DATA, bytes(100)))
        await reader.read()

    async with listening(pretend) as (host, port):
        with transport() as reader:
            ours = Memory(100)
            assert not await read(reader, f"{host}:{port}#{'00' * 16}", [(ours.address, 4096, 100)])
            assert ours.bytes() == bytes([UNTOUCHED]) * 100


async def test_nothing_is_served_before_the_proof(pair: Pair) -> None:
    """Neither to one who asks at once, nor to one who repeats what another said."""
    _, peer, theirs = pair
    body = wire.RANGE.pack(theirs.address, 100)
    request = wire.REQUEST.pack(1, wire.checksum(body)) + body
    recorded: list[bytes] = []

    async def spy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(wire.frame(wire.HELLO, wire.GREETING.pack(wire.MAGIC, bytes(32))))
        recorded.append(await reader.readexactly(wire.LOGIN.size))

    async with listening(spy) as address:
        with transport() as victim:
            assert not await read(victim, through(peer.session, address), [(Memory(1).address, theirs.address, 1)])
    for login in (b"", bytes(wire.LOGIN.size), recorded[0]):
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(peer.session))
        writer.write(login + request * 20)
        said = await reader.read()
        writer.close()
        assert frames(said) == [wire.HELLO, wire.REFUSED]
        assert theirs.bytes()[:100] not in said


def frames(said: bytes) -> list[int]:
    """Kinds of the frames in what a server said."""
    kinds = []
    while said:
        kind, size, _ = wire.FRAME.unpack_from(said)
        kinds.append(kind)
        said = said[wire.FRAME.size + size :]
    return kinds


async def test_a_peer_restarted_on_its_port_is_another_one(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    reader, _, theirs = pair
    ours = Memory(100)
    wanted = [(ours.address, theirs.address, 100)]
    with transport() as first:
        first.register(theirs.address, theirs.size)
        old = first.session
        assert await read(reader, old, wanted)
    assert not await read(reader, old, wanted), "nobody listens"
    with transport(port=port_of(old)) as second:
        second.register(theirs.address, theirs.size)
        ours.fill(bytes(100))
        assert not await read(reader, old, wanted)
        assert ours.bytes() == bytes(100)
        assert any("another life" in message for message in caplog.messages)
        assert await read(reader, second.session, wanted)


@pytest.mark.parametrize("session", ["", "127.0.0.1:1", "127.0.0.1:x#" + "00" * 16, "127.0.0.1:1#" + "zz" * 16])
async def test_a_session_of_another_transport_is_a_failed_read(pair: Pair, session: str) -> None:
    assert not await read(pair[0], session, [(Memory(1).address, 1, 1)])


async def test_connections_are_limited(caplog: pytest.LogCaptureFixture) -> None:
    with transport(limits=replace(LIMITS, connections=1)) as peer, transport() as one, transport() as two:
        memory, ours = Memory(100, seed=1), Memory(100)
        peer.register(memory.address, memory.size)
        wanted = [(ours.address, memory.address, 100)]
        assert await read(one, peer.session, wanted)
        assert not await read(two, peer.session, wanted)
        assert any("too many connections" in message for message in caplog.messages)
        assert await read(one, peer.session, wanted)


async def test_a_guest_that_says_nothing_is_put_out(pair: Pair) -> None:
    with transport(limits=replace(LIMITS, handshake_s=0.2)) as peer:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(peer.session))
        assert frames(await asyncio.wait_for(reader.read(), 60)) == [wire.HELLO]
        await eventually(lambda: not peer.connections)
        writer.close()


async def test_a_client_that_does_not_take_its_bytes_is_put_out() -> None:
    """Else the bytes it asked for would be kept for it for ever."""
    limits = replace(LIMITS, stall_s=0.3)
    size = 64 << 20
    with transport(limits=limits) as peer:
        memory = Memory(size, seed=1)
        peer.register(memory.address, memory.size)
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(peer.session), limit=1024)
        await log_in(reader, writer, peer)
        body = wire.RANGE.pack(memory.address, size)
        writer.write(wire.REQUEST.pack(1, wire.checksum(body)) + body)
        await eventually(lambda: not peer.connections)
        writer.close()


@pytest.mark.parametrize("count", [0, wire.RANGES_MAX + 1, 2**32 - 1])
async def test_requests_of_a_wrong_size_are_refused(pair: Pair, count: int) -> None:
    _, peer, _ = pair
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(peer.session))
    await log_in(reader, writer, peer)
    writer.write(wire.REQUEST.pack(count, 0))
    assert frames(await reader.read()) == [wire.REFUSED]
    writer.close()


async def log_in(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: TcpTransport) -> None:
    """As a client that knows the secret."""
    from evolving_node_agent.engines.sglang.host.authentication import Side, proof

    hello = await reader.readexactly(wire.FRAME.size + wire.GREETING.size)
    (server_nonce,) = struct.unpack("32s", hello[-32:])
    nonce = b"n" * 32
    shown = proof(SECRET, wire.PURPOSE + peer.incarnation, Side.CLIENT, server_nonce, nonce)
    writer.write(wire.LOGIN.pack(nonce, peer.incarnation, shown))
    await reader.readexactly(wire.FRAME.size + 32)
