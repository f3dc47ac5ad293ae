"""Where a request is decoded: room first, then what going there costs."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from evolving.core.candidates import NodeView
from evolving.core.decode_routing import DecodeNode, choose_decode, score_decode
from evolving.core.routing import Context, RoutingConfig, duplicate_s
from evolving.core.terms import Role
from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients

CONFIG = RoutingConfig(fetch_bytes_per_s=100e6, output_tokens=400)  # 100,000 tokens a second
CONTEXT = Context("r", tokens=64_000, block_tokens=64, pool_blocks=990)
DECODE = DecodeCoefficients(d0_s=0.008, d1_s=0, d2_s=1e-4, d3_s=2e-8)


def decode_node(node_id: str, **changes: object) -> DecodeNode:
    """An idle node that holds nothing and has room for everything; `changes` are of it as either kind of node."""
    kv = NodeView(
        node_id,
        Role.DECODE,
        ready=True,
        wait_s=0.0,
        new_tokens_per_iteration=512,
        coefficients=PrefillCoefficients(0.004, 4e-5, 2e-10),
        kv_bytes_per_token=1_000,
    )
    names = {name for name in changes if hasattr(kv, name) and name != "coefficients"}
    kv = replace(kv, **{name: changes[name] for name in names})  # type: ignore[arg-type]
    node = DecodeNode(kv, slots_free=8, decoding=0, context_tokens=0, memory_tokens=math.inf, coefficients=DECODE)
    return replace(node, **{name: changes[name] for name in changes if name not in names})  # type: ignore[arg-type]


def chosen(*nodes: DecodeNode, context: Context = CONTEXT) -> str:
    """Who was chosen, whatever the order of the nodes."""
    picks = {choose_decode(context, order, CONFIG).chosen for order in (nodes, nodes[::-1])}
    (pick,) = picks
    assert pick is not None
    return pick.node_id


# -- what it costs


@given(batch=st.integers(0, 64), batch_tokens=st.integers(0, 10**6), tokens=st.integers(1, 10**5))
def test_the_others_wait_counts_as_this_requests_own(batch: int, batch_tokens: int, tokens: int) -> None:
    """Over all requests of the batch, iteration by iteration, against the batch without this one."""
    context = replace(CONTEXT, tokens=tokens)
    score = score_decode(context, decode_node("a", decoding=batch, context_tokens=batch_tokens), CONFIG)
    with_it_s = DECODE.decode_iteration_s(batch + 1, batch_tokens + tokens)
    without_s = DECODE.decode_iteration_s(batch, batch_tokens)
    cost_s = sum(with_it_s + sum(with_it_s - without_s for _ in range(batch)) for _ in range(400))
    assert score.iteration_s == with_it_s
    assert score.decode_s == pytest.approx(cost_s)


def test_a_request_is_expected_to_generate_no_more_than_it_may() -> None:
    whole, part = (
        score_decode(replace(CONTEXT, output_tokens_max=most), decode_node("a"), CONFIG).decode_s
        for most in (math.inf, 100)
    )
    assert part == pytest.approx(whole / 4)


def test_what_device_memory_lacks_is_sent_and_what_host_memory_lacks_is_stored() -> None:
    node = decode_node("a", l1_blocks=10, any_blocks=40, room_tokens=100)
    score = score_decode(CONTEXT, node, CONFIG)
    assert score.received_tokens == 64_000 - 640
    assert score.receive_s == pytest.approx(score.received_tokens / 100_000)
    assert score.stored_tokens == 64_000 - 40 * 64
    assert score.evict_s == duplicate_s(CONTEXT, node.node, CONFIG) > 0
    assert score.total_s == score.receive_s + score.evict_s + score.decode_s  # no wait
    here = score_decode(CONTEXT, replace(node, prefilled_here=True), CONFIG)
    assert (here.received_tokens, here.stored_tokens, here.move_s) == (0, 0, 0.0)
    assert here.decode_s == score.decode_s


@pytest.mark.parametrize(("memory_tokens", "share"), [(64_000, 0.0), (32_000, 0.25), (-32_000, 0.75), (-(10**9), 1.0)])
def test_a_context_waits_for_the_memory_of_as_many_of_those_before(memory_tokens: int, share: float) -> None:
    """They hold 128,000 tokens, and all of it is free when each has generated 400."""
    node = decode_node("a", decoding=2, context_tokens=128_000, memory_tokens=memory_tokens)
    score = score_decode(CONTEXT, node, CONFIG)
    assert score.wait_s == pytest.approx(share * 400 * DECODE.decode_iteration_s(2, 128_000))
    assert score.total_s == score.wait_s + score.move_s + score.decode_s
    assert score_decode(CONTEXT, replace(node, prefilled_here=True), CONFIG).wait_s == 0


@pytest.mark.parametrize("memory_tokens", [-math.inf, -64_000, 0, 63_999])
def test_where_nobody_decodes_nobody_is_waited_for(memory_tokens: float) -> None:
    """However little memory there is: no decode that ends would add to it."""
    node = decode_node("a", memory_tokens=memory_tokens)
    score = score_decode(CONTEXT, node, CONFIG)
    assert score.wait_s == 0
    assert score == score_decode(CONTEXT, replace(node, memory_tokens=math.inf), CONFIG)


# -- the choice


kv_states = st.fixed_dictionaries(
    {
        "l1_blocks": st.integers(0, 1_000),
        "any_blocks": st.integers(0, 1_000),
        "room_tokens": st.integers(0, 10**5),
        "decoding": st.integers(0, 20),
        "context_tokens": st.integers(0, 10**6),
    }
)


@given(
    roomy=kv_states,
    full=kv_states,
    request_id=st.text(max_size=4),
)
def test_a_node_without_room_never_beats_one_with_room(
    roomy: dict[str, int], full: dict[str, int], request_id: str
) -> None:
    context = replace(CONTEXT, request_id=request_id)
    nodes = decode_node("full", **full, slots_free=0), decode_node("roomy", **roomy, slots_free=1)
    assert chosen(*nodes, context=context) == "roomy"


def test_a_full_decode_node_is_still_one() -> None:
    decision = choose_decode(CONTEXT, [decode_node("a", slots_free=0)], CONFIG)
    assert decision.chosen is not None
    assert decision.chosen.reason == "full"
    assert "all are full" in decision.reason


@given(
    state=kv_states,
    more_l1=st.integers(0, 500),
    more_any=st.integers(0, 500),
    request_id=st.text(max_size=4),
)
def test_of_two_nodes_alike_but_for_what_they_hold_the_holder_is_chosen(
    state: dict[str, int], more_l1: int, more_any: int, request_id: str
) -> None:
    """However little it costs to send."""
    context = replace(CONTEXT, request_id=request_id)
    other = decode_node("other", **state)
    held = {"l1_blocks": state["l1_blocks"] + more_l1, "any_blocks": state["any_blocks"] + more_any}
    holder = decode_node("holder", **{**state, **held})
    costs = [score_decode(context, node, CONFIG).move_s for node in (holder, other)]
    assume(costs[0] < costs[1])
    assert chosen(other, holder, context=context) == "holder"


def test_a_branch_stays_where_its_copy_is_while_that_is_not_much_slower() -> None:
    """64,000 tokens take 0.64 s to send. Beside one short request 400 iterations take 0.05 s longer, and it waits
    1.38 ms more in each, 0.55 s; beside two that is twice as much."""
    idle = decode_node("idle")
    holder = decode_node("holder", l1_blocks=1_000, any_blocks=1_000, decoding=1, context_tokens=1_000)
    assert chosen(idle, holder) == "holder"
    assert chosen(idle, replace(holder, decoding=2, context_tokens=2_000)) == "idle"
    assert chosen(idle, replace(holder, node=replace(idle.node, node_id="busy"))) == "idle", "who lacks all of it too"


def test_a_copy_is_worth_no_long_wait_for_memory() -> None:
    """Beside the one short request, as above, but that has to end first: 3 s at most."""
    holder = decode_node("holder", l1_blocks=1_000, any_blocks=1_000, decoding=1, context_tokens=1_000)
    assert chosen(decode_node("idle"), replace(holder, memory_tokens=63_000)) == "idle"
    assert chosen(decode_node("idle"), replace(holder, memory_tokens=64_000)) == "holder"


def test_a_full_host_memory_keeps_a_branch_on_its_node() -> None:
    """Sent in no time; but on the other node the context would drive out as many counted tokens."""
    config = replace(CONFIG, fetch_bytes_per_s=1e12)
    holder = decode_node("holder", any_blocks=1_000, room_tokens=0, decoding=2, context_tokens=128_000)
    for room_tokens, node_id in ((0, "holder"), (64_000, "other")):
        other = decode_node("other", room_tokens=room_tokens)
        decision = choose_decode(CONTEXT, [holder, other], config)
        assert decision.chosen is not None
        assert decision.chosen.node_id == node_id
        assert "costs least" in decision.reason


def test_of_nodes_that_cost_alike_the_one_with_a_copy_in_host_memory_keeps_it() -> None:
    """Both have to be sent it, and both have room; the other has more slots."""
    holder, other = decode_node("holder", any_blocks=1_000, slots_free=1), decode_node("other")
    costs = [score_decode(CONTEXT, node, CONFIG).total_s for node in (holder, other)]
    assert costs[0] == costs[1]
    assert chosen(holder, other) == "holder"


def test_a_new_context_goes_to_the_shortest_iterations() -> None:
    busy, long_contexts = decode_node("busy", decoding=9), decode_node("long", decoding=2, context_tokens=900_000)
    assert chosen(busy, long_contexts, decode_node("idle", decoding=2)) == "idle"
    assert chosen(busy, long_contexts) == "busy"


def test_nodes_that_cost_alike_are_told_apart_by_free_slots_then_by_the_hash() -> None:
    nodes = [decode_node(name, slots_free=slots) for name, slots in (("a", 5), ("b", 5), ("c", 5), ("d", 4))]
    picks = Counter(chosen(*nodes, context=replace(CONTEXT, request_id=f"r{at}")) for at in range(300))
    assert set(picks) == {"a", "b", "c"}
    assert min(picks.values()) > 50


# -- who is asked


def test_roles_say_who_is_asked() -> None:
    idle_prefill = decode_node("p", role=Role.PREFILL)
    assert chosen(decode_node("d", decoding=9), idle_prefill) == "d"
    assert chosen(decode_node("d", decoding=9), decode_node("m", role=Role.MIXED)) == "m"
    decision = choose_decode(CONTEXT, [idle_prefill], CONFIG)
    assert decision.chosen is not None
    assert "other" in decision.reason


def test_no_node_is_no_choice_and_says_why() -> None:
    nodes = decode_node("down", ready=False), decode_node("failed", excluded="broke this request")
    decision = choose_decode(CONTEXT, nodes, CONFIG)
    assert decision.chosen is None
    assert {score.node_id: score.reason for score in decision.candidates} == {
        "down": "not ready",
        "failed": "broke this request",
    }
