"""Decisions as etcd keeps them: read as they were written, computed again with the same result, and bounded."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from core.planning import MODELS, WORKS, a_slice, mean_work, node_model
from hypothesis import given
from hypothesis import strategies as st

from evolving.core.config import Gate, PlannerConfig
from evolving.core.modes import Hold, Mode
from evolving.core.planner import Decision, DecisionKind, Split
from evolving.core.replan import decide_by_throughput, evaluate
from evolving.core.slices import Slice
from evolving.core.terms import Role
from evolving.core.throughput import NodeModel
from evolving.runtime.keys import BadRecord
from evolving.v1.planner_pb2 import ListDecisionsRequest
from evolving_planner.history import History
from evolving_planner.measures import Missing
from evolving_planner.records import decode_decision, decode_split, encode_decision, encode_split
from evolving_planner.service import PlannerService

P, D, M, X = Role
HOLDS = st.none() | st.builds(Hold, st.text(), st.text(), st.none() | st.floats(0, 1e10))
MISSING = st.none() | st.builds(Missing, *[st.integers(0, 2**62)] * 4, st.floats(0, 1e9))


def decision(epoch: int, nodes: int = 2) -> Decision:
    roles = {f"node-{index}": P if index else D for index in range(nodes)}
    return Decision(1.5, DecisionKind.OPERATOR, f"to {epoch}", "ops", epoch - 1, epoch, roles, roles, 0.25)


def measured(models: dict[str, NodeModel], roles: dict[str, Role], config: PlannerConfig) -> Decision:
    slices = [a_slice(mean_work(iterations=300 + 7 * i), 10.0 * len(roles), started_s=60.0 * i) for i in range(10)]
    evaluation = evaluate(slices, roles, models, config)
    return decide_by_throughput(
        Split(3, roles),
        roles,
        evaluation,
        mode=Mode.AUTO,
        hold=None,
        prefill_share=0.5,
        author="planner",
        now_s=1_700_000_000.5,
    )


@given(
    nodes=st.lists(st.tuples(MODELS, st.sampled_from([P, D, M, X])), min_size=1, max_size=6),
    slices=st.lists(st.builds(a_slice, st.none() | WORKS, st.floats(0.1, 300)), max_size=10),
    windows=st.integers(0, 2),
    gate=st.sampled_from(Gate),
    hold=HOLDS,
    missing=MISSING,
)
def test_what_was_evaluated_is_read_as_it_was_written_and_computes_to_the_same(
    nodes: list[tuple[NodeModel, Role]],
    slices: list[Slice],
    windows: int,
    gate: Gate,
    hold: Hold | None,
    missing: Missing | None,
) -> None:
    models = {f"n{i}": model for i, (model, _) in enumerate(nodes)}
    roles = {f"n{i}": role for i, (_, role) in enumerate(nodes)}
    config = PlannerConfig(gate=gate, slices_valid_least=2)
    evaluation = evaluate(slices, roles, models, config, slices[::-1] * windows)
    written = replace(decision(4), evaluation=evaluation, mode=Mode.SHADOW, hold=hold)
    read, read_missing = decode_decision(encode_decision(written, missing))
    assert read == written
    assert read_missing == missing
    kept = read.evaluation
    assert kept is not None
    assert evaluate(kept.slices, kept.roles, kept.models, kept.config, kept.earlier) == evaluation


@pytest.mark.parametrize("value", [b"", b"{}", b"[]", b"\xff", b"null", b'{"kind": "stay"}'])
def test_what_is_no_decision_is_a_bad_record(value: bytes) -> None:
    with pytest.raises(BadRecord):
        decode_decision(value)


@given(data=st.data())
def test_a_damaged_decision_is_a_bad_record_or_a_decision(data: st.DataObject) -> None:
    roles = {"a": P, "b": D}
    value = bytearray(encode_decision(measured(dict.fromkeys(roles, node_model()), roles, PlannerConfig()), Missing()))
    for place in data.draw(st.lists(st.integers(0, len(value) - 1), min_size=1, max_size=3)):
        value[place] = data.draw(st.integers(0, 255))
    try:
        decode_decision(bytes(value))
    except BadRecord:
        return


def test_the_split_is_read_as_it_was_written() -> None:
    split = decision(4).split()
    assert decode_split(encode_split(split)) == split


def test_a_decision_of_many_nodes_fits_into_a_value_of_etcd() -> None:
    roles = {f"node-{i:04d}.cluster.example": P if i % 2 else D for i in range(256)}
    models = {node: node_model(1.0 + i / 1000) if i % 8 == 0 else node_model() for i, node in enumerate(roles)}
    made = measured(models, roles, PlannerConfig())
    value = encode_decision(made, Missing())
    assert len(value) < 1_000_000
    assert decode_decision(value)[0] == made


def test_earlier_slices_that_are_too_much_for_etcd_are_left_out_before_the_rest_is() -> None:
    roles = {"a": P, "b": D}
    slices = [a_slice(mean_work(iterations=300 + 7 * i), 20.0, started_s=60.0 * i) for i in range(10)]
    evaluation = evaluate(slices, roles, dict.fromkeys(roles, node_model()), PlannerConfig(), slices * 400)
    assert len(evaluation.earlier) == 4000
    read, _ = decode_decision(encode_decision(replace(decision(4), evaluation=evaluation), None))
    assert read.evaluation == replace(evaluation, earlier=())


def test_a_record_from_before_earlier_windows_were_looked_at_is_read() -> None:
    """It may hold an operator's hold."""
    roles = {"a": P, "b": D}
    made = measured(dict.fromkeys(roles, node_model()), roles, PlannerConfig())
    document = json.loads(encode_decision(made, None))
    del document["evaluation"]["earlier"], document["evaluation"]["counted_earlier"]
    document["evaluation"]["config"].pop("evidence_windows")
    assert decode_decision(json.dumps(document).encode())[0] == made


def test_an_evaluation_too_large_for_etcd_is_left_out_and_the_decision_kept() -> None:
    roles = {f"{'n' * 200}-{i}": P if i % 2 else D for i in range(4000)}
    evaluation = evaluate([], roles, dict.fromkeys(roles, node_model()), PlannerConfig())
    made = replace(decision(4), evaluation=evaluation)
    read, _ = decode_decision(encode_decision(made, None))
    assert read == replace(made, evaluation=None)


# -- history


def history_of(epochs: int) -> History:
    history = History()
    for epoch in range(1, epochs + 1):
        history.put(history.next_number, encode_decision(decision(epoch), None), revision=10 + epoch)
    return history


def epochs(history: History, before: int | None = None) -> list[int]:
    return [kept.decision.epoch_after for kept in history.before(before)]


def test_the_newest_decision_says_what_is_in_force() -> None:
    history = history_of(3)
    hold = Hold("ops", "a test", 17.0)
    history.put(3, encode_decision(replace(decision(4), hold=hold, prefill_share=0.75), None), revision=20)
    assert (history.epoch, history.hold, history.prefill_share, history.next_number) == (4, hold, 0.75, 4)
    empty = History()
    assert (empty.epoch, empty.hold, empty.prefill_share, empty.next_number) == (0, None, 0.5, 0)


def test_a_decision_that_cannot_be_read_hides_no_other_and_keeps_its_number() -> None:
    history = history_of(3)
    for number in (1, 3):
        with pytest.raises(BadRecord):
            history.put(number, b"{", revision=50)
    assert epochs(history) == [3, 1]
    assert history.next_number == 4
    assert history.epoch == 3
    assert history.surplus(keep=2) == [0, 1], "it counts, and goes when its time has come"


def test_an_older_value_or_removal_changes_nothing() -> None:
    history = history_of(2)
    history.put(1, encode_decision(decision(9), None), revision=11)
    assert epochs(history) == [2, 1]
    history.forget(1, revision=11)
    assert epochs(history) == [2, 1]
    history.forget(1, revision=12)
    assert epochs(history) == [1]


def test_the_newest_are_kept_and_fewer_where_they_are_too_large_together() -> None:
    assert history_of(5).surplus(keep=3) == [0, 1]
    assert history_of(2).surplus(keep=3) == []
    large = History()
    value = encode_decision(decision(1, nodes=10_000), None)
    for number in range(30):
        large.put(number, value, revision=10)
    surplus = large.surplus(keep=200)
    assert surplus == list(range(len(surplus)))
    assert 0 < len(surplus) < 30
    assert (30 - len(surplus)) * len(value) < 32 * 1024 * 1024, "all of it comes in one message"


def test_decisions_are_listed_from_the_newest_down_by_number() -> None:
    history = history_of(7)
    assert epochs(history) == [7, 6, 5, 4, 3, 2, 1]
    assert epochs(history, before=3) == [3, 2, 1]
    history.put(7, encode_decision(decision(8), None), revision=30)
    assert epochs(history, before=3) == [3, 2, 1], "numbers stay"
    assert epochs(history, before=0) == []


async def test_a_page_of_large_decisions_is_shorter_so_that_every_client_takes_it() -> None:
    history, value = History(), encode_decision(decision(1, nodes=10_000), None)
    for number in range(30):
        history.put(number, value, revision=10)
    loaded = asyncio.Event()
    loaded.set()
    view = cast("Any", SimpleNamespace(history=history, loaded=loaded))
    other = cast("Any", None)
    service = PlannerService(view, other, other, other, other, Mode.AUTO, other)
    token, listed, pages = "", 0, 0
    while token or not pages:
        page = await service.ListDecisions(ListDecisionsRequest(page_size=1000, page_token=token), other)
        assert page.ByteSize() < 4 * 1024 * 1024
        token, listed, pages = page.next_page_token, listed + len(page.decisions), pages + 1
    assert listed == 30
    assert 1 < pages < 30


def test_a_split_without_its_decision_gets_one_once() -> None:
    history = history_of(3)
    last = decision(3)
    orphan = Split(4, {**last.roles_after, "node-0": P}, "orphan", "planner", 9.0)
    found = history.decision_behind(orphan, None)
    assert found is not None
    assert (found.epoch_before, found.epoch_after, found.reason) == (3, 4, "orphan")
    assert found.kind is DecisionKind.SWITCH, "the same nodes, and no operator"
    history.put(3, encode_decision(found, None), revision=30)
    assert history.decision_behind(orphan, None) is None
    assert History().decision_behind(Split(), None) is None
    joined = replace(orphan, epoch=7, roles={**orphan.roles, "new": P})
    found = history.decision_behind(joined, None)
    assert found is not None
    assert (found.kind, found.epoch_after) == (DecisionKind.MEMBERSHIP, 7)
    assert found.split() == joined


def test_a_split_by_an_operator_whose_decision_is_lost_holds() -> None:
    history = history_of(3)
    roles = {**decision(3).roles_after, "node-0": P}
    found = history.decision_behind(Split(4, roles, "they say so", "operator:x", 9.0), None)
    assert found is not None
    assert found.kind is DecisionKind.OPERATOR
    assert found.hold == Hold("operator:x", "they say so", None)


def test_what_a_planner_was_about_to_write_is_the_decision_behind_its_split() -> None:
    history = history_of(3)
    mine = replace(decision(4), hold=Hold("ops", "", 99.0), prefill_share=0.9)
    assert history.decision_behind(mine.split(), mine) is mine
    others = replace(mine.split(), author="operator:x")
    found = history.decision_behind(others, mine)
    assert found is not None
    assert found.author == "operator:x"
