"""Engines for the conformance suite: the mock always, SGLang where its tests are asked for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import pytest_asyncio
from engine.sglang.driving import Node
from engine.sglang.lending import Lender

from evolving_node_agent.engines.mock import MockConfig, MockEngine

_SGLANG = [pytest.mark.sglang, pytest.mark.slow]
ENGINES = ["mock", pytest.param("sglang", marks=_SGLANG)]
# For tests in which KV moves: SGLang over each transport. "sglang" is Mooncake's TCP.
over_each_transport = pytest.mark.parametrize(
    "kind", [*ENGINES, pytest.param("sglang-tcp", marks=_SGLANG)], indirect=True
)
Starter = Callable[..., AbstractAsyncContextManager[list[Node]]]


@contextlib.asynccontextmanager
async def started(*names: str, **overrides: Any) -> AsyncIterator[list[Node]]:
    """Mock engines that serve; stopped at the end, whatever happens."""
    sizes = {"l1_tokens": 4096, "l2_tokens": 8192, "chunk_tokens": 128} | overrides
    context_tokens = sizes["l1_tokens"] // 2
    longest = {"max_context_tokens": context_tokens, "max_prompt_tokens": context_tokens - 128}
    engines = {name: MockEngine(MockConfig(name, vocab_size=512, speed_up=4.0, **(longest | sizes))) for name in names}
    listeners: list[asyncio.Task[None]] = []
    try:
        infos = await asyncio.gather(*(engine.start() for engine in engines.values()))
        nodes = [Node(name, engine, info) for (name, engine), info in zip(engines.items(), infos, strict=True)]
        listeners += [asyncio.create_task(node.listen()) for node in nodes]
        yield nodes
    finally:
        await asyncio.gather(*(engine.stop(0) for engine in engines.values()))
        await asyncio.gather(*listeners)


def kill(node: Node) -> None:
    """The engine's process dies: by a signal, or by its crash hook where it lives in this process."""
    if isinstance(node.engine, MockEngine):
        node.engine.faults.crash(-signal.SIGKILL)
    else:
        os.kill(node.info.pid, signal.SIGKILL)


def check_engine(node: Node) -> None:
    """What the engine itself can check of its bookkeeping."""
    if isinstance(node.engine, MockEngine):
        node.engine.check_invariants()


@pytest.fixture(scope="session", autouse=True)
def no_compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Engines run where nothing can be compiled, as in their image."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CC", "CXX", "CUDAHOSTCXX"):
            patch.setenv(name, "/nowhere/compiler")
        patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("extensions")))
        yield


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def lender(no_compiler: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lender]:
    """Who has the SGLang engines of all tests here."""
    running = Lender(tmp_path_factory.mktemp("engines"))
    yield running
    await running.close()


@pytest.fixture(scope="session", params=ENGINES)
def kind(request: pytest.FixtureRequest) -> str:
    """Which engine."""
    return str(request.param)


@pytest.fixture(scope="module")
def start(kind: str, lender: Lender) -> Starter:
    """Engines for a block, with nothing in them: `async with start("a", "b", decode_slots=1) as (a, b)`.

    Of the mock new ones; SGLang's have served others.
    """
    if kind == "mock":
        return started
    transport = "tcp" if kind == "sglang-tcp" else "mooncake-tcp"
    return lambda *names, **overrides: lender.lend(*names, transport=transport, **overrides)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def nodes(start: Starter) -> AsyncIterator[list[Node]]:
    """Two engines that a module's tests share; each test takes prompts of its own."""
    async with start("a", "b") as pair:
        yield pair
        for node in pair:
            await node.until_idle()
            check_engine(node)
