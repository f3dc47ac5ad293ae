"""NVIDIA Dynamo's offline replay of recorded sessions, by the binding of `ai-dynamo-runtime`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dynamo._core import run_mocker_trace_replay

from evolving_sim.node_config import NodeConfig
from evolving_sim.traces import TraceSession

_MODEL = "replayed"


def write_sessions(sessions: Sequence[TraceSession], path: Path) -> None:
    """The sessions' main agents in the Weka/AgentX form, which the replay reads as it stands."""
    with path.open("w") as file:
        for session in sessions:
            rows = [
                {
                    "t": request.at_s,
                    "type": "s",
                    "model": _MODEL,
                    "in": request.input_tokens,
                    "out": max(1, request.output_tokens),
                    "hash_ids": request.block_ids.tolist(),
                    "api_time": request.service_s,
                    "think_time": request.think_s,
                }
                for request in session.agents[0].requests
            ]
            row = {
                "id": session.session_id,
                "models": [_MODEL],
                "block_size": session.block_tokens,
                "hash_id_scope": "local",
                "requests": rows,
            }
            file.write(json.dumps(row) + "\n")


def replay(path: Path, machine: NodeConfig, prefill: int, decode: int, concurrency: int) -> dict[str, Any]:
    """Its summary of the sessions on so many prefill and decode workers behind its KV router, closed loop."""
    engine = {
        "block_size": machine.block_tokens,
        "num_gpu_blocks": machine.l1_tokens // machine.block_tokens,
        "max_num_seqs": machine.decode_slots,
        "max_num_batched_tokens": machine.chunk_tokens,
    }
    result = run_mocker_trace_replay(
        [path],
        prefill_engine_args={"engine": {**engine, "worker_type": "prefill"}},
        decode_engine_args={"engine": {**engine, "worker_type": "decode"}},
        num_prefill_workers=prefill,
        num_decode_workers=decode,
        replay_concurrency=concurrency,
        router_mode="kv_router",
        trace_format="weka",
        model_name=_MODEL,
    )
    summary: dict[str, Any] = result.summary
    return summary
