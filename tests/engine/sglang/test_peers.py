"""The peer service's door: who knows the cluster's token is served, nobody else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from listening import listening
from tcp_proxy import At, Way, proxied

from evolving_node_agent.engines.sglang.framing import write_frame
from evolving_node_agent.engines.sglang.host import peers as p
from evolving_node_agent.engines.sglang.host.pages import Layout

LAYOUT = Layout((1, 2), 64, (3, 4), 128, 5)
WELCOME = p.Welcome("format", "life", "session", LAYOUT)


class Service:
    """Greets, and locates nothing; remembers what it was asked."""

    def __init__(self, secret: bytes) -> None:
        self.secret = secret
        self.asked: list[Any] = []
        self.address = ("", 0)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await p.serve_guest(reader, writer, self.secret, {p.Hello: self._welcome, p.Locate: self._locate})

    async def _welcome(self, guest: p.Guest, hello: p.Hello) -> p.Reply:
        self.asked.append(hello)
        return WELCOME

    async def _locate(self, guest: p.Guest, ask: p.Locate) -> p.Reply:
        self.asked.append(ask)
        return p.Located([])


@contextlib.asynccontextmanager
async def serving(secret: bytes) -> AsyncIterator[Service]:
    """A peer service."""
    service = Service(secret)
    async with listening(service.serve) as service.address:
        yield service


@contextlib.asynccontextmanager
async def guest(secret: bytes) -> AsyncIterator[p.Peers]:
    """Someone who connects."""
    peers = p.Peers("format", secret)
    yield peers
    await peers.close()


def at(address: tuple[str, int]) -> str:
    """host:port."""
    return f"{address[0]}:{address[1]}"


@pytest.mark.parametrize("secret", [b"", b"the token"])
async def test_who_knows_the_token_is_served(secret: bytes) -> None:
    async with serving(secret) as service, guest(secret) as peers:
        peer = await peers.at(at(service.address))
        assert peer.welcome == WELCOME
        assert await peer.ask(p.Locate(b""), p.Located) == p.Located([])


@pytest.mark.parametrize(("ours", "theirs"), [(b"", b"the token"), (b"the token", b""), (b"the token", b"another")])
async def test_who_does_not_is_not(ours: bytes, theirs: bytes) -> None:
    async with serving(theirs) as service, guest(ours) as peers:
        with pytest.raises(p.PeerLost, match="token"):
            await peers.at(at(service.address))
        assert service.asked == []


async def test_nothing_is_answered_before_the_proof() -> None:
    async with serving(b"the token") as service:
        for said in (b"", bytes(64)):
            reader, writer = await asyncio.open_connection(*service.address)
            writer.write(said)
            for _ in range(10):
                write_frame(writer, p._encode(p._Asked(1, p.Locate(b""))))
            with contextlib.suppress(ConnectionError):  # it may end the connection before it has read all this
                assert len(await reader.read()) == 32, "its nonce, and nothing more"
            writer.close()
        assert service.asked == []


async def test_a_server_that_does_not_know_the_token_is_found_out() -> None:
    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(32))
        said = await reader.readexactly(64)
        writer.write(said[32:])  # the client's own proof, sent back
        await reader.read()

    async with listening(pretend) as address, guest(b"the token") as peers:
        with pytest.raises(p.PeerLost, match="token"):
            await peers.at(at(address))


async def test_a_damaged_answer_ends_the_connection_and_the_next_one_is_good() -> None:
    async with serving(b"the token") as service, proxied(service.address) as proxy, guest(b"the token") as peers:
        proxy.harm(flip=At(Way.ANSWER, 80))  # 64 bytes of proof come before
        with pytest.raises(p.PeerLost):
            await peers.at(at(proxy.address))
        proxy.heal()
        assert (await peers.at(at(proxy.address))).welcome == WELCOME
