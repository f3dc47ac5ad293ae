"""A tokenizer small enough to write down: one id a byte, a few merges, and ChatML's special tokens."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write(directory: Path) -> Tokenizer:
    """Write a model directory (no weights) and return its tokenizer. `<|im_end|>` ends an output."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("\u010a", "\u010a"), ("h", "i"), ("o", "k"), ("\u0120", "ok")]  # "\n\n", "hi", "ok", " ok"
    pieces = [*alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": TEMPLATE}))
    end = tokenizer.token_to_id("<|im_end|>")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    return tokenizer
