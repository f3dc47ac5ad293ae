"""How well the fitted time model tells iterations it was not fitted to, on the real small model (paper, figure 5).

    make bench-fit        25 minutes (or: python tests/bench/bench_fit.py --warm-up-s 60 --repeats 2)

One SGLang engine on CPU runs both phases under random load; equations 1 and 2 are fitted to windows of a second. Then
it runs settings the fit never saw, in another order in each repeat, one kind of iteration at a time. Errors are means
over all of those of |predicted − measured| / measured; repeat noise is how far one repeat of a setting lies from the
mean of its others, which no model can tell. Beside it, prefill is predicted from total prompt length as Arrow does:
fitted to the same windows, which keep no sum of squares, and, with the square, to the very samples it is judged on.
Writes build/bench-fit.json. The bars: each error at most max(10 %, 1.5 × repeat noise), aim 7 %, and either of Arrow's
at least three times ours. Exits with 1 when one is missed.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from bench.fit_errors import KINDS, Sample, TotalLength, bars, mean_error, repeat_noise  # noqa: E402
from bench.fit_load import Recorder, Settings, warm_up  # noqa: E402
from engine.sglang.driving import Node  # noqa: E402

from evolving.core.fit import fit_decode, fit_prefill  # noqa: E402
from evolving_node_agent.engines.sglang import SglangConfig, SglangEngine  # noqa: E402

OUTPUT = ROOT / "build" / "bench-fit.json"


async def start(model: Path) -> Node:
    """A started engine."""
    config = SglangConfig(
        str(model),
        model_name="bench",
        l1_tokens=12_288,
        l2_tokens=24_576,
        max_prompt_tokens=3072,
        log_path=str(ROOT / "build" / "bench-fit-engine.log"),
    )
    engine = SglangEngine(config)
    return Node("bench", engine, await engine.start())


async def measure(model: Path, warm_up_s: float, window_s: float, repeats: int, some: int) -> dict[str, Any]:
    """All of it."""
    node = await start(model)
    recorder = Recorder(node, window_s)
    tasks = [asyncio.create_task(node.listen()), asyncio.create_task(recorder.follow())]
    draw = random.Random(11)
    try:
        await warm_up(node, draw, warm_up_s)
        windows = tuple(recorder.windows)
        settings = Settings(node, recorder, draw)
        await settings.prepare()
        samples, runs = list[Sample](), 0
        for repeat in range(repeats):
            names = settings.names()[:: max(1, len(settings.names()) // some) if some else 1]
            for name in draw.sample(names, len(names)):
                samples += await settings.run(name)
            runs += len(names)
            print(f"repeat {repeat + 1} of {repeats}: {len(samples)} samples of {runs} runs", flush=True)
    finally:
        await node.engine.stop(0)
        await asyncio.gather(*tasks)
    how = {"warm_up_s": warm_up_s, "window_s": window_s, "repeats": repeats, "runs": runs}
    return evaluate(windows, samples) | how


def evaluate(windows: tuple[Any, ...], samples: list[Sample]) -> dict[str, Any]:
    """Fit to the windows, predict the samples."""
    prefill, decode = fit_prefill(windows), fit_decode(windows)
    if prefill is None or decode is None:
        raise RuntimeError(f"{len(windows)} windows are too few for a fit: warm up for longer")
    counts = {kind: sum(sample.kind == kind for sample in samples) for kind in KINDS}
    if not all(counts.values()):
        raise RuntimeError(f"a kind was never measured: {counts}")
    prompts = [sample for sample in samples if sample.kind.startswith("prefill")]
    by_length, at_best = TotalLength.of_windows(windows), TotalLength.of_samples(prompts)
    predicted = [
        prefill.coefficients.c0_s * (sample.sums.iterations - 1)
        + prefill.coefficients.prefill_iteration_s(sample.sums.prefill)
        if sample.kind.startswith("prefill")
        else decode.coefficients.d0_s * (sample.sums.iterations - 1)
        + decode.coefficients.decode_iteration_s(sample.sums.requests, sample.sums.context_tokens)
        for sample in samples
    ]
    return {
        **mean_error(samples, predicted),
        "repeat_noise": repeat_noise(samples),
        "prefill_total_length_model": by_length.error(prompts),  # fitted to the same windows
        "prefill_total_length_model_at_best": at_best.error(prompts),  # fitted, with a square, to what it is judged on
        "prefill_fit": asdict(prefill),
        "decode_fit": asdict(decode),
        "windows": len(windows),
        "counts": counts,
        "samples": [
            {
                "setting": each.setting,
                "measured_s": each.sums.busy_s / each.sums.iterations,
                "error": value / each.s - 1,
            }
            for each, value in zip(samples, predicted, strict=True)
        ],
    }


def main(
    model_path: Annotated[Path, typer.Option(help="The model.")] = ROOT / "build" / "models" / "smollm2-135m-instruct",
    warm_up_s: Annotated[float, typer.Option(help="Random load that is fitted, seconds.")] = 240.0,
    window_s: Annotated[float, typer.Option(help="Length of a row of the fit, seconds.")] = 1.0,
    repeats: Annotated[int, typer.Option(help="Runs of each held-out setting.")] = 4,
    some: Annotated[int, typer.Option(help="About so many settings instead of all; 0: all.")] = 0,
) -> None:
    """Measure, write build/bench-fit.json, and exit with 1 when a bar is missed."""
    began_s = time.monotonic()
    result = asyncio.run(measure(model_path, warm_up_s, window_s, repeats, some))
    result["seconds"] = time.monotonic() - began_s
    OUTPUT.write_text(json.dumps(result, indent=1))
    for kind in KINDS:
        print(f"{kind:15s} error {result[kind]:.3f}, repeat noise {result['repeat_noise'][kind]:.3f}")
    for name in ("prefill_total_length_model", "prefill_total_length_model_at_best"):
        print(f"{name}: {result[name]:.3f}")
    judged = bars(result)
    print(*judged, OUTPUT, sep="\n")
    raise typer.Exit(0 if all(bar.met for bar in judged) else 1)


if __name__ == "__main__":
    typer.run(main)
