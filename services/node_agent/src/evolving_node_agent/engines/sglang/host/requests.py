"""Legs as SGLang requests."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req
from sglang.srt.runtime_context import get_exec
from sglang.srt.sampling.sampling_params import SamplingParams

from evolving_node_agent.engines.port import FinishReason, Sampling
from evolving_node_agent.engines.sglang.translate import id_array

from .legs import Leg


def make_request(leg: Leg, sampling: Sampling, max_new_tokens: int, priority: int, model_config: Any) -> Req:
    """A request whose earlier output is output to SGLang too, so that limits and penalties count it.

    `max_new_tokens` counts from the request's very first output token.
    """
    prompt = len(leg.tokens) - leg.generated
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        stop_token_ids=set(sampling.stop_token_ids),
        sampling_seed=sampling.seed,
    )
    params.normalize(None)
    request = Req(
        rid=leg.rid,
        origin_input_text="",
        origin_input_ids=id_array(leg.tokens[:prompt]),
        sampling_params=params,
        stream=True,
        # SGLang's ignore_eos would ignore stop tokens as well.
        eos_token_ids=None if sampling.ignore_eos else model_config.hf_eos_token_id,
        vocab_size=model_config.vocab_size,
        priority=priority,
        extra_key=leg.extra_key,
    )
    request.output_ids.extend(leg.tokens[prompt:].tolist())
    request.leg = leg
    return request


def is_abort(request: Req) -> bool:
    """Whether the request ended (or is about to) without a result."""
    return isinstance(request.finished_reason, FINISH_ABORT)


def finish_reason(request: Req) -> FinishReason | None:
    """Why a request ended by itself; None while it runs."""
    if request.finished_reason is None:
        return None
    if is_abort(request):
        return FinishReason.ABORTED
    return FinishReason.LENGTH if isinstance(request.finished_reason, FINISH_LENGTH) else FinishReason.STOP


@contextlib.contextmanager
def seeded(batch: Any) -> Iterator[None]:
    """Let requests that have a seed be sampled by it for one forward pass.

    SGLang looks at seeds in its deterministic mode only, where requests without one share a constant. Here those draw
    a fresh one each. Neither min_p nor SGLang's CUDA samplers know seeds; a batch that needs them goes unseeded.
    """
    info = batch.sampling_info
    seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
    supported = get_exec().kernel.sampling_backend == "pytorch" and not info.need_min_p_sampling
    if not supported or info.sampling_seed is not None or all(seed is None for seed in seeds):
        yield
        return
    drawn = [secrets.randbits(62) if seed is None else seed for seed in seeds]
    info.sampling_seed = torch.tensor(drawn, dtype=torch.int64, device=batch.device)
    try:
        yield
    finally:
        info.sampling_seed = None  # batches that merge must agree on having seeds


def restore_penalties(batch: Any, earlier_only: bool) -> None:
    """Let the batch's penalizers know output that was generated before the batch was made.

    SGLang counts each output token when the next one is about to be decoded. A request that enters with output behind
    it (resumed, transferred or retracted) would start from nothing. With `earlier_only` the last token is left to
    SGLang's own count, which adds it before the first decode step.
    """
    orchestrator = batch.sampling_info.penalizer_orchestrator
    if not orchestrator.is_required:
        return
    outputs = [request.output_ids[: -1 if earlier_only else None] for request in batch.reqs]
    for penalizer in orchestrator.penalizers.values():
        if penalizer.is_prepared():
            for row, output in enumerate(outputs):
                _count_output(penalizer, row, output)


def _count_output(penalizer: Any, row: int, output: Iterable[int]) -> None:
    ids = torch.tensor(list(output), dtype=torch.int64)
    if not len(ids):
        return
    if hasattr(penalizer, "cumulated_frequency_penalties"):
        target, weight = penalizer.cumulated_frequency_penalties[row], penalizer.frequency_penalties[row]
        target.scatter_add_(0, ids.to(target.device), weight.expand(len(ids)))
    if hasattr(penalizer, "cumulated_presence_penalties"):
        target, weight = penalizer.cumulated_presence_penalties[row], penalizer.presence_penalties[row]
        target[ids.to(target.device)] = weight
    if hasattr(penalizer, "cumulated_repetition_penalties"):
        target, weight = penalizer.cumulated_repetition_penalties[row], penalizer.repetition_penalties[row]
        target[ids.to(target.device)] = weight
