"""Right tokens: equal to plain transformers in float32, however a request travels."""

from __future__ import annotations

import asyncio
from itertools import islice

import pytest

from evolving_node_agent.engines.port import CachedTokens, FinishReason, Prefilled, Sampling

from .conftest import over_each_transport
from .driving import Node, collect, greedy, jobs, prefill_only, serve
from .reference import clear_prompts, reference

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.sglang, pytest.mark.timeout(300)]


@over_each_transport
@pytest.mark.parametrize("length", [1, 63, 64, 65, 500])
async def test_a_prompt_of_any_length_moves_between_nodes(pair: list[Node], length: int) -> None:
    tokens, wanted = next(clear_prompts(length, 24, 1000 + length))
    served = await serve(pair[0], pair[1], tokens, 24)
    assert served.ids == wanted
    assert served.finished.reason is FinishReason.LENGTH
    assert served.finished.iterations == 23


async def test_both_legs_on_one_node_move_nothing(pair: list[Node]) -> None:
    tokens, wanted = next(clear_prompts(300, 20, 2000))
    served = await serve(pair[0], pair[0], tokens, 20)
    assert served.ids == wanted
    assert served.sent.bytes == 0
    assert served.started.cached_tokens == 300
    assert served.started.first_token == wanted[0]


@over_each_transport
async def test_many_at_once_in_both_directions(pair: list[Node]) -> None:
    wanted = list(islice(clear_prompts(150, 30, 3000), 12))
    a, b = pair
    ways = [(a, b), (b, a), (a, a), (b, b)]
    served = await asyncio.gather(*(serve(*ways[index % 4], tokens, 30) for index, (tokens, _) in enumerate(wanted)))
    assert [each.ids for each in served] == [output for _, output in wanted]


@over_each_transport
async def test_the_next_turn_reuses_prompt_and_output(pair: list[Node]) -> None:
    a, b = pair
    tokens, output = next(clear_prompts(200, 70, 4000))
    first = await serve(a, b, tokens, 70)
    assert first.ids == output
    # The last token has no KV yet, so 269 tokens are four full blocks.
    longer = tokens + output + tokens[:10]
    wanted, gap = reference(longer, 8)
    assert gap > 0
    second = await serve(b, a, longer, 8)
    assert second.ids == wanted
    assert second.cached == CachedTokens(l1=256)
    # Back on the node that computed the prompt only: its three full blocks, and the rest comes over.
    third = await serve(a, b, longer, 8)
    assert third.ids == wanted
    assert third.cached.l1 == 256, "decode on a left the whole context there"


async def test_resume_continues_after_earlier_output(pair: list[Node]) -> None:
    a, b = pair
    tokens, output = next(clear_prompts(120, 40, 5000))
    for produced in (1, 17):
        resumed = await serve(b, a, tokens + output[:produced], greedy(40), generated=produced)
        assert output[:produced] + resumed.ids == output
        assert resumed.finished.reason is FinishReason.LENGTH


async def test_stop_tokens_end_either_leg(pair: list[Node]) -> None:
    a, b = pair
    tokens, output = next(clear_prompts(90, 30, 6000))
    stop = next(token for token in output[5:] if token not in output[:5])
    cut = output[: output.index(stop) + 1]
    served = await serve(a, b, tokens, Sampling(max_tokens=30, stop_token_ids=(stop,)))
    assert served.ids == cut
    assert served.finished.reason is FinishReason.STOP
    job = Sampling(max_tokens=30, stop_token_ids=(output[0],))
    first = await _first(a, tokens, job)
    assert first == (output[0], FinishReason.STOP)


async def test_one_token_needs_no_decode_leg(pair: list[Node]) -> None:
    tokens, output = next(clear_prompts(90, 1, 7000))
    assert (await prefill_only(pair[0], tokens)).first_token == output[0]


async def test_penalties_count_output_across_legs_and_resumes(pair: list[Node]) -> None:
    """With a penalty on what was generated, a transferred or resumed request must not forget its own output."""
    a, b = pair
    tokens, _ = next(clear_prompts(100, 1, 8000))
    for fields in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 1.9}):
        sampling = greedy(48, **fields)
        whole = await serve(a, a, tokens, sampling)
        moved = await serve(a, b, tokens, sampling)
        assert moved.ids == whole.ids
        resumed = await serve(b, a, tokens + whole.ids[:20], sampling, generated=20)
        assert whole.ids[:20] + resumed.ids == whole.ids


async def test_a_seed_fixes_sampled_tokens(pair: list[Node]) -> None:
    a, b = pair
    tokens, _ = next(clear_prompts(100, 1, 9000))
    warm = Sampling(max_tokens=16, temperature=1.5, seed=11, ignore_eos=True)
    one, two = await serve(a, b, tokens, warm), await serve(b, a, tokens, warm)
    assert one.ids == two.ids


async def _first(node: Node, tokens: list[int], sampling: Sampling) -> tuple[int, FinishReason | None]:
    job, _ = jobs(node, tokens, sampling)
    events = await collect(node.engine.prefill(job))
    assert isinstance(events[-1], Prefilled)
    return events[-1].first_token, events[-1].finish
