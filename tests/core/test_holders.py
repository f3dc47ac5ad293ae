"""What peers can bring of a context, and who brings it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evolving.core.holders import HINTS_MAX, HeldRun, HolderHint, fetchable_blocks, holder_hints, spare_share

LIVE = {"a": 0.0, "b": 1.0, "c": 2.0}


def test_one_holder_for_all_is_preferred_to_a_less_loaded_pair() -> None:
    runs = [HeldRun(0, 4, ("a", "c")), HeldRun(4, 4, ("b", "c"))]
    assert holder_hints(runs, "t", 0, 8, LIVE) == (HolderHint("c", 0, 8),)


def test_equal_holders_the_least_loaded() -> None:
    assert holder_hints([HeldRun(2, 8, ("c", "b"))], "t", 2, 6, LIVE) == (HolderHint("b", 2, 4),)


def test_hints_stop_at_the_first_block_nobody_else_holds() -> None:
    runs = [HeldRun(0, 4, ("a",)), HeldRun(4, 2, ("t",)), HeldRun(6, 2, ("a",))]
    assert holder_hints(runs, "t", 0, 8, LIVE) == (HolderHint("a", 0, 4),)
    assert holder_hints([HeldRun(0, 4, ("dead",))], "t", 0, 4, LIVE) == ()


def test_hints_are_few_and_of_what_is_lacked_first() -> None:
    runs = [HeldRun(at, 1, ("ab"[at % 2],)) for at in range(2 * HINTS_MAX)]
    blocks = {hint.first_block for hint in holder_hints(runs, "t", HINTS_MAX + 200, 2 * HINTS_MAX, LIVE)}
    assert len(blocks) == HINTS_MAX
    assert blocks >= set(range(HINTS_MAX + 200, 2 * HINTS_MAX))
    assert len(holder_hints(runs, "t", 0, 2 * HINTS_MAX, LIVE)) == HINTS_MAX


@given(
    held=st.lists(st.sets(st.sampled_from("abc"), max_size=3), max_size=12),
    own=st.integers(0, 12),
)
def test_hints_name_holders_only_without_gap_or_overlap(held: list[set[str]], own: int) -> None:
    """Of what the target has itself, what others have too; of what it lacks, all up to the first block nobody has."""
    runs = [HeldRun(at, 1, tuple(sorted(nodes))) for at, nodes in enumerate(held) if nodes]
    named: list[int] = []
    for hint in holder_hints(runs, "t", own, len(held), LIVE):
        blocks = range(hint.first_block, hint.first_block + hint.blocks)
        assert blocks
        assert all(hint.node_id in held[block] for block in blocks)
        named += blocks
    ends = next((block for block in range(own, len(held)) if not held[block]), len(held))
    assert named == [block for block in range(min(ends, len(held))) if held[block]]


held_blocks = st.lists(st.sets(st.sampled_from("abct"), max_size=3), max_size=12)


@given(held=held_blocks, first=st.integers(0, 12))
def test_what_can_be_fetched_is_what_the_hints_bring(held: list[set[str]], first: int) -> None:
    runs = [HeldRun(at, 1, tuple(sorted(nodes))) for at, nodes in enumerate(held)]
    live = dict.fromkeys("abct", 0.0)
    hints = holder_hints(runs, "t", first, len(held), live)
    brought = {block for hint in hints for block in range(hint.first_block, hint.first_block + hint.blocks)}
    lacked = len(brought & set(range(first, len(held))))
    assert fetchable_blocks(runs, "t", first) == lacked
    without_gaps = [run for run in runs if run.node_ids]  # the directory leaves blocks that nobody holds out
    assert fetchable_blocks(without_gaps, "t", first) == lacked


@given(held=held_blocks)
def test_spare_are_held_blocks_with_a_second_copy(held: list[set[str]]) -> None:
    runs = [HeldRun(at, 1, tuple(sorted(nodes))) for at, nodes in enumerate(held)]
    copies = [len(nodes) for nodes in held if nodes]
    assert spare_share(runs) * len(copies) == sum(each > 1 for each in copies)
