"""Fetches beside the queue: who waits for whom, what is kept of a broken one, and what of it cost time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evolving.core.config import FetchConfig
from evolving_node_agent.engines.port import (
    Aborted,
    CachedTokens,
    EngineStatus,
    Holder,
    Prefilled,
    PrefillEvent,
    Taken,
    Tier,
)
from evolving_node_agent.engines.sglang.host.peers import Locate, Located, Peers

from .conftest import running
from .driving import Node, black_holes, collect, greedy, jobs, names, prefill_only, prompt
from .factory import SECRET
from .reference import clear_prompts

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.sglang, pytest.mark.timeout(300)]
BLOCK = 64
NEVER_S = 1e6


async def until_status(node: Node, condition: Callable[[EngineStatus], bool]) -> EngineStatus:
    """Wait for a status that fulfils the condition."""
    async for status in node.engine.status_changes():
        if condition(status):
            return status
    raise AssertionError("the engine is gone")


async def held_by(node: Node, tokens: list[int]) -> list[int]:
    """The prompt, once its full blocks are in the node's L2."""
    await prefill_only(node, tokens)
    await node.until_holds(Tier.L2, names(tokens))
    return tokens


async def events_of(node: Node, tokens: list[int], **job: Any) -> tuple[Taken, Prefilled]:
    """A request of one token."""
    prefill_job, _ = jobs(node, tokens, greedy(1), **job)
    taken, prefilled = await collect(node.engine.prefill(prefill_job))
    assert isinstance(taken, Taken)
    assert isinstance(prefilled, Prefilled)
    return taken, prefilled


async def test_a_fetch_without_turns_holds_up_nobody(pair: list[Node], tmp_path: Path) -> None:
    """Bandwidth for one chunk: the first leg gets two blocks, and then nobody gets any more."""
    source = pair[0]
    tokens = await held_by(source, prompt(50_000, 6 * BLOCK + 9))
    other = await held_by(source, prompt(50_001, 4 * BLOCK + 9))
    async with running(tmp_path, {"s": {"fetch": FetchConfig(chunk_blocks=2, bytes_per_s=1.0)}}) as (node,):
        job, _ = jobs(node, tokens, greedy(1), holders=(source.holder(0, 6),), fetch_deadline_s=NEVER_S)
        seen: list[PrefillEvent] = []

        async def slow() -> None:
            seen.extend([event async for event in node.engine.prefill(job)])

        waiting = asyncio.create_task(slow())
        status = await until_status(node, lambda status: status.fetched_tokens == 2 * BLOCK)
        assert status.fetch_backlog_tokens == 4 * BLOCK
        assert status.fetching_blocks == 0
        await until_status(node, lambda status: status.queued == {job.leg_id: len(tokens) - 2 * BLOCK})
        # Others behind it: one with nothing to fetch, and one that can't fetch and whose deadline passes.
        assert (await prefill_only(node, prompt(50_002, 100))).cached == CachedTokens()
        taken, prefilled = await events_of(node, other, holders=(source.holder(0, 4),), fetch_deadline_s=0.2)
        assert (taken.fetch_s, taken.hidden_s) == (0.0, 0.0)
        assert taken.queue_s >= 0.2
        assert prefilled.cached == CachedTokens()
        assert not seen, "a leg whose fetch is not over was taken"
        assert await node.engine.abort(job.leg_id)
        with pytest.raises(Aborted):
            await waiting
        # What had come stays, and nothing else does.
        assert (await prefill_only(node, tokens)).cached == CachedTokens(l2=2 * BLOCK)
        await node.until_only_cache()
        status = node.engine.status()
        assert (status.fetching_blocks, status.fetch_backlog_tokens, status.fetched_tokens) == (0, 0, 2 * BLOCK)


async def test_a_finished_fetch_passes_a_slower_one_ahead(pair: list[Node]) -> None:
    source, node = pair
    tokens = await held_by(source, prompt(51_000, 3 * BLOCK + 5))
    async with black_holes(0, 3) as holes:
        job, _ = jobs(
            node, prompt(51_001, 3 * BLOCK + 5), greedy(1), holders=holes, fetch_deadline_s=NEVER_S, priority=5
        )
        waiting = asyncio.create_task(collect(node.engine.prefill(job)))
        await until_status(node, lambda status: job.leg_id in status.queued)
        taken, prefilled = await events_of(node, tokens, holders=(source.holder(0, 3),), fetch_deadline_s=NEVER_S)
        assert prefilled.cached == CachedTokens(peer=3 * BLOCK)
        assert taken.fetch_s > 0
        assert taken.hidden_s == 0, "the engine had nothing else to do"
        assert job.leg_id in node.engine.status().queued
        assert await node.engine.abort(job.leg_id)
        with pytest.raises(Aborted):
            await waiting


async def test_what_came_before_the_deadline_is_used(pair: list[Node]) -> None:
    source, node = pair
    tokens, output = next(clear_prompts(5 * BLOCK + 7, 1, 52_000))
    await held_by(source, tokens)
    async with black_holes(2, 3) as holes:
        taken, prefilled = await events_of(node, tokens, holders=(source.holder(0, 2), *holes), fetch_deadline_s=0.5)
    assert prefilled.cached == CachedTokens(peer=2 * BLOCK)
    assert prefilled.first_token == output[0]
    assert taken.queue_s >= 0.5
    await until_status(node, lambda status: status.fetching_blocks == 0 and status.fetch_backlog_tokens == 0)


async def test_a_holder_that_has_less_is_followed_by_the_next(pair: list[Node]) -> None:
    source, node = pair
    tokens = await held_by(source, prompt(53_000, 5 * BLOCK + 7))
    nobody = Holder("x", "127.0.0.1:9", "nobody", 0, 5)
    _, prefilled = await events_of(node, tokens, holders=(nobody, source.holder(0, 1), source.holder(0, 5)))
    assert prefilled.cached == CachedTokens(peer=5 * BLOCK)


async def pass_by(node: Node, seed: int) -> None:
    """Compute more than the node's L2 holds, all of it needed by branches."""
    for each in range(64):
        filler = prompt(seed + each, BLOCK + 1)
        await prefill_only(node, filler, priority=1)
        await node.engine.set_needs({names(filler)[0]: 1})
    await node.until(lambda: names(prompt(seed, BLOCK))[0] not in node.held[Tier.L2])


async def test_a_fetch_under_the_wait_costs_nothing_and_stays(pair: list[Node], small: Node) -> None:
    source = pair[0]
    longest = small.info.max_prompt_tokens
    tokens, output = next(clear_prompts(longest, 1, 54_000))
    await held_by(source, tokens)
    # The computed prompt of a request whose decode leg has not come leaves room for short ones only.
    first, decode = jobs(small, prompt(54_500, longest - 3 * BLOCK), greedy(2), keep_s=NEVER_S)
    holding = asyncio.create_task(collect(small.engine.prefill(first)))
    await until_status(small, lambda status: status.holding == 1)
    fetching = asyncio.create_task(events_of(small, tokens, holders=(source.holder(0, longest // BLOCK),)))
    usable = (longest - 1) // BLOCK
    await until_status(small, lambda status: status.fetched_tokens == usable * BLOCK)
    await pass_by(small, 54_600)
    assert not fetching.done()
    await collect(small.engine.decode(decode))
    await holding
    taken, prefilled = await fetching
    assert prefilled.cached == CachedTokens(peer=usable * BLOCK)
    assert prefilled.first_token == output[0]
    assert taken.hidden_s == taken.fetch_s > 0
    await small.until_only_cache()


async def test_a_fetch_waits_until_what_it_reads_can_be_kept(pair: list[Node], small: Node) -> None:
    """What is kept for waiting legs is half of L2: two of these prompts, and not a third."""
    source = pair[0]
    longest = small.info.max_prompt_tokens
    usable = (longest - 1) // BLOCK
    assert 2 * usable * BLOCK <= small.info.l2_tokens // 2 < 3 * usable * BLOCK
    *prompts, ended = [await held_by(source, prompt(57_000 + each, longest)) for each in range(4)]
    first, decode = jobs(small, prompt(57_500, longest - 3 * BLOCK), greedy(2), keep_s=NEVER_S)
    holding = asyncio.create_task(collect(small.engine.prefill(first)))
    await until_status(small, lambda status: status.holding == 1)
    before = small.engine.status().fetched_tokens
    whole: dict[str, Any] = {"holders": (source.holder(0, usable),), "fetch_deadline_s": NEVER_S}

    def two_are_here(status: EngineStatus, waiting: int) -> bool:
        came = (status.fetched_tokens - before, status.fetch_backlog_tokens, status.fetching_blocks)
        return came == (2 * usable * BLOCK, waiting * usable * BLOCK, 0)

    waiting = [asyncio.create_task(events_of(small, tokens, **whole)) for tokens in prompts]
    await until_status(small, lambda status: two_are_here(status, 1))
    job, _ = jobs(small, ended, greedy(1), **whole)
    aborted = asyncio.create_task(collect(small.engine.prefill(job)))
    await until_status(small, lambda status: two_are_here(status, 2))
    assert await small.engine.abort(job.leg_id)
    with pytest.raises(Aborted):
        await aborted
    await pass_by(small, 57_600)
    assert two_are_here(small.engine.status(), 1)
    await collect(small.engine.decode(decode))
    await holding
    for leg in waiting:
        _, prefilled = await leg
        assert prefilled.cached == CachedTokens(peer=usable * BLOCK)
    await small.until_only_cache()
    assert small.engine.status().fetched_tokens - before == 3 * usable * BLOCK, "read twice, or not at all"


async def test_own_copies_stay_for_a_leg_that_waits(small: Node) -> None:
    longest = small.info.max_prompt_tokens
    tokens = await held_by(small, prompt(56_000, longest))
    await small.engine.free_l1()
    first, decode = jobs(small, prompt(56_500, longest - 3 * BLOCK), greedy(2), keep_s=NEVER_S)
    holding = asyncio.create_task(collect(small.engine.prefill(first)))
    await until_status(small, lambda status: status.holding == 1)
    waiting = asyncio.create_task(events_of(small, tokens))
    await until_status(small, lambda status: len(status.queued) == 1)
    await pass_by(small, 56_600)
    assert not waiting.done()
    await collect(small.engine.decode(decode))
    await holding
    _, prefilled = await waiting
    assert prefilled.cached == CachedTokens(l2=(longest - 1) // BLOCK * BLOCK)
    await small.until_only_cache()


def altered(node: Node, address: int) -> None:
    """Flip the bits of a byte in the memory of the node's engine."""
    with Path(f"/proc/{node.info.pid}/mem").open("r+b", buffering=0) as memory:
        memory.seek(address)
        byte = memory.read(1)
        memory.seek(address)
        memory.write(bytes([byte[0] ^ 0xFF]))


async def alter_block(node: Node, name: bytes, half: int, offset: int) -> None:
    """Change one byte of a block in the node's L2: `half` 0 is K, 1 is V."""
    peers = Peers(node.info.kv_format, SECRET)
    peer = await peers.at(node.info.pool_address)
    assert peer.welcome is not None
    ((page, _, _),) = (await peer.ask(Locate(name), Located)).places
    layout = peer.welcome.layout
    altered(node, layout.l2_blocks[half] + page * layout.l2_page_bytes + offset % layout.l2_page_bytes)
    await peers.close()


@pytest.mark.parametrize(("half", "offset"), [(0, 0), (0, -1), (1, 0), (1, 12_345), (1, -1)])
async def test_a_page_altered_at_the_peer_is_computed(pair: list[Node], half: int, offset: int) -> None:
    source, node = pair
    tokens, output = next(clear_prompts(5 * BLOCK + 7, 1, 55_000 + 100 * half + offset % 97))
    await held_by(source, tokens)
    await source.engine.free_l1()
    right = await source.engine.block_digests(names(tokens), Tier.L2)
    await alter_block(source, names(tokens)[2], half, offset)
    wrong = await source.engine.block_digests(names(tokens), Tier.L2)
    assert [name for name in right if right[name] != wrong[name]] == [names(tokens)[2]]
    prefilled = await prefill_only(node, tokens, holders=(source.holder(0, 5),))
    assert prefilled.cached == CachedTokens(peer=2 * BLOCK)
    assert prefilled.first_token == output[0]
    await node.until_holds(Tier.L2, names(tokens))
    held = await node.engine.block_digests(names(tokens), Tier.L2)
    assert all(held[name] == right[name] for name in names(tokens)[:2])
    assert held[names(tokens)[2]] != wrong[names(tokens)[2]]
    await source.engine.clear()
