"""The engine on the real small model: against plain SGLang on the same prompts, and what reuse saves.

    make bench-engine        (or: python tests/bench/bench_engine.py --model-path DIR)

In one run: plain SGLang and our engine, each alone on the machine and warmed up, answer the same prompts sent at once;
then two of our engines time a 1,500-token prompt computed, found in L1, and read from a peer's L2. Writes
build/bench-engine.json. The bar: found answers at least 10 times sooner than computed.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from engine.sglang.driving import BLOCK, Node, names, prefill_only, serve  # noqa: E402

from evolving_node_agent.engines.port import Tier  # noqa: E402
from evolving_node_agent.engines.sglang import SglangConfig, SglangEngine  # noqa: E402

OUTPUT = ROOT / "build" / "bench-engine.json"
PLAIN = ROOT / "tests" / "engine" / "sglang" / "plain.py"
L1_TOKENS, L2_TOKENS, CHUNK_TOKENS, LONG = 8192, 16384, 512, 1500


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Random ordinary token ids."""
    draw = random.Random(seed)
    return [[draw.randrange(300, 40_000) for _ in range(length)] for _ in range(count)]


def plain(model: Path, asked: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Plain SGLang's ids and seconds, second round."""
    flags = {"page_size": BLOCK, "max_total_tokens": L1_TOKENS, "chunked_prefill_size": CHUNK_TOKENS}
    with tempfile.TemporaryDirectory() as directory:
        requests, answers = Path(directory) / "requests.json", Path(directory) / "answers.json"
        requests.write_text(json.dumps({"prompts": asked, "new_tokens": new_tokens, "flags": flags}))
        subprocess.run([sys.executable, PLAIN, model, requests, answers], check=True, stderr=subprocess.DEVNULL)
        result: dict[str, Any] = json.loads(answers.read_text())
        return result


async def start(model: Path, name: str) -> tuple[Node, float]:
    """A started engine and the seconds it took."""
    log = str(ROOT / "build" / f"bench-engine-{name}.log")
    config = SglangConfig(
        str(model),
        model_name="bench",
        l1_tokens=L1_TOKENS,
        l2_tokens=L2_TOKENS,
        chunk_tokens=CHUNK_TOKENS,
        log_path=log,
    )
    engine, began = SglangEngine(config), time.monotonic()
    node = Node(name, engine, await engine.start())
    return node, time.monotonic() - began


async def throughput(node: Node, asked: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Our ids and seconds on one node, both phases, second round; nothing is reused between rounds."""
    for round_number in range(2):
        root = bytes([round_number]) * 32
        began = time.monotonic()
        served = await asyncio.gather(*(serve(node, node, tokens, new_tokens, root=root) for tokens in asked))
        seconds = time.monotonic() - began
    return {"ids": [each.ids for each in served], "seconds": seconds}


async def timed(node: Node, tokens: list[int], **job: Any) -> float:
    """Seconds to the first token."""
    began = time.monotonic()
    await prefill_only(node, tokens, **job)
    return time.monotonic() - began


async def reuse(near: Node, far: Node, repeats: int) -> dict[str, float]:
    """Medians of the seconds to the first token of a prompt computed, in L1, and in a peer's L2."""
    seconds: dict[str, list[float]] = {"computed_s": [], "l1_s": [], "peer_l2_s": []}
    for tokens in prompts(repeats, LONG, seed=7):
        seconds["computed_s"].append(await timed(near, tokens))
        seconds["l1_s"].append(await timed(near, tokens))
        await near.until_holds(Tier.L2, names(tokens))
        seconds["peer_l2_s"].append(await timed(far, tokens, holders=(near.holder(0, LONG // BLOCK),)))
    return {name: statistics.median(values) for name, values in seconds.items()}


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, the host KV pool included."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


async def measure(model: Path, requests: int, length: int, new_tokens: int, repeats: int) -> dict[str, Any]:
    """All of it."""
    asked = prompts(requests, length, seed=3)
    theirs = plain(model, asked, new_tokens)
    near, start_s = await start(model, "near")
    listeners = [asyncio.create_task(near.listen())]
    far = None
    try:
        ours = await throughput(near, asked, new_tokens)
        far, _ = await start(model, "far")
        listeners.append(asyncio.create_task(far.listen()))
        await timed(far, prompts(1, 200, seed=9)[0])  # warm
        times = await reuse(near, far, repeats)
        resident = resident_bytes(near.info.pid)
    finally:
        for node in (near, far):
            if node is not None:
                await node.engine.stop(0)
        await asyncio.gather(*listeners)
    tokens = requests * (length + new_tokens)
    return {
        "requests": requests,
        "prompt_tokens": length,
        "new_tokens": new_tokens,
        "plain_tokens_per_s": tokens / theirs["seconds"],
        "ours_tokens_per_s": tokens / ours["seconds"],
        "ratio": theirs["seconds"] / ours["seconds"],
        "outputs_equal": sum(one == other for one, other in zip(ours["ids"], theirs["ids"], strict=True)),
        "long_prompt_tokens": LONG,
        **times,
        "speedup_l1": times["computed_s"] / times["l1_s"],
        "speedup_peer_l2": times["computed_s"] / times["peer_l2_s"],
        "bar_speedup_l1": 10,
        "start_s": start_s,
        "resident_bytes": resident,
    }


def main(
    model_path: Annotated[Path, typer.Option(help="The model.")] = ROOT / "build" / "models" / "smollm2-135m-instruct",
    requests: Annotated[int, typer.Option(help="Prompts at once.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens of each.")] = 300,
    new_tokens: Annotated[int, typer.Option(help="Tokens generated for each.")] = 48,
    repeats: Annotated[int, typer.Option(help="Long prompts timed.")] = 5,
) -> None:
    """Measure and write build/bench-engine.json."""
    result = asyncio.run(measure(model_path, requests, length, new_tokens, repeats))
    OUTPUT.write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))
    verdict = "met" if result["speedup_l1"] >= result["bar_speedup_l1"] else "MISSED"
    print(f"found in L1 {result['speedup_l1']:.1f} times sooner than computed, bar 10 {verdict}; {OUTPUT}")


if __name__ == "__main__":
    typer.run(main)
