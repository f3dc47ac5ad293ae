"""Two nodes whose memory is too small for their work finish it all the same, with the right tokens."""

from __future__ import annotations

import asyncio
import random
from itertools import islice
from typing import Any

import pytest

from evolving_node_agent.engines.port import DecodeLost, NoRoom, Rejected

from .driving import Node, collect, greedy, jobs, prefill_only, prompt, serve
from .reference import clear_prompts

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.sglang, pytest.mark.timeout(300)]
PATIENT: dict[str, Any] = {"keep_s": 240.0, "reserve_deadline_s": 240.0}


async def test_prompts_of_the_longest_kind_cross_in_both_directions(cramped: list[Node]) -> None:
    """Each node could fill up with computed prompts the other has no room for."""
    longest = cramped[0].info.max_prompt_tokens
    wanted = list(islice(clear_prompts(longest, 6, 20_000), 10))
    served = await asyncio.gather(
        *(serve(cramped[n % 2], cramped[1 - n % 2], tokens, 6, **PATIENT) for n, (tokens, _) in enumerate(wanted))
    )
    assert [each.ids for each in served] == [output for _, output in wanted]


async def test_retracted_decodes_resume(cramped: list[Node]) -> None:
    """Short prompts with long outputs: admitted together, they outgrow the pool."""
    c, d = cramped
    before = d.engine.status().retractions
    wanted = list(islice(clear_prompts(40, 260, 21_000), 10))
    served = await asyncio.gather(*(serve(c, d, tokens, 260, **PATIENT) for tokens, _ in wanted))
    assert [each.ids for each in served] == [output for _, output in wanted]
    await d.until_idle()
    assert d.engine.status().retractions > before, "the pool was not under pressure"


async def test_a_long_prompt_is_computed_beside_decodes(cramped: list[Node]) -> None:
    """Decode first, then at most a chunk: between two chunks every stream produces a token."""
    c, d = cramped
    streams = [asyncio.create_task(serve(d, c, prompt(22_000 + n, 40), 200, **PATIENT)) for n in range(3)]
    await c.until_decoding(3)
    tokens, wanted = next(clear_prompts(896, 1, 22_100))
    chunks = -(-len(tokens) // c.info.chunk_tokens)
    await c.until_decoding(3)
    before = c.engine.status()
    assert (await prefill_only(c, tokens)).first_token == wanted[0]
    served = await asyncio.gather(*streams)
    await c.until_idle()
    after = c.engine.status()
    assert after.prefill_iterations - before.prefill_iterations == chunks
    assert all(len(each.ids) == 200 for each in served)
    # At least as many decode iterations as chunks, all with the three streams in them.
    assert after.iterations - before.iterations - chunks >= chunks


async def test_mixed_load_in_all_directions(cramped: list[Node]) -> None:
    rng = random.Random(5)
    wanted = []
    for seed in range(30):
        length, new = rng.randint(20, 700), rng.randint(2, 60)
        wanted.append((next(clear_prompts(length, new, 23_000 + 100 * seed)), new))
    served = await asyncio.gather(
        *(serve(rng.choice(cramped), rng.choice(cramped), tokens, new, **PATIENT) for (tokens, _), new in wanted)
    )
    wrong = [n for n, each in enumerate(served) if each.ids != wanted[n][0][1]]
    assert wrong == []
    for node in cramped:
        await node.until_idle()


async def test_no_room_within_the_deadline(cramped: list[Node]) -> None:
    c, d = cramped
    crowd = [asyncio.create_task(serve(c, d, prompt(24_000 + n, 30), 120)) for n in range(d.info.decode_slots)]
    await d.until_decoding(d.info.decode_slots)
    job, decode = jobs(c, prompt(24_100, 30), greedy(8), reserve_deadline_s=0.2)
    legs = [asyncio.create_task(collect(c.engine.prefill(job))), asyncio.create_task(collect(d.engine.decode(decode)))]
    with pytest.raises(NoRoom):
        await legs[1]
    with pytest.raises(DecodeLost):
        await legs[0]
    await asyncio.gather(*crowd)


async def test_impossible_jobs_are_rejected(pair: list[Node]) -> None:
    a, _ = pair
    longest = a.info.max_prompt_tokens
    for tokens, sampling, generated in (
        ([], greedy(4), 0),
        ([5] * (longest + 1), greedy(4), 0),
        ([a.info.vocab_size], greedy(4), 0),
        ([5, 6], greedy(4), 2),
        ([5, 6, 7], greedy(1), 1),
        ([5, 6], greedy(4, temperature=-1.0), 0),
        ([5, 6], greedy(4, top_k=0), 0),
    ):
        job, decode = jobs(a, tokens, sampling, generated)
        with pytest.raises(Rejected):
            await collect(a.engine.prefill(job))
        with pytest.raises(Rejected):
            await collect(a.engine.decode(decode))
    assert len((await serve(a, a, [5] * longest, 4)).ids) == 4
