"""Reading traces: real sessions as recorded, and lines that aren't."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evolving_sim.trace_files import TraceError, read_sessions
from evolving_sim.traced import CLAUDE_CODE_TRACE, TraceKind
from evolving_sim.traces import Step, branch_steps

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
CLAUDE_CODE = FIXTURES / "claude_code_small.jsonl.xz"
MOONCAKE = FIXTURES / "mooncake_small.jsonl.gz"


def rows(path: Path) -> list[dict[str, Any]]:
    opener = lzma.open if path.suffix == ".xz" else gzip.open
    with opener(path, "rt") as file:
        return [json.loads(line) for line in file]


def asked(hash_ids: list[int], t: float, **more: Any) -> dict[str, Any]:
    """A request of a 2-token-block session."""
    return {"t": t, "type": "n", "in": 2 * len(hash_ids), "out": 3, "hash_ids": hash_ids, **more}


def session_line(*requests: dict[str, Any], **more: Any) -> str:
    return json.dumps({"id": "s", "block_size": 2, "hash_id_scope": "local", "requests": list(requests), **more})


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_every_recorded_request_is_read_as_it_stands() -> None:
    for row, session in zip(rows(CLAUDE_CODE), read_sessions(CLAUDE_CODE), strict=True):
        assert session.session_id == row["id"]
        assert not session.ids_shared
        assert not session.open_loop
        recorded = {"": [each for each in row["requests"] if each["type"] != "subagent"]}
        recorded |= {each["agent_id"]: each["requests"] for each in row["requests"] if each["type"] == "subagent"}
        assert {agent.agent_id for agent in session.agents} == set(recorded)
        assert session.agents[0].agent_id == ""
        for agent in session.agents:
            for request, raw in zip(agent.requests, recorded[agent.agent_id], strict=True):
                assert request.block_ids.tolist() == raw["hash_ids"]
                assert (request.input_tokens, request.output_tokens) == (raw["in"], raw["out"])
                assert len(request.block_ids) == request.input_tokens // session.block_tokens


def test_a_main_agent_goes_on_after_the_sub_agents_it_waits_for() -> None:
    seen = 0
    for session in read_sessions(CLAUDE_CODE):
        main = session.agents[0].requests
        for agent in session.agents[1:]:
            before, after = main[agent.starts_after], main[agent.starts_after + 1]
            last = agent.requests[-1]
            assert agent.parent_waits
            # It starts within two seconds of the answer that asked for it, and ends before the main agent goes on.
            assert 0 <= agent.requests[0].at_s - before.at_s - before.service_s <= 2
            assert last.at_s + last.service_s + after.think_s <= after.at_s + 1e-6
            seen += 1
    assert seen


def test_think_time_begins_when_all_that_was_waited_for_has_ended(tmp_path: Path) -> None:
    def sub(agent_id: str, t: float, *times: float, **more: Any) -> dict[str, Any]:
        requests = [asked([9], each, api_time=1.0) for each in times]
        return {"t": t, "type": "subagent", "agent_id": agent_id, "requests": requests, **more}

    path = write(
        tmp_path / "trace.jsonl",
        session_line(
            asked([1], 0.0, api_time=2.0),
            sub("short", 10.0, 0.0, 3.0, duration_ms=7_000, status="completed"),  # from 3 to 7
            sub("long", 20.0, 0.0, 14.0, duration_ms=16_000, status="completed"),  # from 4 to 19
            sub("background", 5.0, 0.0, 90.0, duration_ms=None, status="async_launched"),  # from 5 to 96
            asked([1, 2], 25.0, api_time=4.0),
            asked([1, 2, 3], 26.0),
            asked([1, 2, 3, 4], 40.0, think_time=11.0),
        ),
    )
    (session,) = read_sessions(path)
    main, short, long, background = session.agents
    assert [request.think_s for request in main.requests] == [0, 6, 0, 11]  # 25 - 19; came before the answer; 40 - 29
    assert [request.service_s for request in main.requests] == [2, 4, 3, 0]  # 40 - 11 - 26; the last is unknown
    assert [(agent.agent_id, agent.starts_after, agent.parent_waits) for agent in (short, long, background)] == [
        ("short", 0, True),
        ("long", 0, True),
        ("background", 0, False),
    ]
    assert [request.think_s for request in short.requests] == [1, 2]
    assert [request.think_s for request in long.requests] == [2, 13]
    assert [request.think_s for request in background.requests] == [3, 89]
    assert session.duration_s == 96


def test_steps_of_a_branch_follow_from_the_blocks_alone(tmp_path: Path) -> None:
    prompts = [[1, 2], [1, 2, 3], [1, 2, 3], [1, 2], [1, 2, 7], [8]]
    path = write(tmp_path / "t.jsonl", session_line(*(asked(ids, float(at)) for at, ids in enumerate(prompts))))
    (session,) = read_sessions(path)
    steps = [(each.step, each.version, each.shared_blocks) for each in branch_steps(session.agents[0].requests)]
    assert steps == [
        (Step.OPENS, 1, 0),
        (Step.EXTENDS, 1, 2),
        (Step.EXTENDS, 1, 3),
        (Step.REWRITES, 2, 2),  # a prefix of the last prompt drops blocks
        (Step.EXTENDS, 2, 2),
        (Step.REWRITES, 3, 0),
    ]


def test_prompts_that_extend_each_other_share_their_memory() -> None:
    for session in read_sessions(CLAUDE_CODE):
        for agent in session.agents:
            steps = list(branch_steps(agent.requests))
            for earlier, later, step in zip(agent.requests, agent.requests[1:], steps[1:], strict=False):
                assert not later.block_ids.flags.writeable
                if step.step is Step.EXTENDS:
                    assert np.shares_memory(earlier.block_ids, later.block_ids)


def test_a_mooncake_line_is_a_session_of_one_request() -> None:
    sessions = list(read_sessions(MOONCAKE))
    assert len({session.session_id for session in sessions}) == len(sessions)
    for row, session in zip(rows(MOONCAKE), sessions, strict=True):
        (agent,) = session.agents
        (request,) = agent.requests
        assert session.open_loop
        assert session.ids_shared
        assert request.at_s == row["timestamp"] / 1000
        assert (request.input_tokens, request.output_tokens) == (row["input_length"], row["output_length"])
        # The last id may be of part of a block.
        assert request.block_ids.tolist() == row["hash_ids"][: row["input_length"] // 512]


def test_plain_and_packed_files_read_alike(tmp_path: Path) -> None:
    line = session_line(asked([1, 2], 0.0)) + "\n"
    (tmp_path / "a.jsonl").write_text(line)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(line.encode()))
    for path in sorted(tmp_path.iterdir()):
        (session,) = read_sessions(path)
        assert session.agents[0].requests[0].block_ids.tolist() == [1, 2]


BROKEN = {
    "not JSON": "{",
    "not an object": "[1]",
    "no known form": "{}",
    "no requests": session_line(),
    "requests of another kind": json.dumps({"id": "s", "block_size": 2, "requests": 3}),
    "no block size": json.dumps({"id": "s", "requests": [asked([1], 0.0)]}),
    "block size 0": session_line(asked([1], 0.0), block_size=0),
    "no id": session_line(asked([1], 0.0), id=None),
    "fewer ids than blocks": session_line({**asked([1], 0.0), "in": 4}),
    "an id below 0": session_line(asked([-1], 0.0)),
    "an id too large": session_line(asked([1 << 32], 0.0)),
    "an id that is none": session_line(asked(["x"], 0.0)),  # type: ignore[list-item]
    "an id that is text": session_line(asked(["5"], 0.0)),  # type: ignore[list-item]
    "a fraction for an id": session_line(asked([1.5], 0.0)),  # type: ignore[list-item]
    "a list for an id": session_line(asked([[1]], 0.0)),  # type: ignore[list-item]
    "blocks no memory holds": session_line(asked([1], 0.0), block_size=1 << 62),
    "more tokens than are counted": session_line({**asked([1], 0.0), "out": 1 << 32}),
    "a number too long to read": session_line(asked([1], 0.0)).replace("2", "2" * 5000, 1),
    "a time no clock has": session_line(asked([1], 10**400)),
    "an id that is no text": session_line(asked([1], 0.0), id="\ud800"),
    "lists without end": "[" * 100_000,
    "tokens below 0": session_line({**asked([1], 0.0), "out": -1}),
    "a time that is none": session_line(asked([1], float("nan"))),
    "a time below 0": session_line(asked([1], -1.0)),
    "a sub-agent without an end": session_line(
        asked([1], 0.0), {"type": "subagent", "agent_id": "a", "t": 1.0, "requests": [asked([1], 0.0)]}
    ),
    "a request of Mooncake's without ids": json.dumps({"timestamp": 0, "input_length": 512, "output_length": 1}),
}


@pytest.mark.parametrize("line", BROKEN.values(), ids=BROKEN.keys())
def test_a_line_that_is_no_session_is_named(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "trace.jsonl", session_line(asked([1], 0.0)), "", line)
    sessions = read_sessions(path)
    assert next(sessions).session_id == "s"
    with pytest.raises(TraceError, match=r"trace\.jsonl:3: ") as caught:
        next(sessions)
    assert (caught.value.path, caught.value.line) == (path, 3)


@pytest.mark.parametrize("fixture", [CLAUDE_CODE, MOONCAKE], ids=["xz", "gz"])
@pytest.mark.parametrize("damage", ["cut", "bent", "bent inside"])
def test_a_damaged_archive_is_named(tmp_path: Path, fixture: Path, damage: str) -> None:
    data = bytearray(fixture.read_bytes())
    if damage == "cut":
        del data[len(data) // 2 :]
    elif damage == "bent":
        data[:4] = b"what"
    else:
        data[len(data) // 3 : len(data) // 2] = b"\xff" * (len(data) // 2 - len(data) // 3)
    path = tmp_path / fixture.name
    path.write_bytes(data)
    with pytest.raises(TraceError, match=path.name):
        list(read_sessions(path))


def test_ids_in_common_with_the_agents_last_request_may_be_left_out(tmp_path: Path) -> None:
    whole = [asked([1, 2, 3], 0.0), asked([1, 2, 3, 4], 5.0), asked([1, 9], 9.0)]
    helper = {"type": "subagent", "agent_id": "a", "t": 4.0, "duration_ms": 1000, "status": "completed"}
    short = [asked([1, 2, 3], 0.0), {**asked([4], 5.0), "in": 8, "shared_blocks": 3}]
    short += [{**asked([9], 9.0), "in": 4, "shared_blocks": 1}]
    own, left_out = [asked([7], 0.0), asked([7, 8], 1.0)], [asked([7], 0.0), {**asked([8], 1.0), "in": 4}]
    left_out[1]["shared_blocks"] = 1
    lines = [
        session_line(rows[0], {**helper, "requests": its}, *rows[1:]) for rows, its in ((whole, own), (short, left_out))
    ]
    one, other = read_sessions(write(tmp_path / "a.jsonl", *lines))
    for ours, theirs in zip(one.agents, other.agents, strict=True):
        assert [r.block_ids.tolist() for r in ours.requests] == [r.block_ids.tolist() for r in theirs.requests]
    wrong = write(tmp_path / "b.jsonl", session_line(asked([1], 0.0), {**asked([4], 5.0), "in": 8, "shared_blocks": 3}))
    with pytest.raises(TraceError, match="3 shared_blocks are more"):
        list(read_sessions(wrong))


def test_the_trace_of_the_package_is_read_by_its_name() -> None:
    sessions = TraceKind("coding", CLAUDE_CODE_TRACE).sessions()
    assert len(sessions) == 426
    small = {session.session_id: session for session in read_sessions(CLAUDE_CODE)}
    for packaged in [each for each in sessions if each.session_id in small]:
        for ours, theirs in zip(packaged.agents, small.pop(packaged.session_id).agents, strict=True):
            for one, other in zip(ours.requests, theirs.requests, strict=True):
                assert np.array_equal(one.block_ids, other.block_ids)
                assert (one.at_s, one.think_s, one.output_tokens) == (other.at_s, other.think_s, other.output_tokens)
    assert small == {}
