"""Engines for the conformance suite: the mock always, SGLang where its tests are asked for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from engine.sglang.driving import Node

from evolving_node_agent.engines.mock import MockConfig, MockEngine
from evolving_node_agent.engines.port import Engine

_SGLANG = [pytest.mark.sglang, pytest.mark.slow]
ENGINES = ["mock", pytest.param("sglang", marks=_SGLANG)]
# For tests in which KV moves: SGLang over each transport. "sglang" is Mooncake's TCP.
over_each_transport = pytest.mark.parametrize(
    "kind", [*ENGINES, pytest.param("sglang-tcp", marks=_SGLANG)], indirect=True
)
L1_TOKENS = 4096
Starter = Callable[..., AbstractAsyncContextManager[list[Node]]]


def make(kind: str, directory: Path, name: str, **overrides: Any) -> Engine:
    """An engine that was not started. `overrides`: l1_tokens, l2_tokens, chunk_tokens, decode_slots."""
    sizes = {"l1_tokens": L1_TOKENS, "l2_tokens": 2 * L1_TOKENS, "chunk_tokens": 128} | overrides
    if kind == "mock":
        context_tokens = sizes["l1_tokens"] // 2
        longest = {"max_context_tokens": context_tokens, "max_prompt_tokens": context_tokens - 128}
        return MockEngine(MockConfig(name, vocab_size=512, speed_up=4.0, **(longest | sizes)))
    from engine.sglang.factory import make_engine

    return make_engine(directory, name, transport="tcp" if kind == "sglang-tcp" else "mooncake-tcp", **sizes)


@contextlib.asynccontextmanager
async def started(kind: str, directory: Path, *names: str, **overrides: Any) -> AsyncIterator[list[Node]]:
    """Engines that serve; stopped at the end, whatever happens."""
    engines = {name: make(kind, directory, name, **overrides) for name in names}
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


@pytest.fixture(scope="session", params=ENGINES)
def kind(request: pytest.FixtureRequest) -> str:
    """Which engine."""
    return str(request.param)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def nodes(kind: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[Node]]:
    """Two engines that all tests share; each test takes prompts of its own."""
    async with started(kind, tmp_path_factory.mktemp("nodes"), "a", "b") as pair:
        yield pair
        for node in pair:
            await node.until_idle()
            check_engine(node)


@pytest.fixture
def start(kind: str, tmp_path: Path) -> Starter:
    """Engines of a test's own: `async with start("a", "b", decode_slots=1) as (a, b)`."""
    return lambda *names, **overrides: started(kind, tmp_path, *names, **overrides)
