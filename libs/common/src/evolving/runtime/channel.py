"""Client side: channels to other services with the same limits, the bearer token and the ids of the current call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from evolving.runtime.guard import BRANCH_ID_KEY, REQUEST_ID_KEY
from evolving.runtime.log import current_ids
from evolving.runtime.settings import MAX_MESSAGE_BYTES, split_address
from evolving.wire.status import Context

_ID_KEYS = {"request_id": REQUEST_ID_KEY, "branch_id": BRANCH_ID_KEY}


def open_channel(
    address: str | Sequence[str], *, token: str | None = None, max_message_bytes: int = MAX_MESSAGE_BYTES
) -> grpc.aio.Channel:
    """A channel to one service, or to replicas of one (round robin over those that answer).

    address: "host:port", or several with IP hosts. token: sent as `authorization: Bearer`. The ids bound by
    `log_context` travel as metadata. Connecting happens on first use; close the channel when done.
    """
    options = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        # Any ping's answer, those that measure a busy connection included. While one is out no keepalive is sent, so
        # that gRPC's own minute would be how long a peer that froze in mid-stream holds the stream.
        ("grpc.http2.ping_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.lb_policy_name", "round_robin"),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # One process may be client of many nodes with the same settings: each channel has its own connection.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return _IdentifiedChannel(grpc.aio.insecure_channel(_target(address), options=options), token)


def _target(address: str | Sequence[str]) -> str:
    addresses = [address] if isinstance(address, str) else list(address)
    assert addresses, "an address is needed"
    for one in addresses:
        split_address(one)
    return addresses[0] if len(addresses) == 1 else f"ipv4:{','.join(addresses)}"


def call_timeout_s(context: Context, at_most_s: float, keep_s: float = 0.0) -> float:
    """The timeout for a call made while serving another: what is left of its deadline less `keep_s` (time to answer
    with), at most `at_most_s`, never negative."""
    left_s: float | None = context.time_remaining()
    return at_most_s if left_s is None else max(0.0, min(at_most_s, left_s - keep_s))


class _IdentifiedCallable:
    """A method of a channel that adds the token and the current ids to each call's metadata.

    A wrapper instead of grpc.aio interceptors: those put a task between caller and call, which delays cancellation.
    """

    def __init__(self, inner: Any, authorization: tuple[tuple[str, str], ...]) -> None:
        self._inner = inner
        self._authorization = authorization

    def __call__(self, *args: Any, metadata: Any = None, **options: Any) -> Any:
        ids = tuple((_ID_KEYS[name], value) for name, value in current_ids().items() if value.isascii())
        merged = (*(metadata or ()), *self._authorization, *ids)
        return self._inner(*args, metadata=merged, **options)


class _IdentifiedChannel(grpc.aio.Channel):
    def __init__(self, inner: grpc.aio.Channel, token: str | None) -> None:
        self._inner = inner
        self._authorization = (("authorization", f"Bearer {token}"),) if token else ()

    async def __aenter__(self) -> _IdentifiedChannel:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        return _IdentifiedCallable(self._inner.unary_unary(*args, **options), self._authorization)

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return _IdentifiedCallable(self._inner.unary_stream(*args, **options), self._authorization)

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        return _IdentifiedCallable(self._inner.stream_unary(*args, **options), self._authorization)

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return _IdentifiedCallable(self._inner.stream_stream(*args, **options), self._authorization)
