"""Watches a cluster while it is measured: memory of every process, and how many copies branches count."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from cluster import LocalCluster

from evolving.v1 import directory_pb2, directory_pb2_grpc

POLL_S = 0.25
SAMPLES_KEPT = 60  # of each process, spread over the run
GROWTH_BYTES, GROWTH_SHARE = 8 << 20, 0.05  # what the last quarter may grow by, whichever is more


@dataclass(slots=True)
class Watch:
    """Polls until cancelled."""

    cluster: LocalCluster
    directory: directory_pb2_grpc.DirectoryServiceAsyncStub
    peak_held_blocks: int = 0
    peak_held_by_node: dict[str, int] = field(default_factory=dict)
    peak_l1_blocks: int = 0
    peak_l2_blocks: int = 0
    _begun_s: float = field(default_factory=time.monotonic)
    _resident: dict[str, list[tuple[float, int]]] = field(default_factory=dict)

    async def run(self) -> None:
        """Poll; a directory that is too busy to answer is asked again."""
        while True:
            for process in self.cluster.processes.values():
                samples = self._resident.setdefault(process.name, [])
                samples.append((time.monotonic() - self._begun_s, resident_bytes(process.pid)))
            nodes = await self._nodes()
            self.peak_held_blocks = max(self.peak_held_blocks, sum(node.held_blocks for node in nodes))
            for node in nodes:
                most = self.peak_held_by_node.get(node.node_id, 0)
                self.peak_held_by_node[node.node_id] = max(most, node.held_blocks)
            self.peak_l1_blocks = max(self.peak_l1_blocks, sum(node.l1_blocks for node in nodes))
            self.peak_l2_blocks = max(self.peak_l2_blocks, sum(node.l2_blocks for node in nodes))
            await asyncio.sleep(POLL_S)

    async def _nodes(self) -> Sequence[directory_pb2.NodeStats]:
        try:
            return (await self.directory.GetStats(directory_pb2.GetStatsRequest(), timeout=5)).nodes
        except grpc.aio.AioRpcError:
            return ()

    def memory(self) -> dict[str, Any]:
        """Per process: resident bytes over time, and what the last quarter of the run added."""
        return {name: growth(samples) for name, samples in self._resident.items()}


def resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 when it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return pages * resource.getpagesize()


def growth(samples: list[tuple[float, int]]) -> dict[str, Any]:
    """Samples of (second, resident bytes): some of them, and what the last quarter of the time added.

    That is from the third quarter's peak to its own: a process that passes prompts on goes up and down with them.
    """
    half_s, last_s = samples[-1][0] * 0.5, samples[-1][0] * 0.75
    before = max(resident for at_s, resident in samples if half_s <= at_s <= last_s)
    growth = max(resident for at_s, resident in samples if at_s >= last_s) - before
    kept = samples[:: -(-len(samples) // SAMPLES_KEPT)]
    return {
        "resident_bytes": [[round(at_s, 1), resident] for at_s, resident in kept],
        "last_quarter_growth_bytes": growth,
        "steady": growth < max(GROWTH_BYTES, GROWTH_SHARE * before),
    }
