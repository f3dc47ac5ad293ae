"""The rules of the split: shapes, fewest moves, operators' proposals and holds."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
from core.planning import NINE, shape_of, split_of
from hypothesis import given
from hypothesis import strategies as st

from evolving.core.membership import default_shape
from evolving.core.modes import Hold, hold_in_force
from evolving.core.planner import (
    Decision,
    DecisionKind,
    EpochChanged,
    Split,
    SplitRefused,
    SplitShape,
    assign,
    check_roles,
    effective_roles,
    parse_role,
    propose_changes,
    propose_keep,
    propose_shape,
    release,
    role_text,
)
from evolving.core.terms import Role

P, D, M, X = Role.PREFILL, Role.DECODE, Role.MIXED, Role.DRAINING
NODES = NINE[:6]


def by_shape(split: Split, live: set[str], text: str, expected_epoch: int = 0) -> Decision:
    shape = SplitShape.parse(text)
    return propose_shape(
        split,
        live,
        shape,
        expected_epoch=expected_epoch,
        reason="",
        author="ops",
        now_s=7.0,
    )


def by_node(split: Split, live: set[str], expected_epoch: int = 0, **changes: Role) -> Decision:
    return propose_changes(
        split,
        live,
        changes,
        expected_epoch=expected_epoch,
        reason="",
        author="ops",
        prefill_share=0.5,
        now_s=7.0,
    )


def test_a_shape_is_written_as_in_the_paper() -> None:
    assert SplitShape.parse("4P5D") == SplitShape(4, 5)
    assert str(SplitShape(4, 5)) == "4P5D"
    assert SplitShape.parse(" 2p1d ") == SplitShape(2, 1)


@pytest.mark.parametrize("text", ["", "2P", "P1D", "2P1D1D", "-1P2D", "2.5P1D", "1P0D", "0P3D", "9999999P1D"])
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(SplitRefused):
        SplitShape.parse(text)


def test_roles_are_read_as_they_are_written() -> None:
    assert [parse_role(role_text(role)) for role in Role] == list(Role)
    with pytest.raises(SplitRefused, match="prefill, decode, mixed, draining"):
        parse_role("idle")


def test_by_default_half_of_the_nodes_prefill_rounded_up() -> None:
    assert [str(default_shape(n)) for n in (2, 3, 4, 9)] == [
        "1P1D",
        "2P1D",
        "2P2D",
        "5P4D",
    ]


def test_a_live_node_that_no_split_lists_serves_both_phases_and_a_dead_one_has_no_role() -> None:
    assert effective_roles(split_of(a=P, b=D), {"b", "c"}) == {"b": D, "c": M}


@given(
    current=st.dictionaries(st.sampled_from(NODES), st.sampled_from(list(Role))),
    nodes=st.sets(st.sampled_from(NODES), min_size=2),
    data=st.data(),
)
def test_a_shape_is_met_with_the_fewest_moves(current: dict[str, Role], nodes: set[str], data: st.DataObject) -> None:
    prefill = data.draw(st.integers(1, len(nodes) - 1))
    shape = SplitShape(prefill, len(nodes) - prefill)
    roles = assign(shape, current, nodes)
    assert set(roles) == nodes
    assert shape_of(roles) == (shape.prefill, shape.decode)

    def moves(candidate: Mapping[str, Role]) -> int:
        return sum(current.get(node) is not role for node, role in candidate.items())

    every_way = (
        {node: P if node in chosen else D for node in nodes}
        for chosen in itertools.combinations(sorted(nodes), shape.prefill)
    )
    assert moves(roles) == min(moves(way) for way in every_way)


def test_an_operator_sets_a_shape() -> None:
    decision = by_shape(split_of(a=P, b=P, c=D), {"a", "b", "c"}, "1P2D")
    assert decision.kind is DecisionKind.OPERATOR
    assert decision.roles_after == {"a": P, "b": D, "c": D}
    assert decision.moved_nodes == ("b",)
    assert (decision.epoch_before, decision.epoch_after) == (5, 6)
    assert decision.split() == Split(6, {"a": P, "b": D, "c": D}, "operator asked for 1P2D", "ops", 7.0)


def test_a_shape_leaves_draining_nodes_out() -> None:
    decision = by_shape(split_of(a=P, b=X, c=D), {"a", "b", "c", "d"}, "1P2D")
    assert decision.roles_after == {"a": P, "b": X, "c": D, "d": D}


@pytest.mark.parametrize("text", ["1P1D", "3P1D"])
def test_a_shape_of_another_size_than_the_cluster_is_refused(text: str) -> None:
    with pytest.raises(SplitRefused, match="3 serve"):
        by_shape(split_of(a=P, b=P, c=D), {"a", "b", "c"}, text)


def test_an_operator_names_nodes_and_the_others_keep_their_roles() -> None:
    decision = by_node(split_of(a=P, b=P, c=D), {"a", "b", "c"}, b=D)
    assert decision.roles_after == {"a": P, "b": D, "c": D}
    assert decision.reason == "operator asked for b=decode"
    assert decision.prefill_share == pytest.approx(1 / 3)


def test_two_nodes_can_swap() -> None:
    decision = by_node(split_of(a=P, b=D), {"a", "b"}, a=D, b=P)
    assert decision.roles_after == {"a": D, "b": P}


def test_an_unknown_or_dead_node_is_refused() -> None:
    for name in ("z", "b"):
        with pytest.raises(SplitRefused, match=f"no such node: {name}"):
            by_node(split_of(a=P, b=D, c=D), {"a", "c"}, **{name: P})


@pytest.mark.parametrize("changes", [{"a": D}, {"b": P}, {"a": X}, {"b": X}, {"a": X, "b": X}])
def test_with_two_nodes_no_phase_may_be_left_without_one(
    changes: dict[str, Role],
) -> None:
    with pytest.raises(SplitRefused, match="no node would"):
        by_node(split_of(a=P, b=D), {"a", "b"}, **changes)


def test_a_node_that_serves_both_phases_lets_the_other_drain() -> None:
    assert by_node(split_of(a=P, b=D), {"a", "b"}, a=X, b=M).roles_after == {
        "a": X,
        "b": M,
    }


def test_a_single_node_may_have_any_role() -> None:
    for role in Role:
        check_roles({"a": role}, {"a"})


def test_naming_no_node_is_refused() -> None:
    with pytest.raises(SplitRefused):
        by_node(split_of(a=P, b=D), {"a", "b"})


def test_a_proposal_against_an_older_split_is_refused() -> None:
    split = split_of(epoch=5, a=P, b=D)
    for stale in (4, 6):
        with pytest.raises(EpochChanged) as refused:
            by_node(split, {"a", "b"}, stale, a=M)
        assert refused.value.metadata == {"current_epoch": "5"}
        with pytest.raises(EpochChanged):
            by_shape(split, {"a", "b"}, "1P1D", stale)
    assert by_node(split, {"a", "b"}, 5, a=M).epoch_after == 6


def test_a_proposal_that_changes_nothing_is_a_decision_of_the_same_epoch() -> None:
    decision = by_shape(split_of(a=P, b=D), {"a", "b"}, "1P1D")
    assert not decision.changes_split
    assert decision.epoch_after == decision.epoch_before == 5


def test_a_hold_lasts_until_its_time_or_for_ever() -> None:
    timed, lasting = Hold("ops", until_s=10.0), Hold("ops")
    assert hold_in_force(timed, 9.9) is timed
    assert hold_in_force(timed, 10.0) is None
    assert hold_in_force(lasting, 1e12) is lasting
    assert hold_in_force(None, 0.0) is None


def test_an_operator_s_proposal_says_what_holds_from_then_on() -> None:
    split, live, hold = split_of(a=P, b=P, c=D), {"a", "b", "c"}, Hold("ops", "a test of decode", until_s=99.0)
    for given_hold in (hold, None):
        shaped = propose_shape(
            split,
            live,
            SplitShape(1, 2),
            expected_epoch=0,
            reason="",
            author="ops",
            now_s=7.0,
            hold=given_hold,
        )
        named = propose_changes(
            split,
            live,
            {"b": D},
            expected_epoch=0,
            reason="",
            author="ops",
            prefill_share=0.5,
            now_s=7.0,
            hold=given_hold,
        )
        assert (shaped.hold, named.hold) == (given_hold, given_hold)


def test_an_operator_holds_the_split_as_it_is() -> None:
    split, hold = split_of(a=P, b=D), Hold("ops", until_s=99.0)

    def keep(expected_epoch: int) -> Decision:
        return propose_keep(
            split, expected_epoch=expected_epoch, reason="", author="ops", prefill_share=0.4, now_s=7.0, hold=hold
        )

    decision = keep(5)
    assert (decision.kind, decision.hold, decision.prefill_share) == (DecisionKind.OPERATOR, hold, 0.4)
    assert not decision.changes_split
    with pytest.raises(EpochChanged):
        keep(4)


def test_releasing_leaves_the_split_and_ends_the_hold() -> None:
    split = split_of(a=P, b=D)
    decision = release(split, reason="", author="ops", prefill_share=0.4, now_s=7.0)
    assert decision.kind is DecisionKind.OPERATOR
    assert not decision.changes_split
    assert decision.roles_after == split.roles
    assert decision.hold is None
    assert decision.prefill_share == 0.4
    assert decision.reason == "operator released the split"
