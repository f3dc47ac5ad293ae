"""The engine port under memory pressure: what goes first, what counts do, and that nothing is lost or made up."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import count

import pytest
from engine.conftest import Starter, check_engine
from engine.sglang.driving import Node, collect, greedy, jobs, prefill_only, prompt, serve
from engine.test_conformance import BLOCK, names_of

from evolving.core.needs import need
from evolving_node_agent.engines.port import Aborted, CachedTokens, Tier

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]
# A prompt of eight blocks is computed in one chunk, so that it is one node of SGLang's tree.
SMALL = {"l1_tokens": 32 * BLOCK, "l2_tokens": 64 * BLOCK, "chunk_tokens": 8 * BLOCK}
PROMPT = 8 * BLOCK + 1  # eight full blocks are reusable
FILLING = 12  # prompts: more than either tier holds


async def fill(node: Node, seed: int, prompts: int = FILLING) -> None:
    """Push through more prompts than fit."""
    for index in range(prompts):
        await prefill_only(node, prompt(seed + index, PROMPT))


async def holds(node: Node, names: list[bytes], tier: Tier) -> int:
    """How many of these blocks have bytes in a tier."""
    return len(await node.engine.block_digests(names, tier))


async def test_uncounted_blocks_go_first_and_the_oldest_of_them(start: Starter) -> None:
    async with start("a", **SMALL) as (node,):
        counted, plain = prompt(1, PROMPT), prompt(2, PROMPT)
        await prefill_only(node, counted)
        await node.engine.set_needs(dict.fromkeys(names_of(counted), need(1, elsewhere=False)))
        await prefill_only(node, plain)
        await fill(node, 100)
        assert await holds(node, names_of(counted), Tier.L2) == 8
        assert await holds(node, names_of(plain), Tier.L2) == 0
        assert (await prefill_only(node, counted)).cached.total == 8 * BLOCK
        assert (await prefill_only(node, plain)).cached == CachedTokens()


async def test_a_count_of_zero_gives_a_block_up(start: Starter) -> None:
    async with start("a", **SMALL) as (node,):
        tokens = prompt(1, PROMPT)
        await prefill_only(node, tokens)
        await node.engine.set_needs(dict.fromkeys(names_of(tokens), need(2, elsewhere=False)))
        await fill(node, 100)
        assert await holds(node, names_of(tokens), Tier.L2) == 8
        await node.engine.set_needs(dict.fromkeys(names_of(tokens), 0))
        assert await node.engine.needs() == {}
        await fill(node, 200)
        assert await holds(node, names_of(tokens), Tier.L2) == 0


async def test_a_parent_stays_with_its_counted_child(start: Starter) -> None:
    async with start("a", **SMALL) as (node,):
        tokens = prompt(1, PROMPT)
        await prefill_only(node, tokens)
        *_, last = names_of(tokens)
        await node.engine.set_needs({last: need(1, elsewhere=False)})
        await fill(node, 100)
        assert await holds(node, names_of(tokens), Tier.L2) == 8


async def test_counts_bias_and_never_pin(start: Starter) -> None:
    """A pool full of blocks needed alike still evicts, the least recently used first."""
    async with start("a", **SMALL) as (node,):
        for index in range(FILLING):
            tokens = prompt(index, PROMPT)
            await prefill_only(node, tokens)
            await node.engine.set_needs(dict.fromkeys(names_of(tokens), need(1, elsewhere=False)))
        assert await holds(node, names_of(prompt(0, PROMPT)), Tier.L2) == 0
        assert await holds(node, names_of(prompt(FILLING - 1, PROMPT)), Tier.L2) == 8


async def test_what_another_node_has_goes_before_what_the_pool_would_lose(start: Starter) -> None:
    """However many count it, and though it is younger and its last block of eight, an output, is on this node alone.
    Where two of eight are, it goes as what the pool would lose: the longest unused first."""
    async with start("a", **SMALL) as (node,):
        last, mixed, spare = (prompt(800 + index, 8 * BLOCK) for index in range(3))
        needs: dict[bytes, int] = {}
        for tokens, alone in ((last, 8), (mixed, 2), (spare, 1)):
            await prefill_only(node, tokens)
            names = names_of(tokens)
            await node.until_holds(Tier.L2, names)
            needs |= dict.fromkeys(names[:-alone], need(3, elsewhere=True))
            needs |= dict.fromkeys(names[-alone:], need(1, elsewhere=False))
        await node.engine.set_needs(needs)
        seeds = count(820)
        for going, staying in ((spare, [last, mixed]), (last, [mixed])):
            kept = {name for tokens in staying for name in names_of(tokens)}
            while node.held[Tier.L2].intersection(names_of(going)):
                assert node.held[Tier.L2].issuperset(kept)
                filler = prompt(next(seeds), 8 * BLOCK)
                await prefill_only(node, filler)
                await node.engine.set_needs(dict.fromkeys(names_of(filler), need(1, elsewhere=False)))


async def test_needs_are_what_was_set(nodes: list[Node]) -> None:
    node = nodes[0]
    tokens = prompt(700, 4 * BLOCK)
    await prefill_only(node, tokens)
    names = names_of(tokens)
    three, two, one = need(3, elsewhere=True), need(2, elsewhere=False), need(1, elsewhere=False)
    await node.engine.set_needs({names[0]: three, names[1]: one})
    await node.engine.set_needs({names[1]: two, names[2]: one})
    needs = await node.engine.needs()
    assert {name: needs[name] for name in names if name in needs} == {names[0]: three, names[1]: two, names[2]: one}
    await node.engine.set_needs(dict.fromkeys(names, 0))
    assert not set(names) & set(await node.engine.needs())


async def test_events_follow_every_eviction(start: Starter) -> None:
    """`Node.listen` asserts that nothing is stored twice or removed twice; here, that nothing was left out."""
    async with start("a", "b", **SMALL) as pair:
        a, b = pair
        for index in range(FILLING):
            await serve(*((a, b) if index % 2 else (b, a)), prompt(300 + index, 400), 90)
        for node in pair:
            await node.until_idle()
            check_engine(node)
            gone = set(node.parents)
            for tier in Tier:
                digests = await node.engine.block_digests(sorted(node.parents), tier)
                await node.until(partial(_is_held, node, tier, set(digests)))
                gone -= set(digests)
            assert gone, "more went through than fits"


def _is_held(node: Node, tier: Tier, names: set[bytes]) -> bool:
    return node.held[tier] == names


async def test_what_a_leg_uses_is_not_the_first_to_leave_l2(start: Starter) -> None:
    """Nobody has counted it yet, and all else is counted: what was used longest ago goes."""
    async with start("a", **SMALL) as (node,):
        counted = [prompt(900 + index, PROMPT) for index in range(9)]
        for tokens in counted:
            await node.engine.set_needs(dict.fromkeys(names_of(tokens), need(1, elsewhere=False)))
        for tokens in counted[:6]:
            await prefill_only(node, tokens)
        used = prompt(950, 4 * BLOCK)
        job, _ = jobs(node, used, greedy(8), keep_s=1000.0)
        leg = asyncio.create_task(collect(node.engine.prefill(job)))
        async for status in node.engine.status_changes():
            if status.holding:
                break
        for tokens in counted[6:]:
            await prefill_only(node, tokens)
            await node.until_holds(Tier.L2, names_of(tokens))
        assert await holds(node, names_of(used), Tier.L2) == 4
        assert await holds(node, names_of(counted[0]), Tier.L2) < 8
        assert await node.engine.abort(job.leg_id)
        with pytest.raises(Aborted):
            await leg
        await node.until_idle()


@pytest.mark.timeout(600)
async def test_pressure_from_both_sides_changes_no_token(start: Starter) -> None:
    """Two nodes that hand requests to each other, with room for a few: all end, each with its tokens."""
    prompts = [prompt(500 + index, 100 + 60 * (index % 9)) for index in range(24)]
    async with start("a", "b", **SMALL) as pair:
        a, b = pair
        alone = [(await serve(a, a, tokens, 40)).ids for tokens in prompts]
        for node in pair:
            await node.until_idle()
            await node.engine.clear()
        ways = [(a, b), (b, a), (a, a), (b, b)]
        async with asyncio.timeout(400):
            served = await asyncio.gather(
                *(
                    serve(*ways[index % 4], tokens, 40, keep_s=300.0, reserve_deadline_s=300.0)
                    for index, tokens in enumerate(prompts)
                )
            )
        assert [each.ids for each in served] == alone
        for node in pair:
            await node.until_idle()
            check_engine(node)


async def test_freeing_device_memory_keeps_host_memory(nodes: list[Node]) -> None:
    node = nodes[0]
    tokens = prompt(710, 4 * BLOCK)
    names = names_of(tokens)
    served = asyncio.create_task(serve(node, node, prompt(711, 100), 60))
    await prefill_only(node, tokens)
    await node.until_holds(Tier.L2, names)
    assert await node.engine.free_l1() >= len(names)
    await node.until(lambda: not node.held[Tier.L1].intersection(names))
    assert await holds(node, names, Tier.L1) == 0
    assert await holds(node, names, Tier.L2) == len(names)
    assert len((await served).ids) == 60, "a running request keeps what it uses"
