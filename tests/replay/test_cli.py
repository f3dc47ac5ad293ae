"""evolving-replay as people run it: the report it writes, and one line for whatever is wrong."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from replay.pool_gateway import PoolGateway, serving
from scripted_gateway import Play, refusal
from waiting import eventually

FIXTURES = Path(__file__).parents[1] / "fixtures"
TRACE = FIXTURES / "claude_code_small.jsonl.xz"
COMMAND = Path(sys.executable).parent / "evolving-replay"


async def started(*arguments: object) -> asyncio.subprocess.Process:
    """The command, running."""
    return await asyncio.create_subprocess_exec(
        COMMAND, *map(str, arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


async def outcome(process: asyncio.subprocess.Process) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def run(*arguments: object) -> tuple[int, str, str]:
    return await outcome(await started(*arguments))


def report_in(path: Path) -> Any:
    return json.loads(path.read_text())


async def test_a_table_and_a_file(tmp_path: Path) -> None:
    gateway = PoolGateway()
    token = tmp_path / "token"
    token.write_text("secret\n")
    report = tmp_path / "new" / "report.json"
    async with serving(gateway) as address:
        code, out, err = await run(
            TRACE, "--gateway", address, "--token-file", token, "--sessions", 2, "--compression", 1e9,
            "--max-prompt-tokens", 70_000, "--max-session-hours", 0.1, "--output", report,
        )  # fmt: skip
    assert (code, "Traceback" in err) == (0, False), err
    assert set(gateway.tokens_seen) == {"Bearer secret"}
    written = report_in(report)
    assert written["complete"] is True
    assert (written["sessions"], written["requests"], written["failed"]) == (2, len(gateway.requests), 0)
    assert set(written["lost_by"]) == {"eviction", "routing", "switch", "node", "fetch_failed"}
    assert set(written["ttft"]) == {"mean_s", "p50_s", "p95_s", "p99_s"}
    assert f"2 sessions, {written['requests']} requests" in out
    assert "node-a" in out


async def test_sessions_that_don_t_fit_are_left_out(tmp_path: Path) -> None:
    gateway = PoolGateway(max_prompt_tokens=70_000)
    async with serving(gateway) as address:
        code, out, err = await run(TRACE, "--gateway", address, "--compression", 1e9)
        assert (code, out.split()[1]) == (0, "4")
        assert "4 sessions; 3 left out" in err
        code, _, err = await run(TRACE, "--gateway", address, "--max-prompt-tokens", 100)
    assert code == 2
    assert "70000" in err
    assert max(len(each.token_ids) // 4 for each in gateway.requests) <= 70_000


async def test_mooncake_s_trace_comes_when_it_says() -> None:
    gateway = PoolGateway()
    async with serving(gateway) as address:
        code, out, err = await run(FIXTURES / "mooncake_small.jsonl.gz", "--gateway", address, "--compression", 1000)
    assert (code, out.split()[1]) == (0, "200"), err
    assert len(gateway.requests) == 200


async def test_interrupted_it_reports_what_was_played(tmp_path: Path) -> None:
    gateway = PoolGateway()
    gateway.plays.extend([*[Play()] * 5, *[Play(hang_at=0)] * 3])
    report = tmp_path / "report.json"
    async with serving(gateway) as address:
        process = await started(
            TRACE, "--gateway", address, "--compression", 1e9, "--concurrency", 1, "--output", report
        )
        await eventually(lambda: not process.returncode and gateway.running == 1 and len(gateway.plays) == 2)
        process.send_signal(signal.SIGINT)
        code, out, err = await outcome(process)
    assert code == 130
    assert err.strip().splitlines()[-1].startswith("evolving-replay: interrupted")
    written = report_in(report)
    assert (written["complete"], written["requests"], written["unfinished"]) == (False, 5, 1)
    assert "5 requests" in out
    assert re.search(r"^unfinished +1 *$", out, re.MULTILINE)
    assert [each.subtree for each in gateway.ended] == [True] * len(gateway.ended)
    begun = {each.branch.branch_id for each in gateway.requests if not each.branch.parent_branch_id}
    assert {branch_id for each in gateway.ended for branch_id in each.branch_ids} == begun


async def test_where_no_request_finishes(tmp_path: Path) -> None:
    gateway = PoolGateway()
    gateway.plays.extend([Play(fail_at=0, error=refusal(grpc.StatusCode.INVALID_ARGUMENT, "TOO_STRANGE"))] * 200)
    report = tmp_path / "report.json"
    async with serving(gateway) as address:
        code, _, err = await run(TRACE, "--gateway", address, "--compression", 1e9, "--output", report)
    assert code == 1
    assert "no request finished" in err
    assert report_in(report)["failures"] == {"TOO_STRANGE": len(gateway.requests)}


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--help"], 0, "--compression"),
        (["missing.jsonl", "--gateway", "127.0.0.1:1"], 2, "missing.jsonl can't be read: No such file"),
        ([TRACE], 2, "--gateway"),
        ([TRACE, "--gateway", "nowhere"], 2, "'nowhere' is not host:port"),
        ([TRACE, "--gateway", "a:70000"], 2, "'a:70000' is not host:port"),
        ([TRACE, "--gateway", "127.0.0.1:1"], 3, "127.0.0.1:1 refused the connection"),
        ([TRACE, "--gateway", "127.0.0.1:1", "--concurrency", "0"], 2, "--concurrency"),
        ([TRACE, "--gateway", "127.0.0.1:1", "--compression", "nan"], 2, "compression"),
        ([TRACE, "--gateway", "127.0.0.1:1", "--token-file", "missing"], 2, "--token-file: missing can't be read"),
        ([TRACE, "--gateway", "127.0.0.1:1", "--output", "."], 2, "is a directory"),
        ([Path(__file__), "--gateway", "127.0.0.1:1"], 2, "not a trace"),
        ([FIXTURES / "README.md", "--gateway", "127.0.0.1:1"], 2, "README.md:1"),
        ([FIXTURES, "--gateway", "127.0.0.1:1"], 2, "can't be read"),
    ],
)
async def test_what_is_wrong_is_said_in_a_line(arguments: list[object], code: int, says: str) -> None:
    got, out, err = await run(*arguments)
    assert got == code, err
    assert says in out + err
    assert "Traceback" not in err
    if code and "Usage" not in err:
        assert len(err.strip().splitlines()) == 1


async def test_open_arrivals_of_a_trace_without_times() -> None:
    async with serving(PoolGateway()) as address:
        code, _, err = await run(TRACE, "--gateway", address, "--arrivals", "open")
    assert code == 2
    assert len(err.strip().splitlines()) == 1
    assert "closed arrivals" in err
