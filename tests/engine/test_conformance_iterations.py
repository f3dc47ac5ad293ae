"""What an engine says its iterations worked on is what it served. Runs on every engine.

Query-key pairs and contexts are sums over requests, so they do not depend on how batches and chunks were formed.
"""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest
from engine.sglang.driving import BLOCK, Node, Served, greedy, jobs, names, prefill_only, prompt, serve

from evolving.core.iterations import COLD_ITERATIONS, IterationWindow
from evolving.core.work import query_key_pairs
from evolving.runtime.tasks import end_tasks
from evolving_node_agent.engines.port import Prefilled, Tier

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]


async def totals(node: Node) -> IterationWindow:
    """All that ran, once nothing runs any more.

    The newest status may be older than the last event of a leg; what is published after that event is not.
    """
    newest = True
    async for status in node.engine.status_changes():
        busy = status.queued or status.prefilling or status.holding or status.decoding or status.reserved
        if not newest and not busy:
            return status.ran
        newest = False
    raise AssertionError("the engine ended")


async def warm(node: Node) -> None:
    """Leave the cold iterations behind."""
    for seed in range(COLD_ITERATIONS):
        await serve(node, node, prompt(9000 + seed, 8), COLD_ITERATIONS // 2)


def decoded_context(length: int, served: Served) -> int:
    """Σcontext: the i-th iteration of a request feeds its i-th token, at the end of a context of `length` + i."""
    return sum(length + each for each in range(1, served.finished.iterations + 1))


async def test_prompts_one_by_one(nodes: list[Node]) -> None:
    node = nodes[0]
    await warm(node)
    before = await totals(node)
    chunk = node.info.chunk_tokens
    lengths = [1, 65, chunk, chunk + 1, 3 * chunk - 7]
    began_s = time.monotonic()
    for length in lengths:
        await prefill_only(node, prompt(7000 + length, length))
    elapsed_s = time.monotonic() - began_s
    window = (await totals(node)).since(before)
    assert window.prefill.iterations == sum(-(-length // chunk) for length in lengths)
    assert window.prefill.prefill.uncached_tokens == sum(lengths)
    assert window.prefill.prefill.query_key_pairs == sum(query_key_pairs(length, 0) for length in lengths)
    # A later chunk reads what the earlier ones computed, and reuses nothing.
    assert window.prefill.prefill.cached_tokens == window.prefill.prefill.restored_tokens == 0
    assert window.cold_iterations == 0
    assert window.decode.iterations == window.mixed.iterations == 0
    assert 0 < window.prefill.busy_s <= elapsed_s


async def test_reuse_and_restores(nodes: list[Node]) -> None:
    node = nodes[0]
    await warm(node)
    tokens = prompt(7500, 4 * BLOCK)
    await prefill_only(node, tokens)
    await node.until_holds(Tier.L2, names(tokens))
    before = await totals(node)
    hit = await prefill_only(node, [*tokens, *prompt(7501, 30)])
    await node.until_idle()
    await node.engine.free_l1()
    long = 2 * node.info.chunk_tokens + 50
    restored = await prefill_only(node, [*tokens, *prompt(7502, long)])
    window = (await totals(node)).since(before)
    assert hit.cached.l1 == restored.cached.l2 == 4 * BLOCK
    assert window.prefill.iterations == 1 + 3
    assert window.prefill.prefill.uncached_tokens == 30 + long
    # Of each prompt once, in the iteration of its first chunk.
    assert window.prefill.prefill.restored_tokens == 4 * BLOCK
    assert window.prefill.prefill.cached_tokens == 8 * BLOCK
    expected = query_key_pairs(30, 4 * BLOCK) + query_key_pairs(long, 4 * BLOCK)
    assert window.prefill.prefill.query_key_pairs == expected


async def test_requests_at_once_over_both_phases(nodes: list[Node]) -> None:
    a, b = nodes
    await asyncio.gather(warm(a), warm(b))
    before = await asyncio.gather(totals(a), totals(b))
    sizes = [(40, 30), (200, 12), (333, 25), (64, 40), (500, 9)]
    served = await asyncio.gather(
        *(serve(a, (a, b)[index % 2], prompt(8000 + index, size), out) for index, (size, out) in enumerate(sizes))
    )
    after = await asyncio.gather(totals(a), totals(b))
    windows = [now.since(earlier) for now, earlier in zip(after, before, strict=True)]
    computed = [windows[0].prefill.prefill, windows[0].mixed.prefill]
    assert sum(sums.uncached_tokens for sums in computed) == sum(size for size, _ in sizes)
    assert sum(sums.query_key_pairs for sums in computed) == sum(query_key_pairs(size, 0) for size, _ in sizes)
    assert windows[1].prefill.iterations == windows[1].mixed.iterations == 0
    for place, window in enumerate(windows):
        own = [(size, request) for (size, _), request in list(zip(sizes, served, strict=True))[place::2]]
        decoded = [window.decode, window.mixed]
        assert sum(sums.requests for sums in decoded) == sum(each.finished.iterations for _, each in own)
        assert sum(sums.context_tokens for sums in decoded) == sum(decoded_context(*each) for each in own)
        most = max(each.finished.iterations for _, each in own)
        least = sum(each.finished.iterations for _, each in own)
        assert most <= sum(sums.iterations for sums in decoded) <= least
        assert window.decode.expert_share == 0, "both models are dense"


@pytest.mark.parametrize("lengths", [(11.5,), (0.4, 0.7, 1.3, 0.05, 2.2)], ids=["long", "short"])
async def test_a_decode_iteration_between_any_two_that_compute_prompts(
    nodes: list[Node], lengths: tuple[float, ...]
) -> None:
    """However short a chunk is: prompts of `lengths` chunks come beside a request that is being decoded."""
    node = nodes[0]
    await warm(node)
    await totals(node)
    chunk, seed = node.info.chunk_tokens, 8600 + 100 * len(lengths)
    seen: list[IterationWindow] = []
    looked = asyncio.Event()

    async def watch() -> None:
        async for status in node.engine.status_changes():
            if status.decoding:
                seen.append(status.ran)
            looked.set()

    async def one_by_one() -> None:
        for place, length in enumerate(lengths):
            await prefill_only(node, prompt(seed + place, max(1, int(length * chunk))))

    watching = asyncio.create_task(watch())
    decoding = asyncio.create_task(serve(node, node, prompt(seed - 1, 70), 600))
    try:
        await node.until_decoding(1)
        await asyncio.gather(one_by_one(), *(prefill_only(node, prompt(seed + 50 + each, 9)) for each in range(5)))
        for _ in range(2):  # one that was on its way, and one of now
            looked.clear()
            await looked.wait()
        assert not decoding.done(), "nothing was decoded beside the last prompts"
    finally:
        await end_tasks(watching, decoding)
    assert seen[-1].prefill.iterations - seen[0].prefill.iterations >= sum(lengths)
    for earlier, later in itertools.combinations(seen, 2):
        ran = later.since(earlier)
        assert ran.mixed.iterations + ran.decode.iterations >= ran.prefill.iterations - 1


async def test_an_aborted_prompt_counts_what_was_computed(nodes: list[Node]) -> None:
    node = nodes[0]
    await warm(node)
    before = await totals(node)
    length = 12 * node.info.chunk_tokens
    prefill_job, _ = jobs(node, prompt(8500, length), greedy(1))
    async for event in node.engine.prefill(prefill_job):
        assert not isinstance(event, Prefilled), "it was aborted when it was taken"
        await node.engine.abort(prefill_job.leg_id)
        break
    window = (await totals(node)).since(before)
    assert window.prefill.prefill.uncached_tokens == window.prefill.iterations * node.info.chunk_tokens < length
