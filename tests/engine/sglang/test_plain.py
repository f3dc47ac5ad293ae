"""Our engines answer as one plain SGLang engine does, token for token."""

from __future__ import annotations

import asyncio
import json
import sys
from itertools import islice
from pathlib import Path

import pytest
from engine.models import tiny_model

from .driving import BLOCK, Node, serve
from .reference import clear_prompts

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.sglang, pytest.mark.timeout(400)]
PLAIN = Path(__file__).with_name("plain.py")


async def plain_sglang(directory: Path, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Greedy output of an engine without our scheduler."""
    flags = {"page_size": BLOCK, "max_total_tokens": 8192, "chunked_prefill_size": 128}
    requests, answers = directory / "requests.json", directory / "answers.json"
    requests.write_text(json.dumps({"prompts": prompts, "new_tokens": new_tokens, "flags": flags}))
    process = await asyncio.create_subprocess_exec(
        sys.executable, PLAIN, tiny_model(), requests, answers,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    log, _ = await process.communicate()
    assert process.returncode == 0, log.decode()[-2000:]
    ids: list[list[int]] = json.loads(answers.read_text())["ids"]
    return ids


async def test_tokens_equal_those_of_one_plain_engine(pair: list[Node], tmp_path: Path) -> None:
    prompts = [tokens for tokens, _ in islice(clear_prompts(180, 24, 30_000), 8)]
    a, b = pair
    ways = [(a, b), (b, a), (a, a), (b, b)]
    ours = await asyncio.gather(*(serve(*ways[at % 4], tokens, 24) for at, tokens in enumerate(prompts)))
    assert [served.ids for served in ours] == await plain_sglang(tmp_path, prompts, 24)
