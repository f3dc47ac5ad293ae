"""What the iterations of SGLang's loop worked on, for the fit of a time model. Scheduler's thread."""

from __future__ import annotations

from typing import Any, NamedTuple

from evolving.core.timemodel import PrefillSums
from evolving.core.work import PrefillWork, sum_work

from .legs import Phase, PrefillLeg

# What models call them in their configuration: the number of routed experts, and of those a token is sent to.
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")


class BatchWork(NamedTuple):
    """What one batch is about to work on: what `IterationMeter.add` takes after the time."""

    prefill: PrefillSums | None
    reused_tokens: int
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
    """Before the batch runs, and before its legs leave the queue: that is how their first chunk is known."""
    if not batch.forward_mode.is_extend():
        return BatchWork(None, 0, len(batch.reqs), sum(request.seqlen for request in batch.reqs))
    decoding = batch.decoding_reqs or () if batch.forward_mode.is_mixed() else ()
    prompts = len(batch.reqs) - len(decoding)  # those that decode come last
    works, reused_tokens = [], 0
    for request, new, before in zip(batch.reqs[:prompts], batch.extend_lens, batch.prefix_lens, strict=False):
        first = isinstance(request.leg, PrefillLeg) and request.leg.phase is Phase.QUEUED
        works.append(PrefillWork(int(new), int(before), int(request.cached_tokens_host) if first else 0))
        reused_tokens += int(before) if first else 0
    return BatchWork(sum_work(works), reused_tokens, len(decoding), sum(request.seqlen for request in decoding))
