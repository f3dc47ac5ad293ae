"""evolvectl as an operator runs it: a process that finds the cluster through etcd."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from etcd3aio.kv import KVService
from etcd_process import Etcd
from grpc import aio
from scripted_cluster import ScriptedDirectory, ScriptedNode, ScriptedPlanner, nobody, running
from scripted_gateway import Play, ScriptedGateway, output_ids, pack, serve, text_of

from evolving.internal.v1 import node_agent_pb2
from evolving.runtime.keys import Keys, NodeRegistration, ServiceRegistration, Split, encode
from evolving.v1 import common_pb2, directory_pb2
from evolving_client.ctl.failure import Failure
from evolving_client.ctl.plain import plain
from evolving_client.ctl.registry import parse_registry

EVOLVECTL = Path(sys.executable).with_name("evolvectl")
README = Path(__file__).parents[2] / "libs" / "client" / "README.md"
KEYS = Keys()


@dataclass
class Partition:
    """What is registered in an etcd, and processes that look at it."""

    etcd: Etcd
    environment: dict[str, str] = field(default_factory=dict)

    async def put(self, key: str, value: bytes) -> None:
        """Write a key."""
        async with aio.insecure_channel(self.etcd.endpoints[0]) as channel:
            await KVService(channel).put(key, value, timeout=5)

    async def node(self, node_id: str, address: str) -> None:
        """Register a node agent."""
        registration = NodeRegistration(
            node_id=node_id,
            incarnation=f"{node_id}-1",
            address=address,
            model="m",
            kv_format="f",
            block_tokens=64,
            vocab_size=100,
            max_prompt_tokens=900,
            max_context_tokens=1000,
            l1_tokens=1000,
            reserve_tokens=400,
            l2_tokens=4000,
            decode_slots=8,
            chunk_tokens=512,
            kv_bytes_per_token=4,
            transfer_address="",
            pool_address="",
            prefill_coefficients=(0, 0, 0, 0, 0),
            decode_coefficients=(0, 0, 0, 0),
        )
        await self.put(KEYS.node(node_id), encode(registration))

    async def service(self, kind: Any, instance: str, address: str, started_at_s: float = 86400.0) -> None:
        """Register a service instance."""
        registration = ServiceRegistration(kind, instance, address, "1.2", started_at_s)
        await self.put(KEYS.service(kind, instance), encode(registration))

    async def run(self, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
        """Exit code, standard output and standard error of evolvectl."""
        process = await asyncio.create_subprocess_exec(
            EVOLVECTL,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "EVOLVING_ETCD": ",".join(self.etcd.endpoints), **self.environment},
        )
        out, err = await process.communicate(stdin.encode())
        assert process.returncode is not None
        return process.returncode, out.decode(), err.decode()


@pytest.fixture
def partition(etcd: Etcd) -> Partition:
    return Partition(etcd)


@pytest.fixture
async def gateway() -> ScriptedGateway:
    return ScriptedGateway()


@pytest.fixture
async def gateway_address(gateway: ScriptedGateway) -> AsyncIterator[str]:
    server, address = await serve(gateway)
    yield address
    await server.stop(None)


READY = node_agent_pb2.WatchStatusResponse(
    node_id="node-a",
    incarnation="node-a-1",
    role=common_pb2.ROLE_PREFILL,
    epoch=5,
    ready=True,
    wait_s=0.25,
    queued_legs=3,
    queued_tokens=700,
    prefilling_legs=2,
    holding_legs=1,
    decoding=4,
    decode_slots_free=28,
    l1_used_tokens=250,
    l1_total_tokens=1000,
    l2_used_tokens=2000,
    l2_total_tokens=4000,
    l2_zero_tokens=500,
    fetch_backlog_tokens=640,
    engine_starts=2,
    engine_pid=4711,
)


def documented() -> set[str]:
    """What the README's table of `status` names."""
    rows = README.read_text().split("| `status` |")[1].split("| `split show`")[0]
    return set(re.findall(r"`([a-z0-9_]+)`", rows))


async def test_status_asks_every_node_and_service(partition: Partition) -> None:
    split = Split(
        epoch=5,
        roles={"node-a": "prefill", "node-b": "decode", "node-d": "decode"},
        reason="",
        author="",
        written_at_s=0,
    )
    await partition.put(KEYS.split, encode(split))
    with ExitStack() as stack:
        ready = stack.enter_context(running(ScriptedNode(status=READY)))
        silent = stack.enter_context(running(ScriptedNode()))
        starting = stack.enter_context(running(ScriptedNode(status=node_agent_pb2.WatchStatusResponse())))
        planner = ScriptedPlanner()
        planner.split.mode, planner.split.hold.author = "manual", "operator:me"
        leading = stack.enter_context(running(planner))
        standby = stack.enter_context(running(ScriptedPlanner(), serving=False))
        gone = nobody()
        for node_id, address in {"node-a": ready, "node-b": silent, "node-c": starting, "node-d": gone}.items():
            await partition.node(node_id, address)
        await partition.service("planner", "p-1", standby)
        await partition.service("planner", "p-2", leading)
        await partition.service("directory", "d-1", gone)
        await partition.put(KEYS.leader("planner"), leading.encode())
        code, table, err = await partition.run("status", "--timeout-s", "2")
        assert (code, err) == (0, "")
        _, as_json, _ = await partition.run("status", "--json", "--timeout-s", "2")
    value = json.loads(as_json)
    assert (value["partition"], value["epoch"], value["split"]) == ("p0", 5, split.roles)
    assert value["leaders"] == {"planner": leading}
    assert (value["mode"], value["hold"]["author"]) == ("manual", "operator:me")
    nodes = {node["node_id"]: node for node in value["nodes"]}
    assert {name: node["state"] for name, node in nodes.items()} == {
        "node-a": "ready",
        "node-b": "unreachable",
        "node-c": "starting",
        "node-d": "unreachable",
    }
    told = plain(READY)
    told.pop("ready")
    assert nodes["node-a"] == {**told, "address": ready, "model": "m", "state": "ready"}
    assert set(nodes["node-d"]) == set(nodes["node-a"]), "the same fields, whatever state"
    assert nodes["node-d"]["role"] is None
    assert documented() >= {*value, *nodes["node-a"], *value["services"][0]}
    services = {service["instance"]: (service["health"], service["leads"]) for service in value["services"]}
    assert services == {"p-1": ("not_serving", False), "p-2": ("serving", True), "d-1": ("unreachable", None)}

    lines = [line.split() for line in table.splitlines()]
    assert "split 1P2D +1 mixed · epoch 5" in table, "the split's role where a node can't say its own"
    assert f"planner: {leading} leads" in table
    assert "mode manual · held by operator:me until released" in table
    (row,) = (line for line in lines if line[:1] == ["node-a"])
    legs = ["3", "640", "2", "1", "4", "28"]
    kv = ["250/1000", "25%", "2000/4000", "50%", "25%"]
    assert row == ["node-a", "ready", "prefill", "5", "0.25s", *legs, *kv, "4711", "2", ready]
    (row,) = (line for line in lines if line[:1] == ["node-d"])
    assert row[:3] == ["node-d", "unreachable", "decode"]


async def test_an_empty_partition_is_shown_as_such(partition: Partition) -> None:
    code, out, _ = await partition.run("status", "--json")
    assert code == 0
    assert json.loads(out)["nodes"] == []
    assert json.loads(out)["mode"] is json.loads(out)["hold"] is None
    code, _, err = await partition.run("audit")
    assert code == 3
    assert "no directory is registered in partition p0" in err


async def test_partitions_and_prefixes_are_apart(partition: Partition) -> None:
    directory = ScriptedDirectory(audit=directory_pb2.AuditResponse(compared=1))
    with running(directory) as address:
        registration = ServiceRegistration("directory", "d", address, "1", 0.0)
        await partition.put("/other/p00/services/directory/d", encode(registration))
        assert (await partition.run("--prefix", "/other", "--partition", "p00", "audit"))[0] == 0
        assert (await partition.run("--prefix", "/other/", "--partition", "p0", "audit"))[0] == 3
        partition.environment.update(EVOLVING_PREFIX="/other/", EVOLVING_PARTITION="p00")
        assert (await partition.run("audit"))[0] == 0


async def test_the_newest_directory_is_asked_first_and_the_rest_when_it_is_gone(partition: Partition) -> None:
    older, newer = ScriptedDirectory(), ScriptedDirectory()
    with running(older) as older_address:
        await partition.service("directory", "a", older_address, started_at_s=1.0)
        with running(newer) as newer_address:
            await partition.service("directory", "b", newer_address, started_at_s=2.0)
            assert (await partition.run("branch", "ls"))[0] == 0
            assert (len(older.requests), len(newer.requests)) == (0, 1)
        assert (await partition.run("branch", "ls"))[0] == 0
        assert len(older.requests) == 1


async def test_generate_streams_the_text(partition: Partition, gateway: ScriptedGateway, gateway_address: str) -> None:
    await partition.service("gateway", "g", gateway_address)
    gateway.plays.append(Play(fail_at=3))
    code, out, err = await partition.run(
        "generate", "Hi there", "--system", "Be brief.", "--max-tokens", "6", "--branch", "b", "--temperature", "0.5"
    )
    assert (code, out) == (0, text_of(output_ids(6)) + "\n")
    assert "6 output tokens" in err
    request = gateway.requests[-1]
    assert [(message.role, message.content) for message in request.chat.messages] == [
        ("system", "Be brief."),
        ("user", "Hi there"),
    ]
    assert (request.branch.branch_id, request.sampling.max_tokens, request.sampling.temperature) == ("b", 6, 0.5)
    assert request.resume_from == 3


async def test_generate_reads_standard_input(
    partition: Partition, gateway: ScriptedGateway, gateway_address: str
) -> None:
    code, out, err = await partition.run(
        "--gateway", gateway_address, "generate", "--raw", "--json", stdin="Once\nupon"
    )
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["output_token_ids"] == output_ids(128)
    assert (result["reason"], result["cached"]["own_l2"], result["reconnects"]) == ("length", 2, 0)
    assert result["reuse"] == {"pool_tokens": 4, "planned_tokens": 3, "loss": "node"}
    assert gateway.requests[0].text == "Once\nupon"
    assert not gateway.requests[0].branch.branch_id


async def test_generate_takes_and_prints_token_ids(
    partition: Partition, gateway: ScriptedGateway, gateway_address: str
) -> None:
    code, out, _ = await partition.run(
        "--gateway", gateway_address, "generate", "--token-ids", "7, 8 9", "--max-tokens", "3"
    )
    assert code == 0
    assert [int(word) for word in out.split()] == output_ids(3)
    assert gateway.requests[0].token_ids == pack([7, 8, 9])


async def test_a_gateway_that_never_answers_is_a_line(
    partition: Partition, gateway: ScriptedGateway, gateway_address: str
) -> None:
    gateway.plays.append(Play(hang_at=0))
    code, out, err = await partition.run("--gateway", gateway_address, "--timeout-s", "1", "generate", "x")
    assert (code, out) == (3, "")
    assert err.startswith("evolvectl: ")
    assert "--timeout-s" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("value", [b"\xff", b"[]", b"{}", b'{"node_id": "n"}'])
@pytest.mark.parametrize("key", ["nodes/n", "services/gateway/g", "split"])
def test_a_record_of_another_kind_is_named(key: str, value: bytes) -> None:
    with pytest.raises(Failure, match=key):
        parse_registry({key: value})


def test_keys_of_others_are_left_alone() -> None:
    registry = parse_registry({"model": b"\xff", "decisions": b"x", "terms/directory": b"3", "leaders/planner": b"a:1"})
    assert registry.leaders == {"planner": "a:1"}
    assert not registry.nodes
    assert not registry.services


@pytest.mark.parametrize("leader", ["a:1", "b:1", "c:1"])
def test_a_leader_is_the_first_of_its_kind(leader: str) -> None:
    services = {
        f"services/planner/{name}": encode(ServiceRegistration("planner", name, f"{name}:1", "1", 0.0))
        for name in "abc"
    }
    addresses = parse_registry({**services, "leaders/planner": leader.encode()}).addresses("planner")
    assert addresses[0] == leader
    assert set(addresses) == {"a:1", "b:1", "c:1"}
