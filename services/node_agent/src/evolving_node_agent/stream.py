"""One ConnectNode call: what is to be written, in order, and what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from evolving.internal.v1 import directory_pb2, directory_pb2_grpc

_BACKLOG_MAX = 4096  # messages a directory may lag behind; then a fresh snapshot is cheaper


class DirectoryStream:
    """Write with `send`; read by iterating. The call begins with the first `send`, the hello."""

    def __init__(self, stub: directory_pb2_grpc.DirectoryServiceAsyncStub, hello: directory_pb2.NodeHello) -> None:
        self._queue: asyncio.Queue[directory_pb2.ConnectNodeRequest | None] = asyncio.Queue()
        self._ended = False
        self.send(directory_pb2.ConnectNodeRequest(hello=hello))
        self._call = stub.ConnectNode(self._messages())

    @property
    def writable(self) -> bool:
        """Whether what is sent may still arrive."""
        return not self._ended

    def send(self, message: directory_pb2.ConnectNodeRequest) -> None:
        """Write a message after those before it. A directory that lags too far behind loses the stream."""
        if self._ended:
            return
        if self._queue.qsize() >= _BACKLOG_MAX:
            self.cancel()
            return
        self._queue.put_nowait(message)

    def end(self) -> None:
        """No more messages; the directory ends the call once it has read them all."""
        if not self._ended:
            self._ended = True
            self._queue.put_nowait(None)

    def cancel(self) -> None:
        """End the call at once."""
        self._ended = True
        self._call.cancel()

    def responses(self) -> AsyncIterator[directory_pb2.ConnectNodeResponse]:
        """What the directory says, until the call ends. Raises AioRpcError."""
        return self._call.__aiter__()

    async def _messages(self) -> AsyncIterator[directory_pb2.ConnectNodeRequest]:
        while (message := await self._queue.get()) is not None:
            yield message
