"""Configuration of the core: frozen, validated, a comment per field with unit and source."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass


class DecodeToPrefill(enum.StrEnum):
    """What a node's DECODE→PREFILL switch does to the counts of its copies."""

    KEEP = "keep"  # parts no PREFILL home claims are claimed by the node, then its DECODE homes go; KV stays in L2
    RESET = "reset"  # the paper, §4.1: counts 0, memory emptied


class EvictionPolicy(enum.StrEnum):
    """What a node evicts first."""

    AGENT = "agent"  # the least needed by branches, then the longest unused (§4.4)
    LRU = "lru"  # the longest unused; for comparison


class FetchStart(enum.StrEnum):
    """When a prefill leg's blocks are fetched from peers."""

    ENQUEUE = "enqueue"  # at once: the fetch runs while the leg waits (§4.4)
    # When the leg's turn to be computed has come, and none behind it is taken before: the time of the fetch is added to
    # that of the prefill, as it is without fetching under the wait (§4.4). For comparison.
    ADMISSION = "admission"


class FetchRule(enum.StrEnum):
    """What of a prompt routing plans to fetch from peers."""

    SOONER = "sooner"  # as much as makes the first token come soonest (§4.4)
    ALWAYS = "always"  # all they hold, also where computing were sooner; for comparison
    NEVER = "never"  # nothing: KV is used where it lies, or computed; for comparison


class Gate(enum.StrEnum):
    """How sure the planner must be of a gain before it switches."""

    PAPER = "paper"  # mean gain above twice its standard error (§4.3)
    # PAPER's, the error widened where slices resemble their neighbours, with a floor under the gain; where the last
    # window is not sure, earlier ones under the same split count too.
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """How the planner measures and when it switches. Out-of-range values raise ValueError."""

    # Seconds of measurements a decision looks back on (§4.3).
    window_s: float = 600.0
    # Slices of a window, each of which gives one gain per candidate (§4.3).
    slices: int = 10
    # Completed requests of which both the prefill and the decode are known, below which a slice says nothing.
    slice_completions_least: int = 5
    # Slices that must say something; with fewer the split stays.
    slices_valid_least: int = 8
    # The test a gain has to pass.
    gate: Gate = Gate.DEFAULT
    # Windows under one split, the last included, that may count together where the last alone is not sure; 1: the last
    # alone. Default gate only.
    evidence_windows: int = 6
    # Gain below which a switch isn't worth it, share of Θ; the paper's gate has none.
    gain_floor: float = 0.01
    # Seconds after a change of the split without a switch by throughput (§4.3).
    cooldown_s: float = 120.0

    def __post_init__(self) -> None:
        if not 0 < self.window_s < math.inf:
            raise ValueError("window_s must be finite and above 0")
        if not 2 <= self.slices_valid_least <= self.slices:
            raise ValueError("slices_valid_least must be at least 2 and at most slices")
        if self.slice_completions_least < 1:
            raise ValueError("slice_completions_least must be at least 1")
        if self.evidence_windows < 1:
            raise ValueError("evidence_windows must be at least 1")
        if not (0 <= self.gain_floor < math.inf and 0 <= self.cooldown_s < math.inf):
            raise ValueError("gain_floor and cooldown_s must be finite and at least 0")

    @property
    def slice_s(self) -> float:
        """Seconds of one slice."""
        return self.window_s / self.slices


@dataclass(frozen=True, slots=True)
class FetchConfig:
    """Bounds of a node's reads from peers. Out-of-range values raise ValueError."""

    readers: int = 4  # reads under way at once
    chunk_blocks: int = 32  # most blocks of one read; readers × chunk_blocks host pages are buffers at most
    bytes_per_s: float = math.inf  # what all reads together may bring
    suspect_s: float = 10.0  # a peer whose read failed is not asked again for this long

    def __post_init__(self) -> None:
        if self.readers < 1 or self.chunk_blocks < 1:
            raise ValueError(f"readers and chunk_blocks must be at least 1, got {self.readers}, {self.chunk_blocks}")
        if not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s must be positive, got {self.bytes_per_s}")
        if not self.suspect_s >= 0:
            raise ValueError(f"suspect_s must be at least 0, got {self.suspect_s}")


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
