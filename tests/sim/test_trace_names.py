"""Names of recorded requests against the token ids that a replay really sends, hashed as a gateway does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim.naive_pool import BLOCK_TOKENS, main_agent, request, session, sessions

from evolving.core.blocks import TOKEN_BYTES, HashedTokens, hash_tokens, root_digest
from evolving.core.terms import NAME_BYTES
from evolving_replay.ideal import AgentKv, ProducedKv
from evolving_replay.prompts import BlockTokens, SessionPrompts
from evolving_sim.trace_files import read_sessions
from evolving_sim.trace_names import BlockContents, name_session
from evolving_sim.traces import TraceSession

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
Left = tuple[str, ...]  # names of what a request leaves


def replayed(played: Sequence[TraceSession], block_tokens: int) -> list[dict[tuple[int, int], tuple[Left, int]]]:
    """Per session, by agent and request: names of prompt and answer as a cluster would have them, and the ideal reuse.

    Requests of a session are played one after the other, as recorded; answers are random tokens.
    """
    draw = random.Random(1)
    tokens, produced = dict[str, BlockTokens](), dict[str, ProducedKv]()
    left, first_request = [], 0
    for number, each in enumerate(played):
        scope = "shared" if each.ids_shared else str(number)
        blocks = tokens.setdefault(scope, BlockTokens(scope, each.block_tokens, 1 << 20))
        prompts = SessionPrompts(blocks)
        kvs = [AgentKv(produced.setdefault(scope, ProducedKv(block_tokens))) for _ in each.agents]
        rows: dict[tuple[int, int], tuple[Left, int]] = {}
        hashed: list[HashedTokens] = [hash_tokens(root_digest(scope, "", ""), b"", block_tokens)] * len(each.agents)
        before = [sum(len(agent.requests) for agent in each.agents[:at]) for at in range(len(each.agents))]
        for agent, index in in_order(each):
            asked = each.agents[agent].requests[index]
            prompt = prompts.prompt(asked, (first_request if each.ids_shared else 0) + before[agent] + index)
            assert len(prompt) == asked.input_tokens * TOKEN_BYTES
            ideal = kvs[agent].reusable_tokens(prompt)
            answer = np.array([draw.randrange(1 << 20) for _ in range(max(1, asked.output_tokens))], "<u4").tobytes()
            prompts.answered(asked, prompt, answer)
            kvs[agent].finished(prompt, answer)
            kept = (len(prompt + answer) // TOKEN_BYTES - 1) // block_tokens
            hashed[agent] = hash_tokens(root_digest(scope, "", ""), prompt + answer, block_tokens, hashed[agent])
            names = hashed[agent].names
            rows[agent, index] = (
                tuple(names[at * NAME_BYTES : (at + 1) * NAME_BYTES].hex() for at in range(kept)),
                ideal,
            )
        left.append(rows)
        first_request += each.request_count
    return left


def in_order(each: TraceSession) -> list[tuple[int, int]]:
    """Agents and requests as they were recorded, an agent's own in their order."""
    rows = []
    for number, agent in enumerate(each.agents):
        latest_s = 0.0
        for index, asked in enumerate(agent.requests):
            latest_s = max(latest_s, asked.at_s)
            rows.append((latest_s, number, index))
    return [(number, index) for _, number, index in sorted(rows)]


def check(played: Sequence[TraceSession], block_tokens: int) -> None:
    told = replayed(played, block_tokens)
    scopes: dict[str, BlockContents] = {}
    real_of: dict[bytes, str] = {}
    for number, each in enumerate(played):
        scope = "shared" if each.ids_shared else str(number)
        contents = scopes.setdefault(scope, BlockContents(scope, each.block_tokens, block_tokens))
        named = name_session(each, contents)
        for agent, requests in enumerate(named):
            last: Left = ()
            for index, one in enumerate(requests):
                real, _ = told[number][agent, index]
                assert one.blocks == len(real) <= len(one.names)
                for name, real_name in zip(one.names[: one.blocks], real, strict=True):
                    assert real_of.setdefault(name, real_name) == real_name
                same = [one_ == other for one_, other in zip(last, real, strict=False)]
                assert one.shared_blocks == (same.index(False) if False in same else len(same))
                last = real
    assert len(set(real_of.values())) == len(real_of), "another name for the same context"
    ideal_of(played, block_tokens, told)


def ideal_of(
    played: Sequence[TraceSession], block_tokens: int, told: list[dict[tuple[int, int], tuple[Left, int]]]
) -> None:
    """What could be reused of each prompt is the same by our names as by the replay's own account."""
    scopes, produced = dict[str, BlockContents](), set[bytes]()
    for number, each in enumerate(played):
        scope = "shared" if each.ids_shared else str(number)
        contents = scopes.setdefault(scope, BlockContents(scope, each.block_tokens, block_tokens))
        named = name_session(each, contents)
        for agent, index in in_order(each):
            one, asked = named[agent][index], each.agents[agent].requests[index]
            usable = max(0, asked.input_tokens - 1) // block_tokens
            there = [name in produced for name in one.names[:usable]]
            ideal = there.index(False) if False in there else len(there)
            assert ideal * block_tokens == told[number][agent, index][1]
            produced.update(one.names[: one.blocks])


@settings(max_examples=100)
@given(sessions())
def test_names_are_equal_where_a_replays_contexts_are(played: list[TraceSession]) -> None:
    check(played, BLOCK_TOKENS)


@settings(max_examples=50)
@given(sessions(), st.sampled_from((1, 2, 8, 12)))
def test_a_trace_with_larger_or_smaller_blocks_than_the_clusters(played: list[TraceSession], block_tokens: int) -> None:
    check(played, block_tokens)


@pytest.mark.parametrize(
    ("fixture", "block_tokens"),
    [("claude_code_small.jsonl.xz", 64), ("claude_code_small.jsonl.xz", 256), ("mooncake_small.jsonl.gz", 64)],
)
def test_real_sessions(fixture: str, block_tokens: int) -> None:
    check(list(read_sessions(FIXTURES / fixture))[:20], block_tokens)


def test_a_prompt_that_extends_the_last_one_holds_its_answer_as_far_as_it_is_long_enough() -> None:
    """Ten tokens and ten of an answer: of the four blocks that have KV then, 18 tokens hold all."""
    played = session(main_agent(request([1, 2], tail=2, output=10), request([1, 2, 3, 4], tail=2, output=1)))
    ((first, second),) = name_session(played, BlockContents("s", BLOCK_TOKENS, BLOCK_TOKENS))
    assert (first.blocks, second.blocks) == (4, 4)
    assert second.version == 1
    assert second.shared_blocks == 4
    assert second.names is first.names, "and its names are the same list"


def test_a_rewrite_is_another_version_that_keeps_what_it_starts_with() -> None:
    compacted = request([1, 2, 9], output=4)
    played = session(main_agent(request([1, 2, 3, 4, 5], output=4), compacted, request([1, 2, 9, 10], output=1)))
    ((whole, short, after),) = name_session(played, BlockContents("s", BLOCK_TOKENS, BLOCK_TOKENS))
    assert [each.version for each in (whole, short, after)] == [1, 2, 2]
    assert short.shared_blocks == 2
    assert list(short.names[:2]) == list(whole.names[:2])
    assert not set(short.names[2:]) & set(whole.names)


def test_blocks_that_are_no_parts_of_the_traces_are_refused() -> None:
    with pytest.raises(ValueError, match="must divide them or be a multiple"):
        BlockContents("s", 64, 48)
