"""A cluster whose etcd has three members, any of which can be killed and started again."""

from __future__ import annotations

import asyncio
from pathlib import Path

from chaos.watching import restart
from cluster import ClusterSpec, LocalCluster
from etcd_process import Etcd


class FaultyCluster(LocalCluster):
    """The services know all members of etcd, as in production."""

    def __init__(self, spec: ClusterSpec) -> None:
        super().__init__(spec)
        self.etcd = Etcd(3)

    @property
    def etcd_address(self) -> str:
        """Of all members, comma-separated."""
        return ",".join(self.etcd.endpoints)

    def start_etcd(self) -> None:
        """Start all members and wait until they answer."""
        asyncio.run(self.etcd.start())

    def stop(self) -> list[str]:
        """See LocalCluster. What etcd wrote is thrown away."""
        try:
            return super().stop()
        finally:
            self.etcd.destroy()

    async def heal(self) -> None:
        """Start again what was killed, and wait until it serves."""
        await self.etcd.start()
        await restart(self, *(name for name, process in self.processes.items() if not process.alive()))

    @property
    def planners(self) -> dict[str, str]:
        """Names of the planners, by address."""
        return {process.address: name for name, process in self.processes.items() if name.startswith("planner")}


def spec_in(directory: Path) -> ClusterSpec:
    """Four nodes, two of each service that may be doubled.

    A chunk of a prompt takes 0.1 s and a token 0.02 s, so that there is time to strike in the middle of either; nodes
    that die are believed in for 4 s.
    """
    node_flags = (
        "--chunk-tokens 256 --prefill-coefficients 0.004,4e-4,0,1e-6,0 --decode-coefficients 0.02,0,1e-4,0 "
        "--decode-slots 16 --l1-tokens 32768 --l2-tokens 32768 --max-prompt-tokens 4096 --max-context-tokens 6144"
    )
    return ClusterSpec(
        state_dir=directory,
        model_path=Path("/dev/null"),
        engine="mock",
        nodes=4,
        initial_split="2P2D",
        gateways=2,
        planners=2,
        gateway_port=0,
        node_flags=tuple(node_flags.split()),
        service_flags=("--registration-ttl-s", "4"),
        start_timeout_s=60,
        grace_s=8,
    )
