"""Processes die, freeze and restart under load: no request fails, no token is wrong, nothing is left."""

from __future__ import annotations

import asyncio
import signal

import pytest
from chaos.oracle import output_of
from chaos.watching import evolvectl, node_status, progress, restart, roles
from chaos.workload import Load, working
from cluster import LocalCluster

from evolving.v1 import common_pb2
from evolving_client import Client, Finished, RetryPolicy, Tokens

pytestmark = pytest.mark.slow


def worked(load: Load) -> None:
    """The load did what it is there for."""
    assert load.failures == []
    assert min(load.finished, load.left_early, load.late) > 0


async def test_every_process_killed_in_turn(cluster: LocalCluster, addresses: list[str]) -> None:
    prefill, decode = await roles(cluster, common_pb2.ROLE_PREFILL), await roles(cluster, common_pb2.ROLE_DECODE)
    victims = ["gateway", "directory", "planner", prefill[0], decode[0]]
    async with working(addresses, agents=6, seed=1) as load:
        for victim in victims:
            await progress(load)
            cluster.kill(victim)
            if victim != "directory":  # only it can acknowledge that a branch ended, which agents wait for
                await progress(load)
            await restart(cluster, victim)
    worked(load)


async def test_a_rolling_restart(cluster: LocalCluster, addresses: list[str]) -> None:
    async with working(addresses, agents=6, seed=2) as load:
        for batch in (["gateway-2", "node-a"], ["planner", "node-b", "directory"], ["gateway", "node-c"]):
            await progress(load)
            for name in batch:
                cluster.kill(name, signal.SIGTERM)
            waits = (asyncio.to_thread(cluster.wait_ended, name) for name in batch)
            assert await asyncio.gather(*waits) == [0] * len(batch)
            await restart(cluster, *batch)
    worked(load)


async def test_a_decode_node_that_freezes_costs_a_pause(cluster: LocalCluster, addresses: list[str]) -> None:
    prompt, tokens, victim = range(7, 300), 1_500, ""
    finished = None
    try:
        async with Client(*addresses, timeout_s=45) as client:
            received = 0
            async for event in client.generate(token_ids=prompt, max_tokens=tokens, ignore_eos=True):
                if isinstance(event, Tokens):
                    received += len(event.token_ids)
                    if received >= 20 and not victim:
                        (victim,) = (name for name, status in (await node_status(cluster)).items() if status.decoding)
                        cluster.kill(victim, signal.SIGSTOP)
                if isinstance(event, Finished):
                    finished = event
    finally:
        if victim:
            cluster.kill(victim, signal.SIGCONT)
    assert victim, "nothing was frozen"
    assert finished is not None
    assert finished.output_token_ids == output_of(prompt, tokens)
    assert (finished.attempts, finished.reconnects) == (1, 0)
    assert finished.decode_node_id != victim


async def test_the_split_flips_under_load(cluster: LocalCluster, addresses: list[str]) -> None:
    epochs = []
    async with working(addresses, agents=6, seed=4) as load:
        for shape in ("1P3D", "3P1D", "2P2D", "3P1D", "1P3D", "2P2D"):
            await progress(load, 5)
            epochs.append((await evolvectl(cluster, "split", "set", shape))["epoch"])
    worked(load)
    assert epochs == list(range(epochs[0], epochs[0] + len(epochs))), "one writer, one epoch each"


async def test_a_client_without_patience_learns_of_a_gateway_that_stops(
    cluster: LocalCluster, addresses: list[str]
) -> None:
    """Two addresses and no second try at either still are enough for every gateway's restart."""
    policy = RetryPolicy(max_failures=2, initial_backoff_s=0.0, max_backoff_s=0.0)
    prompt = range(3, 100)
    async with Client(*addresses, timeout_s=60, retry=policy) as client:
        running = asyncio.create_task(client.generate(token_ids=prompt, max_tokens=2_000, ignore_eos=True).finish())
        cluster.kill("gateway", signal.SIGTERM)
        assert (await running).output_token_ids == output_of(prompt, 2_000)
    await asyncio.to_thread(cluster.wait_ended, "gateway")
    await restart(cluster, "gateway")
