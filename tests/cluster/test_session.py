"""A coding agent's session on a whole cluster, its KV followed block by block: the demo, held to its promises."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import ClusterSpec, LocalCluster
from demo import play, summarise


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[dict[str, Any]]:
    """The session as the demo writes it down, played on mock engines."""
    state = tmp_path_factory.mktemp("session")
    spec = ClusterSpec(state_dir=state, engine="mock", gateway_port=0, model_path=model_path)
    cluster = LocalCluster(spec)
    cluster.start()
    try:
        yield asyncio.run(play(cluster))
    finally:
        assert cluster.stop() == [], "every process stops within its grace period"


def turns(result: dict[str, Any], *events: str) -> list[dict[str, Any]]:
    """The rows of these events."""
    found = [row for row in result["turns"] if row["event"] in events]
    assert found
    return found


def test_every_event_of_a_session_occurs(result: dict[str, Any]) -> None:
    events = {row["event"] for row in result["turns"]}
    assert events == {"root", "tool", "fork", "subagent", "resume", "compaction", "end"}
    assert summarise(result) == []


def test_turns_reuse_all_that_can_be_reused(result: dict[str, Any]) -> None:
    for row in turns(result, "tool", "resume", "fork"):
        assert row["cached_tokens"] == row["reusable_tokens"] > 0
        assert row["computed_tokens"] == row["prompt_tokens"] - row["cached_tokens"]
        assert sum(row["cached_from"].values()) == row["cached_tokens"]


def test_a_turn_on_another_prefill_node_reads_its_peers_memory(result: dict[str, Any]) -> None:
    before = turns(result, "tool")[-1]
    fork = turns(result, "fork")[0]
    assert fork["prefill_node"] != before["prefill_node"]
    assert fork["cached_from"]["peer"] == fork["reusable_tokens"]


def test_a_fork_takes_shared_blocks_from_one_to_two(result: dict[str, Any]) -> None:
    """§4.1: +1 on the blocks the new branch reuses."""
    assert all(row["counts"]["shared_blocks"] == 0 for row in turns(result, "root", "tool"))
    fork = turns(result, "fork")[0]
    assert fork["counts"]["shared_blocks"] >= fork["reusable_tokens"] // result["block_tokens"]


def test_a_subagent_leaves_its_parents_blocks_alone(result: dict[str, Any]) -> None:
    fork, resume = turns(result, "fork")[0], turns(result, "resume")[0]
    assert turns(result, "subagent")[0]["counts"]["shared_blocks"] == 0
    assert resume["counts"]["shared_blocks"] == fork["counts"]["shared_blocks"]


def test_compaction_takes_dropped_blocks_to_zero(result: dict[str, Any]) -> None:
    """§4.1: -1 on what the new context dropped; the copies stay until room is needed."""
    resume, compaction = turns(result, "resume")[0], turns(result, "compaction")[0]
    assert compaction["version"] == resume["version"] + 1
    assert compaction["counts"]["zero_blocks"] > 0
    assert compaction["cached_tokens"] > 0, "the system prompt is still shared with the old context"


def test_after_the_ends_nothing_is_counted(result: dict[str, Any]) -> None:
    assert all(row["counts"]["shared_blocks"] == 0 for row in turns(result, "end"))
    assert turns(result, "end")[-1]["counts"]["held_blocks"] == 0
    assert result["audit"] == {"mismatches": 0, "nonzero_after_end": 0}


def test_the_switch_failed_nothing_and_restarted_nothing(result: dict[str, Any]) -> None:
    switch = result["switch"]
    assert {switch["from"], switch["to"]} == {"prefill", "decode"}
    assert switch["failed_requests"] == 0
    assert switch["restarted"] is False
