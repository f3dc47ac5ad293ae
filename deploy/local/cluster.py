"""A whole cluster as processes of this machine: etcd, the four services and some nodes.

For the quick start (control.py), the demo and the tests; production runs the same commands from containers
(docker-compose.yml).
Every process gets a log file and a process group of its own; `state.json` names them, so that another shell can stop
what this one started.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_STATE = ROOT / "build" / "cluster"
DEFAULT_MODEL = ROOT / "build" / "models" / "smollm2-135m-instruct"
BIN = Path(sys.executable).parent
POLL_S = 0.2
_PORTS = (10_000, 32_000)
_given: set[int] = set()


class ClusterError(Exception):
    """The cluster could not be started or stopped; the message says what to do."""


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """What to start. Port 0 means any free one."""

    state_dir: Path = DEFAULT_STATE
    nodes: int = 3
    engine: str = "sglang"
    model_path: Path = DEFAULT_MODEL
    partition_id: str = "p0"
    gateways: int = 1
    planners: int = 1
    gateway_port: int = 7000
    initial_split: str = ""  # empty: 2P1D, of fewer nodes the planner's own
    node_flags: tuple[str, ...] = ()  # more flags for every node agent
    gateway_flags: tuple[str, ...] = ()  # more flags for every gateway
    planner_flags: tuple[str, ...] = ()  # more flags for every planner
    service_flags: tuple[str, ...] = ()  # more flags for every service, nodes included
    start_timeout_s: float = 300.0
    grace_s: float = 20.0


@dataclass(slots=True)
class Process:
    """One process of the cluster. `started` is its kernel start time, so that a reused pid is never taken for it."""

    name: str
    pid: int
    started: str
    address: str
    metrics_address: str
    command: list[str] = field(default_factory=list)

    def alive(self) -> bool:
        """Whether this very process still runs."""
        return kernel_start(self.pid) == self.started


def kernel_start(pid: int) -> str | None:
    """Start time of a live process in clock ticks since boot, or None (gone, or a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else fields[19]


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on now, all different.

    They lie below the kernel's ephemeral range: one out of it may be taken by any outgoing connection before the
    process it is meant for binds it. None is given twice, for the same reason.
    """
    ports: list[int] = []
    while len(ports) < count:
        port = _PORTS[0] + secrets.randbelow(_PORTS[1] - _PORTS[0])  # tests may have seeded `random`
        if port not in _given and not _port_open(port):
            _given.add(port)
            ports.append(port)
    return ports


def _silent(_line: str) -> None:
    """Say nothing."""


class LocalCluster:
    """Starts, watches and stops the processes of one cluster."""

    def __init__(self, spec: ClusterSpec, say: Callable[[str], None] = _silent) -> None:
        self.spec = spec
        self.say = say
        self.processes: dict[str, Process] = {}
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    # -- state

    @property
    def state_file(self) -> Path:
        """Where the running processes are written down."""
        return self.spec.state_dir / "state.json"

    def log_path(self, name: str) -> Path:
        """The log of one process."""
        return self.spec.state_dir / "logs" / f"{name}.log"

    def load(self) -> bool:
        """Read what an earlier `start` wrote down; False when nothing of it runs any more."""
        if not self.state_file.exists():
            return False
        rows = json.loads(self.state_file.read_text())["processes"]
        self.processes = {row["name"]: Process(**row) for row in rows}
        return any(process.alive() for process in self.processes.values())

    def save(self) -> None:
        """Write down what runs."""
        self.spec.state_dir.mkdir(parents=True, exist_ok=True)
        rows = [asdict(process) for process in self.processes.values()]
        self.state_file.write_text(json.dumps({"processes": rows}, indent=1))

    @property
    def etcd_address(self) -> str:
        """host:port of etcd's client door."""
        return self.processes["etcd"].address

    @property
    def gateway_address(self) -> str:
        """host:port of the first gateway."""
        return self.processes["gateway"].address

    # -- start

    def start(self) -> None:
        """Start everything and wait until it serves. On failure everything is stopped again.

        Raises ClusterError naming the process that failed and the end of its log.
        """
        if self.load():
            raise ClusterError("a cluster is already running here; stop it with: make down")
        shutil.rmtree(self.spec.state_dir, ignore_errors=True)
        (self.spec.state_dir / "logs").mkdir(parents=True)
        self.processes.clear()
        try:
            self.start_etcd()
            self.start_services()
            for index in range(self.spec.nodes):
                self.start_node(f"node-{chr(ord('a') + index)}")
            self.wait_ready([name for name in self.processes if name != "etcd"])
        except BaseException:
            self.stop()
            raise

    def start_etcd(self) -> None:
        """Start a one-member etcd and wait for it."""
        client, peer = free_ports(2)
        url, peer_url = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
        command = [str(BIN / "etcd"), "--name", "local", "--data-dir", str(self.spec.state_dir / "etcd")]
        command += ["--listen-client-urls", url, "--advertise-client-urls", url, "--listen-peer-urls", peer_url]
        command += ["--initial-advertise-peer-urls", peer_url, "--initial-cluster", f"local={peer_url}"]
        # Without compaction etcd keeps every revision for ever: leases' keys, the planner's decisions.
        command += ["--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1h"]
        command += ["--log-level", "warn", "--unsafe-no-fsync"]
        self._spawn("etcd", command, f"127.0.0.1:{client}", "")
        self._wait("etcd", lambda: _port_open(client), 30)

    def start_services(self) -> None:
        """Start directory, planners and gateways."""
        self.start_service("directory", "directory", 0, "--data-dir", str(self.spec.state_dir / "directory"))
        for index in range(self.spec.planners):
            split = self.spec.initial_split or ("2P1D" if self.spec.nodes >= 3 else "")
            flags = ("--initial-split", split, *self.spec.planner_flags)
            self.start_service(_numbered("planner", index), "planner", 0, *flags)
        has_tokenizer = (self.spec.model_path / "tokenizer.json").exists()
        tokenizer = ["--tokenizer-path", str(self.spec.model_path)] if has_tokenizer else []
        for index in range(self.spec.gateways):
            port = self.spec.gateway_port + index if self.spec.gateway_port else 0
            self.start_service(_numbered("gateway", index), "gateway", port, *tokenizer, *self.spec.gateway_flags)

    def start_node(self, node_id: str) -> None:
        """Start one node agent with its engine."""
        flags = ["--node-id", node_id, "--engine", self.spec.engine]
        config = self.spec.model_path / "config.json"
        if self.spec.engine == "sglang":
            flags += ["--model-path", str(self.spec.model_path)]
            flags += ["--engine-log-file", str(self.log_path(f"{node_id}.engine"))]
        elif config.exists():  # the gateway's tokenizer and the mock must agree
            flags += ["--mock-vocabulary-tokens", str(json.loads(config.read_text())["vocab_size"])]
        self.start_service(node_id, "node-agent", 0, *flags, *self.spec.node_flags)

    def start_service(self, name: str, kind: str, port: int, *flags: str) -> None:
        """Start one process of a service, without waiting."""
        own, metrics = free_ports(2)
        own = port or own
        if port and _port_open(port):
            raise ClusterError(f"port {port} for {name} is taken; choose another with --gateway-port")
        command = [str(BIN / f"evolving-{kind}"), "--listen", f"127.0.0.1:{own}"]
        command += ["--metrics-listen", f"127.0.0.1:{metrics}", "--etcd-endpoints", self.etcd_address]
        command += ["--partition-id", self.spec.partition_id, "--grace-s", str(self.spec.grace_s)]
        self._spawn(name, [*command, *self.spec.service_flags, *flags], f"127.0.0.1:{own}", f"127.0.0.1:{metrics}")

    def restart(self, name: str) -> None:
        """Start a process again with the very command, and ports, it had."""
        old = self.processes[name]
        self._spawn(name, old.command, old.address, old.metrics_address)

    def _spawn(self, name: str, command: Sequence[str], address: str, metrics_address: str) -> None:
        environment = dict(os.environ, PYTHONUNBUFFERED="1", PATH=f"{BIN}:{os.environ.get('PATH', '')}")
        with self.log_path(name).open("ab") as log:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment
            )
        self._children[name] = child
        self.processes[name] = Process(
            name, child.pid, kernel_start(child.pid) or "", address, metrics_address, list(command)
        )
        self.save()

    def wait_ready(self, names: Iterable[str]) -> None:
        """Wait until each of these answers SERVING, telling of each as it comes."""
        waiting, begun, deadline = list(names), time.monotonic(), time.monotonic() + self.spec.start_timeout_s
        while waiting:
            for name in list(waiting):
                self._check_alive(name)
                if self.serving(name):
                    waiting.remove(name)
                    self.say(f"{name} serves after {time.monotonic() - begun:.0f} s" + _left(waiting))
            if waiting and time.monotonic() > deadline:
                tail = self.log_tail(waiting[0])
                raise ClusterError(f"{', '.join(waiting)}: not ready after {self.spec.start_timeout_s:.0f} s\n{tail}")
            time.sleep(POLL_S)

    def serving(self, name: str) -> bool:
        """Whether a process says it serves (grpc.health.v1)."""
        with grpc.insecure_channel(self.processes[name].address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)  # its methods come at run time
            try:
                reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=1)
            except grpc.RpcError:
                return False
            return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    def _wait(self, name: str, ready: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not ready():
            self._check_alive(name)
            if time.monotonic() > deadline:
                raise ClusterError(f"{name}: not ready after {timeout_s:.0f} s\n{self.log_tail(name)}")
            time.sleep(POLL_S)

    def _check_alive(self, name: str) -> None:
        child = self._children.get(name)
        status = child.poll() if child else None
        if status is not None:
            raise ClusterError(f"{name} exited with {status}; the end of {self.log_path(name)}:\n{self.log_tail(name)}")

    def log_tail(self, name: str, lines: int = 15) -> str:
        """The last lines a process logged."""
        return "\n".join(self.log_path(name).read_text(errors="replace").splitlines()[-lines:])

    # -- stop

    def kill(self, name: str, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal to the process alone, not to its children."""
        process = self.processes[name]
        if process.alive():
            os.kill(process.pid, signal_number)
        child = self._children.get(name)
        if child and signal_number == signal.SIGKILL:
            child.wait()

    def wait_ended(self, name: str) -> int:
        """The exit status of a process that was told to end. Raises TimeoutExpired some time after its grace period."""
        return self._children[name].wait(self.spec.grace_s + 10)

    def stop(self) -> list[str]:
        """Stop all: everything else drains before etcd goes. Returns those that had to be killed."""
        killed = []
        for batch in ([name for name in self.processes if name != "etcd"], ["etcd"]):
            present = [self.processes[name] for name in batch if name in self.processes]
            for process in present:
                if process.alive():
                    os.kill(process.pid, signal.SIGTERM)
            deadline = time.monotonic() + self.spec.grace_s + 10
            while any(process.alive() for process in present) and time.monotonic() < deadline:
                time.sleep(POLL_S)
                for child in self._children.values():
                    child.poll()
            for process in present:
                if process.alive():
                    killed.append(process.name)
                _kill_group(process.pid)
        for child in self._children.values():
            child.wait()
        self.state_file.unlink(missing_ok=True)
        self.processes.clear()
        self._children.clear()
        return killed


def _kill_group(pid: int) -> None:
    assert pid > 1, "0 and 1 would reach far beyond this cluster"
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # the usual case: nothing was left of it


def _port_open(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _numbered(name: str, index: int) -> str:
    return name if index == 0 else f"{name}-{index + 1}"


def _left(waiting: Sequence[str]) -> str:
    return f"; waiting for {', '.join(waiting)}" if waiting else ""
