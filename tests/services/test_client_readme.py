"""The examples of the client's README run as they stand."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from scripted_gateway import ScriptedGateway, output_ids, serve, text_of

README = Path(__file__).parents[2] / "libs" / "client" / "README.md"


def examples() -> dict[str, Any]:
    """The functions the README's Python blocks define, by name."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL):
        scope: dict[str, Any] = {"__name__": "readme"}
        exec(compile(block, str(README), "exec"), scope)
        names.update({name: thing for name, thing in scope.items() if getattr(thing, "__module__", "") == "readme"})
    return names


@pytest.fixture
async def gateway() -> ScriptedGateway:
    return ScriptedGateway()


@pytest.fixture
async def address(gateway: ScriptedGateway) -> AsyncIterator[str]:
    server, address = await serve(gateway)
    yield address
    await server.stop(None)


def test_every_example_is_run_here() -> None:
    assert set(examples()) == {"agent", "careful", "exact", "stream"}


async def test_stream(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await examples()["stream"](address) == text_of(output_ids(16))
    assert len(capsys.readouterr().out.splitlines()) == 2


async def test_agent(address: str, gateway: ScriptedGateway) -> None:
    assert await examples()["agent"](address) == ["system", "user", "assistant"]
    root = gateway.requests[0].branch.branch_id
    assert [(request.branch.version, request.branch.parent_branch_id) for request in gateway.requests] == [
        (1, ""),
        (1, ""),
        (1, root),
        (1, root),
        (2, ""),
    ]
    assert len(gateway.ended) == 3, "root, sub-agent and fork"


async def test_exact(address: str) -> None:
    assert await examples()["exact"](address) == (11, 12, 13, *output_ids(4), 21, 22, *output_ids(4))


async def test_careful(address: str) -> None:
    server, gone = await serve(ScriptedGateway())
    await server.stop(None)
    assert await examples()["careful"](gone, address) == text_of(output_ids(8))
