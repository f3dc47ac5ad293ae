"""What a node says it holds, what it really holds, and in which order it lets go."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from evolving_node_agent.engines.port import CachedTokens, Cleared, Tier

from .driving import OTHER_ROOT, Node, names, prefill_only, prompt, serve
from .reference import clear_prompts, reference

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.sglang, pytest.mark.timeout(300)]
BLOCK = 64


async def test_prompt_and_output_blocks_are_announced_on_both_nodes_and_tiers(pair: list[Node]) -> None:
    a, b = pair
    tokens = prompt(101, 200)
    served = await serve(a, b, tokens, 150)
    prompt_names = names(tokens)
    all_names = names(tokens + served.ids[:-1])  # the last token has no KV
    assert len(all_names) == 5
    for tier in Tier:
        await a.until_holds(tier, prompt_names)
        await b.until_holds(tier, all_names)
    assert not a.held[Tier.L1].intersection(all_names[3:])
    assert b.parents[all_names[0]] is None
    assert [b.parents[name] for name in all_names[1:]] == all_names[:-1]


async def test_output_blocks_are_written_through_while_decoding(pair: list[Node]) -> None:
    a, b = pair
    tokens = prompt(102, 64)
    running = asyncio.create_task(serve(a, b, tokens, 600))
    # Its first output block, long before the request ends: its name is not known here, its parent is.
    parent = names(tokens)[0]
    await b.until(lambda: any(b.parents.get(name) == parent for name in b.held[Tier.L2]))
    assert not running.done()
    served = await running
    assert names(tokens + served.ids)[1] in b.held[Tier.L2]


async def test_bytes_of_transferred_blocks_equal_the_sources(pair: list[Node]) -> None:
    a, b = pair
    tokens = prompt(103, 320)
    await serve(a, b, tokens, 8)
    wanted = names(tokens)
    for node in pair:
        for tier in Tier:
            await node.until_holds(tier, wanted)
    digests = [await node.engine.block_digests(wanted, tier) for node in pair for tier in Tier]
    assert all(set(each) == set(wanted) for each in digests)
    assert all(one == other for one, other in pairwise(digests))
    assert len(set(digests[0].values())) == 5


async def test_roots_share_nothing(pair: list[Node]) -> None:
    a, _ = pair
    tokens, output = next(clear_prompts(130, 1, 104))
    assert (await prefill_only(a, tokens)).cached == CachedTokens()
    other = await prefill_only(a, tokens, root=OTHER_ROOT)
    assert other.cached == CachedTokens()
    assert other.first_token == output[0]
    await a.until_holds(Tier.L2, names(tokens) + names(tokens, OTHER_ROOT))
    assert not set(names(tokens)).intersection(names(tokens, OTHER_ROOT))


async def test_a_peers_host_memory_serves_a_prompt(pair: list[Node]) -> None:
    a, b = pair
    tokens = prompt(105, 400)
    await prefill_only(a, tokens)
    await a.until_holds(Tier.L2, names(tokens))
    longer = tokens + prompt(106, 30)
    wanted, gap = reference(longer, 12)
    assert gap > 0
    served = await serve(b, b, longer, 12, holders=(a.holder(0, 6),))
    assert served.cached == CachedTokens(peer=384)
    assert served.ids == wanted
    assert await b.engine.block_digests(names(tokens), Tier.L2) == await a.engine.block_digests(names(tokens), Tier.L2)


async def test_a_peer_adds_to_what_is_here(pair: list[Node]) -> None:
    a, b = pair
    tokens = prompt(107, 400)
    await prefill_only(a, tokens)
    await prefill_only(b, tokens[:200])
    await a.until_holds(Tier.L2, names(tokens))
    await b.until_holds(Tier.L2, names(tokens[:200]))
    assert (await prefill_only(b, tokens, holders=(a.holder(0, 6),))).cached == CachedTokens(l1=192, peer=192)


async def test_holders_that_have_nothing_are_computed_around(pair: list[Node]) -> None:
    a, b = pair
    tokens, output = next(clear_prompts(200, 1, 108))
    gone = a.holder(0, 3)
    wrong = type(gone)("x", "127.0.0.1:9", "nobody", 0, 3)
    stale = type(gone)("a", a.info.pool_address, "an earlier life", 0, 3)
    prefilled = await prefill_only(b, tokens, holders=(wrong, stale, gone))
    assert prefilled.first_token == output[0]
    assert prefilled.cached == CachedTokens()


async def test_counts_are_kept_by_name(pair: list[Node]) -> None:
    engine = pair[0].engine
    one, two = names(prompt(109, 128))
    await engine.set_needs({one: 2, two: 1})
    assert await engine.needs() == {one: 2, two: 1}
    await engine.set_needs({one: 0, two: 3})
    assert await engine.needs() == {two: 3}
    await engine.set_needs({two: 0})
    assert await engine.needs() == {}


async def test_eviction_goes_by_counts_then_by_age(cramped: list[Node]) -> None:
    node = cramped[0]
    kept, old, young = (prompt(110 + index, 448) for index in range(3))
    for tokens in (kept, old, young):
        await prefill_only(node, tokens)
        await node.until_holds(Tier.L2, names(tokens))
    # Only the last block is counted: its ancestors must stay with it.
    await node.engine.set_needs({names(kept)[-1]: 1})
    seed = 120
    while node.held[Tier.L1].issuperset(names(old)):
        await prefill_only(node, prompt(seed, 448))
        seed += 1
    assert node.held[Tier.L1].issuperset(names(kept))
    while node.held[Tier.L1].intersection(names(young)):
        await prefill_only(node, prompt(seed, 448))
        seed += 1
    assert node.held[Tier.L1].issuperset(names(kept))
    # So it goes in host memory too.
    while node.held[Tier.L2].intersection(names(young)):
        await prefill_only(node, prompt(seed, 448))
        seed += 1
    assert node.held[Tier.L2].issuperset(names(kept))
    await node.engine.set_needs({names(kept)[-1]: 0})


async def test_own_host_memory_serves_what_left_the_device(cramped: list[Node]) -> None:
    node = cramped[1]
    tokens, output = next(clear_prompts(448, 1, 130))
    await prefill_only(node, tokens)
    await node.until_holds(Tier.L2, names(tokens))
    seed = 140
    while node.held[Tier.L1].intersection(names(tokens)):
        await prefill_only(node, prompt(seed, 448))
        seed += 1
    assert node.held[Tier.L2].issuperset(names(tokens))
    again = await prefill_only(node, tokens)
    assert again.cached == CachedTokens(l2=384)
    assert again.first_token == output[0]


async def test_free_l1_leaves_host_copies(pair: list[Node]) -> None:
    _, b = pair
    tokens = prompt(150, 256)
    await prefill_only(b, tokens)
    await b.until_holds(Tier.L2, names(tokens))
    running = asyncio.create_task(serve(b, b, prompt(151, 128), 300))
    await b.until_holds(Tier.L2, names(prompt(151, 128)))
    dropped = await b.engine.free_l1()
    assert dropped >= 4
    await b.until(lambda: not b.held[Tier.L1].intersection(names(tokens)))
    assert b.held[Tier.L1].issuperset(names(prompt(151, 128))), "a running request keeps its blocks"
    await running
    await b.until(lambda: not b.held[Tier.L1].intersection(names(prompt(151, 128))))
    assert b.held[Tier.L2].issuperset(names(tokens) + names(prompt(151, 128)))
    again = await prefill_only(b, [*tokens, 9])
    assert again.cached == CachedTokens(l2=256)


async def test_first_events_say_that_nothing_is_held(pair: list[Node]) -> None:
    assert pair[0].events[:2] == [Cleared(Tier.L1), Cleared(Tier.L2)]


async def test_status_counts_what_is_held(pair: list[Node]) -> None:
    a, _ = pair
    before = a.engine.status().prefill_tokens
    await prefill_only(a, prompt(160, 70))
    async for status in a.engine.status_changes():
        if status.prefill_tokens != before:
            break
    assert status.prefill_tokens - before == 70
    await a.until_only_cache()
