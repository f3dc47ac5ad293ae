"""The directory is killed under load and started again with the same files: nothing it acknowledged is lost."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import grpc
import grpc.aio
import pytest
from chaos.watching import progress, restart
from chaos.workload import working
from cluster import LocalCluster

from evolving.internal.v1 import directory_pb2, directory_pb2_grpc
from evolving.runtime.channel import open_channel
from evolving.v1 import common_pb2
from evolving.wire.status import parse_error

pytestmark = pytest.mark.slow

_CALL_S = 10.0


@dataclass
class Ledger:
    """Agents that call the directory themselves, and what it acknowledged to them."""

    stub: directory_pb2_grpc.DirectoryServiceAsyncStub
    versions: dict[str, int] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    unanswered: int = 0
    stopping: bool = False

    async def work(self, agent: int) -> None:
        """Branches begin, are rewritten and end, until stopped. A call without an answer is made again."""
        for number in itertools.count():
            branch = f"ledger-{agent}-{number}"
            for version in range(1, 2 + number % 3):
                await self._answered(functools.partial(self.begin, branch, version, f"v{version}"))
                self.versions[branch] = version
                if self.stopping:
                    return
            if number % 2:
                await self._answered(functools.partial(self.end, branch))
                self.ended.add(branch)

    async def begin(self, branch: str, version: int, request_id: str) -> directory_pb2.BeginResponse:
        """A request whose context has as many blocks as its version says."""
        names = b"".join(f"{branch}/{block}".encode().rjust(16, b".") for block in range(version))
        request = directory_pb2.BeginRequest(
            partition_id="p0",
            tenant="default",
            branch=common_pb2.BranchMetadata(branch_id=branch, version=version),
            request_id=request_id,
            new_names=names,
        )
        return await self.stub.Begin(request, timeout=_CALL_S)

    async def end(self, *branches: str) -> directory_pb2.EndResponse:
        """End branches."""
        request = directory_pb2.EndRequest(partition_id="p0", tenant="default", branch_ids=branches)
        return await self.stub.End(request, timeout=_CALL_S)

    async def _answered(self, call: Callable[[], Awaitable[object]]) -> None:
        while True:
            try:
                await call()
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise
                self.unanswered += 1
                await asyncio.sleep(0.05)
            else:
                return

    async def refusal(self, branch: str, version: int) -> str:
        """Why another request of a branch is refused."""
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await self.begin(branch, version, "another")
        return parse_error(refused.value).reason

    async def compare(self) -> None:
        """Every branch is as it was acknowledged."""
        for branch, version in self.versions.items():
            if branch in self.ended:
                assert await self.refusal(branch, version) == "BRANCH_ENDED", branch
                continue
            request = directory_pb2.ReadBranchRequest(partition_id="p0", tenant="default", branch_id=branch)
            view = (await self.stub.ReadBranch(request, timeout=_CALL_S)).branch
            assert (view.version, view.prompt_blocks) == (version, version), branch
            assert version == 1 or await self.refusal(branch, version - 1) == "STALE_VERSION", branch


async def test_nothing_the_directory_acknowledged_is_lost_when_it_is_killed(
    cluster: LocalCluster, addresses: list[str]
) -> None:
    async with (
        open_channel(cluster.processes["directory"].address) as channel,
        working(addresses, agents=5, seed=11) as load,
    ):
        ledger = Ledger(directory_pb2_grpc.DirectoryServiceStub(channel))
        agents = [asyncio.create_task(ledger.work(agent)) for agent in range(4)]
        for _ in range(3):
            await progress(load)
            cluster.kill("directory")
            await restart(cluster, "directory")
        await progress(load)
        ledger.stopping = True
        await asyncio.gather(*agents)
        assert ledger.unanswered, "it was killed under this load"
        assert len(ledger.ended) > 10
        await ledger.compare()
        live = ledger.versions.keys() - ledger.ended
        assert sorted((await ledger.end(*live)).ended_branch_ids) == sorted(live)
    assert load.failures == []
    assert load.finished > 0
