"""What an operator sees of a cluster, and what must be true of it once nothing runs."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import urllib.request
from collections.abc import Callable
from typing import Any

from chaos.workload import Load
from cluster import BIN, LocalCluster

from evolving.internal.v1 import node_agent_pb2, node_agent_pb2_grpc
from evolving.runtime.channel import open_channel
from evolving.v1 import common_pb2, directory_pb2, directory_pb2_grpc

_LONGEST_S = 60.0
_LEGS = ("queued_legs", "queued_tokens", "prefilling_legs", "holding_legs", "decoding", "reserved")


async def evolvectl(cluster: LocalCluster, *arguments: str) -> Any:
    """What a command prints as JSON."""
    command = [str(BIN / "evolvectl"), "--etcd", cluster.etcd_address, "--json", *arguments]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


async def until(condition: Callable[[], bool], what: str) -> None:
    """Look again until it holds."""
    deadline_s = asyncio.get_running_loop().time() + _LONGEST_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline_s, what
        await asyncio.sleep(0.05)


async def progress(load: Load, requests: int = 15) -> None:
    """Wait until so many more requests finished: the cluster serves, whatever was done to it."""
    target = load.finished + requests
    await until(lambda: load.finished >= target or bool(load.failures), "no request finishes")
    assert not load.failures, load.failures[:5]


async def restart(cluster: LocalCluster, *names: str) -> None:
    """Start processes again that ended, and wait until they serve."""
    for name in names:
        cluster.restart(name)
    await asyncio.to_thread(cluster.wait_ready, names)


async def node_status(cluster: LocalCluster) -> dict[str, node_agent_pb2.WatchStatusResponse]:
    """What each node says of itself now."""
    return {name: await status_of(cluster, name) for name in cluster.processes if name.startswith("node-")}


async def roles(cluster: LocalCluster, role: common_pb2.Role.ValueType) -> list[str]:
    """Nodes that have a role now."""
    return [name for name, status in (await node_status(cluster)).items() if status.role == role]


async def settled(cluster: LocalCluster) -> None:
    """Wait until nothing is left of requests and branches; says what is, when it stays."""
    names = [name for name in cluster.processes if name != "etcd"]
    await asyncio.to_thread(cluster.wait_ready, names)
    deadline_s = asyncio.get_running_loop().time() + _LONGEST_S
    while left := await _left(cluster):
        assert asyncio.get_running_loop().time() < deadline_s, left
        await asyncio.sleep(0.2)


async def _left(cluster: LocalCluster) -> str:
    async with open_channel(cluster.processes["directory"].address) as channel:
        directory = directory_pb2_grpc.DirectoryServiceStub(channel)
        audit = await directory.Audit(directory_pb2.AuditRequest(), timeout=_LONGEST_S)
        branches = await directory.ListBranches(directory_pb2.ListBranchesRequest(), timeout=_LONGEST_S)
    wrong = [audit.mismatch_count, audit.nonzero_after_end, len(audit.unreachable_node_ids)]
    busy = [
        status
        for status in (await node_status(cluster)).values()
        if not status.ready or any(getattr(status, name) for name in _LEGS)
    ]
    return f"{audit}, {branches}, {busy}" if any(wrong) or branches.branches or busy else ""


async def status_of(cluster: LocalCluster, name: str) -> node_agent_pb2.WatchStatusResponse:
    """What one node says of itself now."""
    async with open_channel(cluster.processes[name].address) as channel:
        stub = node_agent_pb2_grpc.NodeAgentServiceStub(channel)
        request = node_agent_pb2.WatchStatusRequest(partition_id=cluster.spec.partition_id)
        status = await stub.WatchStatus(request, timeout=_LONGEST_S).read()
    assert isinstance(status, node_agent_pb2.WatchStatusResponse)
    return status


async def moves(cluster: LocalCluster, reason: str) -> int:
    """How often the gateways moved a request, since each began, for one reason."""
    gateways = [process for name, process in cluster.processes.items() if name.startswith("gateway")]
    pages = [await asyncio.to_thread(_page, f"http://{process.metrics_address}/metrics") for process in gateways]
    return sum(int(count) for page in pages for count in re.findall(rf'moves_total{{reason="{reason}"}} (\d+)', page))


def _page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=_LONGEST_S) as answer:
        return str(answer.read().decode())


def complaints(cluster: LocalCluster) -> list[str]:
    """Log lines of bugs: an error of any process but etcd, or a trace."""
    lines = []
    for name in cluster.processes:
        if name == "etcd":
            continue
        for line in cluster.log_path(name).read_text(errors="replace").splitlines():
            known = json.loads(line) if line.startswith("{") else {"level": "not a log line"}
            if known["level"] not in ("debug", "info", "warning") or '"locals"' in line:
                lines.append(f"{name}: {line[:2000]}")
    return lines
