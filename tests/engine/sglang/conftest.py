"""Few engine starts: most tests borrow engines that others used before."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from .driving import Node
from .factory import make_engine
from .lending import Lender

# Two of the longest prompts fit L1, and what fits one chunk is one node of SGLang's tree.
SMALL = {"l1_tokens": 2048, "l2_tokens": 4096, "chunk_tokens": 512}


@contextlib.asynccontextmanager
async def running(directory: Path, fields: Mapping[str, Mapping[str, Any]]) -> AsyncIterator[list[Node]]:
    """Engines of a test's own, by name, with these fields of their configs; stopped at the end, whatever happens."""
    engines = {name: make_engine(directory, name, **own) for name, own in fields.items()}
    listeners: list[asyncio.Task[None]] = []
    try:
        infos = await asyncio.gather(*(engine.start() for engine in engines.values()))
        nodes = [Node(name, engine, info) for (name, engine), info in zip(engines.items(), infos, strict=True)]
        listeners += [asyncio.create_task(node.listen()) for node in nodes]
        yield nodes
    finally:
        await asyncio.gather(*(engine.stop(0) for engine in engines.values()))
        await asyncio.gather(*listeners)


over_each_transport = pytest.mark.parametrize("transport", ["mooncake-tcp", "tcp"], indirect=True)


@pytest.fixture(scope="session", params=["mooncake-tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    """How KV travels between the pair's nodes: the default, but in tests `over_each_transport`."""
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(transport: str, lender: Lender) -> AsyncIterator[list[Node]]:
    """Two nodes with room for everything a module's tests do."""
    async with lender.lend("a", "b", transport=transport) as nodes:
        yield nodes


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cramped(lender: Lender) -> AsyncIterator[list[Node]]:
    """Two nodes whose KV fits a few requests."""
    async with lender.lend("c", "d", l1_tokens=2048, l2_tokens=4096, chunk_tokens=64, decode_slots=12) as nodes:
        yield nodes


@pytest_asyncio.fixture(loop_scope="session")
async def small(lender: Lender) -> AsyncIterator[Node]:
    """A node whose prefill has room for one prompt of the longest kind."""
    async with lender.lend("small", **SMALL) as (node,):
        yield node
