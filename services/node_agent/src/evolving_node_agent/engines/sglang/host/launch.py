"""SGLang, started as a library: its command line, its hooks, its scheduler."""

from __future__ import annotations

import gc
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from evolving_node_agent.engines.port import EngineInfo
from evolving_node_agent.engines.sglang.config import SglangConfig

from .inbox import Inbox
from .measuring import experts_of
from .transport import Transport

EVICTION_POLICY = "branch_needs"  # what SGLang calls our eviction order
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",  # the eviction order is ours
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "evolving_node_agent.engines.sglang.host.served",  # one model, not all there are
}
_FLAGS_CPU = (
    "--device=cpu",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--disable-cuda-graph",
)


def arguments(config: SglangConfig, cuda: bool) -> list[str]:
    """SGLang's command line. A later flag wins over an earlier one."""
    # Rows for every request that may hold KV at once.
    rows = config.decode_slots + config.prefill_slots
    return [
        f"--model-path={config.model_path}",
        f"--dtype={config.dtype}",
        f"--page-size={config.block_tokens}",
        f"--max-total-tokens={config.l1_tokens}",
        f"--chunked-prefill-size={config.chunk_tokens}",
        f"--max-running-requests={rows}",
        "--grammar-backend=none",
        "--skip-tokenizer-init",
        "--skip-server-warmup",
        "--disable-overlap-schedule",
        "--enable-priority-scheduling",
        "--disable-priority-preemption",
        # Decode first, then at most one chunk.
        "--prefill-decode-interval=1",
        "--prefill-decode-interval-min-bs=1",
        f"--radix-eviction-policy={EVICTION_POLICY}",
        "--enable-hierarchical-cache",
        f"--hicache-ratio={config.l2_tokens / config.l1_tokens}",
        "--hicache-write-policy=write_through",
        "--hicache-mem-layout=page_first_direct",
        "--hicache-io-backend=direct",
        *(() if cuda else _FLAGS_CPU),
        *config.extra_flags,
    ]


def build_scheduler(config: SglangConfig, inbox: Inbox) -> Any:
    """Load SGLang with our plugin and construct its scheduler, model and pools. Takes seconds to minutes."""
    # The hundreds of thousands of objects of these modules stay: no use in looking through them again and again.
    gc.disable()
    upstream = _import_sglang(config, inbox)
    gc.freeze()
    gc.enable()
    import torch
    from sglang.srt.server_args import PortArgs, prepare_server_args

    server_args = prepare_server_args(arguments(config, torch.cuda.is_available()))
    port_args = PortArgs.init_new(server_args)
    world_rank = upstream.spawn_world_rank(server_args, tp_rank=0, pp_rank=0)
    ranks = upstream.SpawnRanks(world_rank=world_rank, dp_rank=None, gpu_id=0)
    upstream.publish(server_args, role="scheduler", ranks=ranks)
    return upstream.Scheduler(server_args, port_args)


def _import_sglang(config: SglangConfig, inbox: Inbox) -> Any:
    """SGLang's scheduler module, with our plugin in place."""
    import torch

    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not torch.cuda.is_available():
        from . import cpu

        cpu.install()
    from . import plugin

    plugin.activate(config, inbox)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.managers import scheduler

    return scheduler


def open_transport(config: SglangConfig, secret: bytes) -> Transport:
    """The transport of the config, listening. Raises RuntimeError, OSError, ValueError."""
    if config.transport == "tcp":
        import torch

        from .tcp_transport import TcpTransport

        if torch.cuda.is_available():
            raise ValueError("transport tcp moves host memory only, and this engine's L1 is on a GPU: take Mooncake's")
        port = config.port + 1 if config.port else 0
        return TcpTransport(config.bind_host, config.peer_host, port, secret)
    from .mooncake_transport import MooncakeTransport

    return MooncakeTransport(config.peer_host, config.transport.removeprefix("mooncake-"), config.rdma_device)


def engine_info(scheduler: Any, config: SglangConfig, incarnation: str) -> EngineInfo:
    """The facts of this life of the engine; addresses are not known yet."""
    model = config.model_name or Path(config.model_path).resolve().name
    experts, experts_per_token = experts_of(scheduler.model_config)
    return EngineInfo(
        incarnation=incarnation,
        model=model,
        kv_format=_kv_format(scheduler, config, model),
        block_tokens=config.block_tokens,
        vocab_size=int(scheduler.model_config.vocab_size),
        max_prompt_tokens=min(config.prompt_limit_tokens, int(scheduler.max_req_len) - 2),
        max_context_tokens=int(scheduler.model_config.context_len),
        l1_tokens=int(scheduler.max_total_num_tokens),
        reserve_tokens=config.reserve_tokens,
        l2_tokens=config.l2_tokens,
        decode_slots=config.decode_slots,
        chunk_tokens=config.chunk_tokens,
        kv_bytes_per_token=_kv_bytes_per_token(scheduler),
        transfer_address="",
        pool_address="",
        pid=os.getpid(),
        experts=experts,
        experts_per_token=experts_per_token,
    )


def _kv_bytes_per_token(scheduler: Any) -> int:
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    return sum(int(layer[0].numel() * layer.element_size()) for layer in (*pool.k_buffer, *pool.v_buffer))


def _kv_format(scheduler: Any, config: SglangConfig, model: str) -> str:
    """Equal for engines whose KV bytes mean the same: same model files, dtype, page shape and rank layout."""
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    shape = (len(pool.k_buffer), *pool.k_buffer[0].shape[1:])
    return f"{model}:{_model_revision(Path(config.model_path))}:{pool.k_buffer[0].dtype}:{shape}:{config.block_tokens}"


def _model_revision(directory: Path) -> str:
    """A digest of the model's config and of the names and sizes of its weights."""
    weights = sorted((path.name, path.stat().st_size) for path in directory.glob("*.safetensors"))
    config = json.loads((directory / "config.json").read_text())
    return hashlib.sha256(json.dumps([config, weights], sort_keys=True).encode()).hexdigest()[:16]
