"""Routing of the arms, each against the rule its system documents."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim.arm_views import BLOCK_TOKENS, ROUTING, asked, decode_node, names, prefill_node

from evolving.core.decode_routing import choose_decode
from evolving.core.routing import choose_prefill, score_prefill
from evolving.core.work import PrefillWork
from evolving_sim.arms.arm import PrefillChoice, PrefillNode
from evolving_sim.arms.dynamo_router import LeastActiveBlocks, LeastPrefillCost
from evolving_sim.arms.fetching import FetchesAll, FetchesSooner
from evolving_sim.arms.ours import LeastDecodeCost, LeastPredictedTtft
from evolving_sim.arms.parameters import KV_ROUTER_WITH_POOL, CacheAffinityConfig, KvRouterConfig
from evolving_sim.arms.seen_prefixes import SeenPrefixes
from evolving_sim.arms.sglang import CacheAffinity, RoundRobin, StickySession

NODES = ("n0", "n1", "n2")


def idle(*open_requests: int) -> list[PrefillNode]:
    """n0, n1, … with so many open requests each."""
    return [prefill_node(f"n{number}", open_requests=count) for number, count in enumerate(open_requests)]


# -- what a router believes nodes hold


class NaiveSeen:
    """Every prompt sent, in order."""

    def __init__(self) -> None:
        self.sent: list[tuple[tuple[bytes, ...], str]] = []

    def match(self, prompt: Sequence[bytes]) -> tuple[str, int]:
        def common(other: Sequence[bytes]) -> int:
            depth = 0
            while depth < min(len(prompt), len(other)) and prompt[depth] == other[depth]:
                depth += 1
            return depth

        deepest = max((common(other) for other, _ in self.sent), default=0)
        return (
            ("", 0) if not deepest else next((node, deepest) for other, node in self.sent if common(other) == deepest)
        )


PROMPTS = st.lists(st.sampled_from("ab"), max_size=6).map("".join)


def prefix_names(path: str) -> list[bytes]:
    """Names that are equal where prefixes are."""
    return [path[: depth + 1].encode().ljust(16) for depth in range(len(path))]


@given(st.lists(st.tuples(PROMPTS, st.sampled_from(NODES), st.sets(st.sampled_from(NODES), min_size=1))))
def test_seen_prefixes_are_those_of_all_prompts_sent_to_nodes_that_stayed(
    steps: list[tuple[str, str, set[str]]],
) -> None:
    """Of two nodes with the longest prefix it is the one that it went to first, as the gateway's tree has it."""
    seen, naive = SeenPrefixes(), NaiveSeen()
    for path, node_id, kept in steps:
        serving = sorted(kept | {node_id})
        seen.keep_only(serving)
        naive.sent = [(prompt, node) for prompt, node in naive.sent if node in serving]
        prompt = prefix_names(path)
        assert seen.match(prompt) == naive.match(prompt)
        seen.add(prompt, node_id)
        naive.sent.append((tuple(prompt), node_id))


# -- SGLang Model Gateway: cache-affinity


def test_a_prompt_follows_its_prefix_whatever_the_load_within_bounds() -> None:
    policy = CacheAffinity(CacheAffinityConfig())
    first = names("a", 10)
    assert policy.choose(asked("r1", first), idle(5, 0, 3), 0.0) == PrefillChoice("n1")
    longer = names("b", 20, parent=first)
    assert policy.choose(asked("r2", longer), idle(0, 64, 0), 1.0) == PrefillChoice("n1")


@pytest.mark.parametrize(("shared", "follows"), [(3, False), (4, True)])
def test_a_match_counts_above_the_threshold(shared: int, follows: bool) -> None:
    """cache_threshold 0.3: of ten blocks and a token, four are more than that."""
    policy = CacheAffinity(CacheAffinityConfig())
    first = names("a", 10)
    policy.choose(asked("r1", first), idle(1, 0, 1), 0.0)
    chosen = policy.choose(asked("r2", names("b", 10, parent=first[:shared])), idle(0, 2, 1), 1.0)
    assert chosen == PrefillChoice("n1" if follows else "n0")


@pytest.mark.parametrize(
    ("loads", "balanced"),
    [
        ((0, 64), True),  # the difference is not above balance_abs_threshold
        ((0, 65), False),
        ((140, 205), True),  # it is, but 205 is not more than 1.5 times 140
        ((130, 196), False),
    ],
)
def test_the_least_loaded_gets_the_prompt_where_loads_are_uneven_by_both_thresholds(
    loads: tuple[int, int], balanced: bool
) -> None:
    policy = CacheAffinity(CacheAffinityConfig())
    prompt = names("a", 10)
    policy.choose(asked("r1", prompt), idle(1, 0), 0.0)
    chosen = policy.choose(asked("r2", names("b", 11, parent=prompt)), idle(*loads), 1.0)
    assert chosen.node_id == ("n1" if balanced else "n0")


def test_what_was_sent_while_loads_were_uneven_is_remembered_too() -> None:
    policy = CacheAffinity(CacheAffinityConfig())
    prompt = names("a", 10)
    policy.choose(asked("r1", prompt), idle(0, 100), 0.0)
    assert policy.choose(asked("r2", names("b", 11, parent=prompt)), idle(3, 0), 1.0).node_id == "n0"


def test_a_node_that_left_the_phase_is_forgotten() -> None:
    policy = CacheAffinity(CacheAffinityConfig())
    prompt = names("a", 10)
    policy.choose(asked("r1", prompt), idle(0, 1, 1), 0.0)
    without = [node for node in idle(0, 2, 1) if node.view.node_id != "n0"]
    assert policy.choose(asked("r2", prompt), without, 1.0).node_id == "n2"
    assert policy.choose(asked("r3", prompt), idle(0, 1, 2), 2.0).node_id == "n2", "what n0 had before it left is gone"


# -- sticky sessions


@given(st.lists(st.tuples(st.sampled_from("uvwxyz"), st.sets(st.sampled_from(NODES), min_size=1)), min_size=1))
def test_an_agent_stays_while_its_node_serves(steps: list[tuple[str, set[str]]]) -> None:
    """Where it doesn't it is drawn again; of the last two nodes of an agent the older one that serves has it."""
    policy, known = StickySession(1), dict[str, list[str]]()
    for number, (agent_id, serving) in enumerate(steps):
        nodes = [prefill_node(node_id) for node_id in sorted(serving)]
        chosen = policy.choose(asked(f"r{number}", names("a", 1), agent_id=agent_id), nodes, float(number)).node_id
        before = [node_id for node_id in known.get(agent_id, []) if node_id in serving]
        assert chosen in serving
        if before:
            assert chosen == before[0]
        else:
            known[agent_id] = [*known.get(agent_id, []), chosen][-2:]


def test_sub_agents_go_where_their_agent_is_and_agents_spread() -> None:
    policy = StickySession(1)
    nodes = idle(0, 0, 0)
    homes = Counter[str]()
    for number in range(60):
        agent = f"agent {number}"
        home = policy.choose(asked(f"r{number}", names("a", 1), agent_id=agent), nodes, 0.0)
        sub = replace(asked(f"s{number}", names("b", 1), agent_id=agent), branch_id="sub", parent_branch_id=agent)
        assert policy.choose(sub, nodes, 1.0) == home
        homes[home.node_id] += 1
    assert set(homes) == set(NODES)


# -- round robin


def test_round_robin_takes_decode_nodes_in_turn() -> None:
    policy = RoundRobin()
    nodes = [decode_node(node_id, decoding=decoding) for node_id, decoding in zip(NODES, (60, 0, 0), strict=True)]
    chosen = [policy.choose(asked(f"r{number}", names("a", 1)), nodes, 0.0) for number in range(7)]
    assert chosen == ["n0", "n1", "n2", "n0", "n1", "n2", "n0"]


# -- Dynamo's KV router

BLOCKS = st.integers(0, 40)
WORKS = st.lists(st.builds(PrefillWork, st.integers(0, 5_000), st.integers(0, 5_000)), max_size=3)


@given(
    st.lists(st.tuples(WORKS, BLOCKS, BLOCKS, BLOCKS), min_size=1, max_size=4),
    st.sampled_from([(KvRouterConfig(), 0.0), (KV_ROUTER_WITH_POOL, 0.5)]),
)
def test_the_kv_router_takes_the_least_of_its_documented_cost(
    drawn: list[tuple[list[PrefillWork], int, int, int]], configured: tuple[KvRouterConfig, float]
) -> None:
    """Blocks to compute there already, and of this prompt, less what device (1.0) and host memory (0.75) hold.

    With a pool also half of what that has beyond device memory ("Using HiCache").
    """
    config, pooled = configured
    nodes = [
        prefill_node(f"n{number}", prefilling=works, l1_blocks=l1, any_blocks=l1 + host, fetchable_blocks=elsewhere)
        for number, (works, l1, host, elsewhere) in enumerate(drawn)
    ]
    tokens = 40 * BLOCK_TOKENS + 1
    costs = {}
    for number, (works, l1, host, elsewhere) in enumerate(drawn):
        blocks = (sum(work.uncached_tokens for work in works) + tokens) / BLOCK_TOKENS
        costs[f"n{number}"] = max(0.0, blocks - l1 - 0.75 * host - pooled * (host + elsewhere))
    chosen = LeastPrefillCost(config, 1).choose(asked("r", names("a", 40)), nodes, 0.0)
    assert chosen.fetched_blocks == 0
    assert costs[chosen.node_id] == pytest.approx(min(costs.values()))


def test_the_kv_router_leaves_a_prefix_for_a_node_with_less_to_do() -> None:
    """§2.3: it spreads load evenly and forces prefixes to be computed again."""
    prompt = names("a", 1_000)
    policy = LeastPrefillCost(KvRouterConfig(), 1)
    holder = prefill_node("n0", l1_blocks=1_000, prefilling=[PrefillWork(70_000)])
    assert policy.choose(asked("r1", prompt), [holder, prefill_node("n1")], 0.0).node_id == "n1"
    holder = prefill_node("n0", l1_blocks=1_000, prefilling=[PrefillWork(60_000)])
    assert policy.choose(asked("r2", prompt), [holder, prefill_node("n1")], 0.0).node_id == "n0"


def test_the_kv_router_draws_among_equals() -> None:
    policy = LeastPrefillCost(KvRouterConfig(), 1)
    chosen = {policy.choose(asked(f"r{number}", names("a", 1)), idle(0, 0, 0), 0.0).node_id for number in range(50)}
    assert chosen == set(NODES)


def test_the_kv_router_decodes_where_the_fewest_tokens_are() -> None:
    nodes = [decode_node("n0", decoding=1, context_tokens=900), decode_node("n1", decoding=30, context_tokens=800)]
    assert LeastActiveBlocks(1).choose(asked("r", names("a", 1)), nodes, 0.0) == "n1"


# -- ours, and what comes from the pool


@given(st.lists(st.tuples(st.floats(0, 5), BLOCKS, BLOCKS, BLOCKS), min_size=1, max_size=4))
def test_ours_is_the_cores_choice(drawn: list[tuple[float, int, int, int]]) -> None:
    nodes = [
        prefill_node(f"n{number}", wait_s=wait_s, l1_blocks=l1, any_blocks=l1 + host, fetchable_blocks=elsewhere)
        for number, (wait_s, l1, host, elsewhere) in enumerate(drawn)
    ]
    prompt = asked("r", names("a", 40), pool_blocks=40)
    best = choose_prefill(prompt.context, [node.view for node in nodes], ROUTING).chosen
    assert best is not None
    chosen = LeastPredictedTtft(ROUTING).choose(prompt, nodes, 0.0)
    assert chosen == PrefillChoice(best.node_id, best.fetched_blocks)


@given(st.lists(st.tuples(st.integers(0, 64), st.integers(0, 5_000_000)), min_size=1, max_size=4))
def test_our_decode_node_is_the_cores_choice(drawn: list[tuple[int, int]]) -> None:
    nodes = [
        decode_node(f"n{number}", decoding=decoding, context_tokens=tokens, slots_free=64 - decoding)
        for number, (decoding, tokens) in enumerate(drawn)
    ]
    prompt = asked("r", names("a", 40))
    best = choose_decode(prompt.context, nodes, ROUTING).chosen
    assert best is not None
    assert LeastDecodeCost(ROUTING).choose(prompt, nodes, 0.0) == best.node_id


def test_a_pool_below_the_engine_brings_all_there_is() -> None:
    """§2.3: pool with fetch at prefill start."""
    nodes = [
        prefill_node("n0", fetchable_blocks=7, prefilling=[PrefillWork(99)]),
        prefill_node("n1", fetchable_blocks=9),
    ]
    policy = FetchesAll(LeastPrefillCost(KvRouterConfig(), 1))
    assert policy.choose(asked("r", names("a", 40), pool_blocks=9), nodes, 0.0) == PrefillChoice("n1", 9)


def test_our_fetch_under_anothers_routing_is_the_cores_for_that_node() -> None:
    """Table D.5: routing as in SGLang, only the data plane is changed."""
    nodes = [prefill_node("n0", open_requests=1), prefill_node("n1", wait_s=2.0, fetchable_blocks=40)]
    prompt = asked("r", names("a", 40), pool_blocks=40)
    chosen = FetchesSooner(CacheAffinity(CacheAffinityConfig()), ROUTING).choose(prompt, nodes, 0.0)
    assert chosen == PrefillChoice("n1", score_prefill(prompt.context, nodes[1].view, ROUTING).fetched_blocks)
    assert chosen.fetched_blocks > 0


# -- determinism


def test_policies_with_the_same_seed_choose_alike_and_with_others_not() -> None:
    def chosen(seed: int) -> list[str]:
        draw = random.Random(1)
        prefill, sticky, decode = LeastPrefillCost(KvRouterConfig(), seed), StickySession(seed), LeastActiveBlocks(seed)
        out = []
        for number in range(40):
            prompt = asked(f"r{number}", names("a", draw.randrange(1, 9)), agent_id=f"a{draw.randrange(20)}")
            out += [
                prefill.choose(prompt, idle(0, 0, 0), 0.0).node_id,
                sticky.choose(prompt, idle(0, 0, 0), 0.0).node_id,
                decode.choose(prompt, [decode_node(node_id) for node_id in NODES], 0.0),
            ]
        return out

    assert chosen(1) == chosen(1)
    assert chosen(1) != chosen(2)
