"""The split follows nodes that come and go, at once."""

from __future__ import annotations

import pytest
from core.planning import NINE, shape_of, split_of
from hypothesis import given
from hypothesis import strategies as st

from evolving.core.membership import follow_membership
from evolving.core.modes import Hold
from evolving.core.planner import (
    Decision,
    DecisionKind,
    Split,
    SplitShape,
    check_roles,
    effective_roles,
)
from evolving.core.terms import Role

P, D, M, X = Role.PREFILL, Role.DECODE, Role.MIXED, Role.DRAINING
NODES = NINE[:6]


def follow(split: Split, live: set[str], initial: str | None = None, prefill_share: float = 0.5) -> Decision | None:
    shape = SplitShape.parse(initial) if initial else None
    return follow_membership(
        split,
        live,
        initial=shape,
        prefill_share=prefill_share,
        author="planner",
        now_s=7.0,
    )


def test_the_first_split_waits_for_the_nodes_it_names() -> None:
    nothing = Split()
    assert follow(nothing, {"a", "b"}, initial="2P1D") is None
    decision = follow(nothing, {"a", "b", "c"}, initial="2P1D")
    assert decision is not None
    assert decision.roles_after == {"a": P, "b": P, "c": D}
    assert (decision.epoch_before, decision.epoch_after) == (0, 1)


def test_without_a_shape_the_first_split_waits_for_two_nodes() -> None:
    assert follow(Split(), set()) is None
    assert follow(Split(), {"a"}) is None
    decision = follow(Split(), {"a", "b", "c"})
    assert decision is not None
    assert decision.roles_after == {"a": P, "b": P, "c": D}


@pytest.mark.parametrize(("initial", "least"), [(None, 2), ("2P1D", 3)])
def test_the_first_split_waits_until_the_nodes_it_needs_are_warm(initial: str | None, least: int) -> None:
    live = {"a", "b", "c", "d"}
    shape = SplitShape.parse(initial) if initial else None
    for warm in (set(), {"a"}, {"a", "b"}, {"b", "c", "d"}, live, {"a", "gone", "left"}):
        decision = follow_membership(
            Split(), live, initial=shape, prefill_share=0.5, author="planner", now_s=7.0, warm=warm
        )
        assert (decision is not None) == (len(warm & live) >= least)
        if decision is not None:
            assert set(decision.roles_after) == live, "the others join at once"
    later = follow_membership(
        split_of(a=P, b=D), live, initial=shape, prefill_share=0.5, author="planner", now_s=7.0, warm=set()
    )
    assert later is not None, "a split that is there follows its nodes"


def test_more_nodes_than_the_first_split_names_are_assigned_by_its_share() -> None:
    decision = follow(Split(), {"a", "b", "c", "d", "e", "f"}, initial="2P1D")
    assert decision is not None
    assert shape_of(decision.roles_after) == (4, 2)


def test_a_membership_that_fits_the_split_decides_nothing() -> None:
    assert follow(split_of(a=P, b=D), {"a", "b"}) is None
    assert follow(split_of(a=P, b=D), set()) is None, "with no node left there is nothing to decide"
    assert follow(split_of(), {"a"}) is None, "a single unlisted node serves both phases anyway"


def test_a_lost_node_leaves_the_split_at_once_and_the_others_keep_their_roles() -> None:
    decision = follow(split_of(a=P, b=P, c=D), {"a", "c"})
    assert decision is not None
    assert decision.kind is DecisionKind.MEMBERSHIP
    assert decision.roles_after == {"a": P, "c": D}
    assert decision.moved_nodes == ()
    assert decision.reason == "lost b"
    assert decision.epoch_after == 6


def test_a_phase_that_lost_its_last_node_gets_another() -> None:
    for lost, left in (("c", {"a": P, "b": D}), ("a", {"b": P, "c": D})):
        decision = follow(split_of(a=P, b=P, c=D), {"a", "b", "c"} - {lost})
        assert decision is not None
        assert decision.roles_after == left


def test_the_last_node_keeps_its_role() -> None:
    decision = follow(split_of(a=P, b=D), {"b"})
    assert decision is not None
    assert decision.roles_after == {"b": D}
    back = follow(decision.split(), {"a", "b"})
    assert back is not None
    assert back.roles_after == {"a": P, "b": D}


def test_a_node_that_comes_back_restores_the_share_aimed_at() -> None:
    aim = 1 / 3
    lost = follow(split_of(a=P, b=D, c=D), {"b", "c"}, prefill_share=aim)
    assert lost is not None
    assert shape_of(lost.roles_after) == (1, 1)
    back = follow(lost.split(), {"a", "b", "c"}, prefill_share=lost.prefill_share)
    assert back is not None
    assert shape_of(back.roles_after) == (1, 2)


def test_a_newcomer_that_would_do_equally_well_in_either_phase_prefills() -> None:
    decision = follow(split_of(a=X), {"a", "b", "c"}, prefill_share=0.5)
    assert decision is not None
    assert decision.roles_after == {"a": X, "b": P, "c": D}


def test_one_lost_while_another_joins_is_one_decision() -> None:
    decision = follow(split_of(a=P, b=D), {"a", "c"})
    assert decision is not None
    assert decision.roles_after == {"a": P, "c": D}
    assert decision.reason == "lost b; joined c"


@given(
    roles=st.dictionaries(st.sampled_from(NODES), st.sampled_from(list(Role))),
    steps=st.lists(st.sets(st.sampled_from(NODES)), min_size=1, max_size=8),
    share=st.floats(0, 1),
)
def test_whatever_comes_and_goes_each_phase_keeps_a_node_and_epochs_grow(
    roles: dict[str, Role], steps: list[set[str]], share: float
) -> None:
    split = Split(epoch=1, roles=roles)
    for live in steps:
        decision = follow(split, live, prefill_share=share)
        if decision is None:
            continue
        assert decision.changes_split
        assert decision.epoch_after == split.epoch + 1
        kept = {n: r for n, r in split.roles.items() if n in live}
        split = decision.split()
        assert follow(split, live, prefill_share=share) is None, "the split settles in one decision"
        assert set(split.roles) <= live
        serving = {n: r for n, r in effective_roles(split, live).items() if r is not X}
        if len(serving) >= 2:
            check_roles(serving, set(serving))
        moved = [n for n, r in kept.items() if split.roles[n] is not r]
        assert len(moved) <= 1, "a node that stays moves only to fill an empty phase"


def test_nodes_that_come_and_go_are_followed_under_a_hold_which_stays() -> None:
    hold = Hold("ops", until_s=99.0)
    for now_s, kept in ((98.0, hold), (99.0, None)):
        for split, live in ((split_of(a=P, b=P, c=D), {"a", "c"}), (Split(), {"a", "b"})):
            decision = follow_membership(
                split,
                live,
                initial=None,
                prefill_share=0.5,
                author="planner",
                now_s=now_s,
                hold=hold,
            )
            assert decision is not None
            assert decision.changes_split
            assert decision.hold == kept
