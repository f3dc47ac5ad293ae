"""One generation: a stream of events that outlives its gateway.

When the stream breaks, the same request id is sent again with the tokens already received (`resume_from`,
`resume_token_ids`), to the next gateway, and goes on after them. What the caller sees is a pause.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

from grpc import aio

from evolving.v1 import gateway_pb2
from evolving_client.errors import EvolvingError, ProtocolError, Unavailable, from_rpc
from evolving_client.events import (
    Event,
    Finished,
    Started,
    Tokens,
    encode_token_ids,
    finished_from,
    started_from,
    tokens_from,
)
from evolving_client.gateways import Gateways
from evolving_client.retry import Retries, RetryPolicy

Prepare = Callable[[gateway_pb2.GenerateRequest, Retries], Awaitable[None]]
Listener = Callable[[Event], None]


class Generation:
    """An async iterator of `Started`, `Tokens`… and, last, `Finished`.

    Nothing is sent before the first event is asked for. Leaving the loop early, cancelling the task, `aclose()` or
    losing the last reference cancels the call, and the cluster stops the work.

    Raises what `evolving_client.errors` lists; after an error or the end it is exhausted.
    """

    def __init__(
        self,
        gateways: Gateways,
        request: gateway_pb2.GenerateRequest,
        *,
        policy: RetryPolicy,
        timeout_s: float | None,
        prepare: Prepare | None = None,
        listener: Listener | None = None,
    ) -> None:
        self._gateways = gateways
        self._request = request
        self._policy = policy
        self._timeout_s = timeout_s
        self._prepare = prepare
        self._listener = listener
        self._retries: Retries | None = None
        self._call: aio.UnaryStreamCall[Any, gateway_pb2.GenerateResponse] | None = None
        self._address = ""
        self._received: list[int] = []
        self._held_text_at = (-1, 0)  # output index, and in which sending
        self._version = request.branch.version
        self._sent_times = 0
        self._over = False

    @property
    def request_id(self) -> str:
        """Names this request in logs of the cluster."""
        return self._request.request_id

    @property
    def received_token_ids(self) -> tuple[int, ...]:
        """Output tokens received until now."""
        return tuple(self._received)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._over:
            raise StopAsyncIteration
        try:
            event = self._checked(await self._next_message())
            while event is None:
                event = self._checked(await self._next_message())
        except BaseException:
            self._stop()
            raise
        if isinstance(event, Finished):
            self._stop()
        if self._listener is not None:
            self._listener(event)
        return event

    async def finish(self) -> Finished:
        """Read to the end and return the result."""
        async for event in self:
            if isinstance(event, Finished):
                return event
        raise EvolvingError("this generation is over already")

    async def aclose(self) -> None:
        """Cancel the call if it still runs."""
        self._stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def __del__(self) -> None:
        self._stop()

    def _stop(self) -> None:
        self._over = True
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    async def _next_message(self) -> gateway_pb2.GenerateResponse:
        """The next message of the stream, opened again as often as the policy allows."""
        if self._retries is None:
            self._retries = Retries(self._policy, self._timeout_s)
            if self._prepare is not None:
                await self._prepare(self._request, self._retries)
        return await self._retries.run(self._read)

    async def _read(self) -> gateway_pb2.GenerateResponse:
        assert self._retries is not None
        if self._call is None:
            self._call = self._open(self._retries.remaining_s())
        try:
            message = await self._call.read()
        except aio.AioRpcError as error:
            self._call = None
            failure = from_rpc(error)
            self._retries.note_failure(failure)
            if isinstance(failure, Unavailable):
                self._gateways.leave(self._address)
            raise failure from error
        if message is aio.EOF:
            raise ProtocolError("the stream ended without a result")
        assert isinstance(message, gateway_pb2.GenerateResponse)
        return message

    def _open(self, timeout_s: float | None) -> aio.UnaryStreamCall[Any, gateway_pb2.GenerateResponse]:
        self._request.resume_from = len(self._received)
        self._request.resume_token_ids = encode_token_ids(self._received)
        self._address = self._gateways.address
        self._sent_times += 1
        stub = self._gateways.stub(self._address)
        return stub.Generate(self._request, timeout=timeout_s, metadata=self._gateways.metadata)

    def _checked(self, message: gateway_pb2.GenerateResponse) -> Event | None:
        """The event of a message that fits what came before it; None when it only repeats something."""
        match message.WhichOneof("event"):
            case "started":
                return self._on_started(message.started)
            case "tokens":
                return self._on_tokens(tokens_from(message.tokens))
            case "finished":
                return self._on_finished(message.finished)
        raise ProtocolError("the server sent an event this client doesn't know: is the gateway newer?")

    def _on_started(self, message: gateway_pb2.GenerateStarted) -> Started:
        if message.request_id != self._request.request_id:
            raise ProtocolError(f"asked for {self._request.request_id}, was answered for {message.request_id}")
        self._version = message.version
        return started_from(message)

    def _on_tokens(self, tokens: Tokens) -> Tokens | None:
        expected = len(self._received)
        if tokens.index != expected:
            raise ProtocolError(f"output token {expected} was due, the server sent token {tokens.index}")
        if not tokens.token_ids:
            # Text that was held back, after the last id. When the stream broke behind it, the next brings it again.
            earlier, self._held_text_at = self._held_text_at, (tokens.index, self._sent_times)
            return None if earlier[0] == tokens.index and earlier[1] < self._sent_times else tokens
        self._received.extend(tokens.token_ids)
        assert self._retries is not None
        self._retries.note_progress()
        return tokens

    def _on_finished(self, message: gateway_pb2.GenerateFinished) -> Finished:
        finished = finished_from(
            message,
            request_id=self._request.request_id,
            version=self._version,
            reconnects=self._sent_times - 1,
        )
        if finished.output_token_ids != tuple(self._received):
            raise ProtocolError(
                f"the result has {len(finished.output_token_ids)} tokens, other than the {len(self._received)} sent"
            )
        return finished
