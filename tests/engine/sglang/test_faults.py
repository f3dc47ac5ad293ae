"""Processes that die, hang, or are told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from etcd_process import free_ports

from evolving_node_agent.engines.port import (
    Cleared,
    DecodeLost,
    EngineDown,
    EngineError,
    SourceLost,
    Tier,
)

from .conftest import over_each_transport, running
from .driving import Node, collect, greedy, jobs, names, prefill_only, prompt, serve
from .factory import make_engine
from .reference import clear_prompts

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.sglang, pytest.mark.timeout(300)]
LOST = (EngineDown, SourceLost, DecodeLost)


def free_port() -> int:
    """A port nobody listens on, nor on the next one."""
    while True:
        (port,) = free_ports(1)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port + 1))
            return port


def group_is_empty(pid: int) -> bool:
    """Whether no process is left in the engine's group."""
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fragile(
    pair: list[Node], transport: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[list[Node]]:
    """A node that lives, and one on a fixed port that is killed."""
    fields = {"port": free_port(), "transport": transport}
    async with running(tmp_path_factory.mktemp("fragile"), {"e": fields}) as nodes:
        yield [pair[0], *nodes]


@over_each_transport
async def test_a_node_killed_under_load_and_restarted_on_its_port(fragile: list[Node]) -> None:
    alive, mortal = fragile
    crowd = [
        asyncio.create_task(serve(*((alive, mortal) if n % 2 else (mortal, alive)), prompt(40_000 + n, 500), 40))
        for n in range(16)
    ]
    # Requests in both directions and all stages when it dies.
    await asyncio.wait(crowd, return_when=asyncio.FIRST_COMPLETED)
    exited = asyncio.create_task(mortal.engine.exited())
    os.killpg(mortal.info.pid, signal.SIGKILL)
    assert await exited == -signal.SIGKILL
    ended = await asyncio.wait_for(asyncio.gather(*crowd, return_exceptions=True), 30)
    for end in ended:
        if isinstance(end, BaseException):
            assert isinstance(end, ExceptionGroup)
            assert end.split(LOST)[1] is None, "another error than a lost peer"
    assert any(isinstance(end, BaseException) for end in ended)
    await alive.until_idle()

    old = mortal.info
    mortal.info = await mortal.engine.start()
    assert mortal.info.transfer_address == old.transfer_address
    assert mortal.info.incarnation != old.incarnation
    mortal.held = {Tier.L1: set(), Tier.L2: set()}
    mortal.parents.clear()
    mortal.events.clear()
    listening = asyncio.create_task(mortal.listen())
    for round_seed in (41_000, 42_000):
        for source, target in ((alive, mortal), (mortal, alive)):
            tokens, wanted = next(clear_prompts(300, 10, round_seed))
            assert (await serve(source, target, tokens, 10)).ids == wanted
    # Its host memory can be read as well.
    tokens = prompt(43_000, 200)
    await prefill_only(mortal, tokens)
    await mortal.until_holds(Tier.L2, names(tokens))
    fetched = await prefill_only(alive, tokens, holders=(mortal.holder(0, 3),))
    assert fetched.cached.peer == 192
    assert mortal.events[:2] == [Cleared(Tier.L1), Cleared(Tier.L2)]
    listening.cancel()


@over_each_transport
async def test_a_holder_that_hangs_costs_its_deadline_only(fragile: list[Node]) -> None:
    alive, mortal = fragile
    tokens, output = next(clear_prompts(260, 1, 44_000))
    await prefill_only(mortal, tokens)
    other, _ = next(clear_prompts(100, 1, 44_100))
    os.killpg(mortal.info.pid, signal.SIGSTOP)
    try:
        hung = asyncio.create_task(prefill_only(alive, tokens, holders=(mortal.holder(0, 4),), fetch_deadline_s=1.0))
        await prefill_only(alive, other)
        assert not hung.done(), "one fetch never blocks another request"
        prefilled = await asyncio.wait_for(hung, 20)
    finally:
        os.killpg(mortal.info.pid, signal.SIGCONT)
    assert prefilled.first_token == output[0]
    assert prefilled.cached.total == 0


async def test_stop_lets_running_legs_end(fragile: list[Node]) -> None:
    _, mortal = fragile
    request = asyncio.create_task(serve(mortal, mortal, prompt(45_000, 100), 60))
    await mortal.until_decoding(1)
    await mortal.engine.stop(30.0)
    assert len((await request).ids) == 60
    assert group_is_empty(mortal.info.pid)
    job, _ = jobs(mortal, prompt(45_001, 10), greedy(2))
    with pytest.raises(EngineDown):
        await collect(mortal.engine.prefill(job))
    assert await mortal.engine.abort("anything") is False


async def test_stop_without_grace_ends_legs(fragile: list[Node]) -> None:
    _, mortal = fragile
    mortal.info = await mortal.engine.start()
    request = asyncio.create_task(serve(mortal, mortal, prompt(46_000, 100), 2000))
    await mortal.until_decoding(1)
    await mortal.engine.stop(0.0)
    with pytest.raises(ExceptionGroup) as ended:
        await request
    assert ended.value.split(EngineDown)[1] is None
    assert group_is_empty(mortal.info.pid)
    await mortal.engine.stop(0.0)


async def test_a_start_that_fails_shows_the_log(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    engine = make_engine(tmp_path, "nothing", model_path=str(tmp_path / "model"))
    with pytest.raises(EngineError, match=r"(?s)did not start.*Error"):
        await engine.start()


OWNER = """
import asyncio, pathlib, sys
from engine.sglang.factory import make_engine

async def main():
    engine = make_engine(pathlib.Path(sys.argv[1]), "orphan")
    starting = asyncio.create_task(engine.start())
    while (process := engine._process) is None:
        await asyncio.sleep(0.01)
    print(process.pid, flush=True)
    await starting
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_an_engine_dies_with_its_owner(tmp_path: Path) -> None:
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, str(tmp_path), stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )  # fmt: skip
    assert owner.stdout is not None
    pid = int(await owner.stdout.readline())
    assert not group_is_empty(pid)
    owner.kill()
    await owner.wait()
    while not group_is_empty(pid):
        await asyncio.sleep(0.05)
