"""A directory in the test's own loop, nodes that speak its stream protocol, and gateways' calls."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from etcd_process import Etcd
from running import running
from waiting import WAIT_S, eventually

from evolving.core.blocks import split_names
from evolving.core.terms import Phase, Role, Tier
from evolving.internal.v1 import directory_pb2, directory_pb2_grpc
from evolving.runtime import keys as records
from evolving.runtime.channel import open_channel
from evolving.runtime.clock import SystemClock
from evolving.runtime.service import Service
from evolving.v1 import common_pb2
from evolving.v1 import directory_pb2 as public_pb2
from evolving.v1 import directory_pb2_grpc as public_grpc
from evolving_directory.__main__ import run_directory
from evolving_directory.settings import DirectorySettings

KEYS = records.Keys()
_Change = directory_pb2.KvChange


def context(label: str, blocks: int, after: bytes = b"") -> bytes:
    """Names of a context: `blocks` blocks called after `label` behind the names `after`."""
    names = [after] if after else []
    parent = after[-16:]
    for index in range(blocks):
        parent = hashlib.sha256(parent + f"{label}/{index}".encode()).digest()[:16]
        names.append(parent)
    return b"".join(names)


def blocks_of(names: bytes) -> list[bytes]:
    """One name each."""
    return [names[at : at + 16] for at in range(0, len(names), 16)]


@dataclass
class Directory:
    """Stubs of one directory."""

    service: Service[DirectorySettings]
    channel: grpc.aio.Channel
    internal: directory_pb2_grpc.DirectoryServiceAsyncStub
    public: public_grpc.DirectoryServiceAsyncStub

    async def begin(
        self, branch: str, names: bytes, request: str = "r1", base: bytes = b"", **metadata: Any
    ) -> directory_pb2.BeginResponse:
        """A request of a branch, as a gateway announces it."""
        return await self.internal.Begin(
            directory_pb2.BeginRequest(
                partition_id="p0",
                tenant="default",
                branch=common_pb2.BranchMetadata(branch_id=branch, **metadata),
                request_id=request,
                base_blocks=len(base) // 16,
                base_name=base[-16:],
                new_names=names,
            ),
            timeout=WAIT_S,
        )

    async def finish(self, branch: str, request: str = "r1") -> None:
        """The request is over."""
        await self.internal.Finish(
            directory_pb2.FinishRequest(partition_id="p0", tenant="default", branch_id=branch, request_id=request),
            timeout=WAIT_S,
        )

    async def end(self, *branches: str, subtree: bool = False) -> list[str]:
        """End branches; which ended."""
        answer = await self.internal.End(
            directory_pb2.EndRequest(partition_id="p0", tenant="default", branch_ids=branches, subtree=subtree),
            timeout=WAIT_S,
        )
        return list(answer.ended_branch_ids)

    async def branch(self, branch: str) -> common_pb2.Branch:
        """Read a branch."""
        request = public_pb2.ReadBranchRequest(branch_id=branch)
        return (await self.public.ReadBranch(request, timeout=WAIT_S)).branch

    async def stats(self) -> public_pb2.GetStatsResponse:
        """Sizes and counters."""
        return await self.public.GetStats(public_pb2.GetStatsRequest(), timeout=WAIT_S)

    async def audit(self) -> public_pb2.AuditResponse:
        """Compare the counts."""
        return await self.public.Audit(public_pb2.AuditRequest(), timeout=WAIT_S)


@asynccontextmanager
async def directory(etcd: Etcd, **settings: object) -> AsyncIterator[Directory]:
    """A directory that is ready."""
    values = {"etcd_endpoints": etcd.endpoints, "etcd_timeout_s": 2.0, "grace_s": 2.0, "metrics_listen": ""}
    service = Service(DirectorySettings(**{**values, **settings}), SystemClock())
    async with (
        running(service, run_directory(service), lambda: bool(service.address) and service.ready.ready),
        open_channel(service.address) as channel,
    ):
        internal = directory_pb2_grpc.DirectoryServiceStub(channel)
        yield Directory(service, channel, internal, public_grpc.DirectoryServiceStub(channel))


@dataclass
class Node:
    """A node agent as the directory sees it. Keeps what it holds and what it would evict by."""

    node_id: str
    incarnation: str = "1"
    sequence: int = 0  # of the last batch sent
    known_term: int = 0
    held: list[tuple[Tier, bytes]] = field(default_factory=list)  # whole contexts by tier
    told: dict[bytes, tuple[int, bool]] = field(default_factory=dict)  # count, and whether another node has it in L2
    complete: bool = False  # has all counts of the term it last heard of
    acknowledged: int = 0
    reports_acknowledged: int = 0
    resyncs: list[str] = field(default_factory=list)
    retiers: list[str] = field(default_factory=list)
    clears: list[str] = field(default_factory=list)
    count_sequences: list[int] = field(default_factory=list)
    answer_resyncs: bool = True
    error: grpc.aio.AioRpcError | None = None  # why the stream ended
    _heard: dict[bytes, tuple[int, bool]] = field(default_factory=dict)
    _channel: Any = None
    _call: Any = None
    _reader: asyncio.Task[None] | None = None

    @property
    def counts(self) -> dict[bytes, int]:
        """Counts above 0 by name."""
        return {name: count for name, (count, _) in self.told.items()}

    @property
    def elsewhere(self) -> set[bytes]:
        """Counted blocks that another node has in L2, as this one was told."""
        return {name for name, (_, elsewhere) in self.told.items() if elsewhere}

    @asynccontextmanager
    async def connected(self, to: Directory, read: bool = True) -> AsyncIterator[Node]:
        """The node's stream, open."""
        await self.connect(to, read)
        try:
            yield self
        finally:
            await self.disconnect()

    async def connect(self, to: Directory, read: bool = True) -> None:
        """Open the stream and say hello. Without `read` nothing that comes is ever looked at."""
        self._heard, self.complete, self.acknowledged, self.count_sequences, self.error = {}, False, 0, [], None
        self._channel = open_channel(to.service.address)
        self._call = directory_pb2_grpc.DirectoryServiceStub(self._channel).ConnectNode()
        hello = directory_pb2.NodeHello(
            partition_id="p0",
            node_id=self.node_id,
            incarnation=self.incarnation,
            next_sequence=self.sequence + 1,
            known_term=self.known_term,
        )
        await self.send(hello=hello)
        if read:
            self._reader = asyncio.create_task(self._read())

    async def disconnect(self) -> None:
        """Break the stream."""
        self._call.cancel()
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)
            self._reader = None
        await self._channel.close()

    async def send(self, **event: Any) -> None:
        """One event."""
        await self._call.write(directory_pb2.ConnectNodeRequest(**event))

    async def store(self, *contexts: bytes, tier: Tier = Tier.L2, skip: int = 0) -> None:
        """These contexts became present in a tier, but for their first `skip` blocks."""
        self.held += [(tier, names) for names in contexts]
        await self.send_batch([_stored(tier, names, skip) for names in contexts])

    async def remove(self, names: bytes, keep: int = 0, tier: Tier = Tier.L2) -> None:
        """All but the first `keep` blocks of a context left a tier."""
        self.held = [entry for entry in self.held if entry != (tier, names)]
        if keep:
            self.held.append((tier, names[: keep * 16]))
        change = _Change(
            kind=_Change.KIND_REMOVED, tier=common_pb2.Tier.ValueType(tier), first_block=0, names=names, skip=keep
        )
        await self.send_batch([change])

    async def send_batch(self, changes: Sequence[directory_pb2.KvChange]) -> None:
        """The next batch."""
        self.sequence += 1
        await self.send(kv=directory_pb2.KvBatch(sequence=self.sequence, changes=changes))

    async def send_snapshot(self) -> None:
        """Everything held, in one batch a context."""
        for tier, names in self.held:
            self.sequence += 1
            batch = directory_pb2.KvBatch(sequence=self.sequence, changes=[_stored(tier, names, 0)], snapshot=True)
            await self.send(kv=batch)
        self.sequence += 1
        await self.send(kv=directory_pb2.KvBatch(sequence=self.sequence, snapshot=True, snapshot_end=True))

    async def landed(self, branch: str, blocks: int, phase: Phase, request: str = "r1", version: int = 1) -> None:
        """KV of the first blocks of a request's prompt is here."""
        await self.send(
            landed=directory_pb2.Landed(
                tenant="default",
                branch_id=branch,
                version=version,
                request_id=request,
                phase=common_pb2.Phase.ValueType(phase),
                blocks=blocks,
            )
        )

    async def output(self, branch: str, first_block: int, names: bytes, request: str = "r1", version: int = 1) -> None:
        """Output completed these blocks."""
        await self.send(
            output=directory_pb2.Output(
                tenant="default",
                branch_id=branch,
                version=version,
                request_id=request,
                first_block=first_block,
                names=names,
            )
        )

    async def done(self, branch: str, request: str = "r1") -> None:
        """A request is over."""
        await self.send(done=directory_pb2.RequestDone(tenant="default", branch_id=branch, request_id=request))

    async def taken(self) -> None:
        """Wait until the directory acknowledged everything sent."""

        async def acknowledged() -> bool:
            assert self.error is None, self.error
            return self.acknowledged >= self.sequence

        await eventually(acknowledged)

    async def counts_become(self, expected: dict[bytes, int]) -> None:
        """Wait until the node evicts by exactly these counts."""

        async def same() -> bool:
            assert self.error is None, self.error
            return self.complete and self.counts == expected

        try:
            await eventually(same)
        except TimeoutError:
            raise AssertionError(f"complete={self.complete} counts={self.counts}, not {expected}") from None

    async def elsewhere_becomes(self, expected: Iterable[bytes]) -> None:
        """Wait until the node was told of exactly these blocks that another node has them."""
        names = set(expected)

        async def same() -> bool:
            assert self.error is None, self.error
            return self.complete and self.elsewhere == names

        try:
            await eventually(same)
        except TimeoutError:
            raise AssertionError(f"complete={self.complete} told={self.told}, not {names} elsewhere") from None

    async def stream_ended(self) -> grpc.aio.AioRpcError:
        """Wait until the directory ended the stream; why."""

        async def ended() -> bool:
            return self.error is not None

        await eventually(ended)
        assert self.error is not None
        return self.error

    async def _read(self) -> None:
        try:
            async for message in self._call:
                await self._take(message)
        except grpc.aio.AioRpcError as error:
            self.error = error

    async def _take(self, message: directory_pb2.ConnectNodeResponse) -> None:
        assert message.term >= self.known_term, "a directory of a lower term"
        self.known_term = message.term
        kind = message.WhichOneof("event")
        if kind == "ack":
            self.acknowledged, self.reports_acknowledged = message.ack.sequence, message.ack.reports
        elif kind == "resync":
            self.resyncs.append(message.resync.reason)
            self._heard, self.complete = {}, False
            if self.answer_resyncs:
                await self.send_snapshot()
        elif kind == "counts":
            self._take_counts(message.counts)
        elif kind == "counts_query":
            entries = [
                directory_pb2.CountedBlocks(names=name, count=count, elsewhere=elsewhere)
                for name, (count, elsewhere) in self.told.items()
            ]
            query_id = message.counts_query.query_id
            await self.send(counts_reply=directory_pb2.CountsReply(query_id=query_id, counts=entries[::2]))
            await self.send(counts_reply=directory_pb2.CountsReply(query_id=query_id, counts=entries[1::2], last=True))
        elif kind == "clear":
            self.clears.append(message.clear.reason)
        else:
            self.retiers.append(message.retier.reason)

    def _take_counts(self, counts: directory_pb2.Counts) -> None:
        self.count_sequences.append(counts.sequence)
        heard = {
            name: (blocks.count, blocks.elsewhere) for blocks in counts.counts for name in split_names(blocks.names)
        }
        self._heard |= heard
        self.told |= heard
        if counts.complete:
            self.told, self.complete = dict(self._heard), True
        self.told = {name: (count, elsewhere) for name, (count, elsewhere) in self.told.items() if count}


def _stored(tier: Tier, names: bytes, skip: int) -> directory_pb2.KvChange:
    return _Change(
        kind=_Change.KIND_STORED, tier=common_pb2.Tier.ValueType(tier), first_block=0, names=names, skip=skip
    )


def split_record(epoch: int, **roles: Role) -> bytes:
    """The split in etcd."""
    texts = {node: role.name.lower() for node, role in roles.items()}
    return records.encode(records.Split(epoch, texts, "test", "test", 0.0))  # type: ignore[arg-type]
