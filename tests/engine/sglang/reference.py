"""What plain transformers generates, and by how much it preferred it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import count
from typing import Any

import torch
from engine.models import load_reference, tiny_model

from .driving import prompt

GAP = 1e-3  # logits of different chunkings differ by up to 1e-4: tokens that stand closer may differ


@cache
def _model() -> Any:
    return load_reference(tiny_model())


@torch.no_grad()
def reference(tokens: Sequence[int], new_tokens: int) -> tuple[list[int], float]:
    """Greedy output in float32, past the end token, and the smallest gap between the best two logits on the way."""
    model, past = _model(), None
    fed, output, smallest = torch.tensor([list(tokens)]), [], float("inf")
    for _ in range(new_tokens):
        step = model(input_ids=fed, past_key_values=past, use_cache=True)
        past = step.past_key_values
        best = step.logits[0, -1].topk(2)
        smallest = min(smallest, float(best.values[0] - best.values[1]))
        output.append(int(best.indices[0]))
        fed = best.indices[None, :1]
    return output, smallest


def clear_prompts(length: int, new_tokens: int, first_seed: int) -> Iterator[tuple[list[int], list[int]]]:
    """Prompts whose greedy output is beyond doubt, with that output."""
    for seed in count(first_seed):
        tokens = prompt(seed, length)
        output, gap = reference(tokens, new_tokens)
        if gap > GAP:
            yield tokens, output
