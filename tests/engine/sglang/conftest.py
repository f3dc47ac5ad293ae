"""Few engine starts: pairs of nodes live as long as the session."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from .driving import Node
from .factory import make_engine


@contextlib.asynccontextmanager
async def running(directory: Path, *names: str, **overrides: Any) -> AsyncIterator[list[Node]]:
    """Started engines that are stopped at the end, whatever happens."""
    engines = {name: make_engine(directory, name, **overrides) for name in names}
    listeners: list[asyncio.Task[None]] = []
    try:
        infos = await asyncio.gather(*(engine.start() for engine in engines.values()))
        nodes = [Node(name, engine, info) for (name, engine), info in zip(engines.items(), infos, strict=True)]
        listeners += [asyncio.create_task(node.listen()) for node in nodes]
        yield nodes
    finally:
        await asyncio.gather(*(engine.stop(0) for engine in engines.values()))
        await asyncio.gather(*listeners)


@pytest.fixture(scope="session", autouse=True)
def no_compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Engines run where nothing can be compiled, as in their image."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CC", "CXX", "CUDAHOSTCXX"):
            patch.setenv(name, "/nowhere/compiler")
        patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("extensions")))
        yield


over_each_transport = pytest.mark.parametrize("transport", ["mooncake-tcp", "tcp"], indirect=True)


@pytest.fixture(scope="session", params=["mooncake-tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    """How KV travels between the pair's nodes: the default, but in tests `over_each_transport`."""
    return str(request.param)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pair(transport: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[Node]]:
    """Two nodes with room for everything a test does."""
    async with running(tmp_path_factory.mktemp("pair"), "a", "b", chunk_tokens=128, transport=transport) as nodes:
        yield nodes


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def cramped(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[Node]]:
    """Two nodes whose KV fits a few requests."""
    sizes = {"l1_tokens": 2048, "l2_tokens": 4096, "chunk_tokens": 64, "decode_slots": 12}
    async with running(tmp_path_factory.mktemp("cramped"), "c", "d", **sizes) as nodes:
        yield nodes
