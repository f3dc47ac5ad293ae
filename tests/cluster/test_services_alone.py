"""Each service installs, starts, is asked and stops on its own, as an operator meets it first."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import BIN, ClusterSpec, LocalCluster, Process, kernel_start

KINDS = ("gateway", "planner", "directory", "node-agent")
FLAGS = {"node-agent": ("--node-id", "node-a", "--engine", "mock")}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """A cluster of nothing yet, whose etcd address leads nowhere."""
    alone = LocalCluster(ClusterSpec(state_dir=tmp_path, gateway_port=0, engine="mock", grace_s=3))
    (tmp_path / "logs").mkdir()
    alone.processes["etcd"] = Process("etcd", 0, "none", "127.0.0.1:1", "")
    yield alone
    del alone.processes["etcd"]  # there never was one
    alone.stop()


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 40) -> None:
    """Poll a condition until it holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def http_status(address: str, path: str) -> int | None:
    """Status of a GET, or None when nobody listens."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=2) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


@pytest.mark.parametrize("kind", KINDS)
def test_help_lists_every_setting(kind: str) -> None:
    result = subprocess.run(
        [BIN / f"evolving-{kind}", "--help"], check=False, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0
    for flag in ("--listen", "--etcd-endpoints", "--partition-id", "--credentials-file", "--grace-s", "--config"):
        assert flag in result.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_setting_ends_it_with_a_line_that_says_what_to_do(kind: str) -> None:
    command = [BIN / f"evolving-{kind}", *FLAGS.get(kind, ()), "--listen", "nowhere"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "listen" in result.stderr
    assert "host:port" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_without_etcd_it_lives_and_is_not_ready_and_stops_in_time(kind: str, cluster: LocalCluster) -> None:
    cluster.start_service(kind, kind, 0, *FLAGS.get(kind, ()))
    process = cluster.processes[kind]
    wait_for(lambda: http_status(process.metrics_address, "/healthz") == 200, cluster.log_tail(kind))
    assert http_status(process.metrics_address, "/readyz") == 503
    assert http_status(process.metrics_address, "/metrics") == 200
    assert not cluster.serving(kind)
    group = process.pid
    os.kill(process.pid, signal.SIGTERM)
    assert cluster.wait_ended(kind) == 0, cluster.log_tail(kind)
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)
    assert kernel_start(process.pid) is None
