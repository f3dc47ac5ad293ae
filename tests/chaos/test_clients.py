"""Clients that vanish, stop reading, come twice, or end what still runs: others don't notice, and nothing leaks."""

from __future__ import annotations

import asyncio
import random
import struct
import subprocess
import sys
from pathlib import Path

import grpc
import grpc.aio
import pytest
from chaos.oracle import output_of
from chaos.watching import until
from chaos.workload import checked
from cluster import LocalCluster

from evolving.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from evolving_client import BranchEnded, Client, DeadlineExceeded, EvolvingError, Generation

pytestmark = pytest.mark.slow

PROMPT = range(1, 300)
_VANISHING = """
import asyncio, sys
from evolving_client import Client
async def read(branch):
    async for event in branch.generate(token_ids=range(300), max_tokens=1900, ignore_eos=True):
        print(event, flush=True)
async def main():
    async with Client(*sys.argv[2:]) as client:
        await asyncio.gather(*(read(client.branch(f"{sys.argv[1]}-{each}")) for each in range(20)))
asyncio.run(main())
"""


def request(prompt: range, max_tokens: int, request_id: str = "", branch_id: str = "") -> gateway_pb2.GenerateRequest:
    return gateway_pb2.GenerateRequest(
        request_id=request_id,
        token_ids=struct.pack(f"<{len(prompt)}I", *prompt),
        sampling=gateway_pb2.Sampling(max_tokens=max_tokens, ignore_eos=True),
        branch=common_pb2.BranchMetadata(branch_id=branch_id),
    )


async def test_a_client_that_is_killed(cluster: LocalCluster, addresses: list[str]) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _VANISHING, "vanished", *addresses, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    for _ in range(40):
        assert await process.stdout.readline()
    process.kill()
    await process.communicate()
    async with Client(*addresses, timeout_s=30) as client:  # the fixture sees that no leg is left
        await client.end([f"vanished-{each}" for each in range(20)])


async def test_clients_that_do_not_read_hold_up_nobody(cluster: LocalCluster, addresses: list[str]) -> None:
    async with grpc.aio.insecure_channel(addresses[0]) as channel, Client(addresses[0], timeout_s=60) as client:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        # Fewer than the decode slots: what is held back are their messages, not their slots.
        calls = [stub.Generate(request(PROMPT, 2_000), timeout=100) for _ in range(3)]
        for call in calls:
            await call.read()
        for each in range(5):
            prompt = [*PROMPT, each]
            await checked(client.generate(token_ids=prompt, max_tokens=10, ignore_eos=True), prompt, 10)
        for call in calls:
            call.cancel()


async def test_the_same_request_on_one_and_on_two_gateways(cluster: LocalCluster, addresses: list[str]) -> None:
    async def one(address: str) -> str:
        ids: list[int] = []
        async with grpc.aio.insecure_channel(address) as channel:
            call = gateway_pb2_grpc.GatewayServiceStub(channel).Generate(request(PROMPT, 100, "twice", "twice"))
            try:
                async for message in call:
                    assert not message.HasField("tokens") or message.tokens.index == len(ids)
                    ids += memoryview(message.tokens.token_ids).cast("I").tolist()
            except grpc.aio.AioRpcError as error:
                assert tuple(ids) == output_of(PROMPT, 100)[: len(ids)]
                return error.code().name
        assert tuple(ids) == output_of(PROMPT, 100)
        return "done"

    outcomes = await asyncio.gather(*(one(address) for address in (*addresses, *addresses, addresses[0])))
    assert sorted(outcomes) == ["ABORTED"] * 3 + ["done"] * 2, "the last call on each gateway goes on"
    async with Client(*addresses, timeout_s=30) as client:
        assert (await client.branch("twice").info()).running_requests == 0
        assert await client.end(["twice"]) == ("twice",)


async def test_ends_race_with_begins(cluster: LocalCluster, addresses: list[str]) -> None:
    async with Client(*addresses, timeout_s=60) as client:

        async def finish(generation: Generation) -> None:
            try:
                await generation.finish()
            except BranchEnded:
                return

        async def race(number: int) -> None:
            rng = random.Random(number)
            branch = client.branch(f"race-{number}")
            length = rng.randrange(1, 200)
            first = branch.generate(
                token_ids=PROMPT[:length], max_tokens=30, ignore_eos=True, end_after=rng.random() < 0.3
            )
            fork = branch.fork(f"race-{number}-fork").generate(token_ids=PROMPT, max_tokens=20, ignore_eos=True)
            running = [asyncio.create_task(finish(each)) for each in (first, fork)]
            await asyncio.sleep(rng.random() * 0.2)
            if rng.randrange(2):
                running[0].cancel()
            await client.end([branch.id], subtree=bool(rng.randrange(2)))
            for outcome in await asyncio.gather(*running, return_exceptions=True):
                assert outcome is None or isinstance(outcome, asyncio.CancelledError)

        await asyncio.gather(*(race(number) for number in range(60)))
        await client.end([f"race-{number}{kind}" for number in range(60) for kind in ("", "-fork")])


async def test_deadlines_of_every_length_leave_nothing(cluster: LocalCluster, addresses: list[str]) -> None:
    outcomes = set[type]()
    async with Client(*addresses) as client:

        async def caller(number: int) -> None:
            rng = random.Random(number)
            for _ in range(25):
                prompt = [rng.randrange(1, 31_000) for _ in range(rng.choice([3, 70, 900, 3_000]))]
                timeout_s = rng.choice([0.001, 0.01, 0.03, 0.1, 0.3])
                try:
                    await client.generate(
                        token_ids=prompt, max_tokens=rng.choice([1, 50]), ignore_eos=True, timeout_s=timeout_s
                    ).finish()
                except EvolvingError as error:
                    outcomes.add(type(error))

        await asyncio.gather(*(caller(number) for number in range(8)))
    assert outcomes == {DeadlineExceeded}


async def test_files_and_threads_don_t_grow_with_requests(cluster: LocalCluster, addresses: list[str]) -> None:
    names = [name for name in cluster.processes if name != "etcd"]

    def held(name: str) -> int:
        process = Path(f"/proc/{cluster.processes[name].pid}")
        return len(list((process / "fd").iterdir())) + len(list((process / "task").iterdir()))

    async with Client(*addresses, timeout_s=60) as client:

        async def some(count: int) -> None:
            for each in range(count):
                async with client.branch() as branch:
                    await branch.complete(token_ids=[each, *PROMPT], max_tokens=2, ignore_eos=True)

        await asyncio.gather(*(some(5) for _ in range(8)))
        before = {name: held(name) for name in names}
        await asyncio.gather(*(some(25) for _ in range(8)))
        # A connection of another service that was restarted earlier may still come or go; 200 requests would show.
        await until(
            lambda: all(held(name) <= before[name] + 10 for name in names), "something holds on to each request"
        )
