"""From an engine's iterations back to the coefficients they were timed by (paper, section 4.2)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import astuple

import pytest
from engine.sglang.driving import Node, prompt, serve
from engine.test_mock_engine import mocks

from evolving.core.fit import fit_decode, fit_prefill
from evolving.core.iterations import IterationWindow, WindowCutter, measure_mix
from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients
from evolving.runtime.clock import ManualClock

PREFILL = PrefillCoefficients(0.004, 4e-5, 2e-8, 3e-5, 1e-5)
DECODE = DecodeCoefficients(0.008, 0.02, 1e-3, 4e-6, experts_per_token=2, experts=16)
SPEED_UP = 4.0


class IterationClock(ManualClock):
    """Time passes when an iteration waits for it; deadlines, which are far longer, never come."""

    def __init__(self, looked: Callable[[float], None]) -> None:
        """`looked` is called before each iteration, with the time."""
        super().__init__()
        self._looked = looked

    async def sleep(self, duration_s: float) -> None:
        if duration_s < 0.5:
            self._looked(self.now_s())
            await self.advance(duration_s)
        else:
            await asyncio.Event().wait()


async def load(node: Node, draw: random.Random) -> None:
    """Both phases at once; prefixes in L1, in L2, and in neither."""
    prefixes = [prompt(seed, 64 * blocks) for seed, blocks in enumerate((0, 2, 5, 11))]
    for _ in range(40):
        if draw.random() < 0.5:
            await node.engine.free_l1()
        requests = [
            (draw.choice(prefixes) + prompt(draw.randrange(10**6), draw.randrange(1, 200)), draw.randrange(2, 30))
            for _ in range(draw.randrange(1, 6))
        ]
        await asyncio.gather(*(serve(node, node, tokens, out) for tokens, out in requests))


async def test_what_the_mock_is_timed_by_is_found_again_in_wall_time() -> None:
    windows, cutter, nodes = list[IterationWindow](), WindowCutter(0.05), list[Node]()

    def look(now_s: float) -> None:
        window = cutter.add(now_s, "life", nodes[0].engine.status().ran)
        if window is not None:
            windows.append(window)

    sizes = {"l1_tokens": 16_384, "l2_tokens": 32_768, "verify_kv": False, "speed_up": SPEED_UP}
    async with mocks("a", clock=IterationClock(look), prefill=PREFILL, decode=DECODE, **sizes) as (node,):
        nodes.append(node)
        await load(node, random.Random(5))
    prefill, decode = fit_prefill(windows), fit_decode(windows, node.info.experts, node.info.experts_per_token)
    assert prefill is not None
    assert decode is not None
    assert astuple(prefill.coefficients) == pytest.approx([each / SPEED_UP for each in astuple(PREFILL)], rel=1e-6)
    found, expected = astuple(decode.coefficients), astuple(DECODE)
    assert found[:4] == pytest.approx([each / SPEED_UP for each in expected[:4]], rel=1e-6)
    assert found[4:] == expected[4:]
    assert prefill.unidentified == decode.unidentified == ()
    mix = measure_mix(windows)
    assert mix.restored_share is not None
    assert 0 < mix.restored_share < 1
    assert mix.new_tokens_per_iteration is not None
    assert 1 <= mix.new_tokens_per_iteration <= node.info.chunk_tokens
