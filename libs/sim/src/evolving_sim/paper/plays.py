"""One simulated run of an experiment of the paper, and what is kept of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from evolving_sim.paper.figures import Metric
from evolving_sim.results import Summary

WINDOW_S = 600.0

BEST = "best"
"""Instead of a split: whichever serves most of all that stay, found by shorter runs."""

SEARCH_FROM_S, SEARCH_TO_S = 900.0, 2100.0
"""What those are compared by."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a run that is looked at on its own."""

    name: str
    from_s: float
    to_s: float


@dataclass(frozen=True, slots=True)
class Play:
    """What is played. Equal plays are played once."""

    load: str  # of loads.LOADS: what is asked, of which machines
    arm: str  # of arms: which system answers
    shape: str  # the split to begin with, or BEST
    stretches: tuple[Stretch, ...]
    window_s: float = WINDOW_S  # of the planner
    slices: int = 10
    gate: str = "default"
    bursts_per_hour: float = 0.0
    seed: int = 1

    @property
    def end_s(self) -> float:
        """When the last stretch is over."""
        return max(stretch.to_s for stretch in self.stretches)

    @property
    def label(self) -> str:
        """For progress and reports."""
        return f"{self.load}, {self.arm} from {self.shape}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a play."""

    stretches: Mapping[str, Mapping[Metric, float]]  # by name of the stretch
    final_shape: str
    switches: tuple[tuple[float, str], ...] = ()  # when, and the split after it
    windows: tuple[float, ...] = ()  # requests/s of each 600 s
    searched: Mapping[str, float] = field(default_factory=dict)  # by split, requests/s in the runs of a search
    requests: int = 0
    wall_s: float = field(default=0.0, compare=False)

    def as_json(self) -> dict[str, Any]:
        """For runs.json; nan as null."""
        stretches = {
            name: {str(metric): value if math.isfinite(value) else None for metric, value in values.items()}
            for name, values in self.stretches.items()
        }
        return {
            "final_shape": self.final_shape,
            "switches": [list(switch) for switch in self.switches],
            "windows_requests_per_s": list(self.windows),
            "searched_requests_per_s": dict(self.searched),
            "requests": self.requests,
            "wall_s": round(self.wall_s, 1),
            "stretches": stretches,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Outcome:
        """What `as_json` wrote."""
        stretches = {
            name: {Metric(metric): math.nan if value is None else value for metric, value in values.items()}
            for name, values in data["stretches"].items()
        }
        switches = tuple((at_s, shape) for at_s, shape in data["switches"])
        windows = tuple(data["windows_requests_per_s"])
        searched = data["searched_requests_per_s"]
        return cls(stretches, data["final_shape"], switches, windows, searched, data["requests"], data["wall_s"])


_OF_SUMMARY: Mapping[Metric, tuple[str, float]] = {
    Metric.THROUGHPUT: ("requests_per_s", 1.0),
    Metric.TTFT_MEAN: ("ttft_s_mean", 1.0),
    Metric.TTFT_P50: ("ttft_s_p50", 1.0),
    Metric.TTFT_P95: ("ttft_s_p95", 1.0),
    Metric.E2E_MEAN: ("e2e_s_mean", 1.0),
    Metric.E2E_P50: ("e2e_s_p50", 1.0),
    Metric.E2E_P95: ("e2e_s_p95", 1.0),
    Metric.TPOT_MEAN: ("tpot_s_mean", 1e3),
    Metric.PAUSE: ("pause_s_mean", 1.0),
    Metric.QUEUE_WAIT: ("queue_s_mean", 1.0),
    Metric.IMBALANCE: ("most_loaded_wait_ratio", 1.0),
    Metric.IDLE: ("prefill_idle_share", 100.0),
    Metric.HIT_RATE: ("hit_rate", 100.0),
    Metric.IDEAL_HIT_RATE: ("ideal_hit_rate", 100.0),
    # The share of what could be reused, as Table 8 says.
    Metric.LOST_REUSE: ("lost_reuse_of_ideal", 100.0),
    Metric.UNCACHED_TOKENS: ("uncached_tokens_mean", 1.0),
    Metric.SWITCHES: ("switches", 1.0),
    Metric.SWITCH_TIME: ("switch_s_mean", 1.0),
}


def metrics_of(summary: Summary) -> dict[Metric, float]:
    """A summary in the units of the paper's tables."""
    return {metric: getattr(summary, name) * scale for metric, (name, scale) in _OF_SUMMARY.items()}
