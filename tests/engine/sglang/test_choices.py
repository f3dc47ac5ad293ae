"""What leaves memory first when the blocks of a tree node are not needed alike, and settings for comparison."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import count

import pytest
import pytest_asyncio

from evolving.core.config import EvictionPolicy, FetchStart
from evolving.core.needs import need
from evolving_node_agent.engines.port import CachedTokens, Tier
from evolving_node_agent.engines.sglang import SglangConfig

from .conftest import SMALL
from .driving import Node, collect, greedy, jobs, names, prefill_only, prompt
from .lending import Lender
from .test_fetch import NEVER_S, alter_block, events_of, held_by, until_status

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.sglang, pytest.mark.timeout(300)]
BLOCK = 64


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def comparing(lender: Lender) -> AsyncIterator[Node]:
    """A small node with the other value of every setting there is for comparison."""
    others = {"eviction": EvictionPolicy.LRU, "fetch_start": FetchStart.ADMISSION, "page_checksums": False}
    async with lender.lend("comparing", **SMALL, **others) as (node,):
        yield node


async def test_l2_has_room_beside_the_copies_of_what_is_in_l1() -> None:
    SglangConfig("/model", l1_tokens=2048, l2_tokens=4096)
    with pytest.raises(ValueError, match="twice l1_tokens"):
        SglangConfig("/model", l1_tokens=2048, l2_tokens=4096 - BLOCK)


async def test_the_needed_part_of_a_node_outlives_the_rest(small: Node) -> None:
    """One prompt, so one node of SGLang's tree, with counts 2, 2, 1, 1, 0, 0, 0; and a younger one counted once. All
    of them are on another node too."""
    node = small
    mixed, once = prompt(60_000, 7 * BLOCK), prompt(60_001, 4 * BLOCK)
    await held_by(node, mixed)
    await held_by(node, once)
    blocks = names(mixed)
    one, two = need(1, elsewhere=True), need(2, elsewhere=True)
    needs = dict.fromkeys(blocks[:2], two) | dict.fromkeys([*blocks[2:4], *names(once)], one)
    await node.engine.set_needs(needs)
    seeds = count(60_100)
    for tier in (Tier.L1, Tier.L2):
        while node.held[tier].intersection(blocks[4:]):
            assert node.held[tier].issuperset(needs), "a counted block went before one that nobody counts"
            await prefill_only(node, prompt(next(seeds), 7 * BLOCK))
        assert node.held[tier].issuperset(needs)
    # All counted from here on: those with a count of 1 go before those with 2.
    while node.held[Tier.L2].intersection(blocks[2:4]):
        assert node.held[Tier.L2].issuperset(blocks[:2])
        filler = prompt(next(seeds), 7 * BLOCK)
        await prefill_only(node, filler)
        await node.engine.set_needs(dict.fromkeys(names(filler), two))
    assert node.held[Tier.L2].issuperset(blocks[:2])
    # Full of blocks counted alike: the longest unused goes, and serving goes on.
    while node.held[Tier.L2].intersection(blocks[:2]):
        filler = prompt(next(seeds), 7 * BLOCK)
        await prefill_only(node, filler)
        await node.engine.set_needs(dict.fromkeys(names(filler), two))
    assert node.held[Tier.L2].issuperset(names(filler))
    status = await until_status(node, lambda status: status.l2_zero_tokens == 0)
    assert status.l2_used_tokens <= node.info.l2_tokens


async def test_lru_takes_no_notice_of_needs(comparing: Node) -> None:
    node = comparing
    old, young = prompt(61_000, 7 * BLOCK), prompt(61_001, 7 * BLOCK)
    await held_by(node, old)
    await held_by(node, young)
    await node.engine.set_needs(dict.fromkeys(names(old), need(5, elsewhere=False)))
    seeds = count(61_100)
    while node.held[Tier.L2].intersection(names(old)):
        assert node.held[Tier.L2].issuperset(names(young))
        await prefill_only(node, prompt(next(seeds), 7 * BLOCK))
    await node.engine.set_needs(dict.fromkeys(names(old), 0))


async def test_a_fetch_at_admission_begins_when_the_turn_has_come(pair: list[Node], comparing: Node) -> None:
    source, node = pair[0], comparing
    longest = node.info.max_prompt_tokens
    usable = (longest - 1) // BLOCK
    tokens = await held_by(source, prompt(62_000, longest))
    before = node.engine.status().fetched_tokens
    # The computed prompt of a request whose decode leg has not come leaves room for short ones only.
    first, decode = jobs(node, prompt(62_001, longest - 3 * BLOCK), greedy(2), keep_s=NEVER_S)
    holding = asyncio.create_task(collect(node.engine.prefill(first)))
    await until_status(node, lambda status: status.holding == 1)
    waiting = asyncio.create_task(events_of(node, tokens, holders=(source.holder(0, usable),)))
    await until_status(node, lambda status: status.fetch_backlog_tokens == usable * BLOCK)
    for seed in range(10):  # others pass it by
        await prefill_only(node, prompt(62_100 + seed, BLOCK), priority=1)
    status = await until_status(node, lambda status: len(status.queued) == 1)
    assert (status.fetched_tokens, status.fetching_blocks) == (before, 0)
    await collect(node.engine.decode(decode))
    await holding
    taken, prefilled = await waiting
    assert prefilled.cached == CachedTokens(peer=usable * BLOCK)
    assert taken.fetch_s > 0
    assert taken.hidden_s == 0
    await node.until_only_cache()


async def test_without_checksums_an_altered_page_gets_through(pair: list[Node], comparing: Node) -> None:
    """So that the tests with them show that they matter."""
    source, node = pair[0], comparing
    tokens = await held_by(source, prompt(63_000, 5 * BLOCK + 7))
    await alter_block(source, names(tokens)[2], 1, 12_345)
    wrong = await source.engine.block_digests(names(tokens), Tier.L2)
    assert (await prefill_only(node, tokens, holders=(source.holder(0, 5),))).cached == CachedTokens(peer=5 * BLOCK)
    assert await node.engine.block_digests(names(tokens), Tier.L2) == wrong
    await source.engine.clear()
