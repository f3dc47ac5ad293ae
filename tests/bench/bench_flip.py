"""What a role switch costs running streams: the largest gap between tokens, with a flip and without one.

    make bench-flip        (or: python tests/bench/bench_flip.py --model-path DIR --flips 5)

Streams run all the time on a cluster of three real nodes; every stream that ends is replaced. Windows with a flip in
them alternate with windows of the same length without one, so both see the same machine. Writes
build/bench-flip.json. The bar: median of the largest gaps of the flip windows at most 1.5 times that of the others.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer

from evolving.v1 import common_pb2, planner_pb2, planner_pb2_grpc
from evolving_client import Client, EvolvingError, Tokens

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "deploy" / "local"))
from cluster import DEFAULT_MODEL, ROOT, ClusterSpec, LocalCluster

OUTPUT = ROOT / "build" / "bench-flip.json"


class Streams:
    """Streams that never stop, and when each of their tokens came."""

    def __init__(self, client: Client, count: int, tokens: int) -> None:
        self._client, self._count, self._tokens = client, count, tokens
        self._seeds = itertools.count()
        self.arrivals: list[tuple[float, float]] = []  # (monotonic second, gap before it)
        self.finished = 0
        self.failures: list[str] = []

    async def run(self) -> None:
        """Keep `count` streams running until cancelled."""
        await asyncio.gather(*(self._stream() for _ in range(self._count)))

    async def _stream(self) -> None:
        while True:
            prompt = f"Count on from {next(self._seeds) * 17}, one number after the other:"
            last: float | None = None
            try:
                async for event in self._client.generate(text=prompt, max_tokens=self._tokens, ignore_eos=True):
                    if isinstance(event, Tokens):
                        now = time.monotonic()
                        if last is not None:
                            self.arrivals.append((now, now - last))
                        last = now
                self.finished += 1
            except EvolvingError as error:  # a finding of this benchmark
                self.failures.append(repr(error))
                await asyncio.sleep(0.5)

    def largest_gap_s(self, begin_s: float, end_s: float) -> float:
        """The largest gap that touches a window."""
        return max((gap for at, gap in self.arrivals if at >= begin_s and at - gap <= end_s), default=0.0)


async def measure(cluster: LocalCluster, planner: str, streams: int, flips: int, window_s: float) -> dict[str, Any]:
    """Alternate windows with and without a flip of node-b, back and forth."""
    windows: list[dict[str, Any]] = []
    async with Client(cluster.gateway_address) as client, grpc.aio.insecure_channel(planner) as channel:
        stub = planner_pb2_grpc.PlannerServiceStub(channel)
        load = Streams(client, streams, tokens=96)
        task = asyncio.create_task(load.run())
        await asyncio.sleep(window_s)  # every stream has tokens before the first window
        roles = itertools.cycle([common_pb2.ROLE_DECODE, common_pb2.ROLE_PREFILL])
        for number in range(2 * flips):
            flip = number % 2 == 1
            begin = time.monotonic()
            if flip:
                changes = planner_pb2.RoleChanges(roles={"node-b": next(roles)})
                await stub.ProposeSplit(
                    planner_pb2.ProposeSplitRequest(changes=changes, reason="benchmark"), timeout=10
                )
            await asyncio.sleep(window_s)
            windows.append({"flip": flip, "largest_gap_s": load.largest_gap_s(begin, time.monotonic())})
            print(f"window {number + 1} of {2 * flips}: {windows[-1]}", flush=True)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    gaps = {kind: [w["largest_gap_s"] for w in windows if w["flip"] is kind] for kind in (True, False)}
    flip_s, still_s = statistics.median(gaps[True]), statistics.median(gaps[False])
    return {
        "streams": streams,
        "flips": flips,
        "window_s": window_s,
        "flip_gap_median_s": flip_s,
        "still_gap_median_s": still_s,
        "ratio": flip_s / still_s,
        "bar": 1.5,
        "finished_streams": load.finished,
        "failed_streams": len(load.failures),
        "failures": load.failures[:5],
        "windows": windows,
    }


def main(
    model_path: Annotated[Path, typer.Option(help="Model of the nodes.")] = DEFAULT_MODEL,
    engine: Annotated[str, typer.Option(help="sglang or mock.")] = "sglang",
    streams: Annotated[int, typer.Option(help="Streams at once.")] = 8,
    flips: Annotated[int, typer.Option(help="Flips of node-b.")] = 6,
    window_s: Annotated[float, typer.Option(help="Length of a window, seconds.")] = 12.0,
) -> None:
    """Measure and write build/bench-flip.json."""
    state = ROOT / "build" / "bench-flip-cluster"
    spec = ClusterSpec(
        state_dir=state, engine=engine, model_path=model_path, gateway_port=0, planner_flags=("--mode", "manual")
    )
    cluster = LocalCluster(spec, print)
    cluster.start()
    try:
        planner = cluster.processes["planner"].address
        result = asyncio.run(measure(cluster, planner, streams, flips, window_s))
    finally:
        cluster.stop()
    OUTPUT.write_text(json.dumps(result, indent=1))
    verdict = "met" if result["ratio"] <= result["bar"] else "MISSED"
    print(f"largest gap with a flip {result['flip_gap_median_s']:.3f} s, without {result['still_gap_median_s']:.3f} s:")
    print(f"{result['ratio']:.2f} times, bar 1.5 {verdict}; {result['failed_streams']} streams failed; {OUTPUT}")


if __name__ == "__main__":
    typer.run(main)
