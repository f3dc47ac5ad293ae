"""evolvectl's commands against scripted services at given addresses: what it asks, prints and exits with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from evolvectl_harness import DECODE, PREFILL, evolvectl, one_line, scripted_planner
from scripted_cluster import ScriptedModels, ScriptedPlanner, nobody, running
from scripted_gateway import refusal

from evolving.v1 import common_pb2, directory_pb2, gateway_pb2, planner_pb2
from evolving_client.ctl.app import global_first
from evolving_client.ctl.plain import plain

Code = grpc.StatusCode


@pytest.fixture
def planner() -> ScriptedPlanner:
    return scripted_planner()


@pytest.fixture
def planner_address(planner: ScriptedPlanner) -> Iterator[str]:
    with running(planner) as address:
        yield address


def test_split_show_names_live_and_lost_nodes(planner_address: str) -> None:
    outcome = evolvectl("--planner", planner_address, "split", "show")
    assert outcome.code == 0
    assert "split 1P2D · epoch 7 · by operator:me at 1970-01-02 00:00:00Z · because" in outcome.out
    assert ["node-a", "prefill", "live", "10.0.0.1:1"] in outcome.words
    assert ["node-b", "mixed", "live", "10.0.0.2:1"] in outcome.words, "the role in effect, not the one assigned"
    assert ["node-z", "decode", "gone", "-"] in outcome.words


def test_split_show_as_json_has_every_field(planner: ScriptedPlanner, planner_address: str) -> None:
    answer = evolvectl("split", "show", "--json", "--planner", planner_address).json
    assert answer["split"] == {
        "epoch": 7,
        "roles": {"node-a": "prefill", "node-b": "decode", "node-z": "decode"},
        "reason": "because",
        "author": "operator:me",
        "written_at_s": 86400.0,
    }
    assert answer["leader_address"] == "10.0.0.9:1"
    assert [node["role"] for node in answer["nodes"]] == ["prefill", "mixed"]


def test_split_set_sends_a_shape(planner: ScriptedPlanner, planner_address: str) -> None:
    outcome = evolvectl(
        "--planner", planner_address, "split", "set", "2p1D", "--reason", "more prompts", "--expected-epoch", "7"
    )
    assert outcome.code == 0
    assert planner.requests == [
        planner_pb2.ProposeSplitRequest(
            shape=planner_pb2.SplitShape(prefill_nodes=2, decode_nodes=1), reason="more prompts", expected_epoch=7
        )
    ]
    assert "epoch 8" in outcome.out


def test_split_set_sends_roles_of_nodes(planner: ScriptedPlanner, planner_address: str) -> None:
    outcome = evolvectl(
        "--planner", planner_address, "--json", "split", "set", "node-a=decode", "node-b=PREFILL", "node-z=draining"
    )
    assert planner.requests == [
        planner_pb2.ProposeSplitRequest(
            changes=planner_pb2.RoleChanges(
                roles={"node-a": DECODE, "node-b": PREFILL, "node-z": common_pb2.ROLE_DRAINING}
            )
        )
    ]
    assert outcome.json["roles"] == {"node-a": "decode", "node-b": "prefill", "node-z": "draining"}
    assert outcome.json["epoch"] == 8


@pytest.mark.parametrize(
    "words", [["3"], ["2P"], ["2P1D", "node-a=decode"], ["node-a"], ["node-a=boss"], ["=decode"], ["a=decode"] * 2, []]
)
def test_a_split_without_sense_is_wrong_usage(planner: ScriptedPlanner, planner_address: str, words: list[str]) -> None:
    outcome = evolvectl("--planner", planner_address, "split", "set", *words)
    assert outcome.code == 2
    assert not planner.requests


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (refusal(Code.INVALID_ARGUMENT, "INVALID_ARGUMENT"), 1),
        (refusal(Code.ABORTED, "EPOCH_CHANGED"), 1),
        (refusal(Code.FAILED_PRECONDITION, "NOT_LEADER"), 1),
        (refusal(Code.UNAUTHENTICATED, "UNAUTHENTICATED"), 1),
        (refusal(Code.PERMISSION_DENIED, "FORBIDDEN"), 1),
        (refusal(Code.INTERNAL, ""), 1),
        (refusal(Code.UNAVAILABLE, "STORE_UNAVAILABLE"), 3),
        (refusal(Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"), 3),
    ],
)
def test_a_refusal_is_a_line_and_an_exit_code(
    planner: ScriptedPlanner, planner_address: str, error: Any, code: int
) -> None:
    planner.errors.append(error)
    outcome = evolvectl("--planner", planner_address, "split", "set", "2P1D")
    assert outcome.code == code
    line = one_line(outcome)
    assert planner_address in line
    assert not outcome.out


def test_the_leader_a_planner_names_is_asked(planner: ScriptedPlanner, planner_address: str) -> None:
    standby = ScriptedPlanner()
    standby.errors.append(refusal(Code.FAILED_PRECONDITION, "NOT_LEADER", leader=planner_address))
    with running(standby) as address:
        assert evolvectl("--planner", address, "split", "set", "2P1D").code == 0
    assert len(standby.requests) == len(planner.requests) == 1


def test_planners_that_name_each_other_are_asked_once(planner: ScriptedPlanner, planner_address: str) -> None:
    standby = ScriptedPlanner()
    with running(standby) as address:
        standby.errors.append(refusal(Code.FAILED_PRECONDITION, "NOT_LEADER", leader=planner_address))
        planner.errors.append(refusal(Code.FAILED_PRECONDITION, "NOT_LEADER", leader=address))
        assert evolvectl("--planner", address, "split", "set", "2P1D").code == 1
    assert len(standby.requests) == len(planner.requests) == 1


def test_nobody_at_an_address_is_unreachable() -> None:
    gone = nobody()
    for command in (
        ["--planner", gone, "split", "show"],
        ["--directory", gone, "audit"],
        ["--gateway", gone, "models"],
        ["--etcd", gone, "models"],
        ["--etcd", f"{gone},{nobody()}", "status"],
    ):
        outcome = evolvectl("--timeout-s", "2", *command)
        assert outcome.code == 3, command
        assert gone in one_line(outcome)


@pytest.mark.parametrize("command", [["models"], ["generate", "Hello"]])
def test_a_refused_connection_is_called_one_and_not_a_matter_of_patience(command: Sequence[str]) -> None:
    gone = nobody()
    line = one_line(evolvectl("--timeout-s", "2", "--gateway", gone, *command))
    assert f"the gateway at {gone} refused the connection" in line
    assert "evolvectl status" in line
    assert "--timeout-s" not in line


def test_the_token_travels(planner: ScriptedPlanner, planner_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    evolvectl("--planner", planner_address, "--token", "one", "split", "show")
    monkeypatch.setenv("EVOLVING_TOKEN", "two")
    monkeypatch.setenv("EVOLVING_PLANNER", planner_address)
    evolvectl("split", "show")
    assert planner.authorizations == ["Bearer one", "Bearer two"]


def test_the_token_is_read_from_a_file(
    planner: ScriptedPlanner, planner_address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept = tmp_path / "cluster.token"
    kept.write_text("three\n")
    evolvectl("--planner", planner_address, "split", "show", "--token-file", str(kept))
    monkeypatch.setenv("EVOLVING_TOKEN_FILE", str(kept))
    evolvectl("--planner", planner_address, "split", "show")
    evolvectl("--planner", planner_address, "split", "show", "--token", "four")
    assert planner.authorizations == ["Bearer three", "Bearer three", "Bearer four"]


@pytest.mark.parametrize("content", [None, b"", b" \n", b"\xff\xfe"])
def test_a_file_that_holds_no_token_is_wrong_usage(
    planner: ScriptedPlanner, planner_address: str, tmp_path: Path, content: bytes | None
) -> None:
    kept = tmp_path / "cluster.token"
    if content is not None:
        kept.write_bytes(content)
    outcome = evolvectl("--planner", planner_address, "--token-file", str(kept), "split", "show")
    assert outcome.code == 2
    assert str(kept) in one_line(outcome)
    assert not planner.requests


def decision(number: int) -> planner_pb2.Decision:
    """The number-th decision, newest first."""
    return planner_pb2.Decision(
        decided_at_s=86400.0 * (9 - number),
        kind="switch",
        reason=f"reason-{number}",
        epoch_before=10 - number,
        epoch_after=11 - number,
        roles_before={"node-a": PREFILL, "node-b": DECODE},
        roles_after={"node-a": DECODE, "node-b": DECODE, "node-c": PREFILL},
    )


def test_decisions_are_read_page_by_page_up_to_the_limit(planner: ScriptedPlanner, planner_address: str) -> None:
    planner.decisions = [decision(number) for number in range(9)]
    planner.page = 2
    outcome = evolvectl("--planner", planner_address, "decisions", "--limit", "5", "--json")
    assert [each["reason"] for each in outcome.json["decisions"]] == [f"reason-{number}" for number in range(5)]
    everything = evolvectl("--planner", planner_address, "decisions", "--json")
    assert len(everything.json["decisions"]) == 9


def test_a_decision_says_what_changed(planner: ScriptedPlanner, planner_address: str) -> None:
    stay = planner_pb2.Decision(kind="stay", author="planner", epoch_before=3, epoch_after=3, reason="no gain")
    planner.decisions = [decision(0), stay]
    _, _, first, second = evolvectl("--planner", planner_address, "decisions").words
    changes = ["node-a", "prefill→decode,", "node-c", "-→prefill"]
    assert first == ["1970-01-10", "00:00:00Z", "switch", "-", "10→11", *changes, "-", "reason-0"]
    assert second == ["-", "stay", "planner", "3", "-", "-", "no", "gain"]


def test_models_lists_what_is_served() -> None:
    model = gateway_pb2.Model(
        model="m", vocabulary_tokens=10, max_prompt_tokens=20, max_context_tokens=30, block_tokens=64, nodes=3
    )
    with running(ScriptedModels(models=[model])) as address:
        assert ["m", "3", "10", "20", "30", "64"] in evolvectl("--gateway", address, "models").words
        assert evolvectl("--gateway", address, "models", "--json").json == {"models": [plain(model)]}
        outcome = evolvectl("--gateway", f"{nobody()}, {address}", "models")
        assert outcome.code == 0, "the next address is asked"


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["status", "--nonsense"], ["--timeout-s", "0", "status"], ["decisions", "--limit", "0"],
                  ["--etcd", ",", "status"], ["generate", "x", "--raw", "--system", "y"],
                  ["generate", "1", "--token-ids", "--raw"], ["generate", "one", "--token-ids"],
                  ["generate", "", "--token-ids"]]
)  # fmt: skip
def test_wrong_usage_exits_2(arguments: Sequence[str]) -> None:
    assert evolvectl(*arguments).code == 2


@pytest.mark.parametrize("command", [[], ["split"], ["split", "set"], ["branch"], ["block", "show"], ["generate"]])
def test_every_command_has_help(command: Sequence[str]) -> None:
    outcome = evolvectl(*command, "--help")
    assert outcome.code == 0
    assert "Usage:" in outcome.out


def test_help_says_how_the_cluster_is_found() -> None:
    text = " ".join(evolvectl("--help").out.split())
    assert "{prefix}/{partition}/services/" in text
    assert "Exit codes: 0" in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("status --json", "--json status"),
        ("split set 2P1D --etcd a:1 --reason x", "--etcd a:1 split set 2P1D --reason x"),
        ("status --etcd=a:1", "--etcd=a:1 status"),
        ("status --etcd", "--etcd status"),
        ("generate -- --json", "generate -- --json"),
    ],
)
def test_global_options_may_follow_the_command(arguments: str, expected: str) -> None:
    assert global_first(arguments.split(), frozenset({"--etcd"}), frozenset({"--json"})) == expected.split()


def test_plain_values_keep_every_field_and_type() -> None:
    message = planner_pb2.GetSplitResponse(split=planner_pb2.Split(epoch=2**60, roles={"b": DECODE, "a": PREFILL}))
    message.nodes.add(role=99)
    value = plain(message)
    assert list(value) == [each.name for each in planner_pb2.GetSplitResponse.DESCRIPTOR.fields]
    assert value["split"]["epoch"] == 2**60
    assert list(value["split"]["roles"].items()) == [("a", "prefill"), ("b", "decode")]
    assert value["nodes"][0]["role"] == "99", "a role newer than this tool"
    assert plain(planner_pb2.ProposeSplitRequest())["shape"] is None
    assert plain(directory_pb2.AuditMismatch(name=b"\x01\xff"))["name"] == "01ff"
    assert plain(common_pb2.Branch(state=common_pb2.BRANCH_STATE_EXPIRED))["state"] == "expired"
    assert json.loads(json.dumps(value)) == value
