"""The engine port, served: right tokens and right KV, whichever way a request travels. Runs on every engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest
from engine.conftest import over_each_transport
from engine.sglang.driving import ROOT, Node, greedy, jobs, prefill_only, prompt, serve

from evolving.core.blocks import chain_names, split_names
from evolving_node_agent.engines.port import (
    CachedTokens,
    FinishReason,
    Prefilled,
    Sampling,
    Tier,
)

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]
BLOCK = 64


def names_of(tokens: list[int], root: bytes = ROOT) -> list[bytes]:
    """Names of the full blocks of a context, root-most first."""
    data = b"".join(token.to_bytes(4, "little") for token in tokens)
    return split_names(chain_names(root, data, BLOCK))


@over_each_transport
@pytest.mark.parametrize("length", [1, 63, 64, 65, 500])
async def test_every_way_gives_the_same_tokens(nodes: list[Node], length: int) -> None:
    a, b = nodes
    tokens = prompt(100 + length, length)
    alone = await serve(a, a, tokens, 20)
    assert len(alone.ids) == 20
    assert alone.finished.reason is FinishReason.LENGTH
    assert alone.finished.iterations == 19, "the first token comes from the prefill leg"
    for source, target in ((a, b), (b, a), (b, b)):
        assert (await serve(source, target, tokens, 20)).ids == alone.ids


async def test_both_legs_on_one_node_move_nothing(nodes: list[Node]) -> None:
    served = await serve(nodes[0], nodes[0], prompt(200, 150), 5)
    assert served.sent.bytes == 0
    assert served.started.cached_tokens == 150
    assert served.started.first_token == served.ids[0]


@over_each_transport
async def test_a_moved_prompt_moves_bytes_once(nodes: list[Node]) -> None:
    a, b = nodes
    tokens = prompt(210, 4 * BLOCK)
    first = await serve(a, b, tokens, 5)
    assert first.sent.bytes > 0
    assert first.started.cached_tokens == 0
    assert first.started.first_token == first.ids[0]
    again = await serve(a, b, tokens, 5)
    assert again.started.cached_tokens >= 3 * BLOCK, "what is there already is not sent again"
    assert again.sent.bytes < first.sent.bytes
    assert again.ids == first.ids


@over_each_transport
async def test_many_at_once_in_all_directions_equal_one_at_a_time(nodes: list[Node]) -> None:
    a, b = nodes
    ways = [(a, b), (b, a), (a, a), (b, b)]
    prompts = [prompt(300 + index, 40 + 17 * index) for index in range(12)]
    at_once = await asyncio.gather(*(serve(*ways[index % 4], tokens, 24) for index, tokens in enumerate(prompts)))
    for index, (served, tokens) in enumerate(zip(at_once, prompts, strict=True)):
        assert (await serve(*ways[(index + 1) % 4], tokens, 24)).ids == served.ids


@over_each_transport
async def test_reuse_by_source(nodes: list[Node]) -> None:
    a, b = nodes
    tokens = prompt(400, 5 * BLOCK)
    reusable = 4 * BLOCK  # the last token is always computed, and with it its block
    computed = await prefill_only(a, tokens)
    assert computed.cached == CachedTokens()
    assert (await prefill_only(a, tokens)).cached == CachedTokens(l1=reusable)
    await a.until_holds(Tier.L2, names_of(tokens))
    await a.engine.free_l1()
    from_host = await prefill_only(a, tokens)
    assert from_host.cached == CachedTokens(l2=reusable)
    fetched = await prefill_only(b, tokens, holders=(a.holder(0, 5),))
    assert fetched.cached == CachedTokens(peer=reusable)
    assert (await prefill_only(b, tokens)).cached == CachedTokens(l1=reusable)
    first_tokens = {each.first_token for each in (computed, from_host, fetched)}
    assert len(first_tokens) == 1


@over_each_transport
async def test_a_fetch_brings_only_what_is_missing(nodes: list[Node]) -> None:
    a, b = nodes
    tokens = prompt(410, 6 * BLOCK + 5)
    await prefill_only(a, tokens)
    await prefill_only(b, tokens[: 3 * BLOCK])
    await a.until_holds(Tier.L2, names_of(tokens))
    cached = (await prefill_only(b, tokens, holders=(a.holder(0, 6),))).cached
    assert cached.total == 6 * BLOCK
    assert cached.peer == 3 * BLOCK


@over_each_transport
async def test_holders_that_are_gone_cost_only_their_blocks(nodes: list[Node]) -> None:
    """An unreachable peer, a former life of one, a block nobody has: all are misses, and misses are computed."""
    a, b = nodes
    tokens = prompt(420, 3 * BLOCK + 1)
    here = a.holder(0, 3)
    nobody = replace(here, pool_address="127.0.0.1:1")
    former = replace(here, incarnation="a former life")
    for index, holder in enumerate((nobody, former)):
        root = bytes([index]) * 32
        there = await prefill_only(a, tokens, root=root)
        await a.until_holds(Tier.L2, names_of(tokens, root))
        missed = await prefill_only(b, tokens, holders=(holder,), root=root)
        assert missed.cached == CachedTokens()
        assert missed.first_token == there.first_token
    never = prompt(421, 3 * BLOCK + 1)
    assert (await prefill_only(b, never, holders=(here,))).cached == CachedTokens()


@over_each_transport
async def test_the_next_turn_reuses_prompt_and_output(nodes: list[Node]) -> None:
    a, b = nodes
    tokens = prompt(430, 200)
    first = await serve(a, b, tokens, 70)
    longer = tokens + first.ids + prompt(431, 10)
    # The last of 270 tokens has no KV yet: four full blocks.
    assert (await prefill_only(b, longer)).cached == CachedTokens(l1=4 * BLOCK)
    await b.until_holds(Tier.L2, names_of(longer[:269]))
    cached = (await prefill_only(a, longer, holders=(b.holder(0, 4),))).cached
    assert cached.total == 4 * BLOCK
    assert cached.peer == BLOCK, "the block that decode wrote comes from the decode node's L2"


async def test_another_root_shares_nothing(nodes: list[Node]) -> None:
    tokens = prompt(440, 3 * BLOCK)
    await prefill_only(nodes[0], tokens)
    assert (await prefill_only(nodes[0], tokens, root=bytes(reversed(ROOT)))).cached == CachedTokens()


@pytest.mark.parametrize("produced", [1, 17, 39])
async def test_a_resume_continues_as_if_never_cut(nodes: list[Node], produced: int) -> None:
    a, b = nodes
    tokens = prompt(500, 120)
    whole = (await serve(a, b, tokens, 40)).ids
    # `serve` checks that the first index after the prefill leg's token is produced + 1.
    if produced == 39:
        job, _ = jobs(b, tokens + whole[:39], greedy(40), 39)
        events = [event async for event in b.engine.prefill(job)]
        assert isinstance(events[-1], Prefilled)
        assert (events[-1].first_token, events[-1].finish) == (whole[39], FinishReason.LENGTH)
        return
    resumed = await serve(b, a, tokens + whole[:produced], greedy(40), generated=produced)
    assert whole[:produced] + resumed.ids == whole
    assert resumed.finished.reason is FinishReason.LENGTH, "max_tokens counts output of earlier attempts"


async def test_penalties_see_output_of_earlier_attempts(nodes: list[Node]) -> None:
    """A resume that forgot what was said before it would draw otherwise from where a penalty makes the difference."""
    a, b = nodes
    sampling = greedy(48, frequency_penalty=2.0)
    for seed in range(510, 540):
        tokens = prompt(seed, 100)
        free, whole = await serve(a, b, tokens, 48), await serve(a, b, tokens, sampling)
        differs = next((at for at in range(48) if free.ids[at] != whole.ids[at]), 0)
        if differs > 1:
            resumed = await serve(b, a, tokens + whole.ids[:differs], sampling, generated=differs)
            assert whole.ids[:differs] + resumed.ids == whole.ids
            return
    pytest.fail("no prompt repeats itself")


async def test_stop_tokens_end_either_leg(nodes: list[Node]) -> None:
    a, b = nodes
    tokens = prompt(520, 90)
    output = (await serve(a, b, tokens, 30)).ids
    stop = next(token for token in output[5:] if token not in output[:5])
    served = await serve(a, b, tokens, greedy(30, stop_token_ids=(stop,)))
    assert served.ids == output[: output.index(stop) + 1]
    assert served.finished.reason is FinishReason.STOP
    job, _ = jobs(a, tokens, greedy(30, stop_token_ids=(output[0],)))
    *_, last = [event async for event in a.engine.prefill(job)]
    assert isinstance(last, Prefilled)
    assert (last.first_token, last.finish) == (output[0], FinishReason.STOP)


async def test_a_seed_fixes_what_is_drawn(nodes: list[Node]) -> None:
    a, b = nodes
    tokens = prompt(530, 100)
    warm = Sampling(max_tokens=16, temperature=1.5, seed=11, ignore_eos=True)
    assert (await serve(a, b, tokens, warm)).ids == (await serve(b, a, tokens, warm)).ids


async def test_what_events_say_is_what_digests_show(nodes: list[Node]) -> None:
    """`Node.listen` asserts that nothing is stored twice, or removed that wasn't there."""
    a, b = nodes
    tokens = prompt(600, 4 * BLOCK + 7)
    served = await serve(a, b, tokens, 2 * BLOCK)
    names = names_of(tokens + served.ids[:-1])
    await b.until_holds(Tier.L1, names)
    await b.until_holds(Tier.L2, names)
    for node in nodes:
        await node.until_idle()
        for tier in Tier:
            held = sorted(node.held[tier])
            assert set(await node.engine.block_digests(held, tier)) == set(held)
    assert [b.parents[name] for name in names] == [None, *names[:-1]]
    assert await a.engine.block_digests([bytes(16)], Tier.L1) == {}


@over_each_transport
async def test_copies_are_equal_bytes(nodes: list[Node]) -> None:
    """Computed, transferred, fetched from a peer, written through: one digest a block."""
    a, b = nodes
    tokens = prompt(610, 4 * BLOCK + 7)
    names = names_of(tokens)
    await serve(a, b, tokens, 4)
    copies = [(node, tier) for node in nodes for tier in Tier]
    for node, tier in copies:
        await node.until_holds(tier, names)
    digests = [await node.engine.block_digests(names, tier) for node, tier in copies]
    assert all(len(each) == len(names) for each in digests)
    assert all(one == other for one, other in pairwise(digests))
    assert len(set(digests[0].values())) == len(names), "different blocks have different KV"
    fetched = prompt(611, 3 * BLOCK + 1)
    await prefill_only(a, fetched)
    await a.until_holds(Tier.L2, names_of(fetched))
    await prefill_only(b, fetched, holders=(a.holder(0, 3),))
    assert await b.engine.block_digests(names_of(fetched), Tier.L1) == await a.engine.block_digests(
        names_of(fetched), Tier.L1
    )


async def test_status_comes_without_a_change(nodes: list[Node]) -> None:
    seen = 0
    async with asyncio.timeout(30):
        async for status in nodes[0].engine.status_changes():
            assert status.l1_used_tokens > 0
            seen += 1
            if seen == 3:
                return
