"""What the planner hears: the work of legs (paper, section 4.2), and windows of iterations. Pure.

The ages of these messages are set when they are sent.
"""

from __future__ import annotations

from evolving.core.iterations import IterationSums, IterationWindow
from evolving.core.work import query_key_pairs
from evolving.internal.v1 import planner_pb2
from evolving.v1 import common_pb2
from evolving_node_agent.engines.port import CachedTokens


def prefill_sample(tenant: str, request_id: str, tokens: int, cached: CachedTokens) -> planner_pb2.WorkSample:
    """A prefill leg over `tokens`, of which `cached` were reused."""
    uncached = tokens - cached.total
    return planner_pb2.WorkSample(
        tenant=tenant,
        request_id=request_id,
        phase=common_pb2.PHASE_PREFILL,
        uncached_tokens=uncached,
        cached_tokens=cached.total,
        restored_tokens=cached.restored,
        query_key_pairs=query_key_pairs(uncached, cached.total),
    )


def decode_sample(
    tenant: str, request_id: str, output_tokens: int, iterations: int, context_tokens: float
) -> planner_pb2.WorkSample:
    """A decode leg that produced `output_tokens` in `iterations`, at a context of `context_tokens` in the mean."""
    return planner_pb2.WorkSample(
        tenant=tenant,
        request_id=request_id,
        phase=common_pb2.PHASE_DECODE,
        output_tokens=output_tokens,
        iterations=iterations,
        context_tokens=context_tokens,
    )


def window_message(incarnation: str, window: IterationWindow) -> planner_pb2.IterationWindow:
    """A window of the life `incarnation` of the engine."""
    return planner_pb2.IterationWindow(
        incarnation=incarnation,
        prefill=_sums(window.prefill),
        decode=_sums(window.decode),
        mixed=_sums(window.mixed),
        cold_iterations=window.cold_iterations,
    )


def _sums(sums: IterationSums) -> planner_pb2.IterationSums:
    return planner_pb2.IterationSums(
        iterations=sums.iterations,
        busy_s=sums.busy_s,
        uncached_tokens=sums.prefill.uncached_tokens,
        query_key_pairs=sums.prefill.query_key_pairs,
        restored_tokens=sums.prefill.restored_tokens,
        cached_tokens=sums.prefill.cached_tokens,
        requests=sums.requests,
        expert_share=sums.expert_share,
        context_tokens=sums.context_tokens,
    )
