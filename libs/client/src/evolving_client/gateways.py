"""Connections to the gateways: one in use, the others for when it fails."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import grpc
from google.protobuf.message import Message
from grpc import aio

from evolving.v1 import gateway_pb2_grpc
from evolving_client.errors import EvolvingError, Unavailable, from_rpc
from evolving_client.retry import Retries

Response = TypeVar("Response", bound=Message)
Metadata = tuple[tuple[str, str], ...]

_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    # Retries are counted in one place, retry.py.
    ("grpc.enable_retries", 0),
    # A gateway that was restarted is found within a second or two; gRPC's own limit is two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A gateway that vanished without a word is noticed within 25 s, also while a long prompt waits.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # And while an answer streams: a ping that measures the connection is out nearly always then, which holds up the
    # keepalive, and gRPC's own limit for its answer is a minute.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Each client has its own connections, so that closing one or counting its failures concerns no other.
    ("grpc.use_local_subchannel_pool", 1),
)


class Gateways:
    """Channels to the addresses of one cluster's gateways.

    All calls go to one address until it fails; then to the next. Gateways remember what they hashed of a branch, so
    staying with one costs least.
    """

    def __init__(
        self, addresses: Iterable[str], token: str | None, credentials: grpc.ChannelCredentials | None
    ) -> None:
        self.addresses = tuple(addresses)
        if not self.addresses:
            raise ValueError("give the address of at least one gateway")
        self.metadata: Metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        self._credentials = credentials
        self._current = 0
        self._channels: dict[str, aio.Channel] = {}
        self._closed = False

    @property
    def address(self) -> str:
        """The address in use."""
        return self.addresses[self._current]

    def stub(self, address: str) -> gateway_pb2_grpc.GatewayServiceAsyncStub:
        """Methods of the gateway at `address`. Connecting happens at the first call."""
        if self._closed:
            raise EvolvingError("this client is closed")
        channel = self._channels.get(address)
        if channel is None:
            if self._credentials is None:
                channel = aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
            else:
                channel = aio.secure_channel(address, self._credentials, options=_CHANNEL_OPTIONS)
            self._channels[address] = channel
        return gateway_pb2_grpc.GatewayServiceStub(channel)

    def leave(self, address: str) -> None:
        """Use the next address, unless another call has left this one already."""
        if address == self.address:
            self._current = (self._current + 1) % len(self.addresses)

    async def call(self, method: str, request: Message, retries: Retries, response: type[Response]) -> Response:
        """A unary call that may be repeated, with retries."""

        async def attempt() -> Response:
            address = self.address
            timeout_s = retries.remaining_s()
            try:
                answer = await getattr(self.stub(address), method)(request, timeout=timeout_s, metadata=self.metadata)
            except aio.AioRpcError as error:
                failure = from_rpc(error)
                retries.note_failure(failure)
                if isinstance(failure, Unavailable):
                    self.leave(address)
                raise failure from error
            assert isinstance(answer, response)
            return answer

        return await retries.run(attempt)

    async def close(self) -> None:
        """Close all connections; calls in flight are cancelled."""
        self._closed = True
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()
