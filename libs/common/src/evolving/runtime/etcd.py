"""The store on etcd, through etcd3aio's services.

etcd3aio's own watch hides reconnects, its election and lease keeper do not notice a lost lease, and its channel takes
IP literals only; so connections, watches and leases are handled here and the library does the calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, Self, TypeVar

import grpc
import grpc.aio
from etcd3aio import EtcdError, prefix_range_end
from etcd3aio._protobuf import Compare, WatchCreateRequest, WatchRequest, WatchStub
from etcd3aio.kv import KVService
from etcd3aio.lease import LeaseService

from evolving.runtime.clock import Clock
from evolving.runtime.log import get_logger
from evolving.runtime.registration import Registration
from evolving.runtime.settings import MAX_MESSAGE_BYTES
from evolving.runtime.store import Conflict, Fenced, Guard, LeaseLost, Listing, StoreUnavailable, Versioned, WatchBatch

Answer = TypeVar("Answer")
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),  # etcd refuses more than one ping in 5 s
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
]
# Makes etcd end a watch on a member that has lost its leader, which would otherwise stay silent.
_REQUIRE_LEADER = (("hasleader", "true"),)
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.1, 2.0
_log = get_logger(__name__)


class _WatchBroken(Exception):
    """A watch stream ended or fell silent; what it missed is unknown."""


class _Member:
    """One etcd member and the connection to it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self.kv = KVService(self.channel, max_attempts=1)
        self.lease = LeaseService(self.channel, max_attempts=1)
        self.watch = WatchStub(self.channel)

    async def connect(self, timeout_s: float) -> bool:
        """Whether the connection is up, waiting for it at most `timeout_s`."""
        if self.channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY:
            return True
        with contextlib.suppress(TimeoutError, grpc.aio.UsageError):  # the latter: the store was closed meanwhile
            async with asyncio.timeout(timeout_s):
                await self.channel.channel_ready()
                return True
        return False


class EtcdStore:
    """See Store. Talks to one member at a time and goes to the next when that one doesn't answer."""

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        clock: Clock,
        timeout_s: float = 3.0,
        watch_idle_s: float = 5.0,
        on_ready: Callable[[bool], None] | None = None,
    ) -> None:
        """endpoints: members, "host:port". timeout_s: longest a call takes. watch_idle_s: a watch that hears nothing
        for so long asks for a sign of life, and starts over when none comes in `timeout_s`. on_ready: told of changes.
        """
        assert endpoints, "at least one endpoint"
        self._members = [_Member(address) for address in endpoints]
        self._current = 0
        self._clock = clock
        self._timeout_s = timeout_s
        self._watch_idle_s = watch_idle_s
        self._on_ready = on_ready
        self._ready = False
        self._closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    @property
    def ready(self) -> bool:
        """See Store."""
        return self._ready

    @property
    def _closed(self) -> bool:
        return self._closing.done()

    async def get(self, key: str) -> Versioned | None:
        """See Store."""
        answer = await self._call(lambda member, timeout_s: member.kv.get(key, timeout=timeout_s))
        return _versioned(answer.kvs[0]) if answer.kvs else None

    async def list(self, prefix: str) -> Listing:
        """See Store."""
        end = prefix_range_end(prefix)
        answer = await self._call(lambda member, timeout_s: member.kv.get(prefix, end, timeout=timeout_s))
        items = sorted((_versioned(kv) for kv in answer.kvs), key=lambda item: item.key)
        return Listing(tuple(items), answer.header.revision)

    async def put(self, key: str, value: bytes, lease: int | None = None) -> Versioned:
        """See Store."""
        write = [KVService.txn_op_put(key, value, lease=lease or 0), KVService.txn_op_get(key)]
        answer = await self._call(lambda member, timeout_s: member.kv.txn([], write, timeout=timeout_s))
        return _versioned(answer.responses[1].response_range.kvs[0])

    async def delete(self, key: str) -> bool:
        """See Store."""
        answer = await self._call(lambda member, timeout_s: member.kv.delete(key, timeout=timeout_s))
        return int(answer.deleted) > 0

    async def compare_and_swap(
        self,
        key: str,
        expected_mod_revision: int,
        value: bytes,
        *,
        guards: Sequence[Guard] = (),
        lease: int | None = None,
    ) -> Versioned:
        """See Store. Sent once only: a second try could meet the first one's write and call it a conflict."""
        compare = [
            Compare(result=Compare.EQUAL, target=Compare.MOD, key=key.encode(), mod_revision=expected_mod_revision),
            *(KVService.txn_compare_create_revision(guard.key, guard.create_revision) for guard in guards),
        ]
        read = KVService.txn_op_get(key)
        write = [KVService.txn_op_put(key, value, lease=lease or 0), read]
        look = [read, *(KVService.txn_op_get(guard.key) for guard in guards)]
        answer = await self._call(
            lambda member, timeout_s: member.kv.txn(compare, write, look, timeout=timeout_s), once=True
        )
        if answer.succeeded:
            return _versioned(answer.responses[1].response_range.kvs[0])
        found = [[_versioned(kv) for kv in response.response_range.kvs] for response in answer.responses]
        for guard, held in zip(guards, found[1:], strict=True):
            if not held or held[0].create_revision != guard.create_revision:
                raise Fenced(guard)
        raise Conflict(key, found[0][0] if found[0] else None)

    async def grant_lease(self, ttl_s: float) -> int:
        """See Store."""
        whole_s = math.ceil(ttl_s)
        answer = await self._call(lambda member, timeout_s: member.lease.grant(whole_s, timeout=timeout_s))
        return int(answer.ID)

    async def renew_lease(self, lease: int) -> float:
        """See Store."""
        left_s = await self._call(lambda member, timeout_s: _renew(member, lease, timeout_s))
        if left_s <= 0:
            raise LeaseLost(f"lease {lease:x} is gone")
        return left_s

    async def revoke_lease(self, lease: int) -> None:
        """See Store."""
        with contextlib.suppress(LeaseLost):
            await self._call(lambda member, timeout_s: member.lease.revoke(lease, timeout=timeout_s))

    def register(self, key: str, value: bytes, ttl_s: float) -> Registration:
        """See Store."""
        return Registration(self, key, value, ttl_s, self._clock)

    async def watch(self, prefix: str) -> AsyncGenerator[WatchBatch, None]:
        """See Store."""
        backoff_s = _BACKOFF_FIRST_S
        while True:
            try:
                listing = await self.list(prefix)
                yield WatchBatch(True, listing.revision, listing.items)
                async with contextlib.aclosing(self._follow(prefix, listing.revision + 1)) as batches:
                    async for batch in batches:
                        backoff_s = _BACKOFF_FIRST_S
                        if batch.puts or batch.deletes:
                            yield batch
            except (StoreUnavailable, _WatchBroken) as error:
                if self._closed:
                    return
                log = _log.warning if backoff_s == _BACKOFF_FIRST_S else _log.debug  # an outage is told once
                log("watch_restarts", prefix=prefix, error=str(error))
                await self._clock.sleep(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(2 * backoff_s, _BACKOFF_MAX_S)

    async def close(self) -> None:
        """See Store."""
        if not self._closing.done():
            self._closing.set_result(None)
        for member in self._members:
            await member.channel.close()

    async def _follow(self, prefix: str, revision: int) -> AsyncGenerator[WatchBatch, None]:
        """Changes from `revision` on, with an empty batch for each other sign of life. Raises _WatchBroken."""
        member = await self._connected(asyncio.get_running_loop().time() + self._timeout_s)
        stream = member.watch.Watch(metadata=_REQUIRE_LEADER)
        create = WatchCreateRequest(key=prefix.encode(), range_end=prefix_range_end(prefix), start_revision=revision)
        try:
            await self._write(stream, WatchRequest(create_request=create))
            while True:
                response = await self._read(stream)
                if response is grpc.aio.EOF:
                    raise _WatchBroken("the stream ended")
                if response.canceled:
                    compacted = f"compacted up to {response.compact_revision}" if response.compact_revision else ""
                    raise _WatchBroken(response.cancel_reason or compacted or "cancelled by etcd")
                self._set_ready(True)
                yield _batch(response)
        except _WatchBroken:
            self._leave(member)
            raise
        except grpc.aio.AioRpcError as error:
            self._leave(member)
            raise _WatchBroken(f"{member.address}: {error.code().name} {error.details()}") from error
        except asyncio.InvalidStateError as error:  # write on a stream that has ended
            self._leave(member)
            raise _WatchBroken(f"{member.address}: {error}") from error
        finally:
            stream.cancel()

    async def _read(self, stream: Any) -> Any:
        """The next response; when none comes in time, ask for one, and give up when that isn't answered either."""
        reading = _task(stream.read())
        try:
            if not await self._done(reading, self._watch_idle_s):
                ask = WatchRequest()
                ask.progress_request.SetInParent()
                await self._write(stream, ask)
                if not await self._done(reading, self._timeout_s):
                    raise _WatchBroken("etcd fell silent")
            return reading.result()
        finally:
            reading.cancel()

    async def _write(self, stream: Any, request: Any) -> None:
        """Send on a watch stream; on a connection that hangs or is closed meanwhile that alone may take for ever."""
        writing = _task(stream.write(request))
        try:
            if not await self._done(writing, self._timeout_s):
                raise _WatchBroken("etcd takes no requests")
            writing.result()
        finally:
            writing.cancel()

    async def _done(self, work: asyncio.Future[Any], timeout_s: float) -> bool:
        """Whether `work` is done in time. Raises _WatchBroken when the store is closed meanwhile."""
        await asyncio.wait((work, self._closing), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._closed or work.cancelled():
            raise _WatchBroken("the store was closed")
        return work.done()

    async def _call(self, operation: Callable[[_Member, float], Awaitable[Answer]], *, once: bool = False) -> Answer:
        """Run an operation on a member that answers, trying others while time is left unless it may run `once` only.

        Raises StoreUnavailable, LeaseLost.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._timeout_s
        share_s = self._timeout_s if once else self._timeout_s / min(2, len(self._members))
        while True:
            member = await self._connected(deadline_s)
            try:
                answer = await operation(member, max(0.01, min(share_s, deadline_s - loop.time())))
            except (EtcdError, TimeoutError) as error:
                problem = f"{member.address}: {str(error) or 'no answer in time'}"
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND and "lease" in (error.details() or ""):
                    raise LeaseLost(error.details()) from None
                if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    raise  # what we asked makes no sense, on any member: a bug
                problem = f"{member.address}: {error.code().name} {error.details()}"
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not self._closed or (task is not None and task.cancelling()):
                    raise
                problem = "closed"  # closing the channel cancels the call, not the task that waits for it
            else:
                self._set_ready(True)
                return answer
            self._leave(member)
            if once or self._closed or loop.time() + _BACKOFF_FIRST_S >= deadline_s:
                self._set_ready(False)
                raise StoreUnavailable(f"etcd did not answer: {problem}", retry_after_s=1.0)
            await asyncio.sleep(_BACKOFF_FIRST_S)

    async def _connected(self, deadline_s: float) -> _Member:
        """The current member, or the next one there is a connection to. Raises StoreUnavailable at the deadline."""
        loop = asyncio.get_running_loop()
        while not self._closed:
            member = self._members[self._current]
            left_s = deadline_s - loop.time()
            if await member.connect(max(0.0, min(left_s, self._timeout_s / (2 * len(self._members))))):
                return member
            self._leave(member)
            if loop.time() >= deadline_s:
                break
        self._set_ready(False)
        tried = ", ".join(member.address for member in self._members)
        raise StoreUnavailable(f"no connection to etcd at {tried}", retry_after_s=1.0)

    def _leave(self, member: _Member) -> None:
        """Go to the next member, unless another call did already."""
        if self._members[self._current] is member:
            self._current = (self._current + 1) % len(self._members)

    def _set_ready(self, ready: bool) -> None:
        if ready != self._ready:
            self._ready = ready
            _log.info("etcd_ready" if ready else "etcd_away", members=[member.address for member in self._members])
            if self._on_ready is not None:
                self._on_ready(ready)


def _task(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A task that may be given up: its failure is then of no interest."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return task


async def _renew(member: _Member, lease: int, timeout_s: float) -> float:
    """Seconds the lease has after a renewal; not positive when it is gone."""
    stream = member.lease.keep_alive(lease)
    try:
        async with asyncio.timeout(timeout_s):
            response: Any = await stream.read()
    finally:
        stream.cancel()
    if response is grpc.aio.EOF:
        raise EtcdError("the keep-alive stream ended without an answer")
    return float(response.TTL)


def _versioned(kv: Any) -> Versioned:
    return Versioned(kv.key.decode(), bytes(kv.value), kv.mod_revision, kv.create_revision, kv.version)


def _batch(response: Any) -> WatchBatch:
    """One response as a change set; of several changes of a key the last counts."""
    newest: dict[str, Any] = {event.kv.key.decode(): event for event in response.events}
    puts = tuple(_versioned(event.kv) for event in newest.values() if event.type == event.PUT)
    deletes = tuple(key for key, event in newest.items() if event.type == event.DELETE)
    return WatchBatch(False, response.header.revision, puts, deletes)
