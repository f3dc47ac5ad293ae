"""What bench-switch does in the place of upstream's router."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from bench.switch_figures import Phase
from bench.switch_load import OUTPUT_TOKENS, TurnFailed
from bench.switch_upstream import Server, Upstream
from cluster import free_ports


class FakeSglang:
    """Answers as SGLang does: refuses to switch while it is busy."""

    def __init__(self, phase: Phase) -> None:
        self.phase = phase
        self.running = 0
        self.go_on = asyncio.Event()  # generations end only once it is set
        self.failing = False

    async def generate(self, request: web.Request) -> web.StreamResponse:
        await request.json()
        self.running += 1
        if self.failing:
            return web.Response(status=503)
        response = web.StreamResponse()
        await response.prepare(request)
        if self.phase == "prefill":
            await response.write(_line(1))
        await self.go_on.wait()
        if self.phase == "decode":
            for tokens in range(1, OUTPUT_TOKENS + 1):
                await response.write(_line(tokens))
        self.running -= 1
        await response.write(b"data: [DONE]\n\n")
        return response

    async def switch(self, request: web.Request) -> web.Response:
        ask = await request.json()
        if self.running:
            return web.json_response({"success": False, "safe_to_restore": True, "message": "busy"}, status=400)
        if not ask["prepare_only"]:
            self.phase = ask["new_role"]
        return web.json_response({"success": True, "safe_to_restore": True, "message": "ok"})


def _line(tokens: int) -> bytes:
    message = {"output_ids": list(range(tokens)), "meta_info": {"cached_tokens": 48, "finish_reason": None}}
    return b"data: " + json.dumps(message).encode() + b"\n\n"


@asynccontextmanager
async def serving(*phases: Phase) -> AsyncIterator[tuple[list[FakeSglang], Upstream]]:
    """Such nodes, named by their place, and what asks them."""
    fakes, servers, runners = [FakeSglang(phase) for phase in phases], {}, []
    for number, (fake, port) in enumerate(zip(fakes, free_ports(len(phases)), strict=True)):
        app = web.Application()
        app.router.add_post("/generate", fake.generate)
        app.router.add_post("/pd_role_switch", fake.switch)
        runners.append(web.AppRunner(app))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], "127.0.0.1", port).start()
        servers[str(number)] = Server(str(number), fake.phase, port, 0, Path())
    async with aiohttp.ClientSession() as http:
        yield fakes, Upstream(servers, http)
    for runner in runners:
        await runner.cleanup()


def _nothing(_: int) -> None:
    """Nobody waits for tokens."""


async def test_a_busy_node_is_drained_and_then_switched() -> None:
    """As its own word is: refused while busy. Meanwhile it gets nothing new."""
    async with serving("prefill", "prefill", "decode") as (fakes, upstream):
        first = asyncio.create_task(upstream.turn("x", (1, 2), 64, _nothing))
        while not (fakes[0].running and fakes[2].running):
            await asyncio.sleep(0.01)
        switching = asyncio.create_task(upstream.switch("0", "decode", lambda: 1))
        while not upstream.servers["0"].draining:
            await asyncio.sleep(0.01)
        second = asyncio.create_task(upstream.turn("x", (1, 2), 64, _nothing))
        while not fakes[1].running:
            await asyncio.sleep(0.01)
        for fake in fakes:
            fake.go_on.set()
        assert (await switching).refusals >= 1
        assert [fake.phase for fake in fakes] == ["decode", "prefill", "decode"]
        assert ((await first).prefill_node, (await second).prefill_node) == ("0", "1")
        assert (await first).lost_by == {"computed": 16}
        assert len((await first).output) == OUTPUT_TOKENS


async def test_an_idle_node_is_switched_at_once() -> None:
    async with serving("prefill", "prefill", "decode") as (fakes, upstream):
        assert (await upstream.switch("1", "decode", lambda: 0)).refusals == 0
        assert fakes[1].phase == "decode"


async def test_a_node_that_does_not_answer_fails_the_request() -> None:
    async with serving("prefill", "decode") as (fakes, upstream):
        fakes[0].go_on.set()
        fakes[1].failing = True
        with pytest.raises(TurnFailed, match="decode: HTTP 503"):
            await upstream.turn("x", (1, 2), 0, _nothing)
