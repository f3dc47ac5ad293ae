"""A channel to a service that may move, or be nowhere."""

from __future__ import annotations

import asyncio
import contextlib

import grpc.aio

from evolving.runtime.channel import open_channel
from evolving.runtime.settings import MAX_MESSAGE_BYTES

_LAST_CALLS_S = 5.0


class FollowingChannel:
    """Goes to the address that it was last told; `follow_leader` and `follow_service` take its `go_to`.

    Ask `get` for each call anew. Calls that run on a channel that was left have a few seconds to end.
    """

    def __init__(self, *, token: str | None = None, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        """token, max_message_bytes: as for `open_channel`."""
        self._token = token
        self._max_message_bytes = max_message_bytes
        self._channel: grpc.aio.Channel | None = None
        self._opened_to = ""
        self._leaving: set[asyncio.Task[None]] = set()
        self._hurry = asyncio.Event()
        self.address = ""
        """Where to go, "host:port"; "": nowhere."""

    def go_to(self, address: str) -> None:
        """Set `address`; what `get` returned before stays usable until the next `get`."""
        self.address = address

    def get(self) -> grpc.aio.Channel | None:
        """The channel to `address`; None when there is no address."""
        if self.address != self._opened_to:
            self._leave()
            if self.address:
                self._channel = open_channel(self.address, token=self._token, max_message_bytes=self._max_message_bytes)
            self._opened_to = self.address
        return self._channel

    async def close(self) -> None:
        """Close at once, which cancels running calls. `get` opens anew."""
        self._leave()
        self._opened_to = ""
        hurry, self._hurry = self._hurry, asyncio.Event()
        hurry.set()
        await asyncio.gather(*self._leaving)

    def _leave(self) -> None:
        if self._channel is not None:
            task = asyncio.create_task(_close(self._channel, self._hurry), name=f"leaving:{self._opened_to}")
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
            self._channel = None


async def _close(channel: grpc.aio.Channel, hurry: asyncio.Event) -> None:
    """Not by the grace of gRPC's own `close`, which nothing can cut short."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LAST_CALLS_S):
            await hurry.wait()
    await channel.close()
