"""Real sessions against real services with mock engines: everything is answered, reused and ended."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import BIN, ClusterSpec, LocalCluster
from waiting import eventually

from evolving_replay import ReplayOptions, replay
from evolving_replay.selection import Limits, select
from evolving_sim.trace_files import read_sessions

TRACE = Path(__file__).parents[1] / "fixtures" / "claude_code_small.jsonl.xz"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """Three nodes with room for all sessions."""
    spec = ClusterSpec(
        state_dir=tmp_path / "state",
        model_path=tmp_path,
        engine="mock",
        gateway_port=0,
        grace_s=3,
        node_flags=("--mock-speed-up", "20"),
    )
    running = LocalCluster(spec)
    running.start()
    yield running
    running.stop()


def evolvectl(cluster: LocalCluster, *arguments: str) -> Any:
    """What a command prints as JSON, whatever its exit code."""
    command = [str(BIN / "evolvectl"), "--etcd", cluster.etcd_address, "--json", *arguments]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout)


@pytest.mark.slow
async def test_real_sessions(cluster: LocalCluster) -> None:
    sessions, left_out = select(read_sessions(TRACE), Limits(prompt_tokens=65_536, session_hours=0.5))
    assert left_out
    options = ReplayOptions(gateways=(cluster.gateway_address,), concurrency=3, compression=100.0, stagger_s=60.0)
    report = await replay(sessions, options)
    asked = [request for session in sessions for agent in session.agents for request in agent.requests]
    assert report.failures == {}
    assert (report.complete, report.requests, report.branches_not_ended) == (True, len(asked), 0)
    assert report.prompt_tokens == sum(request.input_tokens for request in asked)
    assert report.output_tokens == sum(request.output_tokens for request in asked)
    # What the gateway and the nodes said of each request fits together, and to what was sent.
    loads = report.nodes.values()
    assert sum(load.cached_tokens for load in loads) == round(report.hit_rate * report.prompt_tokens)
    assert sum(load.computed_tokens + load.cached_tokens for load in loads) == report.prompt_tokens
    assert sum(load.prefills for load in loads) == sum(load.decodes for load in loads) == len(asked)
    assert report.hit_rate == pytest.approx(report.ideal_hit_rate - report.lost_reuse + report.beyond_ideal)
    assert report.beyond_ideal == 0, "each session's blocks are its own, and its requests come one after the other"
    # Everything finds room, and thinking leaves time to announce what was produced.
    assert report.ideal_hit_rate > 0.5
    assert report.lost_reuse < 0.05

    async def settled() -> bool:
        audit = await asyncio.to_thread(evolvectl, cluster, "audit")
        return bool(audit["clean"] and audit["nonzero_after_end"] == 0)

    await eventually(settled)
    assert evolvectl(cluster, "branch", "ls")["branches"] == []
