"""Equation 7, decode choice and holder hints."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evolving.core.routing import (
    Context,
    DecodeNode,
    HeldRun,
    HolderHint,
    PrefillNode,
    RoutingConfig,
    choose_decode,
    choose_prefill,
    exceeds_quote,
    holder_hints,
)
from evolving.core.terms import Role
from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients
from evolving.core.work import PrefillWork, queue_service_s, service_s

PREFILL = PrefillCoefficients(c0_s=0.01, c1_s=0.001, c2_s=1e-7, c3_s=1e-5)
DECODE = DecodeCoefficients(d0_s=0.01, d1_s=0, d2_s=0.001, d3_s=1e-6)
CONFIG = RoutingConfig(
    fetch_bytes_per_s=10_000_000,
    fetch_fixed_s=0.0,
)
CONTEXT = Context(request_id="r", tokens=1_000, block_tokens=64)


def prefill_node(node_id: str, **changes: object) -> PrefillNode:
    base = PrefillNode(
        node_id,
        Role.PREFILL,
        ready=True,
        wait_s=0.0,
        new_tokens_per_iteration=512,
        coefficients=PREFILL,
        kv_bytes_per_token=1_000,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def decode_node(node_id: str, **changes: object) -> DecodeNode:
    base = DecodeNode(node_id, Role.DECODE, ready=True, slots_free=8, decoding=0, context_tokens=0, coefficients=DECODE)
    return replace(base, **changes)  # type: ignore[arg-type]


def chosen_prefill(*nodes: PrefillNode, context: Context = CONTEXT) -> str:
    decision = choose_prefill(context, nodes, CONFIG)
    assert decision.chosen is not None
    return decision.chosen.node_id


def chosen_decode(*nodes: DecodeNode) -> str:
    decision = choose_decode(CONTEXT, nodes)
    assert decision.chosen is not None
    return decision.chosen.node_id


def test_equation_7_hides_the_fetch_under_the_wait() -> None:
    context = replace(CONTEXT, pool_blocks=10)
    for wait_s, longer in ((0.5, "wait"), (0.0, "fetch")):
        score = choose_prefill(context, [prefill_node("a", wait_s=wait_s)], CONFIG).chosen
        assert score is not None
        assert score.fetched_blocks == 10
        assert score.fetch_s == pytest.approx(640 * 1_000 / 10_000_000)
        work = PrefillWork(360, 640, 640)
        assert score.service_s == pytest.approx(service_s(work, PREFILL, 512))
        hidden = wait_s if longer == "wait" else score.fetch_s
        assert score.total_s == pytest.approx(hidden + score.service_s)


def test_a_short_wait_away_beats_a_long_wait_at_the_holder() -> None:
    context = replace(CONTEXT, pool_blocks=15)
    holder = prefill_node("holder", l1_blocks=15, any_blocks=15, wait_s=3.0)
    assert chosen_prefill(holder, prefill_node("idle"), context=context) == "idle"
    assert chosen_prefill(replace(holder, wait_s=0.0), prefill_node("idle"), context=context) == "holder"


def test_a_run_cheaper_to_compute_than_to_fetch_is_computed() -> None:
    slow = replace(CONFIG, fetch_bytes_per_s=1_000)
    score = choose_prefill(replace(CONTEXT, pool_blocks=10), [prefill_node("a", any_blocks=4)], slow).chosen
    assert score is not None
    assert (score.fetched_blocks, score.cached_tokens, score.fetch_s) == (0, 4 * 64, 0.0)


def test_own_unacknowledged_sends_are_waited_for() -> None:
    sent = (PrefillWork(400), PrefillWork(700))
    score = choose_prefill(CONTEXT, [prefill_node("a", wait_s=0.2, unacknowledged=sent)], CONFIG).chosen
    assert score is not None
    assert score.wait_s == pytest.approx(0.2 + queue_service_s(sent, PREFILL, 512))


def test_the_last_token_is_always_computed() -> None:
    whole = Context("r", tokens=640, block_tokens=64, pool_blocks=10)
    score = choose_prefill(whole, [prefill_node("a", l1_blocks=10, any_blocks=10)], CONFIG).chosen
    assert score is not None
    assert score.cached_tokens == 639
    assert score.work == PrefillWork(1, 639, 0)


def test_near_ties_are_broken_by_the_hash_of_request_and_node() -> None:
    nodes = [prefill_node(name, wait_s=wait) for name, wait in (("a", 1.0), ("b", 1.02), ("c", 1.04), ("d", 2.0))]
    picks = Counter(chosen_prefill(*nodes, context=replace(CONTEXT, request_id=f"r{i}")) for i in range(300))
    assert set(picks) == {"a", "b", "c"}
    assert min(picks.values()) > 50
    again = {chosen_prefill(*order, context=CONTEXT) for order in (nodes, nodes[::-1])}
    assert len(again) == 1, "two gateways that see the same nodes in another order agree"


def test_roles_say_who_is_asked() -> None:
    idle_decode = prefill_node("d", role=Role.DECODE)
    busy_prefill = prefill_node("p", wait_s=9.0)
    assert chosen_prefill(idle_decode, busy_prefill) == "p"
    assert chosen_prefill(idle_decode, prefill_node("m", role=Role.MIXED, wait_s=9.0)) == "m"
    assert chosen_decode(decode_node("d"), decode_node("p", role=Role.PREFILL, slots_free=99)) == "d"


def test_a_phase_without_nodes_is_served_by_the_other() -> None:
    decision = choose_prefill(CONTEXT, [prefill_node("d", role=Role.DECODE), prefill_node("p", ready=False)], CONFIG)
    assert decision.chosen is not None
    assert decision.chosen.node_id == "d"
    assert "other" in decision.reason
    assert chosen_decode(decode_node("p", role=Role.PREFILL)) == "p"


def test_no_node_is_no_choice_and_says_why() -> None:
    nodes = [
        prefill_node("down", ready=False),
        prefill_node("drains", role=Role.DRAINING),
        prefill_node("failed", excluded="broke this request"),
    ]
    decision = choose_prefill(CONTEXT, nodes, CONFIG)
    assert decision.chosen is None
    assert {score.node_id: score.reason for score in decision.candidates} == {
        "down": "not ready",
        "drains": "role draining",
        "failed": "broke this request",
    }
    assert choose_decode(CONTEXT, [decode_node("x", ready=False)]).chosen is None


def test_decode_goes_to_most_room_then_to_the_shortest_iteration() -> None:
    assert chosen_decode(decode_node("a", slots_free=3), decode_node("b", slots_free=5, decoding=90)) == "b"
    long_contexts = decode_node("a", decoding=2, context_tokens=90_000)
    assert chosen_decode(long_contexts, decode_node("b", decoding=3, context_tokens=10)) == "b"


def test_a_full_decode_node_is_still_one() -> None:
    assert chosen_decode(decode_node("a", slots_free=0)) == "a"
    assert chosen_decode(decode_node("a", slots_free=0), decode_node("b", slots_free=1)) == "b"


def test_a_quote_is_exceeded_by_both_the_floor_and_the_share() -> None:
    assert not exceeds_quote(0.19, 0.0)
    assert exceeds_quote(0.21, 0.0)
    assert not exceeds_quote(12.4, 10.0)
    assert exceeds_quote(12.6, 10.0)


LIVE = {"a": 0.0, "b": 1.0, "c": 2.0}


def test_one_holder_for_all_is_preferred_to_a_less_loaded_pair() -> None:
    runs = [HeldRun(0, 4, ("a", "c")), HeldRun(4, 4, ("b", "c"))]
    assert holder_hints(runs, "t", 0, 8, LIVE) == (HolderHint("c", 0, 8),)


def test_equal_holders_the_least_loaded() -> None:
    assert holder_hints([HeldRun(0, 8, ("c", "b"))], "t", 2, 6, LIVE) == (HolderHint("b", 2, 4),)


def test_hints_stop_at_the_first_block_nobody_else_holds() -> None:
    runs = [HeldRun(0, 4, ("a",)), HeldRun(4, 2, ("t",)), HeldRun(6, 2, ("a",))]
    assert holder_hints(runs, "t", 0, 8, LIVE) == (HolderHint("a", 0, 4),)
    assert holder_hints([HeldRun(0, 4, ("dead",))], "t", 0, 4, LIVE) == ()


@given(
    held=st.lists(st.sets(st.sampled_from("abc"), max_size=3), max_size=12),
    first=st.integers(0, 12),
)
def test_hints_name_holders_only_without_gap_or_overlap(held: list[set[str]], first: int) -> None:
    runs = [HeldRun(at, 1, tuple(sorted(nodes))) for at, nodes in enumerate(held) if nodes]
    at = first
    for hint in holder_hints(runs, "t", first, len(held), LIVE):
        assert hint.first_block == at
        assert hint.blocks > 0
        assert all(hint.node_id in held[block] for block in range(at, at + hint.blocks))
        at += hint.blocks
    assert at >= len(held) or not held[at], "fetching went on as far as anyone holds blocks"


@pytest.mark.parametrize("field", ["fetch_bytes_per_s", "tie_share", "fetch_fixed_s"])
def test_config_is_checked(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        replace(CONFIG, **{field: -1.0})
