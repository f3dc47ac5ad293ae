"""evolvectl's commands about holds, evaluations and models, against a scripted planner."""

from __future__ import annotations

import time
from collections.abc import Iterator

import grpc
import pytest
from evolvectl_harness import DECODE, PREFILL, evolvectl, one_line, scripted_planner
from scripted_cluster import ScriptedPlanner, running
from scripted_gateway import refusal

from evolving.v1 import planner_pb2
from evolving_client.ctl import output
from evolving_client.ctl.plain import plain

MINUTE_S, HOUR_S = 60.0, 3600.0


def candidate(prefill: int, decode: int, gain: float = 0.0, **moves: int) -> planner_pb2.Candidate:
    return planner_pb2.Candidate(
        shape=planner_pb2.SplitShape(prefill_nodes=prefill, decode_nodes=decode),
        moves=moves,  # type: ignore[arg-type]
        prefill_per_s=1.5 * prefill,
        decode_per_s=2.0 * decode,
        throughput_per_s=min(1.5 * prefill, 2.0 * decode),
        mean_gain=gain,
        error=0.0125,
        passes=gain > 0.025,
    )


def evaluation() -> planner_pb2.Evaluation:
    """Of two nodes more than the scripted planner has."""
    measured = planner_pb2.Evaluation(
        counted_slices=1,
        candidates=[
            candidate(1, 4, -0.5, b=DECODE),
            candidate(2, 3),
            candidate(3, 2, 0.25, c=PREFILL),
            candidate(4, 1, 0.01, c=PREFILL, d=PREFILL, e=PREFILL, f=PREFILL, g=PREFILL),
        ],
        missing=planner_pb2.Missing(late_samples=3, unreported_s=75.0),
        gate=planner_pb2.Gate(name="default", window_s=600.0, slices=10, slices_valid_least=8,
                              slice_completions_least=5, gain_floor=0.01, cooldown_s=120.0, evidence_windows=6),
    )  # fmt: skip
    work = planner_pb2.MeanWork(
        uncached_tokens=512, query_key_pairs=131328, cached_tokens=2048, restored_tokens=64, decode_iterations=99.5,
        context_tokens=2600,
    )  # fmt: skip
    measured.slices.add(from_age_s=120, to_age_s=60, completions=17, without_prefill=2, open_requests=6.25, work=work)
    measured.slices.add(from_age_s=60, to_age_s=0)
    measured.models.extend(models(fitted_at_s=86400.0 - 2 * HOUR_S))
    return measured


def models(fitted_at_s: float) -> list[planner_pb2.NodeModel]:
    prefill = planner_pb2.PhaseFit(node_id="a", fitted_at_s=fitted_at_s, rows=40, error_in_sample=0.031,
                                   error_left_out=0.042, unidentified=["c3"], dropped=["c4"], recent_rows=12,
                                   recent_error=0.055)  # fmt: skip
    decode = planner_pb2.PhaseFit(node_id="b", fitted_at_s=fitted_at_s, rows=9, error_in_sample=0.02)
    fitted = planner_pb2.NodeModel(
        node_id="a", prefill_coefficients_s=[0.0123, 8.5e-5, 1.2e-9, 0, 0], decode_coefficients_s=[0.02, 0, 1e-3, 0],
        source="fit", new_tokens_per_iteration=256, restored_share=0.125, prefill_fit=prefill, decode_fit=decode,
    )  # fmt: skip
    return [fitted, planner_pb2.NodeModel(node_id="b", source="config")]


def decision(kind: str, *, with_evaluation: bool) -> planner_pb2.Decision:
    made = planner_pb2.Decision(decided_at_s=86400.0, kind=kind, reason=f"{kind} it is", epoch_before=7, epoch_after=7)
    if with_evaluation:
        made.evaluation.CopyFrom(evaluation())
    return made


@pytest.fixture
def planner() -> ScriptedPlanner:
    planner = scripted_planner()
    planner.split.mode = "auto"
    planner.evaluation = evaluation()
    planner.models = models(time.time() - 2 * HOUR_S)
    return planner


@pytest.fixture
def address(planner: ScriptedPlanner) -> Iterator[str]:
    with running(planner) as address:
        yield address


def test_a_split_that_is_set_holds_and_says_how_to_release_it(planner: ScriptedPlanner, address: str) -> None:
    forever = evolvectl("--planner", address, "split", "set", "2P1D")
    for_a_while = evolvectl("--planner", address, "split", "set", "2P1D", "--hold-s", "5400")
    free = evolvectl("--planner", address, "split", "set", "2P1D", "--no-hold")
    asked = [(request.hold_s, request.no_hold) for request in planner.requests]  # type: ignore[attr-defined]
    assert asked == [(0.0, False), (5400.0, False), (0.0, True)]
    assert "held until released · evolvectl plan release ends it" in forever.out
    assert "held for 1h 30min · evolvectl plan release ends it" in for_a_while.out
    assert "not held" in free.out


def test_a_hold_that_is_none_and_has_a_length_is_wrong_usage(planner: ScriptedPlanner, address: str) -> None:
    outcome = evolvectl("--planner", address, "split", "set", "2P1D", "--no-hold", "--hold-s", "5")
    assert outcome.code == 2
    one_line(outcome)
    assert not planner.requests


def test_a_hold_keeps_every_role(planner: ScriptedPlanner, address: str) -> None:
    outcome = evolvectl("--planner", address, "plan", "hold", "--for-s", "90", "--reason", "upgrade")
    keep = planner_pb2.ProposeSplitRequest(keep=planner_pb2.KeepRoles(), hold_s=90.0, reason="upgrade")
    assert planner.requests == [keep]
    assert "held for 1min 30s" in outcome.out
    assert evolvectl("--planner", address, "plan", "hold", "--json").json["epoch"] == 8


def test_a_hold_is_released(planner: ScriptedPlanner, address: str) -> None:
    outcome = evolvectl("--planner", address, "plan", "release", "--reason", "done")
    assert planner.requests == [planner_pb2.ReleaseSplitRequest(reason="done")]
    assert "not held" in outcome.out
    assert evolvectl("--planner", address, "plan", "release", "--json").json == plain(planner.split.split)


def test_split_show_and_plan_show_tell_who_decides(planner: ScriptedPlanner, address: str) -> None:
    for command in ("split", "plan"):
        planner.split.ClearField("hold")
        free = evolvectl("--planner", address, command, "show").out
        assert "leader: 10.0.0.9:1 · mode auto" in free
        assert "not held" in free
        planner.split.hold.author, planner.split.hold.reason = "operator:me", "upgrade"
        text = evolvectl("--planner", address, command, "show").out
        assert "held by operator:me until released · upgrade · evolvectl plan release ends it" in text
        planner.split.hold.until_s = time.time() + 2 * HOUR_S + 30.0
        assert "held by operator:me for another 2h, until " in evolvectl("--planner", address, command, "show").out


def test_plan_show_finds_the_last_decision_by_measurement(planner: ScriptedPlanner, address: str) -> None:
    planner.decisions = [decision("operator", with_evaluation=False)] * 30
    outcome = evolvectl("--planner", address, "plan", "show")
    assert outcome.code == 0
    assert "what-if" in outcome.out
    assert evolvectl("--planner", address, "plan", "show", "--json").json["decision"] is None
    planner.decisions += [decision("stay", with_evaluation=True), decision("switch", with_evaluation=True)]
    outcome = evolvectl("--planner", address, "plan", "show")
    assert "last decision: stay at 1970-01-02 00:00:00Z: stay it is" in outcome.out
    assert ["2P3D", "3", "6", "3", "-", "-", "present", "-"] in outcome.words
    as_json = evolvectl("--planner", address, "plan", "show", "--json").json
    assert as_json == {**plain(planner.split), "decision": plain(planner.decisions[30])}


def test_it_is_told_which_slices_before_the_window_were_looked_at(planner: ScriptedPlanner, address: str) -> None:
    for _ in range(3):
        planner.evaluation.earlier_slices.add(from_age_s=180, to_age_s=120)
    looked = evolvectl("--planner", address, "plan", "what-if")
    assert "1 of 2 slices count; with the 3 before them no split passes either" in looked.out
    planner.evaluation.counted_earlier_slices = 2
    counted = evolvectl("--planner", address, "plan", "what-if")
    assert "1 of 2 slices count, and 2 before them, under the same split" in counted.out


def test_what_if_compares_a_shape_with_the_present(planner: ScriptedPlanner, address: str) -> None:
    outcome = evolvectl("--planner", address, "plan", "what-if", "3p2d")
    assert planner.requests == [
        planner_pb2.EvaluateSplitRequest(shape=planner_pb2.SplitShape(prefill_nodes=3, decode_nodes=2))
    ]
    assert "3P2D would serve 4 requests/s (prefill 4.5, decode 4)" in outcome.out
    assert (
        "2P3D, the present split, 3 requests/s: gain +25.00%, standard error 1.25%; it passes the gate" in outcome.out
    )
    assert "moves: c→prefill" in outcome.out
    assert "1 of 2 slices count" in outcome.out
    work = ["17", "2", "6.2", "512", "2048", "64", "131328", "99.5", "2600"]
    assert ["2min", "ago", "1min", "ago", *work] in outcome.words
    assert ["1min", "ago", "now", "0", "0", "0.0", *["-"] * 6] in outcome.words
    assert "measurements missing: 3 samples came late, gateways were silent for 1min 15s" in outcome.out
    assert "window 10min in 10 slices" in outcome.out
    assert "up to 6 windows under one split count together" in outcome.out
    planner.evaluation.gate.name = "paper"
    assert "windows under one split" not in evolvectl("--planner", address, "plan", "what-if", "3P2D").out
    assert "does not pass" in evolvectl("--planner", address, "plan", "what-if", "1P4D").out
    assert "it is the present split" in evolvectl("--planner", address, "plan", "what-if", "2P3D").out
    as_json = evolvectl("--planner", address, "plan", "what-if", "3P2D", "--json").json
    assert as_json == {"evaluation": plain(planner.evaluation), "candidate": plain(planner.evaluation.candidates[2])}


def test_what_if_without_a_shape_shows_all(planner: ScriptedPlanner, address: str) -> None:
    planner.evaluation.problem = "the split was changed 20 s ago"
    outcome = evolvectl("--planner", address, "plan", "what-if")
    assert planner.requests == [planner_pb2.EvaluateSplitRequest()]
    assert ["1P4D", "1.5", "8", "1.5", "-50.00%", "1.25%", "-", "b→decode"] in outcome.words
    assert ["3P2D", "4.5", "4", "4", "+25.00%", "1.25%", "passes", "c→prefill"] in outcome.words
    assert "f→prefill and 1 more" in outcome.out
    assert "nothing may move: the split was changed 20 s ago" in outcome.out


@pytest.mark.parametrize("shape", [[], ["5P4D"]])
def test_what_if_without_measurements_says_so(planner: ScriptedPlanner, address: str, shape: list[str]) -> None:
    planner.evaluation = planner_pb2.Evaluation(problem="2 of 10 slices say something")
    outcome = evolvectl("--planner", address, "plan", "what-if", *shape)
    assert outcome.code == 0
    assert "yet: 2 of 10 slices say something" in outcome.out
    assert evolvectl("--planner", address, "plan", "what-if", *shape, "--json").json["candidate"] is None


def test_model_says_what_is_known_of_each_node_and_how_well(planner: ScriptedPlanner, address: str) -> None:
    outcome = evolvectl("--planner", address, "plan", "model")
    coefficients = ["c0", "12.3ms", "c1", "85µs", "c2", "1.2ns", "·", "256", "new", "tokens,", "12.5%", "restored"]
    known = ["2h", "40", "3.1%", "4.2%", "5.5%", "on", "12", "c3,", "c4", "(did", "not", "pay)"]
    assert ["a", "prefill", "fit", *known, *coefficients] in outcome.words
    decode = ["2h", "9", "2.0%", "-", "-", "-", "d0", "20ms", "d2", "1ms"]
    assert ["a", "decode", "fit", "of", "b", *decode] in outcome.words
    assert ["b", "decode", "config", *["-"] * 6, "0"] in outcome.words
    assert evolvectl("--planner", address, "plan", "model", "--json").json == {"nodes": [*map(plain, planner.models)]}


def test_refit_asks_for_some_nodes_or_all(planner: ScriptedPlanner, address: str) -> None:
    one = evolvectl("--planner", address, "plan", "refit", "b")
    assert {row[0] for row in one.words[2:-1]} == {"b"}
    outcome = evolvectl("--planner", address, "plan", "refit")
    assert planner.requests == [planner_pb2.RefitModelRequest(node_ids=["b"]), planner_pb2.RefitModelRequest()]
    assert {row[0] for row in outcome.words[2:-1]} == {"a", "b"}
    assert outcome.out.endswith("measured: prefill of b, decode of b\n")


def test_decisions_show_what_they_were_made_from_when_asked(planner: ScriptedPlanner, address: str) -> None:
    planner.decisions = [decision("operator", with_evaluation=False), decision("stay", with_evaluation=True)]
    planner.decisions[0].hold.author = "operator:me"
    planner.decisions[0].hold.until_s = 2 * 86400.0
    brief = evolvectl("--planner", address, "decisions")
    assert brief.words[2][3:] == ["-", "7", "-", "1970-01-03", "00:00:00Z", "operator", "it", "is"]
    assert brief.words[3][3:] == ["-", "7", "-", "-", "stay", "it", "is"]
    assert "slices count" not in brief.out
    outcome = evolvectl("--planner", address, "decisions", "-v")
    assert ["3P2D", "4.5", "4", "4", "+25.00%", "1.25%", "passes", "c→prefill"] in outcome.words
    assert "1 of 2 slices count" in outcome.out
    assert "missing: 3 samples" in outcome.out
    assert any(row[:5] == ["a", "prefill", "fit", "2h", "40"] for row in outcome.words), "as old as it was then"
    without, whole = (
        evolvectl("--planner", address, "decisions", "--json", *more).json["decisions"][1]["evaluation"]
        for more in ([], ["--verbose"])
    )
    assert without is None
    assert whole == plain(evaluation())


@pytest.mark.parametrize("command", [["what-if"], ["what-if", "1P1D"], ["refit"], ["hold"], ["release"]])
def test_the_leader_is_asked_itself(planner: ScriptedPlanner, address: str, command: list[str]) -> None:
    standby = ScriptedPlanner()
    standby.errors.append(refusal(grpc.StatusCode.FAILED_PRECONDITION, "NOT_LEADER", leader=address))
    with running(standby) as elsewhere:
        assert evolvectl("--planner", elsewhere, "plan", *command).code == 0
    assert len(planner.requests) == 1


def test_without_a_leader_the_line_says_what_to_do(planner: ScriptedPlanner, address: str) -> None:
    planner.errors.append(refusal(grpc.StatusCode.FAILED_PRECONDITION, "NOT_LEADER"))
    outcome = evolvectl("--planner", address, "plan", "what-if")
    assert outcome.code == 1
    assert "evolvectl status" in one_line(outcome)


@pytest.mark.parametrize(
    "words", [["what-if", "5P"], ["what-if", "node-a=decode"], ["what-if", "1P1D", "2P0D"], ["hold", "--for-s", "-1"]]
)
def test_wrong_usage_asks_nobody(planner: ScriptedPlanner, address: str, words: list[str]) -> None:
    assert evolvectl("--planner", address, "plan", *words).code == 2
    assert not planner.requests


@pytest.mark.parametrize("command", ["show", "what-if", "model", "refit", "hold", "release"])
def test_every_command_has_help(command: str) -> None:
    assert "Usage:" in evolvectl("plan", command, "--help").out


@pytest.mark.parametrize(
    ("value_s", "text"),
    [(0.25, "0.25s"), (45, "45s"), (59.7, "1min"), (750, "12min 30s"), (3600, "1h"), (3660, "1h 1min"),
     (86_400 * 3 + 4 * 3600 + 59, "3d 4h"), (86_405, "1d"), (0, "0s")],
)  # fmt: skip
def test_durations_are_readable(value_s: float, text: str) -> None:
    assert output.duration(value_s) == text
