"""Legs that are ended early, in every stage and on either side: the other side learns of it, nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import pytest_asyncio

from evolving_node_agent.engines.port import (
    Aborted,
    DecodeJob,
    DecodeLost,
    EngineError,
    Prefilled,
    PrefillJob,
    Reserved,
    SourceLost,
    Started,
    Taken,
    Tokens,
)

from .driving import Node, collect, greedy, jobs, prompt, serve
from .reference import clear_prompts

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.sglang, pytest.mark.timeout(300)]

PREFILL_STAGES = ["queued", Taken, Prefilled]
DECODE_STAGES = ["waiting", Reserved, Started, Tokens]


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def nothing_stays(pair: list[Node]):  # type: ignore[no-untyped-def]
    """After each test nothing but plain cache is left, and both nodes serve."""
    yield
    for node in pair:
        await node.until_only_cache()
    tokens, wanted = next(clear_prompts(80, 6, 30_000))
    for source, target in ((0, 1), (1, 0)):
        assert (await serve(pair[source], pair[target], tokens, 6)).ids == wanted


class Request:
    """Both legs of a request, started as a gateway would, watched stage by stage."""

    def __init__(self, source: Node, target: Node, jobs: tuple[PrefillJob, DecodeJob]) -> None:
        self.source, self.target = source, target
        self.prefill_job, self.decode_job = jobs
        self.reached: dict[object, asyncio.Event] = {stage: asyncio.Event() for stage in PREFILL_STAGES + DECODE_STAGES}
        self.prefill = asyncio.create_task(self._prefill())
        self.decode = asyncio.create_task(self._decode())

    async def _prefill(self) -> None:
        self.reached["queued"].set()
        async for event in self.source.engine.prefill(self.prefill_job):
            self.reached.setdefault(type(event), asyncio.Event()).set()

    async def _decode(self) -> None:
        await self.reached[Taken].wait()
        self.reached["waiting"].set()
        async for event in self.target.engine.decode(self.decode_job):
            self.reached.setdefault(type(event), asyncio.Event()).set()

    async def errors(self) -> list[type[BaseException] | None]:
        """How the two legs ended."""
        ended = await asyncio.gather(self.prefill, self.decode, return_exceptions=True)
        return [type(end) if isinstance(end, BaseException) else None for end in ended]


def request(pair: list[Node], number: int, same_node: bool) -> Request:
    """A request with a prompt of several chunks and a long output."""
    source, target = pair[number % 2], pair[number % 2 if same_node else 1 - number % 2]
    return Request(source, target, jobs(source, prompt(31_000 + number, 700), greedy(600), keep_s=2.0))


@pytest.mark.parametrize("same_node", [False, True])
@pytest.mark.parametrize("stage", PREFILL_STAGES)
async def test_an_aborted_prefill_ends_its_decode(pair: list[Node], stage: object, same_node: bool) -> None:
    running = request(pair, PREFILL_STAGES.index(stage), same_node)
    await running.reached[stage].wait()
    found = await running.source.engine.abort(running.prefill_job.leg_id)
    if stage == "queued" and not running.reached[Taken].is_set():
        running.reached[Taken].set()  # a decode leg that comes too late
    prefill, decode = await running.errors()
    if stage is Prefilled:
        # The decode leg may have had the KV by then, and goes on.
        assert (prefill, decode) in ((Aborted, SourceLost), (Aborted, None), (None, None))
    else:
        assert found
        assert (prefill, decode) == (Aborted, SourceLost)


@pytest.mark.parametrize("same_node", [False, True])
@pytest.mark.parametrize("stage", DECODE_STAGES)
async def test_an_aborted_decode_ends_its_prefill(pair: list[Node], stage: object, same_node: bool) -> None:
    running = request(pair, 10 + DECODE_STAGES.index(stage), same_node)
    await running.reached[stage].wait()
    assert await running.target.engine.abort(running.decode_job.leg_id) or stage == "waiting"
    prefill, decode = await running.errors()
    assert decode is Aborted or stage == "waiting"
    if stage in ("waiting", Reserved):
        assert prefill in (DecodeLost, None)
    else:
        assert prefill is None, "the KV had landed: the prefill leg was over"


@pytest.mark.parametrize("same_node", [False, True])
@pytest.mark.parametrize("stage", PREFILL_STAGES + DECODE_STAGES)
async def test_a_closed_iterator_aborts_its_leg(pair: list[Node], stage: object, same_node: bool) -> None:
    running = request(pair, 20, same_node)
    await running.reached[stage].wait()
    leg = running.prefill if stage in PREFILL_STAGES else running.decode
    leg.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await leg
    running.reached[Taken].set()
    await running.errors()


async def test_many_aborts_at_random_moments(pair: list[Node]) -> None:
    running = [request(pair, 40 + number, number % 3 == 0) for number in range(12)]
    for number, each in enumerate(running):
        await asyncio.sleep(0.03)
        side = each.source if number % 2 else each.target
        job = each.prefill_job if number % 2 else each.decode_job
        await side.engine.abort(job.leg_id)
        each.reached[Taken].set()
    # What was aborted too early for its decode leg to exist is aborted again.
    for each in running:
        await each.target.engine.abort(each.decode_job.leg_id)
        await each.source.engine.abort(each.prefill_job.leg_id)
    ended = await asyncio.gather(*(each.errors() for each in running))
    allowed = {Aborted, SourceLost, DecodeLost, None}
    assert {kind for pair_ in ended for kind in pair_} <= allowed


async def test_an_unknown_leg_is_not_found(pair: list[Node]) -> None:
    assert await pair[0].engine.abort("never was") is False


async def test_kv_nobody_comes_for_is_dropped(pair: list[Node]) -> None:
    job, decode = jobs(pair[0], prompt(32_000, 100), greedy(5), keep_s=0.2)
    with pytest.raises(DecodeLost):
        await collect(pair[0].engine.prefill(job))
    with pytest.raises(SourceLost):
        await collect(pair[1].engine.decode(decode))


async def test_a_decode_leg_without_a_prefill_leg_is_told(pair: list[Node]) -> None:
    for target in pair:
        _, decode = jobs(pair[0], prompt(33_000, 50), greedy(5))
        with pytest.raises(SourceLost):
            await collect(target.engine.decode(decode))


async def test_a_leg_runs_once(pair: list[Node]) -> None:
    job, _ = jobs(pair[0], prompt(34_000, 300), greedy(5), keep_s=0.5)
    first = asyncio.create_task(collect(pair[0].engine.prefill(job)))
    await asyncio.sleep(0)
    with pytest.raises(EngineError):
        await collect(pair[0].engine.prefill(job))
    with pytest.raises(DecodeLost):
        await first
