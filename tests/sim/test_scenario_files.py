"""Scenario files: what they say is what is simulated, and what is wrong with one is told by its key."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from evolving_sim.arms.named import ARMS
from evolving_sim.machines import GLM_5_2
from evolving_sim.mixes import CODING
from evolving_sim.population import Arrivals, Burst, WorkloadConfig
from evolving_sim.scenario_files.build import scenario_of
from evolving_sim.scenario_files.model import (
    ArrivalsTable,
    BurstTable,
    FaultsTable,
    ScenarioFile,
    TraceTable,
    WorkloadTable,
)
from evolving_sim.scenario_files.reading import ScenarioError, changed, parse, read, values_of
from evolving_sim.traced import TraceKind

TINY = Path(__file__).with_name("tiny.toml")


def told(settings: dict[str, Any]) -> str:
    with pytest.raises(ScenarioError) as failure:
        parse(changed(read(TINY), settings), TINY.parent)
    return str(failure.value)


def test_a_file_says_all_of_a_run() -> None:
    scenario = scenario_of(parse(read(TINY), TINY.parent))
    assert str(scenario.shape) == "2P2D"
    assert scenario.machine.prefill.c1_s == 2.4e-3
    assert scenario.machine.decode_slots == 16
    assert scenario.machine.kv_bytes_per_token == GLM_5_2.kv_bytes_per_token, "left out: the default"
    (period,) = scenario.workload.periods
    assert {kind.name: count for kind, count in period.agents.items()} == {"worker": 12, "reader": 3}
    assert scenario.gateway_s == 0.0
    assert scenario_of(parse(changed(read(TINY), {"gateway_s": 0.2}), TINY.parent)).gateway_s == 0.2


def test_what_is_read_is_told_whole_and_reads_as_the_same() -> None:
    file = parse(read(TINY), TINY.parent)
    document = json.loads(json.dumps(file.as_json(), allow_nan=False))
    assert document["kinds"]["worker"]["context_tokens_max"] == 8000
    assert document["kinds"]["worker"]["think_s"]["least"] == 1.0
    assert parse(document, TINY.parent) == file


def test_a_machine_is_like_another_but_for_its_own_keys() -> None:
    settings = {"machine": {"like": "glm-5.2", "decode_slots": 8, "decode": {"d0_s": 1.0}}}
    machine = parse(changed(read(TINY), settings), TINY.parent).machine
    assert machine.prefill == GLM_5_2.prefill
    assert (machine.decode_slots, machine.decode.d0_s) == (8, 1.0)
    assert machine.decode.experts == GLM_5_2.decode.experts


def test_a_kind_is_like_another_but_for_its_own_keys() -> None:
    raw = changed(read(TINY), {"kinds.worker": {"like": "coding", "turns": {"median": 2, "mean": 3, "most": 9}}})
    kind = parse(raw, TINY.parent).kinds["worker"]
    assert (kind.name, kind.turns.mean, kind.think_s) == ("worker", 3, CODING.think_s)
    assert kind.sub_agents == CODING.sub_agents


def fitted(folder: Path, **changes: Any) -> Path:
    """A file as `evolvectl --json plan model` prints it, of two nodes."""
    nodes = [
        {"node_id": f"n{number}", "prefill_coefficients_s": [0.01 * number, 1e-4, 1e-9, 0.0, 0.0],
         "decode_coefficients_s": [0.02, 0.01, 1e-3, 1e-8]} | changes
        for number in (1, 3)
    ]  # fmt: skip
    path = folder / "model.json"
    path.write_text(json.dumps({"nodes": nodes}))
    return path


def test_a_fitted_model_gives_the_means_of_its_nodes(tmp_path: Path) -> None:
    """The mean of linear models predicts the mean of what they predict."""
    fitted(tmp_path)
    given = {"fitted": "model.json", "decode": {"experts": 8, "experts_per_token": 2}}
    machine = parse(changed(read(TINY), {"machine": given}), tmp_path).machine
    assert machine.prefill.c0_s == pytest.approx(0.02)
    assert (machine.decode.d2_s, machine.decode.experts) == (1e-3, 8)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"decode_coefficients_s": []}, "not what `evolvectl --json plan model` prints"),
        ({"decode_coefficients_s": None}, "not what `evolvectl --json plan model` prints"),
        ({}, "give decode.experts_per_token and decode.experts"),
    ],
)
def test_a_model_that_cannot_be_used_is_told(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    fitted(tmp_path, **changes)
    with pytest.raises(ScenarioError, match=why):
        parse(changed(read(TINY), {"machine": {"fitted": "model.json"}}), tmp_path)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"machin.prefill": 1}, "machin: there is no such key; did you mean machine?"),
        ({"machine.prefil": {}}, "machine.prefil: there is no such key; did you mean prefill? (keys there: like, "),
        ({"machine.prefill.c5_s": 1}, "machine.prefill.c5_s: there is no such key"),
        ({"machine.prefill.c0_s": "fast"}, "machine.prefill.c0_s: must be a valid number"),
        ({"machine.prefill.c0_s": -1}, "machine.prefill: PrefillCoefficients.c0_s must be finite and >= 0, got -1"),
        ({"machine.like": "h100"}, "machine: like must be one of glm-5.2, kimi-k2.6, got 'h100'"),
        ({"machine.fitted": "none.json"}, "none.json can't be read: No such file"),
        ({"planner.gate": "strict"}, "planner.gate: must be 'paper' or 'default', got 'strict'"),
        ({"planner.windows_s": 3}, "planner.windows_s: there is no such key; did you mean window_s?"),
        ({"planner.slices": 1}, "planner: slices_valid_least must be at least 2 and at most slices"),
        ({"shape": "9"}, "shape: '9' is not a shape such as 2P1D"),
        ({"shape": "0P3D"}, "shape: 0P3D: each phase needs a node"),
        ({"seconds": 0}, "seconds: must be greater than 0, got 0"),
        ({"warm_up_s": 500}, "warm_up_s (500) must be less than seconds (120)"),
        ({"arm": "theirs"}, "no arm is called 'theirs'; there are "),
        ({"workload.agents.cook": 3}, "no kind of agent is called 'cook'; there are coding, "),
        ({"workload.agents": {}}, "workload: nothing is asked: give agents, periods, arrivals or recorded"),
        ({"workload.periods": [{"from_s": 0, "agents": {}}]}, "workload: give agents or periods, not both"),
        ({"workload.recorded": ["mine"]}, "no trace is called 'mine': give [traces.mine]"),
        ({"workload.arrivals": [{"kind": "worker", "per_minute": 1}]}, "workload.arrivals[0].per_min is missing"),
        ({"kinds.worker.like": "poet"}, "kinds.worker: like must be one of coding, "),
        ({"kinds.worker.turns": {"median": 3, "mean": 2}}, "kinds.worker.turns: not a spread"),
        ({"kinds.worker.output_tokens": {"median": 3, "men": 2}}, "men: there is no such key; did you mean mean?"),
        ({"kinds.worker.output_tokens.mean": "x"}, "kinds.worker.output_tokens.mean: must be a valid number"),
        ({"faults.node_death": [{"at_s": 1}]}, "faults.node_death[0].node_id is missing"),
        ({"dynamo.planner.interval": 1}, "dynamo.planner.interval: there is no such key; did you mean interval_s?"),
        ({"traces.mine": {"file": "a.jsonl"}}, "traces.mine.trace is missing"),
    ],
)
def test_what_is_wrong_is_told_by_its_key(settings: dict[str, Any], line: str) -> None:
    assert line in told(settings), told(settings)


def test_all_that_is_wrong_is_told_at_once() -> None:
    assert len(told({"seconds": -1, "shape": "many", "planner.gate": "x"}).splitlines()) == 3


def test_a_file_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="can't be read: No such file"):
        read(tmp_path / "none.toml")
    for text in (b"seed = ", b"\xff"):
        (tmp_path / "bad.toml").write_bytes(text)
        with pytest.raises(ScenarioError, match=r"bad\.toml is not TOML"):
            read(tmp_path / "bad.toml")


def test_values_are_as_toml_has_them_or_text() -> None:
    assert values_of("300, 600.5") == [300, 600.5]
    assert values_of("3P6D,4P5D") == ["3P6D", "4P5D"]
    assert values_of("inf,true") == [math.inf, True]
    assert values_of("[1, 2],[3]") == [[1, 2], [3]]
    assert values_of('"a,b"') == ["a,b"]
    assert values_of("paper") == ["paper"]


def test_values_are_set_where_a_key_says_and_nothing_else_is_changed() -> None:
    raw = {"a": {"b": [{"c": 1}, {"c": 2}]}}
    assert changed(raw, {"a.b.1.c": 3, "d.e": 4}) == {"a": {"b": [{"c": 1}, {"c": 3}]}, "d": {"e": 4}}
    assert raw == {"a": {"b": [{"c": 1}, {"c": 2}]}}
    with pytest.raises(ScenarioError, match=r"a\.b\.7\.c: nothing can be set there"):
        changed(raw, {"a.b.7.c": 3})


def test_a_file_can_say_all_that_a_workload_can_be() -> None:
    """Tables that are read by hand have the keys of what is made from them."""
    assert set(TraceTable.model_fields) == {field.name for field in fields(TraceKind)} - {"name"}
    assert set(WorkloadTable.model_fields) - {"agents"} == {field.name for field in fields(WorkloadConfig)}
    assert set(ArrivalsTable.model_fields) == {field.name for field in fields(Arrivals)}
    assert set(BurstTable.model_fields) == {field.name for field in fields(Burst)}


def test_every_key_and_arm_is_in_the_readme() -> None:
    readme = (Path(__file__).parents[2] / "libs" / "sim" / "README.md").read_text()
    keys = {*ScenarioFile.model_fields, *FaultsTable.model_fields} - {"name"}
    assert [name for name in (*keys, *ARMS) if f"`{name}`" not in readme and f"[{name}" not in readme] == []


@pytest.mark.parametrize(
    "example", [path for path in resources.files("evolving_sim.scenario_files").iterdir() if path.name[-5:] == ".toml"]
)
def test_examples_are_scenarios(example: Any) -> None:
    assert isinstance(parse(read(Path(str(example))), Path()), ScenarioFile)
