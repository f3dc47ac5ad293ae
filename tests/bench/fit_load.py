"""Load for the fit of a time model: random for the warm-up, one kind of iteration at a time for what is held out."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from bench.fit_errors import Sample
from engine.sglang.driving import Node, greedy, jobs, prefill_only, serve

from evolving.core.iterations import COLD_ITERATIONS, IterationSums, IterationWindow, WindowCutter
from evolving_node_agent.engines.port import Taken

_TOKENS = (300, 40_000)  # ordinary ids of the model
_REPORTS_S = 3.0  # an engine reports at least every second
_DECODED = 24  # tokens of a request whose decoding is measured
_PLUG_TOKENS = 400  # of a prompt behind which others gather, so that they run in one iteration
_SINGLE_PREFILLS = [(new, cached) for cached in (0, 448, 1216, 2048) for new in (24, 90, 210, 470)]
_BATCH_PREFILLS = [  # (new, cached) of each prompt; together at most a chunk
    [(60, 0), (90, 0)],
    [(200, 0), (40, 1216), (30, 0)],
    [(100, 448), (100, 448), (100, 448), (100, 448)],
    [(25, 2048), (60, 0), (45, 448), (130, 0), (10, 1216)],
    [(40, 448), (70, 1216), (24, 0), (60, 0), (35, 2048), (50, 448)],
    [*[(45, 0)] * 4, *[(30, 448)] * 3],
    [(30, 0)] * 8,
    [(20, 1216), (20, 0), (80, 448), (64, 0), (33, 2048), (15, 448), (90, 0), (50, 448)],
]
_SINGLE_DECODES = [48, 330, 900, 1700, 2700]
_BATCH_DECODES = [
    [100, 100],
    [1500, 200, 700],
    [400, 400, 400, 400],
    [60, 900, 350, 1300, 500],
    [256, 512, 768, 1024, 128, 64],
    [800] * 7,
    [90, 1100, 300, 600, 1500, 200, 450, 700],
]


def text(draw: random.Random, length: int) -> list[int]:
    """Random ordinary token ids."""
    return [draw.randrange(*_TOKENS) for _ in range(length)]


class Recorder:
    """Reads the engine's totals as they come: windows for the fit, and single iterations for what is held out."""

    def __init__(self, node: Node, window_s: float) -> None:
        self.windows: list[IterationWindow] = []
        self.iterations: list[IterationWindow] = []  # differences between reports; one iteration each, or a few
        self._node = node
        self._cutter = WindowCutter(window_s)
        self._before = IterationWindow()
        self._came = asyncio.Condition()

    async def follow(self) -> None:
        """Until the engine ends."""
        async for status in self._node.engine.status_changes():
            window = self._cutter.add(time.monotonic(), self._node.info.incarnation, status.ran)
            if window is not None:
                self.windows.append(window)
            change, self._before = status.ran.since(self._before), status.ran
            if change != IterationWindow():
                self.iterations.append(change)
            async with self._came:
                self._came.notify_all()

    async def until(self, condition: Callable[[], bool]) -> bool:
        """Wait until reports make it true; False: they did not, though some came."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REPORTS_S), self._came:
                return await self._came.wait_for(condition)
        return False


async def warm_up(node: Node, draw: random.Random, seconds: float) -> None:
    """Both phases at once under random load for about `seconds`: batches of one to eight, prompts of which some
    continue what is in L1, or only in L2."""
    for _ in range(COLD_ITERATIONS):
        await serve(node, node, text(draw, 40), 4)
    prefixes = [text(draw, length) for length in (200, 450, 700, 1000, 1400, 1900)]
    for prefix in prefixes:
        await prefill_only(node, prefix)
    end_s = time.monotonic() + seconds

    async def user() -> None:
        for _ in range(draw.randrange(1, 4)):
            prefix = draw.choice([[], [], *prefixes])
            new = draw.choice([draw.randrange(8, 120), draw.randrange(100, 900)])
            await serve(node, node, [*prefix, *text(draw, new)], draw.randrange(2, 48))

    while time.monotonic() < end_s:
        if draw.random() < 0.3:
            await node.engine.free_l1()
        await asyncio.gather(*(user() for _ in range(draw.randrange(1, 9))))


class Settings:
    """The held-out settings. `run` runs one once and returns what it measured: nothing where iterations did not fall as
    the setting wants them."""

    def __init__(self, node: Node, recorder: Recorder, draw: random.Random) -> None:
        self._node = node
        self._recorder = recorder
        self._draw = draw
        self._prefixes: dict[int, list[int]] = {}
        self._contexts: dict[int, list[int]] = {}
        self._runs: dict[str, Callable[[], Awaitable[list[Sample]]]] = {}
        for each in _SINGLE_PREFILLS:
            self._add("prefill_single", [each], self._prefill)
        for batch in _BATCH_PREFILLS:
            self._add("prefill_batch", batch, self._prefill)
        for length in _SINGLE_DECODES:
            self._add("decode_single", [length], self._decode)
        for lengths in _BATCH_DECODES:
            self._add("decode_batch", lengths, self._decode)

    def _add(self, kind: str, what: Sequence[object], run: Callable[..., Awaitable[list[Sample]]]) -> None:
        name = f"{kind} {what}"
        self._runs[name] = partial(run, kind, name, what)

    def names(self) -> list[str]:
        """Of all settings."""
        return list(self._runs)

    async def prepare(self) -> None:
        """Compute the prefixes that settings reuse."""
        for cached in {cached for batch in (_SINGLE_PREFILLS, *_BATCH_PREFILLS) for _, cached in batch} - {0}:
            self._prefixes[cached] = text(self._draw, cached)
        self._prefixes[0] = []

    async def run(self, name: str) -> list[Sample]:
        """One run of a setting."""
        return await self._runs[name]()

    async def _prefill(self, kind: str, name: str, batch: list[tuple[int, int]]) -> list[Sample]:
        """All prompts wait behind another, so that one iteration takes them all."""
        for _, cached in batch:
            if cached:
                await prefill_only(self._node, [*self._prefixes[cached], *text(self._draw, 1)])  # it is in L1
        first = len(self._recorder.iterations)
        plug, _ = jobs(self._node, text(self._draw, _PLUG_TOKENS), greedy(1))
        prompts = [[*self._prefixes[cached], *text(self._draw, new)] for new, cached in batch]
        waiting: list[asyncio.Task[object]] = []
        async for event in self._node.engine.prefill(plug):
            if isinstance(event, Taken):
                waiting = [asyncio.create_task(prefill_only(self._node, prompt)) for prompt in prompts]
        await asyncio.gather(*waiting)
        wanted = (1, sum(new for new, _ in batch), sum(cached for _, cached in batch))

        def found() -> list[IterationSums]:
            ran = [change.prefill for change in self._recorder.iterations[first:]]
            return [
                each
                for each in ran
                if (each.iterations, each.prefill.uncached_tokens, each.prefill.cached_tokens) == wanted
            ]

        await self._recorder.until(lambda: bool(found()))
        lengths = tuple(new + cached for new, cached in batch)
        return [Sample(kind, name, sums, lengths) for sums in found()[:1]]

    async def _decode(self, kind: str, name: str, lengths: list[int]) -> list[Sample]:
        """All prompts are in L1 before they are served, so that they decode together soon."""
        prompts = [self._context(place, length) for place, length in enumerate(lengths)]
        for prompt in prompts:
            await prefill_only(self._node, prompt)
        first = len(self._recorder.iterations)
        await asyncio.gather(*(serve(self._node, self._node, prompt, _DECODED) for prompt in prompts))
        count = len(prompts)

        def ran() -> list[IterationSums]:
            return [change.decode for change in self._recorder.iterations[first:]]

        await self._recorder.until(lambda: sum(each.requests for each in ran()) >= count * (_DECODED - 1))
        full = [each for each in ran() if each.iterations and each.requests == each.iterations * count]
        if not full:
            return []
        total = IterationSums()
        for each in full:
            total = _plus(total, each)
        return [Sample(kind, name, total)]

    def _context(self, place: int, length: int) -> list[int]:
        """The context of that length at a place of a batch, the same in each repeat."""
        return random.Random(1000 * place + length).choices(range(*_TOKENS), k=length)


def _plus(one: IterationSums, other: IterationSums) -> IterationSums:
    """Sums of both; those of decoding."""
    return IterationSums(
        iterations=one.iterations + other.iterations,
        busy_s=one.busy_s + other.busy_s,
        requests=one.requests + other.requests,
        expert_share=one.expert_share + other.expert_share,
        context_tokens=one.context_tokens + other.context_tokens,
    )
