"""SGLang's own server, ready to switch between prefill and decode: `python upstream_server.py [its flags]`.

Without CUDA the same stand-ins as in our engine make it start, in this process and in the ones SGLang spawns from it,
which import this file too.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "60")

import torch

from evolving_node_agent.engines.sglang.host import cpu

_CPU_FLAGS = (
    "--device=cpu",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--disable-cuda-graph",
)
_FLAGS = (
    "--dtype=float32",
    "--max-total-tokens=4096",
    "--grammar-backend=none",
    "--skip-tokenizer-init",
    "--skip-server-warmup",
    "--disable-overlap-schedule",
    "--sleep-on-idle",
    "--enable-cache-report",
    "--log-level=warning",
    "--enable-pd-role-switch",
    "--disaggregation-transfer-backend=mooncake_tcp",
    "--disaggregation-decode-retraction-backup=none",
    "--disaggregation-decode-enable-radix-cache",
)

if not torch.cuda.is_available():
    cpu.install()
    cpu.adapt()
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

    MooncakeKVSender.supports_host_tensor_indices = False  # that path records CUDA events


def main() -> None:
    """Serve until killed."""
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    flags = _FLAGS if torch.cuda.is_available() else (*_CPU_FLAGS, *_FLAGS)
    run_server(prepare_server_args([*flags, *sys.argv[1:]]))


if __name__ == "__main__":
    main()
