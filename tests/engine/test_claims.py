"""How long KV is held for decode legs that come and go."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from evolving.runtime.clock import ManualClock
from evolving_node_agent.engines.claims import Claims

KEEP_S = 10.0
_STEPS = st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.sampled_from([0.0, 3.0, 9.0, 11.0])), max_size=12)


@settings(deadline=None)
@given(_STEPS)
def test_kv_goes_when_nobody_was_there_for_long_enough_and_not_before(steps: list[tuple[int, bool, float]]) -> None:
    """Against a model that knows since when there is nobody."""

    async def run() -> None:
        clock, claims = ManualClock(), Claims()
        gone = asyncio.create_task(claims.none_for(KEEP_S, clock))
        there: set[int] = set()
        empty_since_s: float = 0.0
        await clock.settle()
        for name, comes, wait_s in [*steps, (0, False, 0.0), (1, False, 0.0), (2, False, KEEP_S)]:
            if comes:
                there.add(name)
                claims.add(name)
            else:
                if there == {name}:
                    empty_since_s = clock.now_s()
                there.discard(name)
                claims.discard(name)
            await clock.settle()
            await clock.advance(wait_s)
            await clock.settle()
            assert gone.done() == (not there and clock.now_s() - empty_since_s >= KEEP_S)
            if gone.done():
                return
        raise AssertionError("nobody was there and it is still held")

    asyncio.run(run())


async def test_one_that_leaves_as_another_comes_is_no_moment_without() -> None:
    clock, claims = ManualClock(), Claims()
    claims.add("first")
    gone = asyncio.create_task(claims.none_for(KEEP_S, clock))
    await clock.settle()
    claims.discard("first")
    claims.add("second")
    await clock.advance(KEEP_S)
    await clock.settle()
    assert not gone.done()
    claims.discard("second")
    await clock.settle()
    await clock.advance(KEEP_S)
    await clock.settle()
    assert gone.done()
