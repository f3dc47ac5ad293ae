"""Block names against hashlib applied by hand, and the properties routing and reuse rest on."""

from __future__ import annotations

import hashlib
import struct

import pytest
from evolving.core.blocks import chain_digests, names_of, reusable_blocks, root_digest, split_names
from hypothesis import given
from hypothesis import strategies as st

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)
ROOT = root_digest("m", "t")


def packed(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


@given(tokens=token_lists, block_tokens=st.integers(1, 9))
def test_each_digest_is_sha256_of_the_one_before_and_the_blocks_ids(tokens: list[int], block_tokens: int) -> None:
    digests = chain_digests(ROOT, packed(tokens), block_tokens)
    previous, expected = ROOT, []
    for start in range(0, len(tokens) // block_tokens * block_tokens, block_tokens):
        previous = hashlib.sha256(previous + packed(tokens[start : start + block_tokens])).digest()
        expected.append(previous)
    assert digests == b"".join(expected)
    assert split_names(names_of(digests)) == [digest[:16] for digest in expected]


@given(tokens=token_lists, block_tokens=st.integers(1, 9), cut=st.integers(0, 40))
def test_a_chain_goes_on_from_any_block(tokens: list[int], block_tokens: int, cut: int) -> None:
    whole = chain_digests(ROOT, packed(tokens), block_tokens)
    known = min(cut, len(whole) // 32)
    previous = whole[32 * (known - 1) : 32 * known] if known else ROOT
    rest = chain_digests(previous, packed(tokens[known * block_tokens :]), block_tokens)
    assert whole[: 32 * known] + rest == whole


@given(first=token_lists, second=token_lists)
def test_chains_agree_exactly_as_far_as_the_tokens_do(first: list[int], second: list[int]) -> None:
    same = 0
    while same < min(len(first), len(second)) // 2 and first[2 * same : 2 * same + 2] == second[2 * same : 2 * same + 2]:
        same += 1
    one, other = (split_names(names_of(chain_digests(ROOT, packed(tokens), 2))) for tokens in (first, second))
    assert [a == b for a, b in zip(one, other, strict=False)] == [
        at < same for at in range(min(len(one), len(other)))
    ]


@given(one=st.tuples(st.text(), st.text(), st.text()), other=st.tuples(st.text(), st.text(), st.text()))
def test_roots_differ_for_different_models_tenants_and_adapters(
    one: tuple[str, str, str], other: tuple[str, str, str]
) -> None:
    assert (root_digest(*one) == root_digest(*other)) == (one == other)


@pytest.mark.parametrize(
    ("context_tokens", "next_prompt_tokens", "blocks"),
    [(128, 500, 1), (129, 500, 2), (200, 129, 2), (200, 128, 1), (0, 10, 0), (10, 0, 0)],
)
def test_the_last_sampled_token_has_no_kv_and_one_prompt_token_is_computed(
    context_tokens: int, next_prompt_tokens: int, blocks: int
) -> None:
    assert reusable_blocks(context_tokens, next_prompt_tokens, 64) == blocks
