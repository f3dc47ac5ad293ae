"""The prefix index: its moves, and what it says of copies and depths."""

from __future__ import annotations

import random

import pytest
from core.naming import fresh, ref

from evolving.core.directory_types import HolderRun, Match, NodeDepth, RunRef
from evolving.core.errors import BrokenChain, InvalidArgument
from evolving.core.prefix_index import PrefixIndex, UnknownParent, check_run
from evolving.core.terms import NAME_BYTES, Tier


@pytest.fixture
def rng() -> random.Random:
    return random.Random(1)


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex(run_blocks_max=64)


# ------------------------------------------------------------------------------------------------------------ matching


def test_depths_are_per_tier_and_stop_at_the_first_hole(index: PrefixIndex, rng: random.Random) -> None:
    names = fresh(rng, 40)
    a, b = index.add_node("a"), index.add_node("b")
    index.add_copies(a, Tier.L2, ref(names, 0, 30))
    index.add_copies(a, Tier.L1, ref(names, 0, 10))
    index.add_copies(a, Tier.L1, ref(names, 12, 40))
    index.add_copies(b, Tier.L2, ref(names, 5, 40))
    match = index.match(names + fresh(rng, 3))
    assert match.blocks == 43
    assert match.nodes == {"a": NodeDepth(l1_blocks=10, l2_blocks=30, either_blocks=40)}
    assert match.pool_blocks == match.any_blocks == 40
    assert match.holders == (
        HolderRun(0, 5, ("a",), ("a",)),
        HolderRun(5, 5, ("a",), ("a", "b")),
        HolderRun(10, 2, (), ("a", "b")),
        HolderRun(12, 18, ("a",), ("a", "b")),
        HolderRun(30, 10, ("a",), ("b",)),
    )


def test_the_pool_is_host_memory(index: PrefixIndex, rng: random.Random) -> None:
    names = fresh(rng, 20)
    a = index.add_node("a")
    index.add_copies(a, Tier.L1, ref(names, 0, 20))
    index.add_copies(a, Tier.L2, ref(names, 0, 7))
    match = index.match(names)
    assert (match.pool_blocks, match.any_blocks) == (7, 20)


def test_a_run_nobody_holds_lies_between_holders_without_nodes(index: PrefixIndex, rng: random.Random) -> None:
    names = fresh(rng, 50)
    a = index.add_node("a")
    index.add_copies(a, Tier.L2, ref(names, 0, 50))
    index.remove_copies(a, Tier.L2, ref(names, 10, 20))
    assert index.match(names).holders == (
        HolderRun(0, 10, (), ("a",)),
        HolderRun(10, 10, (), ()),
        HolderRun(20, 30, (), ("a",)),
    )
    assert index.match(names).pool_blocks == 10


def test_a_context_that_leaves_another_midway_matches_what_they_share(index: PrefixIndex, rng: random.Random) -> None:
    names = fresh(rng, 50)
    a = index.add_node("a")
    index.add_copies(a, Tier.L2, ref(names, 0, 50))
    for shared in (0, 1, 15, 16, 17, 31, 32, 49, 50):
        other = names[: shared * NAME_BYTES] + fresh(rng, 5)
        assert index.match(other).pool_blocks == shared


def test_an_empty_index_and_an_empty_context_match_nothing(index: PrefixIndex, rng: random.Random) -> None:
    assert index.match(b"") == Match()
    assert index.match(fresh(rng, 3)) == Match(blocks=3)


def test_a_match_stays_what_it_was(index: PrefixIndex, rng: random.Random) -> None:
    names = fresh(rng, 5)
    a = index.add_node("a")
    index.add_copies(a, Tier.L2, ref(names, 0, 5))
    match = index.match(names)
    index.retire(a)
    index.sweep(1000)
    assert index.add_node("b") == a  # the slot is used again
    assert match.holders == (HolderRun(0, 5, (), ("a",)),)


# ------------------------------------------------------------------------------------------------- what nodes announce


def test_a_run_below_an_unknown_block_is_refused(index: PrefixIndex, rng: random.Random) -> None:
    names = fresh(rng, 40)
    a = index.add_node("a")
    with pytest.raises(UnknownParent):
        index.add_copies(a, Tier.L2, ref(names, 20, 30))
    index.add_copies(a, Tier.L2, ref(names, 0, 18))
    with pytest.raises(UnknownParent):
        index.add_copies(a, Tier.L2, ref(names, 20, 30))
    index.add_copies(a, Tier.L2, ref(names, 18, 30))
    assert index.match(names).pool_blocks == 30
    index.check_invariants()


def test_a_run_below_another_continuation_of_the_same_depth_is_refused(index: PrefixIndex, rng: random.Random) -> None:
    names = fresh(rng, 19)
    a = index.add_node("a")
    index.add_copies(a, Tier.L2, ref(names, 0, 19))
    other = names[: 17 * NAME_BYTES] + fresh(rng, 10)
    with pytest.raises(UnknownParent):
        index.add_copies(a, Tier.L2, ref(other, 19, 27))
    assert index.match(names).pool_blocks == 19
    assert index.match(other).pool_blocks == 17
    index.check_invariants()


def test_a_run_named_from_its_context_start_may_have_holes_above(index: PrefixIndex, rng: random.Random) -> None:
    names = fresh(rng, 40)
    a = index.add_node("a")
    index.add_copies(a, Tier.L2, RunRef(0, names, 35))
    assert index.match(names).holders == (HolderRun(0, 35, (), ()), HolderRun(35, 5, (), ("a",)))
    index.check_invariants()
    index.remove_copies(a, Tier.L2, RunRef(0, names, 35))
    assert index.run_count == 0


def test_what_was_never_held_can_be_removed(index: PrefixIndex, rng: random.Random) -> None:
    names = fresh(rng, 40)
    a, b = index.add_node("a"), index.add_node("b")
    index.add_copies(a, Tier.L2, ref(names, 0, 20))
    assert index.remove_copies(b, Tier.L2, ref(names, 0, 40)).blocks == 0
    assert index.remove_copies(a, Tier.L1, ref(names, 0, 40)).blocks == 0
    assert index.remove_copies(a, Tier.L2, ref(names, 30, 40)).blocks == 0
    assert index.remove_copies(a, Tier.L2, ref(names, 15, 40)).blocks == 5
    index.check_invariants()


@pytest.mark.parametrize(
    "run",
    [
        RunRef(0, b"", 0),
        RunRef(0, bytes(15), 0),
        RunRef(0, bytes(16), 1),
        RunRef(8, bytes(16), 0),
        RunRef(-16, bytes(16), 0),
        RunRef(16, bytes(32), -1),
    ],
)
def test_what_is_no_run_is_refused(run: RunRef) -> None:
    with pytest.raises(InvalidArgument):
        check_run(run)


def test_a_name_under_two_parents_is_no_digest(index: PrefixIndex, rng: random.Random) -> None:
    names = fresh(rng, 32)
    a = index.add_node("a")
    index.add_copies(a, Tier.L2, ref(names, 0, 32))
    moved = fresh(rng, 16) + names
    with pytest.raises(BrokenChain):
        index.add_copies(a, Tier.L2, ref(moved, 0, 48))
    with pytest.raises(BrokenChain):
        index.match(names[16 * NAME_BYTES :] + names)
    twice = fresh(rng, 1) * 3
    index.add_copies(a, Tier.L1, ref(twice, 0, 3))
    with pytest.raises(BrokenChain):
        index.remove_copies(a, Tier.L1, ref(twice, 1, 2))
    index.check_invariants()


# ----------------------------------------------------------------------------------------------------- runs and memory


def test_alike_neighbours_are_one_run_and_unlike_ones_are_not(index: PrefixIndex, rng: random.Random) -> None:
    names = fresh(rng, 48)
    a = index.add_node("a")
    for first in (0, 16, 32):
        index.add_copies(a, Tier.L2, ref(names, first, first + 16))
    assert index.run_count == 1
    index.add_copies(a, Tier.L1, ref(names, 20, 30))
    assert index.run_count == 3
    index.remove_copies(a, Tier.L1, ref(names, 20, 30))
    index.merge_up(index.path(index.deepest(None, 0, names)[0])[-1])
    assert index.run_count == 1


def test_a_run_is_never_longer_than_allowed(rng: random.Random) -> None:
    index = PrefixIndex(run_blocks_max=10)
    a = index.add_node("a")
    names = fresh(rng, 95)
    index.add_copies(a, Tier.L2, ref(names, 0, 95))
    index.check_invariants()
    assert index.run_count == 10
    assert index.match(names).pool_blocks == 95


def test_nothing_is_left_when_all_copies_are_gone(index: PrefixIndex, rng: random.Random) -> None:
    a = index.add_node("a")
    names = fresh(rng, 100)
    for depth in (10, 33, 70):
        branched = names[: depth * NAME_BYTES] + fresh(rng, 20)
        index.add_copies(a, Tier.L2, ref(branched, 0, depth + 20))
    index.clear_tier(a, Tier.L2)
    assert (index.run_count, index.block_count) == (0, 0)
    assert index.indexed(names[:NAME_BYTES]) is None


def test_a_lost_nodes_copies_mean_nothing_at_once_and_are_swept_in_slices(rng: random.Random) -> None:
    index = PrefixIndex(run_blocks_max=4)
    a, b = index.add_node("a"), index.add_node("b")
    names = fresh(rng, 40)
    index.add_copies(a, Tier.L2, ref(names, 0, 40))
    index.add_copies(b, Tier.L2, ref(names, 0, 20))
    index.retire(a)
    assert index.match(names).nodes == {"b": NodeDepth(0, 20, 20)}
    assert index.match(names).pool_blocks == 20
    c = index.add_node("c")
    assert c not in (a, b)  # not before the sweep is over
    slices = 0
    while index.retired:
        index.sweep(runs_max=3)
        slices += 1
    assert slices > 1
    index.check_invariants()
    assert index.block_count == 20
    assert index.add_node("d") == a
