"""SGLang as it is, without our scheduler, for comparison: `python plain.py MODEL REQUESTS.json ANSWERS.json`.

REQUESTS.json: {"prompts": [[token ids]], "new_tokens": n, "flags": {engine arguments}}. All prompts are sent at once,
twice over: the first round warms it up. ANSWERS.json: {"ids": [[token ids]], "seconds": of the second round}. Without
CUDA the same stand-ins as in our engine make it start, in this process and in the ones SGLang spawns from it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from evolving_node_agent.engines.sglang.host import cpu

if not torch.cuda.is_available():  # also in SGLang's children, which import this file
    cpu.install()
    cpu.adapt()

import sglang

CPU_FLAGS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
}


def main(model: str, requests_file: str, answers_file: str) -> None:
    """Answer the requests."""
    requests: dict[str, Any] = json.loads(Path(requests_file).read_text())
    flags = {} if torch.cuda.is_available() else CPU_FLAGS
    engine = sglang.Engine(
        model_path=model, dtype="float32", skip_tokenizer_init=True, disable_overlap_schedule=True,
        grammar_backend="none", sleep_on_idle=True, disable_radix_cache=True, log_level="error",
        **flags, **requests["flags"],
    )  # fmt: skip
    sampling = {"max_new_tokens": requests["new_tokens"], "temperature": 0, "ignore_eos": True}
    for _ in range(2):
        began = time.monotonic()
        answers = engine.generate(input_ids=requests["prompts"], sampling_params=sampling)
        seconds = time.monotonic() - began
    ids = [answer["output_ids"] for answer in answers]
    Path(answers_file).write_text(json.dumps({"ids": ids, "seconds": seconds}))
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
