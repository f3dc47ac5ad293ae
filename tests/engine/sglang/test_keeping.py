"""What L2 keeps for legs that wait."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from engine.sglang.naive_l2 import BLOCK, CHUNK, KEPT, L2, LONGEST, Engine, prompt
from hypothesis import given
from hypothesis import strategies as st

from evolving_node_agent.engines.sglang.host.legs import PrefillLeg

arrivals = st.tuples(st.just("arrive"), st.integers(1, LONGEST), st.integers(0, 1))
others = st.tuples(st.sampled_from(["take", "abort", "press", "settle"]), st.integers(0, 20), st.just(0))


@given(st.lists(st.one_of(arrivals, others), max_size=40))
def test_what_is_read_stays_until_its_leg_is_taken_and_is_read_once(actions: list[tuple[str, int, int]]) -> None:
    async def run() -> None:
        engine = Engine()
        seen: list[PrefillLeg] = []
        for action, number, priority in [*actions, *[("take", 0, 0)] * len(actions)]:
            if action == "arrive":
                seen.append(engine.arrive(prompt(number), priority))
                continue
            if action == "abort":
                if engine.legs:
                    await engine.leave(list(engine.legs)[number % len(engine.legs)])
                continue
            await engine.settle()
            if action == "press":
                engine.store.evict(L2)
            engine.check()
            if action == "take" and engine.legs:
                runnable = [leg for leg, task in engine.legs.items() if task.done()]
                await engine.leave(runnable[number % len(runnable)])
        assert not engine.legs
        await engine.check_nothing_stays()
        came = [sum(end - start for start, end in leg.fetch.spans) for leg in seen]
        assert engine.fetched_tokens == sum(came)
        assert all(tokens <= len(leg.tokens) - 1 for leg, tokens in zip(seen, came, strict=True))

    asyncio.run(run())


async def test_a_fetch_beyond_the_bounds_waits_and_goes_on_where_it_was() -> None:
    engine = Engine()
    legs = [engine.arrive(prompt(12)) for _ in range(4)]
    await engine.settle()
    # 12 + 12 + 8 blocks are what may be kept.
    assert [engine.waits(leg) for leg in legs] == [False, False, True, True]
    assert engine.fetched_tokens == KEPT * BLOCK
    engine.store.evict(L2)
    await engine.leave(legs[1])
    await engine.settle()
    assert [engine.waits(leg) for leg in legs[2:]] == [False, True]
    assert legs[2].fetch.spans == [(start * BLOCK, (start + CHUNK) * BLOCK) for start in (0, 4, 8)]
    assert engine.fetched_tokens == (KEPT + 12) * BLOCK
    engine.store.evict(L2)
    await engine.leave(legs[2])
    await engine.settle()
    engine.check()
    assert engine.fetched_tokens == 4 * 12 * BLOCK
    for leg in (legs[0], legs[3]):
        await engine.leave(leg)
    await engine.check_nothing_stays()


async def test_blocks_that_found_no_room_are_kept_once_there_is_some() -> None:
    engine = Engine()
    own = [engine.put(prompt(12)) for _ in range(4)]
    legs = [engine.arrive(tokens) for tokens in own]
    assert engine.store.locked() == 24
    await engine.leave(legs[0])
    engine.store.evict(12)
    assert [engine.whole(leg) for leg in legs] == [False, True, True, True]
    assert engine.store.locked() == 24
    engine.store.evict(L2)
    assert [engine.whole(leg) for leg in legs] == [False, True, True, False], "the first in rank goes first"
    for leg in legs[1:]:
        await engine.leave(leg)
    await engine.check_nothing_stays()


async def test_own_blocks_that_left_for_want_of_room_are_read_as_well() -> None:
    engine = Engine()
    first, second = (engine.arrive(prompt(12)) for _ in range(2))
    await engine.settle()
    third = engine.arrive(prompt(4, after=engine.put(prompt(12))))
    await engine.settle()
    assert engine.waits(third)
    engine.store.evict(L2)
    await engine.leave(first)
    await engine.settle()
    engine.check()
    assert engine.fetched_tokens == (12 + 12 + 16) * BLOCK
    for leg in (second, third):
        await engine.leave(leg)
    await engine.check_nothing_stays()


async def test_room_goes_by_rank() -> None:
    """To a fetch before the blocks that a leg behind it has, although these came earlier."""
    engine = Engine()
    first, second = (engine.arrive(prompt(12), priority=2) for _ in range(2))
    await engine.settle()
    behind = engine.arrive(engine.put(prompt(12)), priority=0)
    fetching = engine.arrive(prompt(12), priority=1)
    await engine.settle()
    assert engine.waits(fetching)
    await engine.leave(first)
    await engine.settle()
    assert engine.whole(fetching)
    engine.store.evict(L2)
    assert not engine.whole(behind)
    for leg in (second, fetching, behind):
        await engine.leave(leg)
    await engine.check_nothing_stays()


async def test_nobody_gets_room_before_one_ahead_that_waits_for_some() -> None:
    """Not even who would find enough: it would take longer and longer until there is enough for the one ahead."""
    engine = Engine()
    first = engine.arrive(prompt(12), priority=2)
    second = engine.arrive(prompt(14), priority=2)
    third = engine.arrive(prompt(12), priority=1)
    await engine.settle()
    assert engine.waits(third)
    small = engine.arrive(prompt(1), priority=0)
    await engine.settle()
    assert engine.store.locked() < KEPT
    assert engine.waits(small)
    await engine.leave(first)
    await engine.settle()
    assert engine.whole(third)
    assert engine.whole(small)
    for leg in (second, third, small):
        await engine.leave(leg)
    await engine.check_nothing_stays()


async def test_what_is_kept_for_several_legs_counts_once() -> None:
    engine = Engine()
    shared = prompt(12)
    legs = [engine.arrive(prompt(4, after=shared)) for _ in range(5)]
    await engine.settle()
    assert not any(engine.waits(leg) for leg in legs)
    assert engine.fetched_tokens == engine.store.locked() * BLOCK == KEPT * BLOCK
    for leg in legs:
        await engine.leave(leg)
    await engine.check_nothing_stays()


async def test_a_leg_that_comes_with_a_better_rank_gets_on() -> None:
    engine = Engine()
    legs = [engine.arrive(prompt(LONGEST)) for _ in range(3)]
    await engine.settle()
    assert [engine.waits(leg) for leg in legs] == [False, False, True]
    urgent = engine.arrive(prompt(LONGEST), priority=1)
    await engine.settle()
    assert engine.whole(urgent)
    assert engine.waits(legs[2]), "only one leg goes beyond the bounds"
    await engine.leave(urgent)
    await engine.settle()
    assert engine.waits(legs[2])
    await engine.leave(legs[0])
    await engine.settle()
    assert engine.whole(legs[2])
    for leg in legs[1:]:
        await engine.leave(leg)
    await engine.check_nothing_stays()


async def cost_of_a_turn(behind: int) -> tuple[Counter[str], int, int]:
    """What it costs that a leg leaves and others read on, where so many more wait than can get room; the steps of
    looking once more for room to give, where there is none; and the blocks kept."""
    engine = Engine()
    shared = engine.put(prompt(12))
    legs = [engine.arrive(prompt(LONGEST, after=shared)) for _ in range(KEPT // CHUNK + behind)]
    await engine.settle()
    assert all(engine.waits(leg) for leg in legs[2:])
    engine.store.cost.clear()
    fetched_tokens = engine.fetched_tokens
    await engine.leave(legs[0])
    await engine.settle()
    assert engine.fetched_tokens > fetched_tokens, "others got on"
    cost = engine.store.cost.copy()
    engine.keeping.give_up(0)
    engine.store.cost.clear()
    engine.keeping.give_room()
    steps = engine.store.cost["steps"]
    kept_blocks = engine.store.locked()
    for leg in legs[1:]:
        await engine.leave(leg)
    await engine.check_nothing_stays()
    return cost, steps, kept_blocks


@given(behind=st.integers(1, 40))
def test_who_waits_behind_the_first_that_finds_no_room_costs_nothing(behind: int) -> None:
    """Prompts are long: of those that wait only the ones that get room are matched, and one more. What they keep
    together is walked once."""
    few, few_steps, kept_blocks = asyncio.run(cost_of_a_turn(0))
    many, many_steps, same_blocks = asyncio.run(cost_of_a_turn(behind))
    assert many["matches"] == few["matches"]
    assert many_steps - few_steps <= 2 * behind, "a step or two a leg, not its whole prompt"
    assert kept_blocks == same_blocks


async def test_what_came_and_is_kept_is_no_room_for_others() -> None:
    """Until something leaves nobody else's prompt is looked at again."""
    engine = Engine()
    legs = [engine.arrive(prompt(LONGEST)) for _ in range(3)]
    await engine.settle()
    assert engine.waits(legs[2])
    engine.store.matched.clear()
    legs.insert(0, engine.arrive(prompt(LONGEST), priority=1))
    await engine.settle()
    assert engine.whole(legs[0])
    assert set(engine.store.matched) == {legs[0].tokens[-1]}
    for leg in legs:
        await engine.leave(leg)
    await engine.check_nothing_stays()


async def test_what_one_leg_got_room_for_takes_none_from_the_next_that_shares_it() -> None:
    engine = Engine()
    own = [engine.put(prompt(LONGEST)) for _ in range(3)]
    legs = [engine.arrive(tokens) for tokens in (*own, own[2])]
    shared = engine.store.path(own[2])[-1]
    assert shared.locks == 0
    await engine.leave(legs[0])
    assert shared.locks == 2
    assert engine.store.locked() == KEPT
    for leg in legs[1:]:
        await engine.leave(leg)
    await engine.check_nothing_stays()


@pytest.mark.parametrize("end", ["given up", "its leg is gone", "another's came first"])
async def test_pages_that_are_not_kept_after_all_are_room(end: str) -> None:
    engine = Engine()
    gone, first = (engine.arrive(prompt(12)) for _ in range(2))
    await engine.settle()
    await engine.leave(gone)
    pages = KEPT - 12
    engine.keeping.expect(pages)
    second = engine.arrive(prompt(4))
    await engine.settle()
    assert engine.waits(second)
    if end == "given up":
        engine.keeping.give_up(pages)
    elif end == "its leg is gone":
        engine.keeping.come(gone, pages, pages)
    else:
        engine.keeping.come(first, pages, pages - 4)
    engine.keeping.give_room()
    await engine.settle()
    assert engine.whole(second)
    for leg in (first, second):
        await engine.leave(leg)
    await engine.check_nothing_stays()
