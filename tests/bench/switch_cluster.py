"""Our side of bench-switch: a cluster of three nodes, its split written as an operator writes it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from bench.switch_arm import NODES, START, Plan, measure
from bench.switch_figures import Phase, Seen, Switch
from bench.switch_load import BLOCK_TOKENS, CHUNK_TOKENS, OUTPUT_TOKENS, Turn, TurnFailed
from cluster import ClusterSpec, LocalCluster

from evolving.internal.v1 import node_agent_pb2, node_agent_pb2_grpc
from evolving.runtime.clock import SystemClock
from evolving.runtime.etcd import EtcdStore
from evolving.runtime.keys import Keys, Split, decode
from evolving.v1 import common_pb2, planner_pb2, planner_pb2_grpc
from evolving_client import Client, EvolvingError, Finished, Tokens
from evolving_replay.tally import lost

_CALL_S = 10.0
_ROLES = {"prefill": common_pb2.ROLE_PREFILL, "decode": common_pb2.ROLE_DECODE}
_DECODE_SLOTS = {"mock": 8, "sglang": 5}  # so few that requests wait for decode too while one node has it
_MOCK_SPEED_UP = 0.1  # the mock is a big model on a GPU; so slow, requests of these sizes have to wait


class OurCluster:
    """Asks the gateway."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def turn(self, branch: str, prompt: tuple[int, ...], ideal_tokens: int, came: Callable[[int], None]) -> Turn:
        """See Target."""
        times: list[float] = []
        generation = self._client.branch(branch).generate(
            token_ids=prompt, max_tokens=OUTPUT_TOKENS, ignore_eos=True, timeout_s=300.0
        )
        finished = None
        try:
            async for event in generation:
                if isinstance(event, Tokens):
                    times += [time.monotonic()] * len(event.token_ids)
                    came(len(times))
                elif isinstance(event, Finished):
                    finished = event
        except EvolvingError as error:
            raise TurnFailed(error.reason or type(error).__name__) from error
        assert finished is not None
        return Turn(
            finished.output_token_ids,
            times[0],
            times[1],
            finished.timings.prefill_s,
            finished.prefill_node_id,
            finished.decode_node_id,
            lost(ideal_tokens, finished).by,
            moved=finished.attempts > 0 or finished.reconnects > 0,
        )

    async def end(self, branch: str) -> None:
        """See Target."""
        try:
            await self._client.end([branch])
        except EvolvingError as error:
            raise TurnFailed(error.reason or type(error).__name__) from error


class Splits:
    """Writes splits, and sees them arrive in etcd."""

    def __init__(self, store: EtcdStore, planner: planner_pb2_grpc.PlannerServiceAsyncStub, keys: Keys) -> None:
        self._store = store
        self._planner = planner
        self._keys = keys
        self._written_s: dict[int, float] = {}  # by epoch, when the watch told

    async def watch(self) -> None:
        """For ever."""
        async for batch in self._store.watch(self._keys.split):
            now_s = time.monotonic()
            for item in batch.puts:
                self._written_s.setdefault(decode(Split, item.value).epoch, now_s)

    async def set(self, phases: Mapping[str, Phase]) -> int:
        """Give nodes these roles; others keep theirs. The split's epoch, once it is written."""
        changes = planner_pb2.RoleChanges(roles={node: _ROLES[phase] for node, phase in phases.items()})
        request = planner_pb2.ProposeSplitRequest(changes=changes, reason="benchmark")
        return (await self._planner.ProposeSplit(request, timeout=_CALL_S)).split.epoch

    async def switch(self, node: str, phase: Phase, waiting: Callable[[], int]) -> Switch:
        """As an operator does it. What tells first of the write, its watch or the answer, is taken for its time."""
        waited = waiting()
        epoch = await self.set({node: phase})
        written_s = min(time.monotonic(), self._written_s.get(epoch, math.inf))
        return Switch(node, phase, written_s, waited)


class Watch:
    """What nodes say of themselves: on change, at most every 50 ms."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self.seen: dict[str, list[Seen]] = {node: [] for node in NODES}

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for node in NODES:
                group.create_task(self._follow(node))

    async def _follow(self, node: str) -> None:
        async with _statuses(self._cluster, node) as statuses:
            async for status in statuses:
                legs = status.prefilling_legs, status.queued_legs, status.decoding, status.reserved
                self.seen[node].append(Seen(time.monotonic(), *legs))


@asynccontextmanager
async def _statuses(
    cluster: LocalCluster, node: str
) -> AsyncIterator[AsyncIterator[node_agent_pb2.WatchStatusResponse]]:
    """A node's status stream."""
    async with grpc.aio.insecure_channel(cluster.processes[node].address) as channel:
        stub: Any = node_agent_pb2_grpc.NodeAgentServiceStub(channel)
        call = stub.WatchStatus(node_agent_pb2.WatchStatusRequest(partition_id=cluster.spec.partition_id))
        try:
            yield call
        finally:
            call.cancel()


def spec(engine: str, model: Path, state: Path, fetch: str) -> ClusterSpec:
    """Three nodes with either engine: small blocks, as prompts are short."""
    node_flags = ["--block-tokens", BLOCK_TOKENS, "--chunk-tokens", CHUNK_TOKENS]
    node_flags += ["--decode-slots", _DECODE_SLOTS[engine]]
    if engine == "mock":
        node_flags += ["--mock-speed-up", _MOCK_SPEED_UP]
    else:
        node_flags += ["--l1-tokens", 4096, "--l2-tokens", 16_384, "--max-prompt-tokens", 512]
    return ClusterSpec(
        state_dir=state,
        nodes=len(NODES),
        engine=engine,
        model_path=model if engine == "sglang" else state / "no-model",
        gateway_port=0,
        planner_flags=("--mode", "manual"),  # nobody switches but this benchmark
        node_flags=tuple(map(str, node_flags)),
        gateway_flags=("--fetch", fetch),
    )


async def measure_cluster(engine: str, model: Path, state: Path, fetch: str, plan: Plan) -> dict[str, Any]:
    """Start it, measure it, stop it."""
    cluster = LocalCluster(spec(engine, model, state, fetch), print)
    await asyncio.to_thread(cluster.start)
    try:
        return await _measure(cluster, engine, fetch, plan)
    finally:
        await asyncio.to_thread(cluster.stop)


async def _measure(cluster: LocalCluster, engine: str, fetch: str, plan: Plan) -> dict[str, Any]:
    before = await _lives(cluster)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(cluster.gateway_address))
        channel = grpc.aio.insecure_channel(cluster.processes["planner"].address)
        planner: Any = planner_pb2_grpc.PlannerServiceStub(await stack.enter_async_context(channel))
        store = await stack.enter_async_context(EtcdStore([cluster.etcd_address], clock=SystemClock()))
        splits = Splits(store, planner, Keys(partition=cluster.spec.partition_id))
        watch = Watch(cluster)
        for watching in (splits.watch(), watch.run()):
            stack.callback(asyncio.create_task(watching).cancel)
        await splits.set(START)
        figures = await measure(OurCluster(client), splits.switch, plan, engine, watch.seen)
    after = await _lives(cluster)
    restarted = sorted(name for name in before if before[name] != after[name])
    return {"engine": engine, "fetch": fetch, **figures, "restarted": restarted}


async def _lives(cluster: LocalCluster) -> dict[str, tuple[Any, ...]]:
    """What changes when a process or an engine is started again."""
    lives: dict[str, tuple[Any, ...]] = {}
    for name, process in cluster.processes.items():
        lives[name] = (process.pid, process.alive())
        if name in NODES:
            async with _statuses(cluster, name) as statuses:
                status = await anext(aiter(statuses))
                lives[name] += (status.engine_starts, status.engine_pid, status.incarnation)
    return lives
