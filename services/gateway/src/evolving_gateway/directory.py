"""The directory's client. A directory that is away costs reuse, never a request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc
import grpc.aio

from evolving.internal.v1 import directory_pb2, directory_pb2_grpc
from evolving.runtime.channel import open_channel
from evolving.runtime.clock import Clock
from evolving.runtime.discovery import follow_service
from evolving.runtime.keys import Keys
from evolving.runtime.log import get_logger
from evolving.runtime.metrics import Metrics
from evolving.runtime.store import Store
from evolving.runtime.tasks import end_tasks
from evolving.v1 import common_pb2
from evolving.wire.status import ErrorDetail, parse_error
from evolving_gateway.errors import DirectoryAway, DirectoryRefused

# Answers about the request itself; anything else means that this directory can't answer now.
_REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND)
_NOT_MINE = ("NOT_LEADER", "WRONG_PARTITION", "STALE_TERM")
_REST_S = 1.0
_RETRY_FIRST_S, _RETRY_MAX_S = 0.1, 2.0

_Answer = TypeVar("_Answer")
_log = get_logger(__name__)


class DirectoryClient:
    """Calls the directory that etcd names."""

    def __init__(
        self,
        keys: Keys,
        clock: Clock,
        metrics: Metrics,
        *,
        token: str | None,
        max_message_bytes: int,
        timeout_s: float,
        finish_retry_s: float,
    ) -> None:
        """timeout_s: longest wait for a Begin. finish_retry_s: how long the end of a request is told."""
        self._keys = keys
        self._clock = clock
        self._token = token
        self._max_message_bytes = max_message_bytes
        self._timeout_s = timeout_s
        self._finish_retry_s = finish_retry_s
        self._address = ""
        self._channel: grpc.aio.Channel | None = None
        self._stub: directory_pb2_grpc.DirectoryServiceAsyncStub | None = None
        self._resting_until_s = 0.0
        self._away = False  # did not answer the last call
        self._finishing: set[asyncio.Task[None]] = set()
        self._calls = metrics.counter("gateway_directory_calls", "Calls to the directory.", ("method", "outcome"))

    async def follow(self, store: Store) -> None:
        """Go where etcd says the directory is, for ever."""
        await follow_service(store, self._keys, "directory", self._connect)

    async def begin(self, request: directory_pb2.BeginRequest) -> directory_pb2.BeginResponse | None:
        """Record and match a context; None: no answer. Raises DirectoryRefused (BRANCH_ENDED, STALE_VERSION, …)."""
        return await self._call("Begin", lambda stub: stub.Begin(request, timeout=self._timeout_s))

    async def end(self, tenant: str, branch_ids: Sequence[str], subtree: bool, timeout_s: float) -> list[str]:
        """End branches; ids that were live. Raises DirectoryAway: an end must be acknowledged."""
        request = directory_pb2.EndRequest(
            partition_id=self._keys.partition, tenant=tenant, branch_ids=branch_ids, subtree=subtree
        )
        answer = await self._call("End", lambda stub: stub.End(request, timeout=timeout_s), rest=False)
        if answer is None:
            raise DirectoryAway("the directory does not answer; nothing was ended for sure", retry_after_s=_REST_S)
        return list(answer.ended_branch_ids)

    async def read_branch(self, tenant: str, branch_id: str, timeout_s: float) -> common_pb2.Branch:
        """One branch. Raises DirectoryRefused (NOT_FOUND) or DirectoryAway."""
        request = directory_pb2.ReadBranchRequest(partition_id=self._keys.partition, tenant=tenant, branch_id=branch_id)
        answer = await self._call("ReadBranch", lambda stub: stub.ReadBranch(request, timeout=timeout_s), rest=False)
        if answer is None:
            raise DirectoryAway("the directory does not answer", retry_after_s=_REST_S)
        return answer.branch

    def finish_later(self, tenant: str, branch_id: str, request_id: str) -> None:
        """Tell that a request is over, again and again for a while if the directory is away."""
        request = directory_pb2.FinishRequest(
            partition_id=self._keys.partition, tenant=tenant, branch_id=branch_id, request_id=request_id
        )
        task = asyncio.create_task(self._finish(request), name=f"finish:{request_id}")
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    async def drain(self) -> None:
        """Wait for what `finish_later` still has to tell."""
        if self._finishing:
            await asyncio.wait(self._finishing)

    async def close(self) -> None:
        """Drop the connection and what could not be told."""
        await end_tasks(*self._finishing)
        if self._channel is not None:
            await self._channel.close()

    async def _finish(self, request: directory_pb2.FinishRequest) -> None:
        give_up_s = self._clock.now_s() + self._finish_retry_s
        wait_s = _RETRY_FIRST_S
        while True:
            try:
                done = await self._call(
                    "Finish", lambda stub: stub.Finish(request, timeout=self._timeout_s), rest=False
                )
            except DirectoryRefused as error:
                _log.warning("finish_refused", request_id=request.request_id, reason=error.reason, error=str(error))
                return
            if done is not None:
                return
            if self._clock.now_s() + wait_s > give_up_s:
                _log.warning("finish_not_told", request_id=request.request_id, branch_id=request.branch_id)
                return
            await self._clock.sleep(wait_s)
            wait_s = min(_RETRY_MAX_S, 2 * wait_s)

    async def _call(
        self,
        method: str,
        call: Callable[[directory_pb2_grpc.DirectoryServiceAsyncStub], Awaitable[_Answer]],
        rest: bool = True,
    ) -> _Answer | None:
        """The answer; None when there is none. After a call that timed out, calls with `rest` are not even tried for
        a moment, so that a hanging directory doesn't slow every request."""
        stub = self._stub
        if stub is None or (rest and self._clock.now_s() < self._resting_until_s):
            self._calls.labels(method, "away").inc()
            return None
        try:
            answer = await call(stub)
        except grpc.aio.AioRpcError as error:
            detail = parse_error(error)
            if detail.status in _REFUSALS and detail.reason not in _NOT_MINE:
                self._calls.labels(method, "refused").inc()
                raise _refusal(detail) from error
            self._calls.labels(method, "away").inc()
            if not self._away:  # once, and not for every request that misses it
                self._away = True
                code = detail.status.name
                _log.warning("directory_away", address=self._address, method=method, code=code, error=detail.message)
            if detail.status is grpc.StatusCode.DEADLINE_EXCEEDED:
                self._resting_until_s = self._clock.now_s() + _REST_S
            return None
        self._calls.labels(method, "answered").inc()
        if self._away:
            self._away = False
            _log.info("directory_back", address=self._address)
        return answer

    def _connect(self, address: str) -> None:
        """Go to the directory at `address`; "": there is none."""
        if address == self._address:
            return
        self._address = address
        old, self._channel, self._stub = self._channel, None, None
        self._resting_until_s = 0.0
        if address:
            self._channel = open_channel(address, token=self._token, max_message_bytes=self._max_message_bytes)
            self._stub = directory_pb2_grpc.DirectoryServiceStub(self._channel)
            _log.info("directory", address=address)
        if old is not None:
            task = asyncio.create_task(old.close(self._timeout_s), name="directory:close")
            self._finishing.add(task)
            task.add_done_callback(self._finishing.discard)


def _refusal(detail: ErrorDetail) -> DirectoryRefused:
    return DirectoryRefused(detail.status, detail.reason, detail.message, dict(detail.metadata))
