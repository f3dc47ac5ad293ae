"""Equation 7: where a request is prefilled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evolving.core.candidates import NodeView
from evolving.core.config import FetchRule
from evolving.core.routing import (
    Context,
    PrefillScore,
    RoutingConfig,
    choose_prefill,
    deciding_terms,
    duplicate_s,
    exceeds_quote,
    fetch_s,
    score_prefill,
)
from evolving.core.terms import Role
from evolving.core.timemodel import PrefillCoefficients
from evolving.core.work import PrefillWork, queue_service_s, service_s

PREFILL = PrefillCoefficients(c0_s=0.01, c1_s=0.001, c2_s=1e-7, c3_s=1e-5)
CONFIG = RoutingConfig(
    fetch_bytes_per_s=10_000_000,
    fetch_fixed_s=0.0,
)
CONTEXT = Context(request_id="r", tokens=1_000, block_tokens=64)


def prefill_node(node_id: str, **changes: object) -> NodeView:
    base = NodeView(
        node_id,
        Role.PREFILL,
        ready=True,
        wait_s=0.0,
        new_tokens_per_iteration=512,
        coefficients=PREFILL,
        kv_bytes_per_token=1_000,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def chosen_prefill(*nodes: NodeView, context: Context = CONTEXT) -> str:
    decision = choose_prefill(context, nodes, CONFIG)
    assert decision.chosen is not None
    return decision.chosen.node_id


def test_equation_7_hides_the_fetch_under_the_wait() -> None:
    context = replace(CONTEXT, pool_blocks=10)
    for wait_s, longer in ((0.5, "wait"), (0.0, "fetch")):
        score = choose_prefill(context, [prefill_node("a", wait_s=wait_s, fetchable_blocks=10)], CONFIG).chosen
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
    idle = prefill_node("idle", fetchable_blocks=15)
    assert chosen_prefill(holder, idle, context=context) == "idle"
    assert chosen_prefill(replace(holder, wait_s=0.0), idle, context=context) == "holder"


def test_a_run_cheaper_to_compute_than_to_fetch_is_computed() -> None:
    slow = replace(CONFIG, fetch_bytes_per_s=1_000)
    node = prefill_node("a", any_blocks=4, fetchable_blocks=6)
    score = score_prefill(replace(CONTEXT, pool_blocks=10), node, slow)
    assert (score.fetched_blocks, score.cached_tokens, score.fetch_s) == (0, 4 * 64, 0.0)


# -- F_n: what a fetch costs


def test_the_nodes_own_rate_counts_and_the_configured_one_until_it_has_one() -> None:
    node = prefill_node("a")
    assert fetch_s(640, node, CONFIG) == pytest.approx(640 * 1_000 / 10_000_000)
    assert fetch_s(640, replace(node, fetch_tokens_per_s=100.0), CONFIG) == pytest.approx(6.4)
    assert fetch_s(0, replace(node, fetch_backlog_tokens=10_000), CONFIG) == 0.0, "who fetches nothing waits for none"


@given(tokens=st.integers(1, 10**6), backlog=st.integers(0, 10**6), rate=st.floats(1.0, 1e7))
def test_a_fetch_comes_after_those_of_the_legs_before(tokens: int, backlog: int, rate: float) -> None:
    behind = prefill_node("a", fetch_tokens_per_s=rate, fetch_backlog_tokens=backlog)
    alone = replace(behind, fetch_backlog_tokens=0)
    both = fetch_s(tokens, behind, CONFIG)
    assert both == pytest.approx(fetch_s(tokens + backlog, alone, CONFIG))
    assert both >= fetch_s(tokens, alone, CONFIG)


def test_a_backlog_of_fetches_sends_a_request_elsewhere() -> None:
    context = replace(CONTEXT, pool_blocks=15)
    busy = prefill_node("busy", fetchable_blocks=15, fetch_tokens_per_s=2_000.0, fetch_backlog_tokens=4_000)
    assert chosen_prefill(busy, prefill_node("other", wait_s=0.1, fetchable_blocks=15), context=context) == "other"
    assert chosen_prefill(
        replace(busy, fetch_backlog_tokens=0), prefill_node("other", wait_s=5.0), context=context
    ) == ("busy")


def test_nothing_is_fetched_where_that_is_switched_off() -> None:
    off = replace(CONFIG, fetch=FetchRule.NEVER)
    score = score_prefill(replace(CONTEXT, pool_blocks=15), prefill_node("a", any_blocks=3, fetchable_blocks=12), off)
    assert (score.fetched_blocks, score.fetch_s, score.cached_tokens) == (0, 0.0, 3 * 64)


def test_all_is_fetched_where_that_is_asked_for() -> None:
    context = replace(CONTEXT, pool_blocks=15)
    node = prefill_node("a", any_blocks=3, fetchable_blocks=12, fetch_tokens_per_s=1.0)
    assert score_prefill(context, node, CONFIG).fetched_blocks == 0
    assert score_prefill(context, node, replace(CONFIG, fetch=FetchRule.ALWAYS)).fetched_blocks == 12


@pytest.mark.parametrize(("wait_s", "blocks"), [(0.9, 7), (1.0, 8)])
def test_as_much_is_fetched_as_the_wait_hides(wait_s: float, blocks: int) -> None:
    """Slower than computing: a block takes 0.128 s to fetch, about half of that to compute. One that the wait hides for
    the most part still pays."""
    node = prefill_node("a", wait_s=wait_s, fetchable_blocks=15, fetch_tokens_per_s=500.0)
    assert score_prefill(replace(CONTEXT, pool_blocks=15), node, CONFIG).fetched_blocks == blocks


coefficients = st.builds(
    PrefillCoefficients,
    c0_s=st.floats(0, 0.1),
    c1_s=st.floats(0, 1e-2),
    c2_s=st.floats(0, 1e-6),
    c3_s=st.floats(0, 1e-3),
    c4_s=st.floats(0, 1e-4),
)
fetching_nodes = st.builds(
    prefill_node,
    st.just("a"),
    wait_s=st.floats(0, 10),
    any_blocks=st.integers(0, 10),
    fetchable_blocks=st.integers(0, 40),
    fetch_tokens_per_s=st.floats(1, 1e6),
    fetch_backlog_tokens=st.integers(0, 10_000),
    coefficients=coefficients,
)


@given(node=fetching_nodes)
def test_no_other_number_of_fetched_blocks_is_sooner(node: NodeView) -> None:
    context = Context("r", tokens=51 * 64, block_tokens=64, pool_blocks=node.any_blocks + node.fetchable_blocks)
    chosen = score_prefill(context, node, CONFIG)
    assert chosen.fetched_blocks <= node.fetchable_blocks
    for blocks in range(node.fetchable_blocks + 1):
        cached = (node.any_blocks + blocks) * 64
        work = PrefillWork(context.tokens - cached, cached, cached)
        ready_s = max(node.wait_s, fetch_s(blocks * 64, node, CONFIG))
        assert chosen.total_s <= ready_s + service_s(work, node.coefficients, 512) + 1e-9


# -- dup_n: what later work a placement causes


def evicted_by_storing(held: int, stored: int, free: int, zero: int, counted: int) -> int:
    """Blocks that a branch counts and that leave a full memory, one by one, for a context of which `held` are there.
    What is used now stays."""
    memory = ["held"] * held + ["free"] * free + ["zero"] * zero + ["counted"] * counted
    evicted = 0
    for _ in range(stored):
        place = min(range(len(memory)), key=lambda at: ["free", "zero", "counted", "held"].index(memory[at]))
        evicted += memory[place] == "counted"
        memory[place] = "held"
    return evicted


contexts = st.builds(
    Context,
    st.just("r"),
    tokens=st.integers(64 * 40, 64 * 60 + 63),
    block_tokens=st.just(64),
    pool_blocks=st.integers(0, 40),
    spare_share=st.floats(0, 1),
)
storing_nodes = st.builds(
    prefill_node,
    st.just("a"),
    any_blocks=st.integers(0, 40),
    room_tokens=st.integers(0, 80).map(lambda blocks: 64 * blocks),
    fetch_tokens_per_s=st.floats(1, 1e6),
    coefficients=coefficients,
)


@given(
    held=st.integers(0, 20), missing=st.integers(0, 20), new=st.integers(0, 20), free=st.integers(0, 30),
    zero=st.integers(0, 30), tail=st.integers(0, 63),
)  # fmt: skip
def test_storing_a_context_evicts_what_the_naive_model_evicts(
    held: int, missing: int, new: int, free: int, zero: int, tail: int
) -> None:
    """At one second a token."""
    context = Context("r", (held + missing + new) * 64 + tail, 64, pool_blocks=held + missing)
    a_second = PrefillCoefficients(c0_s=0.0, c1_s=1.0, c2_s=0.0)
    node = prefill_node("a", any_blocks=held, room_tokens=(free + zero) * 64, coefficients=a_second)
    evicted = evicted_by_storing(held, missing + new, free, zero, counted=40)
    assert duplicate_s(context, node, CONFIG) == 64 * evicted


@given(context=contexts, node=storing_nodes, pool_blocks=st.integers(0, 40))
def test_new_tokens_and_duplicates_take_the_same_room(context: Context, node: NodeView, pool_blocks: int) -> None:
    other = replace(context, pool_blocks=pool_blocks)
    assert duplicate_s(other, node, CONFIG) == duplicate_s(context, node, CONFIG)


@given(context=contexts, node=storing_nodes)
def test_a_placement_costs_less_the_more_the_node_holds_or_has_room_for(context: Context, node: NodeView) -> None:
    cost_s = duplicate_s(context, node, CONFIG)
    assert cost_s >= 0
    assert duplicate_s(context, replace(node, any_blocks=node.any_blocks + 1), CONFIG) <= cost_s
    assert duplicate_s(context, replace(node, room_tokens=node.room_tokens + 64), CONFIG) <= cost_s


@given(context=contexts, node=storing_nodes)
def test_room_enough_costs_nothing(context: Context, node: NodeView) -> None:
    lacks = (context.tokens // 64 - node.any_blocks) * 64
    for room in (lacks, context.tokens, prefill_node("x").room_tokens):
        assert duplicate_s(context, replace(node, room_tokens=room), CONFIG) == 0
    assert duplicate_s(context, replace(node, any_blocks=context.tokens // 64, room_tokens=0), CONFIG) == 0


@given(context=contexts, node=storing_nodes, wait_s=st.floats(0, 10), request_id=st.text(max_size=4))
def test_of_two_nodes_alike_but_for_room_the_one_where_the_context_fits_is_chosen(
    context: Context, node: NodeView, wait_s: float, request_id: str
) -> None:
    """However little it costs."""
    context = replace(context, request_id=request_id)
    tight = replace(node, node_id="tight", wait_s=wait_s)
    roomy = replace(tight, node_id="roomy", room_tokens=context.tokens)
    if duplicate_s(context, tight, CONFIG) > 0:
        assert chosen_prefill(tight, roomy, context=context) == "roomy"


@given(context=contexts, node=storing_nodes, more=st.integers(1, 80))
def test_of_two_full_nodes_the_tighter_is_never_better(context: Context, node: NodeView, more: int) -> None:
    tight, roomy = (replace(node, room_tokens=node.room_tokens + room) for room in (0, 64 * more))
    assert score_prefill(context, roomy, CONFIG).total_s <= score_prefill(context, tight, CONFIG).total_s


def test_a_little_more_room_does_not_draw_all_contexts() -> None:
    """Neither has room for the 1,000 tokens, which take 10 ms at most to fetch again and a second to compute."""
    nodes = [prefill_node(name, room_tokens=room, fetch_tokens_per_s=1e5) for name, room in (("a", 0), ("b", 64))]
    spare = [replace(CONTEXT, request_id=f"r{at}", spare_share=1.0) for at in range(300)]
    picks = Counter(chosen_prefill(*nodes, context=context) for context in spare)
    assert min(picks["a"], picks["b"]) > 100


@given(context=contexts, node=storing_nodes)
def test_what_lies_elsewhere_too_costs_the_cheaper_of_a_fetch_and_computing(context: Context, node: NodeView) -> None:
    alone, spare = (duplicate_s(replace(context, spare_share=share), node, CONFIG) for share in (0.0, 1.0))
    between = duplicate_s(context, node, CONFIG)
    assert spare <= between * (1 + 1e-9)
    assert between <= alone * (1 + 1e-9)
    without = replace(CONFIG, fetch=FetchRule.NEVER)
    assert duplicate_s(replace(context, spare_share=1.0), node, without) == pytest.approx(alone)


def test_a_full_node_loses_to_an_equal_one_with_room() -> None:
    context = replace(CONTEXT, pool_blocks=15)
    full = prefill_node("full", fetchable_blocks=15, room_tokens=0)
    assert chosen_prefill(full, prefill_node("roomy", fetchable_blocks=15, wait_s=0.1), context=context) == "roomy"
    unneeded = replace(full, room_tokens=1_000)  # as much is held for no branch
    assert chosen_prefill(unneeded, prefill_node("roomy", wait_s=3.0), context=context) == "full"


def test_a_new_context_goes_where_there_is_room_too() -> None:
    """Nobody holds any of it, and the node without room is idle: 15 blocks at 1.1 ms a token are a second."""
    full = prefill_node("full", room_tokens=0)
    assert chosen_prefill(full, prefill_node("roomy", wait_s=0.9)) == "roomy"
    assert chosen_prefill(full, prefill_node("roomy", wait_s=1.5)) == "full"


def test_what_every_node_evicts_widens_no_tie() -> None:
    """A second of later work on both nodes, beside which the 30 ms between them are little; the wait is not."""
    near = prefill_node("near", room_tokens=0, fetchable_blocks=15, fetch_tokens_per_s=1e6)
    far = replace(near, node_id="far", wait_s=0.03)
    for at in range(20):
        context = replace(CONTEXT, request_id=f"r{at}", pool_blocks=15)
        near_s, far_s = (score_prefill(context, node, CONFIG).total_s for node in (near, far))
        assert near_s < far_s < near_s * (1 + CONFIG.tie_share)
        assert chosen_prefill(near, far, context=context) == "near"


# -- what decided


def scores_of(*nodes: NodeView, context: Context) -> tuple[str, ...]:
    """The terms a choice hung on."""
    return deciding_terms(choose_prefill(context, nodes, CONFIG), CONFIG)


def test_terms_that_decided_are_named() -> None:
    context = replace(CONTEXT, pool_blocks=15)
    plain, far = prefill_node("a"), prefill_node("b", wait_s=9.0)
    assert scores_of(plain, far, context=CONTEXT) == (), "any of them would have chosen the idle node"
    holder = prefill_node("holder", l1_blocks=15, any_blocks=15, wait_s=0.5)
    slow = prefill_node("slow", fetchable_blocks=15, fetch_tokens_per_s=1_500.0)
    assert scores_of(holder, slow, context=context) == ("fetch", "all_but_wait")
    full = prefill_node("full", fetchable_blocks=15, room_tokens=0)
    assert scores_of(holder, full, context=context) == ("duplicate", "all_but_wait")


totals = st.floats(0, 5)


@given(terms=st.lists(st.tuples(totals, totals, totals), min_size=1, max_size=5))
def test_a_term_decided_only_if_another_node_is_better_without_it(terms: list[tuple[float, ...]]) -> None:
    nodes = [
        prefill_node(
            str(at), wait_s=wait_s, room_tokens=room * 100, fetchable_blocks=12, fetch_tokens_per_s=1 + 1_000 * rate
        )
        for at, (wait_s, room, rate) in enumerate(terms)
    ]
    context = replace(CONTEXT, pool_blocks=12)
    decision = choose_prefill(context, nodes, CONFIG)
    chosen = decision.chosen
    assert chosen is not None
    at_once = RoutingConfig(fetch_bytes_per_s=1e300, fetch_fixed_s=0.0)
    fast = [replace(node, fetch_tokens_per_s=0.0) for node in nodes]
    free = {node.node_id: score_prefill(context, node, at_once).total_s for node in fast}
    without: dict[str, Callable[[PrefillScore], float]] = {
        "fetch": lambda score: free[score.node_id],
        "duplicate": lambda score: max(score.wait_s, score.fetch_s) + score.service_s,
        "all_but_wait": lambda score: score.wait_s,
    }
    for term in deciding_terms(decision, CONFIG):
        total_s = without[term]
        assert any(total_s(score) < total_s(chosen) for score in decision.candidates)


# -- the choice


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


def test_a_phase_without_nodes_is_served_by_the_other() -> None:
    decision = choose_prefill(CONTEXT, [prefill_node("d", role=Role.DECODE), prefill_node("p", ready=False)], CONFIG)
    assert decision.chosen is not None
    assert decision.chosen.node_id == "d"
    assert "other" in decision.reason


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


def test_a_quote_is_exceeded_by_both_the_floor_and_the_share() -> None:
    assert not exceeds_quote(0.19, 0.0)
    assert exceeds_quote(0.21, 0.0)
    assert not exceeds_quote(12.4, 10.0)
    assert exceeds_quote(12.6, 10.0)


@pytest.mark.parametrize("field", ["fetch_bytes_per_s", "tie_share", "fetch_fixed_s", "output_tokens"])
def test_config_is_checked(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        replace(CONFIG, **{field: -1.0})  # type: ignore[arg-type]
