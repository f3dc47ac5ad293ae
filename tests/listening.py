"""Servers of a test's own: no connection of theirs outlives them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def listening(serve: Serve, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[tuple[str, int]]:
    """`serve` handles each connection, which is closed when that returns. Yields where it listens.

    Closing an asyncio server leaves its connections open, and what is still open when the loop closes fails another
    test, whenever it is collected.
    """
    connections: set[asyncio.Task[None]] = set()

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(connection(reader, writer))
        connections.add(task)
        task.add_done_callback(connections.discard)

    server = await asyncio.start_server(accept, host, port)
    try:
        yield server.sockets[0].getsockname()[:2]
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
