"""Dynamo's replay is given what ours plays: the same requests, each after what it waits for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.dynamo_replay import replay, write_sessions

from evolving_sim.machines import GLM_5_2
from evolving_sim.traces import TraceAgent, TraceRequest, TraceSession


def request(tokens: int, think_s: float) -> TraceRequest:
    return TraceRequest(0.0, tokens, 10, np.arange(tokens // 64, dtype=np.uint32), think_s, 1.0)


def session(name: str) -> TraceSession:
    """A main agent with one sub-agent it waits for after its first request, and one in the background."""
    return TraceSession(name, 64, ids_shared=False, open_loop=False, agents=(
        TraceAgent("", "", -1, False, (request(640, 0.0), request(700, 2.0), request(760, 3.0))),
        TraceAgent("waited for", "", 0, True, (request(128, 0.5), request(200, 1.0))),
        TraceAgent("background", "", 0, False, (request(128, 0.25),)),
    ))  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "sessions.jsonl"
    write_sessions([session("one"), session("two")], path)
    return path


def rows(path: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    return {line["request_id"]: line for line in lines}


def test_requests_wait_for_what_they_waited_for_and_then_think(path: Path) -> None:
    waits = {
        name: {(each["request_id"], each["relation"], each["delay_ms"]) for each in row["dependencies"]}
        for name, row in rows(path).items()
        if row["play_id"] == "0"
    }
    assert waits == {
        "0.0#0": set(),
        "0.0#1": {("0.0#0", "sequence", 2000.0), ("0.1#1", "join", 2000.0)},
        "0.0#2": {("0.0#1", "sequence", 3000.0)},
        "0.1#0": {("0.0#0", "spawn", 500.0)},
        "0.1#1": {("0.1#0", "sequence", 1000.0)},
        "0.2#0": {("0.0#0", "spawn", 250.0)},
    }


def test_prompts_share_the_blocks_they_shared_within_their_session_only(path: Path) -> None:
    ids = {name: row["hash_ids"] for name, row in rows(path).items()}
    assert len(ids["0.0#0"]) == 10
    assert ids["0.0#1"][:10] == ids["0.0#0"]
    assert ids["0.0#1"][10] not in ids["0.0#2"]  # a part of a block
    assert not {each for name in ids if name[0] == "0" for each in ids[name]} & {*ids["1.0#2"], *ids["1.1#1"]}


def test_dynamo_plays_them_all(path: Path) -> None:
    pytest.importorskip("dynamo._core", reason="ai-dynamo-runtime is not installed")
    found = replay(path, GLM_5_2, 1, 2, concurrency=1)
    assert found["requests"] == 12
    assert found["prompt_tokens_mean"] == pytest.approx((640 + 700 + 760 + 128 + 200 + 128) / 6)
    assert found["simulated_s"] > 2 * (0.5 + 1.0 + 2.0 + 3.0)
