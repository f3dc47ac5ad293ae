"""Block names: the chain, its root, hashing on from a known prefix, and what a next turn can reuse (§4.2, §6)."""

from __future__ import annotations

import hashlib
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evolving.core.blocks import (
    DIGEST_BYTES,
    chain,
    chain_names,
    common_blocks,
    hash_tokens,
    names_of,
    reusable_blocks,
    root_digest,
    split_names,
)
from evolving.core.errors import InvalidArgument
from evolving.core.terms import NAME_BYTES

ROOT = root_digest("model@1/float32/nhd", "", "tenant-a")


def pack(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def test_a_digest_chains_all_32_bytes_of_the_one_before() -> None:
    tokens = pack([1, 2, 3, 4, 5, 6, 7])
    first = hashlib.sha256(ROOT + pack([1, 2, 3])).digest()
    second = hashlib.sha256(first + pack([4, 5, 6])).digest()
    assert chain(ROOT, tokens, 3) == [first, second]
    assert names_of([first, second]) == first[:NAME_BYTES] + second[:NAME_BYTES] == chain_names(ROOT, tokens, 3)
    assert split_names(chain_names(ROOT, tokens, 3)) == [first[:NAME_BYTES], second[:NAME_BYTES]]


def test_chaining_goes_on_from_any_digest() -> None:
    tokens = pack(list(range(40)))
    whole = chain(ROOT, tokens, 4)
    assert chain(whole[2], tokens[3 * 16 :], 4) == whole[3:]


@given(one=st.tuples(st.text(), st.text(), st.text()), other=st.tuples(st.text(), st.text(), st.text()))
def test_nothing_is_shared_across_models_adapters_or_tenants(
    one: tuple[str, str, str], other: tuple[str, str, str]
) -> None:
    tokens = pack(list(range(8)))
    names, others = (split_names(chain_names(root_digest(*parts), tokens, 2)) for parts in (one, other))
    assert (names == others) == (one == other)
    assert one == other or set(names).isdisjoint(others)


@pytest.mark.parametrize(
    ("previous", "tokens", "block_tokens"),
    [(ROOT[:-1], pack([1]), 1), (b"", pack([1]), 1), (ROOT, b"\x01\x02\x03", 1), (ROOT, pack([1]), 0)],
)
def test_what_is_no_digest_or_no_tokens_is_refused(previous: bytes, tokens: bytes, block_tokens: int) -> None:
    with pytest.raises(InvalidArgument):
        chain(previous, tokens, block_tokens)


@pytest.mark.parametrize("seed", range(20))
def test_hashing_on_from_a_known_context_equals_hashing_anew(seed: int) -> None:
    rng = random.Random(seed)
    block_tokens = rng.choice([1, 4, 64])
    tokens = [rng.randrange(2**32) for _ in range(rng.randrange(60 * block_tokens))]
    known = hash_tokens(ROOT, pack(tokens), block_tokens)
    for _ in range(20):
        kept = rng.choice([len(tokens), rng.randrange(len(tokens) + 1)])
        tokens = tokens[:kept] + [rng.randrange(2**32) for _ in range(rng.randrange(3 * block_tokens))]
        grown = hash_tokens(ROOT, pack(tokens), block_tokens, known)
        assert grown == hash_tokens(ROOT, pack(tokens), block_tokens)
        assert grown.names == names_of(chain(ROOT, pack(tokens), block_tokens))
        assert common_blocks(known, pack(tokens)) >= min(kept // block_tokens, known.blocks, grown.blocks)
        known = grown


def test_only_blocks_after_the_known_prefix_are_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    known = hash_tokens(ROOT, pack(list(range(1000))), 10)
    hashed: list[int] = []
    sha256 = hashlib.sha256

    def counting(data: bytes = b"") -> object:
        hashed.append(len(data))
        return sha256(data)

    monkeypatch.setattr(hashlib, "sha256", counting)
    grown = hash_tokens(ROOT, pack(list(range(1025))), 10, known)
    assert hashed == [DIGEST_BYTES + 40] * 2
    assert grown.blocks == 102


@given(st.integers(0, 40), st.data())
def test_a_context_knows_the_digest_before_each_block(blocks: int, data: st.DataObject) -> None:
    tokens = pack(list(range(3 * blocks + 2)))
    block = data.draw(st.integers(0, blocks))
    assert hash_tokens(ROOT, tokens, 3).digest_before(block) == [ROOT, *chain(ROOT, tokens, 3)][block]


def test_a_known_context_of_another_root_or_block_size_is_not_used() -> None:
    tokens = pack(list(range(100)))
    known = hash_tokens(ROOT, tokens, 10)
    other = root_digest("other", "", "")
    assert hash_tokens(other, tokens, 10, known) == hash_tokens(other, tokens, 10)
    assert hash_tokens(ROOT, tokens, 5, known) == hash_tokens(ROOT, tokens, 5)


@pytest.mark.parametrize(
    ("prompt", "output", "following", "blocks"),
    [
        (64, 1, 200, 1),  # the sampled token has no KV, the prompt has
        (63, 1, 200, 0),  # 64 tokens, the last of them without KV
        (64, 64, 500, 1),  # 127 tokens have KV
        (64, 65, 500, 2),
        (640, 64, 641, 10),
        (640, 64, 640, 9),  # one token of the next prompt must be computed
        (0, 0, 0, 0),
        (100, 93, None, 3),  # the next prompt's length is not known yet
    ],
)
def test_what_the_next_turn_can_reuse(prompt: int, output: int, following: int | None, blocks: int) -> None:
    assert reusable_blocks(prompt, output, 64, following) == blocks
