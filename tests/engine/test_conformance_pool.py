"""The engine port as a part of the pool: fetches beside the queue, what they report, and emptying a node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from engine.sglang.driving import Node, black_holes, collect, greedy, jobs, prefill_only, prompt, serve
from engine.test_conformance import BLOCK, names_of

from evolving_node_agent.engines.port import Aborted, CachedTokens, EngineStatus, Prefilled, Taken, Tier

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]


async def until_status(node: Node, condition: Callable[[EngineStatus], bool]) -> EngineStatus:
    """Wait for a status that fulfils the condition."""
    async for status in node.engine.status_changes():
        if condition(status):
            return status
    raise AssertionError("the engine is gone")


async def test_a_fetch_is_told_by_its_leg_and_by_the_status(nodes: list[Node]) -> None:
    a, b = nodes
    tokens = prompt(800, 6 * BLOCK + 1)
    there = await prefill_only(a, tokens)
    await a.until_holds(Tier.L2, names_of(tokens))
    before = b.engine.status().fetched_tokens
    job, _ = jobs(b, tokens, greedy(1), holders=(a.holder(0, 6),))
    taken, prefilled = [event async for event in b.engine.prefill(job)]
    assert isinstance(taken, Taken)
    assert isinstance(prefilled, Prefilled)
    assert prefilled.cached == CachedTokens(peer=6 * BLOCK)
    assert prefilled.first_token == there.first_token
    assert 0 < taken.fetch_s <= taken.queue_s
    assert 0 <= taken.hidden_s <= taken.fetch_s
    status = await until_status(b, lambda status: status.fetched_tokens > before and not status.fetching_blocks)
    assert status.fetched_tokens - before == 6 * BLOCK
    assert status.fetch_busy_s > 0
    assert status.fetch_backlog_tokens == 0


async def test_a_leg_without_holders_fetched_nothing(nodes: list[Node]) -> None:
    job, _ = jobs(nodes[0], prompt(810, 2 * BLOCK), greedy(1))
    taken, _ = [event async for event in nodes[0].engine.prefill(job)]
    assert isinstance(taken, Taken)
    assert (taken.fetch_s, taken.hidden_s) == (0.0, 0.0)


async def test_what_peers_are_still_to_bring_is_not_here_and_a_backlog(nodes: list[Node]) -> None:
    """Of ten blocks this node has two, and peers that say nothing were to bring the next five."""
    node = nodes[0]
    tokens = prompt(815, 10 * BLOCK)
    await prefill_only(node, tokens[: 2 * BLOCK + 1])
    async with black_holes(2, 5) as holders:
        job, _ = jobs(node, tokens, greedy(1), holders=holders, fetch_deadline_s=1000.0)
        leg = asyncio.create_task(collect(node.engine.prefill(job)))
        status = await until_status(node, lambda status: status.fetch_backlog_tokens > 0)
        assert status.queued == {job.leg_id: 8 * BLOCK}
        assert status.fetch_backlog_tokens == 5 * BLOCK
        assert await node.engine.abort(job.leg_id)
        with pytest.raises(Aborted):
            await leg
        await until_status(node, lambda status: not status.queued and status.fetch_backlog_tokens == 0)


async def test_several_fetches_at_once(nodes: list[Node]) -> None:
    """Prompts that share their first blocks, so that some of the fetches want the same."""
    a, b = nodes
    shared = prompt(820, 3 * BLOCK)
    prompts = [shared + prompt(821 + index, (1 + index) * BLOCK + 1) for index in range(6)]
    computed = [await prefill_only(a, tokens) for tokens in prompts]
    for tokens in prompts:
        await a.until_holds(Tier.L2, names_of(tokens))
    fetched = await asyncio.gather(
        *(prefill_only(b, tokens, holders=(a.holder(0, 4 + index),)) for index, tokens in enumerate(prompts))
    )
    assert [each.cached.total for each in fetched] == [(4 + index) * BLOCK for index in range(6)]
    assert [each.first_token for each in fetched] == [each.first_token for each in computed]
    status = await until_status(b, lambda status: not status.queued)
    assert (status.fetching_blocks, status.fetch_backlog_tokens) == (0, 0)
    for tokens in prompts:
        names = names_of(tokens)
        assert await b.engine.block_digests(names, Tier.L2) == await a.engine.block_digests(names, Tier.L2)


async def test_zero_blocks_are_those_without_a_count(nodes: list[Node]) -> None:
    node = nodes[0]
    tokens = prompt(830, 5 * BLOCK)
    await prefill_only(node, tokens)
    await node.until_holds(Tier.L2, names_of(tokens))
    names = names_of(tokens)
    await until_status(node, lambda status: status.l2_zero_tokens == BLOCK * len(node.held[Tier.L2]))
    await node.engine.set_needs({names[0]: 2, names[1]: 1, b"nobody has this": 7})
    await until_status(node, lambda status: status.l2_zero_tokens == BLOCK * (len(node.held[Tier.L2]) - 2))
    await node.engine.set_needs({names[0]: 1, names[1]: 0, b"nobody has this": 0})
    await until_status(node, lambda status: status.l2_zero_tokens == BLOCK * (len(node.held[Tier.L2]) - 1))
    await node.engine.set_needs({names[0]: 0})
    await until_status(node, lambda status: status.l2_zero_tokens == BLOCK * len(node.held[Tier.L2]))


async def test_clearing_drops_both_tiers_and_what_is_in_use_later(nodes: list[Node]) -> None:
    node = nodes[0]
    tokens, used = prompt(840, 5 * BLOCK), prompt(841, 3 * BLOCK)
    names = names_of(tokens)
    await prefill_only(node, tokens)
    await node.until_holds(Tier.L2, names)
    served = asyncio.create_task(serve(node, node, used, 400))
    await node.until_holds(Tier.L2, names_of(used))
    await node.until_decoding(1)
    assert await node.engine.clear() >= len(names)
    for tier in Tier:
        assert not await node.engine.block_digests(names, tier)
    assert not served.done()
    assert await node.engine.block_digests(names_of(used), Tier.L1), "a running request keeps what it uses"
    assert len((await served).ids) == 400
    for tier in Tier:
        await node.until(lambda tier=tier: not node.held[tier].intersection(names + names_of(used)))  # type: ignore[misc]
        assert not await node.engine.block_digests(names + names_of(used), tier)
    assert (await prefill_only(node, tokens)).cached == CachedTokens()
