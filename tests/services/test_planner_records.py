"""The history of decisions: what is kept, and what etcd can take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evolving.core.planner import Decision, DecisionKind, Split
from evolving.core.terms import Role
from evolving.runtime.keys import BadRecord
from evolving_planner.records import History, decode_history, decode_split, encode_history, encode_split


def decision(epoch: int, nodes: int = 2) -> Decision:
    roles = {f"node-{index}": Role.PREFILL if index else Role.DECODE for index in range(nodes)}
    return Decision(1.5, DecisionKind.OPERATOR, f"to {epoch}", "ops", epoch - 1, epoch, roles, roles, 0.25)


def history_of(epochs: int, keep: int, nodes: int = 2) -> History:
    history = History()
    for epoch in range(1, epochs + 1):
        history = history.with_decision(decision(epoch, nodes), keep)
    return history


def test_records_are_read_as_they_were_written() -> None:
    history = history_of(5, keep=3)
    assert decode_history(encode_history(history)) == history
    split = decision(4).split()
    assert decode_split(encode_split(split)) == split


@pytest.mark.parametrize(
    "value", [b"", b"{}", b"[]", b"\xff", b'{"decisions": [{}], "dropped": 0, "prefill_share": 0.5}']
)
def test_what_is_no_history_is_a_bad_record(value: bytes) -> None:
    with pytest.raises(BadRecord):
        decode_history(value)


def test_the_newest_decisions_are_kept_and_the_last_share_aimed_at() -> None:
    history = history_of(5, keep=3)
    assert [d.epoch_after for d in history.decisions] == [3, 4, 5]
    assert history.dropped == 2
    assert history.prefill_share == 0.25


def test_a_history_too_large_for_one_value_loses_its_oldest_decisions() -> None:
    history = history_of(100, keep=100, nodes=500)
    value = encode_history(history)
    assert len(value) < 1_500_000
    fitted = decode_history(value)
    assert fitted.decisions[-1] == history.decisions[-1]
    assert fitted.dropped + len(fitted.decisions) == 100
    assert fitted.decisions == history.decisions[fitted.dropped :]


def test_pages_go_from_the_newest_down_by_number() -> None:
    history = history_of(7, keep=5)
    first, following = history.page(2, None)
    assert [d.epoch_after for d in first] == [7, 6]
    assert following is not None
    later = history.with_decision(decision(8), 5)
    second, following = later.page(2, following)
    assert [d.epoch_after for d in second] == [5, 4]
    assert following is None, "the rest is no longer kept"
    assert later.page(2, 1) == ([], None)
    assert later.page(10, 0) == ([], None)


def test_a_split_without_its_decision_is_completed_once() -> None:
    history = history_of(3, keep=10)
    split = Split(4, {"a": Role.MIXED}, "orphan", "planner", 9.0)
    completed = history.completed(split)
    assert completed.decisions[-1].epoch_before == 3
    assert completed.decisions[-1].epoch_after == 4
    assert completed.decisions[-1].kind is DecisionKind.MEMBERSHIP
    assert completed.completed(split) == completed
    assert History().completed(Split()) == History()
    by_operator = history.completed(replace(split, author="operator:x"))
    assert by_operator.decisions[-1].kind is DecisionKind.OPERATOR
