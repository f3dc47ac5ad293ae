"""One cluster of real processes with mock engines, short of room and with a bad network, for all tests here."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from chaos.watching import complaints, settled
from cluster import ClusterSpec, LocalCluster

_NODE_FLAGS = (
    "--mock-speed-up 4 --decode-slots 4 --l1-tokens 16384 --l2-tokens 8192 --max-prompt-tokens 4096 "
    "--max-context-tokens 6144 --mock-corrupt-every-pages 37 --mock-transfer-delay-s 0.001"
)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """etcd, directory, two planners, two gateways, four nodes. Tests leave all of them serving."""
    running = LocalCluster(
        ClusterSpec(
            state_dir=tmp_path_factory.mktemp("chaos"),
            model_path=Path(os.devnull),
            engine="mock",
            nodes=4,
            initial_split="2P2D",
            gateways=2,
            planners=2,
            gateway_port=0,
            node_flags=tuple(_NODE_FLAGS.split()),
            start_timeout_s=60,
            grace_s=8,
        )
    )
    running.start()
    try:
        yield running
    finally:
        assert running.stop() == [], "these did not stop in their grace period"


@pytest.fixture
def addresses(cluster: LocalCluster) -> list[str]:
    """Both gateways'."""
    return [cluster.processes[name].address for name in ("gateway", "gateway-2")]


@pytest.fixture(autouse=True)
async def _clean_afterwards(cluster: LocalCluster) -> AsyncIterator[None]:
    """After each test everything serves, nothing is left of its requests and branches, and nobody logged a bug."""
    yield
    await settled(cluster)
    assert complaints(cluster) == []
