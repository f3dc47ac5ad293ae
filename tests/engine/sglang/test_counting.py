"""Bookkeeping beside SGLang's tree, against naive models of it."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evolving.core.needs import need
from evolving_node_agent.engines.sglang.host.checksums import PageChecksums
from evolving_node_agent.engines.sglang.host.needs import Needs

NAMES = [bytes([index]) * 16 for index in range(12)]
names = st.sampled_from(NAMES)


def node_of(blocks: list[bytes]) -> SimpleNamespace:
    """A tree node of these blocks."""
    return SimpleNamespace(hash_value=[(name * 2).hex() for name in blocks])


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("needs"), st.dictionaries(names, st.integers(0, 3))),
            st.tuples(st.just("stored"), st.sets(names)),
            st.tuples(st.just("removed"), st.sets(names)),
        ),
        max_size=20,
    )
)
def test_counted_blocks_of_l2_are_those_a_recount_finds(steps: list[tuple[str, dict[bytes, int] | set[bytes]]]) -> None:
    needs, held, expected = Needs(), dict[bytes, None](), dict[bytes, int]()
    needs.watch(held)
    for kind, said in steps:
        if isinstance(said, dict):
            needs.update(said)
            expected = {name: needed for name, needed in (expected | said).items() if needed}
        elif kind == "stored":
            new = said - set(held)
            held.update(dict.fromkeys(new))
            needs.on_stored(new, in_l2=True)
        else:
            gone = said & set(held)
            for name in gone:
                del held[name]
            needs.on_removed(gone)
        assert needs.nonzero() == expected
        assert needs.l2_blocks == len(held.keys() & expected.keys())


@given(st.lists(st.integers(0, 3), min_size=1, max_size=len(NAMES)), st.integers(0, 3))
def test_a_node_is_cut_where_its_blocks_effective_needs_change(own: list[int], below: int) -> None:
    needs = Needs()
    blocks = NAMES[: len(own)]
    needs.update(dict(zip(blocks, own, strict=True)))
    level, cuts = needs.levels(node_of(blocks), below)
    effective = [max(*own[index:], below) for index in range(len(own))]
    # With no needs at all there is nothing to tell apart.
    assert level == (effective[0] if any(own) else below)
    changes = [index for index in range(1, len(own)) if effective[index] != effective[index - 1]]
    assert list(cuts) == changes[::-1]


def test_what_is_remembered_of_nodes_is_renewed_when_a_counted_block_comes_back() -> None:
    needs = Needs()
    needs.update({NAMES[0]: 1})
    before = needs.version
    needs.on_stored([NAMES[1]], in_l2=False)
    assert needs.version == before
    needs.on_stored([NAMES[0]], in_l2=False)
    assert needs.version > before


def test_blocks_that_the_pool_would_lose_are_those_of_now() -> None:
    needs, node = Needs(), node_of(NAMES[:4])
    assert needs.last_blocks(node) == (0, 4)
    needs.update({NAMES[0]: need(2, elsewhere=True), NAMES[1]: need(1, elsewhere=False), NAMES[5]: need(1, False)})
    assert needs.last_blocks(node) == needs.last_blocks(node) == (1, 4)
    needs.update({NAMES[0]: need(2, elsewhere=False)})
    assert needs.last_blocks(node) == (2, 4)
    node.hash_value = node.hash_value[1:]
    assert needs.last_blocks(node) == (1, 3)


@settings(max_examples=20)
@given(st.integers(0, 3), st.integers(0, 1), st.integers(0, 255), st.integers(0, 7))
def test_any_changed_bit_of_a_page_is_found(page: int, half: int, byte: int, bit: int) -> None:
    generator = torch.Generator().manual_seed(1)
    buffer = torch.rand(2, 4, 2, 4, 8, generator=generator)  # 256 bytes a page and half
    generations = torch.zeros(4, dtype=torch.int64)
    checksums = PageChecksums(buffer, generations, enabled=True)

    async def sums() -> list[int | None]:
        return [await checksums.of(each, generation) for each, generation in enumerate(sealed)]

    sealed = checksums.seal(range(4))
    found = asyncio.run(sums())
    assert len(set(found)) == 4
    assert checksums.intact(range(4), found) == 4
    view = buffer.view(torch.uint8).reshape(2, 4, -1)
    view[half, page, byte] ^= 1 << bit
    assert checksums.intact(range(4), found) == page
    assert checksums.intact([page], [None]) == 1, "a peer that keeps none is believed"


def test_a_page_given_away_has_no_checksum() -> None:
    generations = torch.zeros(2, dtype=torch.int64)
    checksums = PageChecksums(torch.zeros(2, 2, 1, 1, 1), generations, enabled=True)
    generations[1] += 1
    assert asyncio.run(checksums.of(1, 0)) is None
    checksums.put([1], [77])
    assert asyncio.run(checksums.of(1, 1)) == 77


def test_no_checksums_without_the_setting() -> None:
    before = threading.active_count()
    checksums = PageChecksums(torch.zeros(2, 2, 1, 1, 1), torch.zeros(2, dtype=torch.int64), enabled=False)
    assert threading.active_count() == before
    assert checksums.seal([0, 1]) == [0, 0]
    assert asyncio.run(checksums.of(0, 0)) is None
    assert checksums.intact([0, 1], [1, 2]) == 2
