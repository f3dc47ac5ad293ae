"""What an engine says of itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from evolving.core.iterations import IterationMeter
from evolving.core.pool import NodePool
from evolving_node_agent.engines.mock.config import MockConfig
from evolving_node_agent.engines.mock.fetching import ReadMeter
from evolving_node_agent.engines.mock.legs import DecodeLeg, DecodeStage, Leg, PrefillLeg, PrefillStage
from evolving_node_agent.engines.port import EngineStatus, Tier


@dataclass(slots=True)
class Progress:
    """Counts since the start of a life."""

    meter: IterationMeter
    iterations: int = 0
    prefill_iterations: int = 0
    prefill_tokens: int = 0


def engine_status(
    config: MockConfig,
    pool: NodePool,
    reads: ReadMeter,
    progress: Progress,
    queue: Iterable[PrefillLeg],
    legs: Iterable[Leg],
) -> EngineStatus:
    """The state now. queue: legs not taken yet, by rank; legs: all."""
    size = config.block_tokens
    prefills, decodes = list[PrefillLeg](), list[DecodeLeg]()
    for leg in legs:
        if isinstance(leg, PrefillLeg):
            prefills.append(leg)
        else:
            decodes.append(leg)
    batch = [leg for leg in decodes if leg.stage is DecodeStage.RUNNING]
    reserved = [leg for leg in decodes if leg.stage is DecodeStage.PULLING]
    waiting = [(leg, *_here_and_coming(pool, leg)) for leg in queue]
    return EngineStatus(
        queued={leg.job.leg_id: len(leg.job.tokens) - here * size for leg, here, _ in waiting},
        prefilling={leg.job.leg_id: leg.left for leg in prefills if leg.stage is PrefillStage.RUNNING},
        holding=sum(leg.stage is PrefillStage.HOLDING for leg in prefills),
        decoding=len(batch),
        decode_context_tokens=sum(leg.context_tokens for leg in batch),
        reserved=len(reserved),
        reserved_context_tokens=sum(leg.context_tokens for leg in reserved),
        l1_used_tokens=pool.used(Tier.L1) * size,
        l2_used_tokens=pool.used(Tier.L2) * size,
        iterations=progress.iterations,
        prefill_iterations=progress.prefill_iterations,
        prefill_tokens=progress.prefill_tokens,
        l2_zero_tokens=pool.zero_l2 * size,
        fetch_backlog_tokens=sum(coming for _, _, coming in waiting) * size,
        fetching_blocks=reads.blocks_under_way,
        fetched_tokens=reads.blocks_fetched * size,
        fetch_busy_s=reads.busy_s,
        ran=progress.meter.totals(),
    )


def _here_and_coming(pool: NodePool, leg: PrefillLeg) -> tuple[int, int]:
    """Of a waiting leg's reusable blocks: how many are here, and how many are still to come from peers."""
    here = pool.held(leg.kv.names, leg.reusable_blocks)
    return here, 0 if leg.fetch.over else max(0, leg.fetch.until - here)
