"""The oracle against one that goes block by block, and what must hold between its policies."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim import naive_pool
from sim.naive_pool import main_agent, request, session, sessions

from evolving_sim.oracle import Policy, simulate
from evolving_sim.trace_files import read_sessions
from evolving_sim.traces import TraceSession
from evolving_sim.workload import make_workload

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"


@settings(max_examples=300)
@given(sessions(), st.integers(1, 4), st.integers(0, 24), st.sampled_from(Policy))
def test_it_agrees_with_a_pool_that_goes_block_by_block(
    played: list[TraceSession], concurrency: int, capacity: int, policy: Policy
) -> None:
    workload = make_workload(played, concurrency)
    outcome = simulate(workload, capacity, policy)
    naive = naive_pool.play(played, concurrency, capacity, policy)
    assert workload.peak_counted_blocks == naive.peak_counted_blocks
    assert outcome.prompt_tokens == naive.prompt_tokens
    assert outcome.ideal_tokens == naive.ideal_tokens
    assert outcome.hit_tokens == naive.hit_tokens


@settings(max_examples=200)
@given(sessions(), st.integers(1, 4), st.integers(0, 24))
def test_no_order_beats_the_one_that_knows_the_future(
    played: list[TraceSession], concurrency: int, capacity: int
) -> None:
    workload = make_workload(played, concurrency)
    hits = {policy: simulate(workload, capacity, policy).hit_tokens for policy in Policy}
    assert max(hits.values()) == hits[Policy.BELADY]


@settings(max_examples=100)
@given(sessions(), st.integers(1, 4), st.sampled_from(Policy))
def test_with_room_for_everything_nothing_is_lost(
    played: list[TraceSession], concurrency: int, policy: Policy
) -> None:  # fmt: skip
    workload = make_workload(played, concurrency)
    outcome = simulate(workload, workload.nodes, policy)
    assert outcome.hit_tokens == outcome.ideal_tokens


@settings(max_examples=200)
@given(sessions(rewrites=False, ids_shared=False), st.integers(1, 4))
def test_counts_lose_nothing_while_all_that_live_branches_have_finds_room(
    played: list[TraceSession], concurrency: int
) -> None:
    """§4.4. Where contexts only grow, nothing but what live branches have is ever asked for again."""
    workload = make_workload(played, concurrency)
    outcome = simulate(workload, workload.peak_counted_blocks, Policy.AGENT)
    assert outcome.hit_tokens == outcome.ideal_tokens


def test_a_waiting_agent_is_what_counts_save_and_the_longest_unused_loses() -> None:
    waiting = session(main_agent(request([1, 2, 3, 4]), request([1, 2, 3, 4, 5], think_s=100.0)))
    passing = [session(main_agent(request([1, 2, 3, 4]))) for _ in range(3)]
    workload = make_workload([waiting, *passing], concurrency=2)
    lost = {policy: simulate(workload, 8, policy).lost_reuse for policy in Policy}
    assert workload.peak_counted_blocks == 8
    assert lost[Policy.AGENT] == lost[Policy.BELADY] == 0
    assert lost[Policy.LRU] > 0


def test_the_answer_is_found_where_the_next_prompt_contains_it() -> None:
    # 10 tokens asked and 7 answered: 16 of 17 tokens have KV, so two more blocks; the next prompt has one block more.
    played = [session(main_agent(request([1, 2], tail=2, output=7), request([1, 2, 3, 4, 5])))]
    with_answers = make_workload(played, 1)
    without = make_workload(played, 1, outputs_return=False)
    assert simulate(with_answers, 100, Policy.LRU).hit_tokens == 16
    assert simulate(without, 100, Policy.LRU).hit_tokens == 8


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    workload = make_workload([session(main_agent(request([1, 2]), request([1, 2])))], 1)
    assert simulate(workload, 100, Policy.LRU).ideal_tokens == 4


def test_on_real_sessions_counts_lose_less_than_the_longest_unused() -> None:
    workload = make_workload(list(read_sessions(FIXTURES / "claude_code_small.jsonl.xz")), 3)
    lost = dict.fromkeys(Policy, 0.0)
    for share in (1.0, 0.86, 0.5):
        for policy in Policy:
            lost[policy] += simulate(workload, int(share * workload.peak_counted_blocks), policy).lost_reuse
    assert lost[Policy.BELADY] < lost[Policy.AGENT] < lost[Policy.LRU]


def test_sessions_of_two_block_sizes_have_no_common_pool() -> None:
    mixed = [*read_sessions(FIXTURES / "claude_code_small.jsonl.xz"), session(main_agent(request([1])))]
    with pytest.raises(ValueError, match=r"one block size, got \[4, 64\]"):
        make_workload(mixed, 1)
