"""A channel that goes where it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from evolving.runtime.following import FollowingChannel


class Place:
    """Says who asks and where, once the gate is open."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.address = ""
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()

    async def say(self, _request: StringValue, context: Any) -> StringValue:
        self.entered.set()
        await self.gate.wait()
        return StringValue(value=f"{self.name} {dict(context.invocation_metadata()).get('authorization')}")


@asynccontextmanager
async def place(name: str) -> AsyncIterator[Place]:
    here = Place(name)
    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(here.say, StringValue.FromString, StringValue.SerializeToString)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Place", {"Say": handler}),))
    here.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield here
    finally:
        here.gate.set()
        await server.stop(None)


async def ask(channel: grpc.aio.Channel | None) -> str:
    assert channel is not None
    say = channel.unary_unary("/test.Place/Say", StringValue.SerializeToString, StringValue.FromString)
    answer = await say(StringValue(), timeout=30)
    return str(answer.value)


@pytest.fixture
async def following() -> AsyncIterator[FollowingChannel]:
    channel = FollowingChannel(token="t")
    yield channel
    await channel.close()


async def test_it_goes_where_it_is_told_and_nowhere(following: FollowingChannel) -> None:
    assert following.get() is None
    async with place("a") as a, place("b") as b:
        following.address = a.address
        first = following.get()
        assert await ask(first) == "a Bearer t"
        assert following.get() is first
        following.go_to(b.address)
        assert await ask(following.get()) == "b Bearer t"
        following.go_to("")
        assert following.get() is None
        following.go_to(a.address)
        assert following.get() is not first
        assert await ask(following.get()) == "a Bearer t"


async def test_a_call_that_runs_ends_where_it_began(following: FollowingChannel) -> None:
    async with place("a") as a, place("b") as b:
        a.gate.clear()
        following.address = a.address
        call = asyncio.create_task(ask(following.get()))
        await a.entered.wait()
        following.address = b.address
        assert (await ask(following.get())).startswith("b")
        a.gate.set()
        assert (await call).startswith("a")


async def test_closing_ends_calls_here_and_on_what_was_left(following: FollowingChannel) -> None:
    async with place("a") as a, place("b") as b:
        calls = []
        for here in (a, b):
            here.gate.clear()
            following.address = here.address
            calls.append(asyncio.create_task(ask(following.get())))
            await here.entered.wait()
        following.get()
        await following.close()
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, asyncio.CancelledError | grpc.aio.AioRpcError)
        b.gate.set()
        assert (await ask(following.get())).startswith("b")
