"""etcd goes away and comes back: what serves goes on serving and says so, the planner alone steps down."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from cluster import ClusterSpec, LocalCluster

from evolving.v1 import planner_pb2, planner_pb2_grpc
from evolving_client import Client

SERVICES = ("gateway", "directory", "planner", "node-a", "node-b")
PATIENCE_S = 40.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """Two nodes with mock engines, and token ids only."""
    spec = ClusterSpec(
        state_dir=tmp_path / "state",
        model_path=tmp_path,
        nodes=2,
        engine="mock",
        gateway_port=0,
        initial_split="1P1D",
        grace_s=3,
        service_flags=("--etcd-timeout-s", "1"),
    )
    running = LocalCluster(spec)
    running.start()
    yield running
    assert running.stop() == []


def readiness(cluster: LocalCluster, name: str) -> dict[str, Any]:
    """What /readyz says, whatever its status."""
    try:
        with urllib.request.urlopen(f"http://{cluster.processes[name].metrics_address}/readyz", timeout=5) as reply:
            body = reply.read()
    except urllib.error.HTTPError as error:
        body = error.read()
    shown: dict[str, Any] = json.loads(body)
    return shown


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Look again until it holds."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.05)


def leader(cluster: LocalCluster) -> str:
    """Who leads, by the planner's own account."""
    with grpc.insecure_channel(cluster.processes["planner"].address) as channel:
        stub: Any = planner_pb2_grpc.PlannerServiceStub(channel)
        return str(stub.GetSplit(planner_pb2.GetSplitRequest(), timeout=5).leader_address)


async def test_all_but_the_planner_s_lead_outlasts_etcd(cluster: LocalCluster) -> None:
    wait_until(lambda: leader(cluster) != "", "a planner leads")
    cluster.kill("etcd")
    wait_until(lambda: all(readiness(cluster, name)["degraded"] == ["etcd"] for name in SERVICES), "they all notice")
    wait_until(lambda: leader(cluster) == "", "the planner steps down by its own clock")
    assert [name for name in SERVICES if not cluster.serving(name)] == []
    async with Client(cluster.gateway_address, timeout_s=30) as client:
        finished = await client.generate(token_ids=range(1, 200), max_tokens=8).finish()
    assert len(finished.output_token_ids) == 8
    cluster.restart("etcd")
    wait_until(lambda: not any(readiness(cluster, name)["degraded"] for name in SERVICES), "they all have it back")
    wait_until(lambda: leader(cluster) != "", "a planner leads again")
