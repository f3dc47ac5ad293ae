"""Processes are killed under load while roles change every second: no request fails, and one planner writes at a time.

Every fault is shown to have struck: the node that is killed has a leg of a known request in the phase meant, and that
request is moved.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from chaos.faulty_cluster import FaultyCluster, spec_in
from chaos.role_changes import RoleChanges, roles_changing
from chaos.split_log import SplitWrite, claims_of, faults_of, split_log
from chaos.watching import moves, progress, restart, settled, status_of, until
from chaos.workload import Asked, Load, working

from evolving.runtime.channel import open_channel
from evolving.runtime.keys import Keys, Split
from evolving.v1 import common_pb2, directory_pb2, directory_pb2_grpc
from evolving_client import Branch, Finished

pytestmark = pytest.mark.slow

_CALL_S = 10.0
_TRIES = 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyCluster]:
    """Four nodes, two planners, two gateways, a directory and three members of etcd."""
    running = FaultyCluster(spec_in(tmp_path_factory.mktemp("faults")))
    running.start()
    try:
        yield running
    finally:
        assert running.stop() == [], "these did not stop in their grace period"


@dataclass(slots=True)
class Scene:
    """A cluster under load. The clients of `loads[0]` begin at the first gateway, those of `loads[1]` at the second."""

    cluster: FaultyCluster
    loads: tuple[Load, Load]
    changes: RoleChanges

    async def flows(self) -> None:
        """Requests finish and roles change, whatever was done."""
        await asyncio.gather(*(progress(load, 4) for load in self.loads), self.changes.go_on())

    async def prefilling(self) -> tuple[str, Asked, asyncio.Task[Finished]]:
        """A node, and a request whose prompt it computes right now."""
        for _ in range(_TRIES):
            _, asked, task = self._ask(prompt_tokens=3_000, max_tokens=5)
            while not asked.received and not task.done():
                node = asked.prefill_node_id
                status = await status_of(self.cluster, node) if node else None
                # It was sent there, and what is queued there is too little to be it.
                working = status is not None and status.prefilling_legs and status.queued_tokens < len(asked.prompt) / 2
                if working and node == asked.prefill_node_id and not asked.received:
                    return node, asked, task
                await asyncio.sleep(0.01)
            await task
        raise AssertionError("no request was caught in its prefill")

    async def decoding(self) -> tuple[str, Asked, asyncio.Task[Finished]]:
        """A node, and a request whose output it makes right now."""
        for _ in range(_TRIES):
            branch, asked, task = self._ask(prompt_tokens=200, max_tokens=250)
            while asked.received < asked.max_tokens / 2 and not task.done():
                homes = await self._decode_homes(branch) if asked.received else set()
                if len(homes) == 1:
                    return homes.pop(), asked, task
                await asyncio.sleep(0.01)
            await task
        raise AssertionError("no request was caught in its decode")

    def _ask(self, prompt_tokens: int, max_tokens: int) -> tuple[Branch, Asked, asyncio.Task[Finished]]:
        load = self.loads[0]
        branch = load.keep(load.client.branch())
        asked = Asked(load.tokens(random.Random(prompt_tokens), prompt_tokens), max_tokens)
        return branch, asked, asyncio.create_task(load.ask(branch, asked, priority=100))

    async def _decode_homes(self, branch: Branch) -> set[str]:
        """Where the KV of a branch that has one request was handed over to."""
        async with open_channel(self.cluster.processes["directory"].address) as channel:
            request = directory_pb2.ReadBranchRequest(branch_id=branch.id)
            answer = await directory_pb2_grpc.DirectoryServiceStub(channel).ReadBranch(request, timeout=_CALL_S)
        return {home.node_id for home in answer.branch.homes if home.phase == common_pb2.PHASE_DECODE}


@asynccontextmanager
async def disturbed(cluster: FaultyCluster, addresses: list[str]) -> AsyncIterator[Scene]:
    """A cluster under load whose roles change. When it is over every request has its result, the split has had one
    writer at a time and nothing is left behind."""
    async with (
        working(addresses, agents=3, seed=21, max_tokens=60) as first,
        working(addresses[::-1], agents=3, seed=22, max_tokens=60) as second,
        roles_changing(list(cluster.planners)) as changes,
    ):
        scene = Scene(cluster, (first, second), changes)
        await scene.flows()
        try:
            yield scene
        finally:
            await cluster.heal()
        await scene.flows()
    for load in scene.loads:
        assert load.failures == []
        assert load.open == [], "these were asked and never answered"
    writes = await split_log(cluster.etcd.endpoints, Keys(partition=cluster.spec.partition_id))
    claims = claims_of(cluster)
    assert claims, "planners say what they write"
    assert faults_of(writes, claims) == []
    assert faults_of(writes, {epoch: {address} for epoch, address in changes.by.items()}) == [], "as was acknowledged"
    await settled(cluster)


async def a_planner_that_leads(scene: Scene) -> None:
    address = await scene.changes.leader()
    name = scene.cluster.planners[address]
    scene.cluster.kill(name)
    await scene.flows()
    assert await scene.changes.leader() != address


async def an_etcd_member(scene: Scene) -> None:
    """The one that leads the others."""
    member = await scene.cluster.etcd.leader()
    member.kill()
    await scene.flows()
    assert await scene.cluster.etcd.leader() is not member


async def all_of_etcd(scene: Scene, away_s: float = 12.0) -> None:
    """Longer than anybody's lease, so that nobody leads and no registration is renewed in time."""
    scene.cluster.etcd.kill()
    changed = len(scene.changes.by)
    async with asyncio.timeout(away_s + 60):
        await asyncio.gather(asyncio.sleep(away_s), *(progress(load, 20) for load in scene.loads))
    assert len(scene.changes.by) <= changed + 1, "one may have been acknowledged just before"


async def all_of_etcd_for_a_minute(scene: Scene) -> None:
    await all_of_etcd(scene, 60.0)


async def a_planner_that_freezes(scene: Scene) -> None:
    """It wakes up when another leads, and must not write as if it still led."""
    address = await scene.changes.leader()
    name = scene.cluster.planners[address]
    scene.cluster.kill(name, signal.SIGSTOP)
    try:
        await scene.flows()
    finally:
        scene.cluster.kill(name, signal.SIGCONT)
    assert await scene.changes.leader() != address


async def a_node_that_prefills(scene: Scene) -> None:
    name, asked, task = await scene.prefilling()
    scene.cluster.kill(name)
    assert asked.received == 0
    await scene.flows()
    finished = await task
    assert finished.attempts > 0, f"{name} had it in prefill"


async def a_node_that_decodes(scene: Scene) -> None:
    name, asked, task = await scene.decoding()
    scene.cluster.kill(name)
    assert 0 < asked.received < asked.max_tokens
    await scene.flows()
    finished = await task
    assert finished.attempts > 0, f"{name} had it in decode"
    assert finished.decode_node_id != name


async def an_engine(scene: Scene) -> None:
    """It dies at work: after so many iterations, and without work it has none."""
    cluster, name = scene.cluster, "node-a"
    sound = cluster.processes[name].command
    cluster.kill(name)
    cluster.processes[name].command = [*sound, "--mock-crash-after-iterations", "100"]
    await restart(cluster, name)
    before = await moves(cluster, "ENGINE_DOWN")
    async with asyncio.timeout(60):
        while await moves(cluster, "ENGINE_DOWN") == before:
            await asyncio.sleep(0.1)
        while (await status_of(cluster, name)).engine_starts < 2:
            await asyncio.sleep(0.1)
    cluster.kill(name)
    cluster.processes[name].command = sound


async def a_gateway(scene: Scene) -> None:
    """Its clients go to the other one with the ids of their requests and the tokens they have."""
    load = scene.loads[0]
    await until(lambda: any(each.received for each in load.open), "the first gateway has a stream")
    scene.cluster.kill("gateway")
    streams = [each for each in load.open if each.received]
    assert streams
    await scene.flows()
    await until(lambda: all(each.result for each in streams) or bool(load.failures), "they go on at the other one")
    assert any(each.result and each.result.reconnects for each in streams)


Fault = Callable[[Scene], Awaitable[None]]
FAULTS: tuple[Fault, ...] = (
    a_planner_that_leads,
    an_etcd_member,
    all_of_etcd,
    a_node_that_prefills,
    a_node_that_decodes,
    an_engine,
    a_gateway,
)


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.__name__ for fault in FAULTS])
async def test_no_request_notices(cluster: FaultyCluster, addresses: list[str], fault: Fault) -> None:
    async with disturbed(cluster, addresses) as scene:
        await fault(scene)


def test_what_a_history_of_the_split_must_not_have() -> None:
    def write(epoch: int, leader: str, office: int) -> SplitWrite:
        return SplitWrite(Split(epoch, {}, "", "", 0.0), leader, office)

    good = [write(1, "a", 5), write(2, "a", 5), write(4, "b", 9)]
    assert faults_of(good, {1: {"a"}, 4: {"b"}}) == []
    for bad in (write(4, "b", 9), write(3, "b", 9), write(5, "a", 5), write(5, "", 0)):
        assert faults_of([*good, bad], {})
    for claims in ({1: {"b"}}, {1: {"a", "b"}}, {3: {"b"}}):
        assert faults_of(good, claims)


DEEP_FAULTS: tuple[Fault, ...] = (all_of_etcd_for_a_minute, a_planner_that_freezes)


@pytest.mark.deep
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", DEEP_FAULTS, ids=[fault.__name__ for fault in DEEP_FAULTS])
async def test_nor_a_longer_fault(cluster: FaultyCluster, addresses: list[str], fault: Fault) -> None:
    async with disturbed(cluster, addresses) as scene:
        await fault(scene)
