"""Configuration of the core: frozen, validated, a comment per field with unit and source."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class DecodeToPrefill(enum.StrEnum):
    """What a node's DECODE→PREFILL switch does to the counts of its copies."""

    KEEP = "keep"  # parts no PREFILL home claims are claimed by the node, then its DECODE homes go; KV stays in L2
    RESET = "reset"  # the paper, §4.1: counts 0, memory emptied


@dataclass(frozen=True, slots=True)
class DirectoryConfig:
    """How the directory keeps branches, counts and copies."""

    # Seconds without a running request or a live descendant after which a branch ends; the longest waits of the
    # traces (§2.1) are hours, a day is past them all.
    idle_ttl_s: float = 24 * 3600.0
    # Seconds an ended branch id stays refused.
    tombstone_s: float = 24 * 3600.0
    # Seconds without an event after which a running request counts as over (its gateway and node died).
    request_ttl_s: float = 3600.0
    # Finished requests remembered per branch, to answer replays and to accept what lands late.
    remembered_requests: int = 64
    # Longest run of the prefix index, in blocks. Longer runs make long matches faster and appends dearer.
    run_blocks_max: int = 256
    # Runs visited per tick while the copies of a lost node are swept, so that no event waits for all of them.
    sweep_runs_per_tick: int = 20_000
    # What a DECODE→PREFILL switch does (§4.1).
    decode_to_prefill: DecodeToPrefill = DecodeToPrefill.KEEP
    # Branches named at most in a block's view.
    block_view_branches_max: int = 100
    # Mismatches given at most by an audit.
    audit_mismatches_max: int = 100

    def __post_init__(self) -> None:
        for name in ("idle_ttl_s", "tombstone_s", "request_ttl_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0")
        for name in ("remembered_requests", "sweep_runs_per_tick", "block_view_branches_max", "audit_mismatches_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.run_blocks_max < 1:
            raise ValueError("run_blocks_max must be at least 1")
