"""What the iterations of SGLang's loop worked on, for the fit of a time model. Scheduler's thread."""

from __future__ import annotations

from typing import Any, NamedTuple

from evolving.core.timemodel import PrefillSums
from evolving.core.work import query_key_pairs

# What models call them in their configuration: the number of routed experts, and of those a token is sent to.
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")


class BatchWork(NamedTuple):
    """What one batch is about to work on: what `IterationMeter.add` takes after the time."""

    prefill: PrefillSums | None
    requests: int
    context_tokens: int


def experts_of(model_config: Any) -> tuple[int, int]:
    """(E, k) of the model; (0, 0): dense."""
    text = model_config.hf_text_config
    experts, per_token = (
        next((int(value) for name in names if isinstance(value := getattr(text, name, None), int)), 0)
        for names in (_EXPERTS, _EXPERTS_PER_TOKEN)
    )
    return (experts, per_token) if 0 < per_token <= experts else (0, 0)


def batch_work(batch: Any) -> BatchWork:
    """Before the batch runs."""
    if not batch.forward_mode.is_extend():
        return BatchWork(None, len(batch.reqs), sum(request.seqlen for request in batch.reqs))
    decoding = batch.decoding_reqs or () if batch.forward_mode.is_mixed() else ()
    prompts = batch.reqs[: len(batch.reqs) - len(decoding)]  # those that decode come last
    # (request, tokens to compute, tokens before them)
    chunks = [*zip(prompts, map(int, batch.extend_lens), map(int, batch.prefix_lens), strict=False)]
    first = [(request, before) for request, _, before in chunks if request.extend_batch_idx == 1]
    sums = PrefillSums(
        uncached_tokens=sum(new for _, new, _ in chunks),
        query_key_pairs=sum(query_key_pairs(new, before) for _, new, before in chunks),
        restored_tokens=sum(int(request.cached_tokens_host) for request, _ in first),
        cached_tokens=sum(before for _, before in first),
    )
    return BatchWork(sums, len(decoding), sum(request.seqlen for request in decoding))
