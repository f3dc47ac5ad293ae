"""NVIDIA Dynamo's offline replay of recorded sessions, by the binding of `ai-dynamo-runtime`.

What it plays is what ours plays: the same sessions with their sub-agents, so many at a time, each request as long after
what it waits for as was thought. It reads the Weka/AgentX form too, but keeps the recorded times there: answers that
come sooner than they were recorded make nobody ask sooner. So the sessions are told as Agentic Mooncake's requests.

Its engines are not quite ours: iterations take what its own model says, host memory is left out, and each iteration
gives a token where ours give `accepted_tokens`: with as few iterations as ours it plays a third more requests a second.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from evolving_sim.node_config import NodeConfig
from evolving_sim.traces import TraceSession

_MODEL = "replayed"


def write_sessions(sessions: Sequence[TraceSession], path: Path) -> None:
    """The sessions, all with blocks of the same size, as Agentic Mooncake's requests: a header, then one a line."""
    header = {
        "schema": "dynamo.agentic_mooncake",
        "version": 2,
        "block_size": sessions[0].block_tokens,
        "hash_id_scope": "local",  # to the file: sessions that share no blocks need ids of their own
        "source": {"format": "weka", "digest": "recorded"},
    }
    with path.open("w") as file:
        file.write(json.dumps(header) + "\n")
        used_ids = 0
        for number, session in enumerate(sessions):
            first_id = used_ids
            used_ids += 1 + max(
                int(each.block_ids.max(initial=0)) for agent in session.agents for each in agent.requests
            )
            for row in _rows(number, session):
                ids = (row.pop("block_ids") + first_id).tolist()
                if row["input_length"] % session.block_tokens:  # the rest of the prompt, which nobody shares
                    ids.append(used_ids)
                    used_ids += 1
                file.write(json.dumps({**row, "hash_ids": ids}) + "\n")


def _rows(number: int, session: TraceSession) -> Iterator[dict[str, Any]]:
    for at, agent in enumerate(session.agents):
        for index, request in enumerate(agent.requests):
            yield {
                "request_id": f"{number}.{at}#{index}",
                "play_id": str(number),
                "source_play_ordinal": number,
                "session_id": f"{number}.{at}",
                "model": _MODEL,
                "input_length": request.input_tokens,
                "output_length": max(1, request.output_tokens),
                "block_ids": request.block_ids.astype("int64"),
                "not_before_ms": 0.0,
                "dependencies": [
                    {
                        "request_id": f"{number}.{awaited}#{last}",
                        "trigger": "completion",
                        "delay_ms": 1000 * request.think_s,
                        "relation": relation,
                    }
                    for awaited, last, relation in _awaited(session, at, index)
                ],
            }


def _awaited(session: TraceSession, at: int, index: int) -> Iterator[tuple[int, int, str]]:
    """What an agent's request waits for: the agent, the request, why. Sub-agents are all the main agent's."""
    if index:
        yield at, index - 1, "sequence"
    elif at:
        yield 0, session.agents[at].starts_after, "spawn"
    for other, agent in enumerate(session.agents):
        if at == 0 and other and agent.parent_waits and agent.starts_after == index - 1:
            yield other, len(agent.requests) - 1, "join"


def replay(path: Path, machine: NodeConfig, prefill: int, decode: int, concurrency: int) -> dict[str, Any]:
    """The sessions on so many prefill and decode workers behind its KV router, so many at a time.

    `wall_s` is what it says it took, to make the workers and play; reading the file and checking what waits for what
    comes before, and is told apart. Raises ImportError where there is no Dynamo, and what it raises itself.
    """
    os.environ.setdefault("DYN_LOG", "error")  # looked at on import; it tells of each request otherwise
    from dynamo._core import run_mocker_trace_replay

    engine = {
        "block_size": machine.block_tokens,
        "num_gpu_blocks": machine.l1_tokens // machine.block_tokens,
        "max_num_seqs": machine.decode_slots,
        "max_num_batched_tokens": machine.chunk_tokens,
        "kv_transfer_bytes_per_token": int(machine.kv_bytes_per_token),
        "kv_transfer_bandwidth": machine.transfer_bytes_per_s / 1e9,
    }
    begun_s = time.perf_counter()
    summary = run_mocker_trace_replay(
        [path],
        prefill_engine_args={"engine": {**engine, "worker_type": "prefill"}},
        decode_engine_args={"engine": {**engine, "worker_type": "decode"}},
        num_prefill_workers=prefill,
        num_decode_workers=decode,
        router_mode="kv_router",
        trace_format="agentic_mooncake",
        agentic_lanes=concurrency,
        execution_model=_MODEL,
    ).summary
    wall_s = summary["wall_time_ms"] / 1000
    return {
        "read_s": time.perf_counter() - begun_s - wall_s,
        "requests": summary["completed_requests"],
        "prompt_tokens_mean": summary["total_input_tokens"] / summary["num_requests"],
        "simulated_s": summary["duration_ms"] / 1000,
        "wall_s": wall_s,
        "ttft_mean_s": summary["mean_ttft_ms"] / 1000,
        "e2e_mean_s": summary["mean_e2e_latency_ms"] / 1000,
        "hit_rate": summary["prefix_cache_reused_ratio"],
    }
