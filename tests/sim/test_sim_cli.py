"""The command line: what it prints and writes, how it fails, and that it says the same anywhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from evolving_sim import cli
from evolving_sim.outcomes import Outcome, play
from evolving_sim.results import Summary
from evolving_sim.scenario_files.reading import parse, read

TINY = Path(__file__).with_name("tiny.toml")
SUMMARY = set(Summary.__dataclass_fields__)
OUTCOME = {"format", "simulated", "complete", "until_s", "final_shape", "summary", "kinds", "windows", "switches",
           "scenario"}  # fmt: skip


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def written(path: Path) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    document: dict[str, Any] = json.loads(path.read_text(), parse_constant=refuse)
    return document


def test_run_prints_a_table_and_writes_json_and_charts(tmp_path: Path) -> None:
    result = command("run", TINY, "--json", tmp_path / "a" / "out.json", "--charts", tmp_path / "charts")
    assert result.exit_code == 0, result.output
    document = written(tmp_path / "a" / "out.json")
    assert set(document) == OUTCOME
    assert (document["format"], document["simulated"], document["complete"]) == (1, True, True)
    assert set(document["summary"]) == SUMMARY
    assert set(document["kinds"]) == {"worker", "reader"}
    assert [(each["from_s"], each["to_s"]) for each in document["windows"]] == [(0, 40), (40, 80), (80, 120)]
    assert document["scenario"]["machine"]["decode_slots"] == 16
    assert f"{document['summary']['requests']:,}" in result.stdout
    assert "first token, P95" in result.stdout
    assert (tmp_path / "charts" / "run.png").read_bytes().startswith(b"\x89PNG")


def test_windows_and_kinds_add_up(tmp_path: Path) -> None:
    command("run", TINY, "--set", "warm_up_s=0", "--json", tmp_path / "out.json")
    document = written(tmp_path / "out.json")
    requests = document["summary"]["requests"]
    assert sum(each["summary"]["requests"] for each in document["windows"]) == requests
    assert sum(each["requests"] for each in document["kinds"].values()) == requests


def test_a_set_key_is_played_instead(tmp_path: Path) -> None:
    command("run", TINY, "--set", "shape=3P1D", "--set", "workload.agents={reader = 2}", "--json", tmp_path / "o.json")
    document = written(tmp_path / "o.json")
    assert document["final_shape"] == "3P1D"
    assert set(document["kinds"]) == {"reader"}


def test_compare_pairs_requests_with_those_of_the_first_run(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ("--arm", "ours-static", "--split", "1P3D", "--split", "2P2D", "--processes", "2")
    result = command("compare", TINY, *arguments, "--json", out, "--charts", tmp_path)
    assert result.exit_code == 0, result.output
    first, second = runs = written(out)["runs"]
    assert [run["name"] for run in runs] == ["1P3D", "2P2D"]
    assert [run["outcome"]["scenario"]["shape"] for run in runs] == ["1P3D", "2P2D"]
    assert set(second["outcome"]) == OUTCOME
    assert first["paired_with_first"] is None
    assert 0 < second["paired_with_first"]["requests"] <= first["outcome"]["summary"]["requests"]
    assert second["paired_with_first"]["e2e_s_sooner"] > 0, "one prefill node is too few"
    assert all(run["name"] in result.stdout for run in runs)
    assert (tmp_path / "figures.png").exists()


def test_sweep_plays_each_value_with_each(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ("--set", "shape=1P3D,2P2D", "--set", "seed=1,2", "--set", "seconds=30", "--processes", "1")
    result = command("sweep", TINY, *arguments, "--json", out, "--charts", tmp_path)
    assert result.exit_code == 0, result.output
    rows = written(out)["rows"]
    assert [row["settings"] for row in rows] == [
        {"shape": shape, "seed": seed, "seconds": 30} for shape in ("1P3D", "2P2D") for seed in (1, 2)
    ]
    assert all(row["outcome"]["until_s"] == 30 for row in rows)
    assert (tmp_path / "sweep.png").exists()


@pytest.mark.parametrize("name", ["agents", "trace"])
def test_an_example_is_a_scenario_to_start_from(tmp_path: Path, name: str) -> None:
    result = command("example", name)
    assert result.exit_code == 0
    (tmp_path / "my.toml").write_text(result.stdout)
    parse(read(tmp_path / "my.toml"), tmp_path)


@pytest.mark.parametrize("arguments", [(), ("run",), ("compare",), ("sweep",), ("paper",), ("example",)])
def test_help_has_examples(arguments: tuple[str, ...]) -> None:
    result = command(*arguments, "--help")
    assert result.exit_code == 0
    assert f"evolving-sim {arguments[0] if arguments else 'run'} " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("run", "none.toml"), "evolving-sim: none.toml can't be read: No such file or directory"),
        (("run", TINY, "--set", "shape"), "evolving-sim: --set: 'shape' is not KEY=VALUE"),
        (("run", TINY, "--set", "seed=1,2"), "evolving-sim: --set: seed takes one value here, got '1,2'"),
        (
            ("run", TINY, "--set", "planer.slices=8"),
            "planer: there is no such key; did you mean planner?",
        ),
        (("run", TINY, "--json", "/"), "evolving-sim: --json: / is a folder; name a file"),
        (("run", TINY, "--charts", TINY), "is a file; name a folder"),
        (("compare", TINY), "evolving-sim: give what to compare: --arm, --split, or both"),
        (("compare", TINY, "--arm", "theirs"), "evolving-sim: arm: no arm is called 'theirs'; there are ours"),
        (("compare", TINY, "--split", "4"), "evolving-sim: shape: '4' is not a shape such as 2P1D"),
        (("sweep", TINY), "Missing option '--set'"),
        (("sweep", TINY, "--set", "seed=1,x"), "evolving-sim: seed: must be a valid integer"),
        (("example", "mine"), "evolving-sim: there is no example 'mine'; there are agents, "),
    ],
)
def test_what_cannot_be_done_is_told(arguments: tuple[str, ...], line: str) -> None:
    result = command(*arguments)
    assert result.exit_code == 2
    assert line in result.stderr
    assert "Traceback" not in result.output


def test_a_bad_line_of_a_trace_is_told_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text(
        '{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}\n{}\n'
    )
    text = TINY.read_text().replace("[workload]", '[traces.mine]\ntrace = "mine.jsonl"\n\n[workload]')
    (tmp_path / "my.toml").write_text(text)
    bad = f"evolving-sim: not a trace: {tmp_path / 'mine.jsonl'}:2: neither a session"
    for arguments in (("run",), ("sweep", "--set", "seed=1,2", "--processes", "2")):
        result = command(*arguments, tmp_path / "my.toml", "--set", "workload.agents={mine = 1}")
        assert (result.exit_code, bad in result.stderr) == (2, True), result.output


def test_ones_own_requests_are_played_when_they_came(tmp_path: Path) -> None:
    """Mooncake's form: the second prompt extends the first one, the third has nothing of it."""
    rows = [
        {"timestamp": 1000 * at_s, "input_length": 600 + 512 * extra, "output_length": 20, "hash_ids": ids}
        for at_s, extra, ids in ((0, 0, [1, 2]), (30, 1, [1, 3, 4]), (60, 0, [5, 6]))
    ]
    (tmp_path / "mine.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "my.toml").write_text(TINY.read_text() + '\n[traces.mine]\ntrace = "mine.jsonl"\n')
    settings = ("--set", 'workload={recorded = ["mine"]}', "--set", "warm_up_s=0")
    result = command("run", tmp_path / "my.toml", *settings, "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    document = written(tmp_path / "out.json")
    assert [each["summary"]["requests"] for each in document["windows"]] == [2, 1, 0]
    assert document["summary"]["ideal_hit_rate"] == pytest.approx(512 / (600 + 1112 + 600))


def test_a_run_without_answers_says_so() -> None:
    result = command("run", TINY, "--set", "seconds=1e-3", "--set", "warm_up_s=0")
    assert result.exit_code == 1
    assert "nothing was answered" in result.stderr


def test_an_interrupted_run_gives_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **options: Any) -> Outcome:
        os.kill(os.getpid(), signal.SIGINT)
        return play(*arguments, **options)

    monkeypatch.setattr(cli, "play", interrupted)
    result = command("run", TINY, "--json", tmp_path / "out.json")
    assert result.exit_code == 130
    assert "interrupted" in result.stderr
    document = written(tmp_path / "out.json")
    assert (document["complete"], document["until_s"], document["windows"]) == (False, 0, [])


def test_a_stopped_run_ends_where_a_shorter_one_does() -> None:
    """Played in steps, in one go, or to be stopped: the same things happen."""
    looks = iter([False] * 3)
    stopped = play(parse(read(TINY), TINY.parent), stop=lambda: next(looks, True))
    assert 0 < stopped.until_s < 120
    raw = dict(read(TINY)) | {"seconds": stopped.until_s, "warm_up_s": 0}
    assert play(parse(raw, TINY.parent)).windows == stopped.windows


def test_results_are_the_same_bytes_in_any_process(tmp_path: Path) -> None:
    def run(seed: str) -> bytes:
        out = tmp_path / f"{seed}.json"
        subprocess.run(
            [sys.executable, "-m", "evolving_sim.cli", "run", str(TINY), "--set", "arm=ours", "--json", str(out)],
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        )
        return out.read_bytes()

    first = run("1")
    assert b'"requests"' in first
    assert run("2") == first
