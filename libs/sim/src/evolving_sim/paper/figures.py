"""What the paper reports, number by number, with the table or section it is printed in.

Only what the simulator can speak to: not H200s, not ThunderAgent, not the accuracy of the fit. A number is kept as it
is printed, in the unit of its metric; what the paper prints twice is kept once, where it is more exact.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


class Side(enum.StrEnum):
    """Whose number it is."""

    OURS = "ours"  # Evolving Infra; on a split that stays where the table says so
    OURS_STATIC = "ours_static"  # the same without the planner, where one table has both
    DYNAMO = "dynamo"
    ARROW = "arrow"
    BEST_STATIC = "best_static"  # SGLang's PD disaggregation on its best split
    ASYNC_FETCH = "async_fetch"  # the same, KV fetched under the queue wait (Table D.5)
    STICKY = "sticky"  # §2.3's routing beside it
    LOAD_AWARE = "load_aware"
    POOL_AT_START = "pool_at_start"


class Metric(enum.StrEnum):
    """What is measured."""

    THROUGHPUT = "throughput"
    TTFT_MEAN = "ttft_mean"
    TTFT_P50 = "ttft_p50"
    TTFT_P95 = "ttft_p95"
    E2E_MEAN = "e2e_mean"
    E2E_P50 = "e2e_p50"
    E2E_P95 = "e2e_p95"
    TPOT_MEAN = "tpot_mean"
    PAUSE = "pause"
    QUEUE_WAIT = "queue_wait"
    IMBALANCE = "imbalance"
    IDLE = "idle"
    HIT_RATE = "hit_rate"
    IDEAL_HIT_RATE = "ideal_hit_rate"
    LOST_REUSE = "lost_reuse"
    UNCACHED_TOKENS = "uncached_tokens"
    SWITCHES = "switches"
    SWITCH_TIME = "switch_time"
    PREFILL_NODES = "prefill_nodes"
    SPREAD = "spread"
    FINAL_SPLITS = "final_splits"
    KEPT_UNNEEDED = "kept_unneeded"  # the paper gives no number for it

    @property
    def unit(self) -> str:
        """As the tables print it."""
        return _UNITS[self]


_UNITS = {
    Metric.THROUGHPUT: "requests/s",
    Metric.TTFT_MEAN: "s",
    Metric.TTFT_P50: "s",
    Metric.TTFT_P95: "s",
    Metric.E2E_MEAN: "s",
    Metric.E2E_P50: "s",
    Metric.E2E_P95: "s",
    Metric.TPOT_MEAN: "ms",
    Metric.PAUSE: "s, between an agent's requests",
    Metric.QUEUE_WAIT: "s, mean, before prefill",
    Metric.IMBALANCE: "wait of the most loaded prefill node / of the average one",
    Metric.IDLE: "% of prefill nodes' time",
    Metric.HIT_RATE: "% of prompt tokens",
    Metric.IDEAL_HIT_RATE: "% of prompt tokens",
    Metric.LOST_REUSE: "% of prompt tokens some earlier request computed",
    Metric.UNCACHED_TOKENS: "tokens/request",
    Metric.SWITCHES: "switches",
    Metric.SWITCH_TIME: "s, mean",
    Metric.PREFILL_NODES: "prefill nodes: at the end of a run that adapts, of the best split of one that does not",
    Metric.SPREAD: "% from the least to the greatest",
    Metric.FINAL_SPLITS: "splits that runs end on",
    Metric.KEPT_UNNEEDED: "% of the blocks held anywhere at the end that no live branch counts",
}

RATIO_METRICS = (
    Metric.THROUGHPUT,
    Metric.TTFT_MEAN,
    Metric.TTFT_P50,
    Metric.TTFT_P95,
    Metric.E2E_MEAN,
    Metric.E2E_P50,
    Metric.E2E_P95,
)
"""Those whose ratio between two sides is compared."""

RATIO_SIDES = (
    (Side.OURS, Side.DYNAMO),
    (Side.OURS, Side.BEST_STATIC),
    (Side.OURS, Side.OURS_STATIC),
    (Side.ASYNC_FETCH, Side.BEST_STATIC),
    (Side.DYNAMO, Side.BEST_STATIC),
    (Side.ARROW, Side.BEST_STATIC),
)
"""Whose ratios: the first to the second."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of the paper."""

    table: str  # "Table 3", "§5.4"
    row: str
    side: Side
    metric: Metric
    value: float
    fitted: bool = False  # something of our nodes or workload was fitted to it
    under: Side | None = None  # the paper prints a ratio to this side only, not what it is made of

    @property
    def name(self) -> str:
        """The metric and whose it is: `throughput_ours`, `ratio_throughput_ours_dynamo`."""
        return f"{self.metric}_{self.side}" if self.under is None else ratio_name(self.metric, self.side, self.under)


def ratio_name(metric: Metric, over: Side, under: Side) -> str:
    """Of the ratio of one side's value to another's."""
    return f"ratio_{metric}_{over}_{under}"


FITTED = frozenset(
    {
        ("Table 5", "CC (90)", Side.BEST_STATIC, Metric.THROUGHPUT),
        ("Table 5", "OSWorld (128)", Side.BEST_STATIC, Metric.THROUGHPUT),
        ("Table 5", "Putnam (224)", Side.BEST_STATIC, Metric.TTFT_MEAN),
        ("Table 6", "1.0 agents/min", Side.BEST_STATIC, Metric.E2E_P50),
        ("Table 8", "CC (126), 4P5D", Side.BEST_STATIC, Metric.LOST_REUSE),
        ("Table 8", "CC (126), 4P5D", Side.BEST_STATIC, Metric.THROUGHPUT),
    }
)
"""What the coefficients are fitted to (calibration.py): a row of a table, whose and which of its numbers."""

_Values = Mapping[str, Mapping[Side, Sequence[float | None]]]


def _figures(table: str, metrics: Sequence[Metric], rows: _Values) -> Iterator[Figure]:
    for row, sides in rows.items():
        for side, values in sides.items():
            for metric, value in zip(metrics, values, strict=True):
                if value is not None:
                    yield Figure(table, row, side, metric, value, (table, row, side, metric) in FITTED)


_O, _D, _B, _A = Side.OURS, Side.DYNAMO, Side.BEST_STATIC, Side.ARROW
_M = Metric

_TABLE_1 = _figures(
    "Table 1",
    (_M.SWITCHES, _M.SWITCH_TIME, _M.HIT_RATE, _M.LOST_REUSE),
    {
        "Putnam (224)": {_D: (2, 798, 96.59, 2.47), _O: (3, 2.3, 98.54, 0.48)},
        "Putnam (256)": {_D: (2, 798, 96.56, 2.48), _O: (2, 3.5, 98.85, 0.17)},
        "Putnam (288)": {_D: (3, 800, 96.42, 2.63), _O: (5, 3.4, 98.56, 0.46)},
        "CC (90)": {_D: (4, 681, 92.25, 5.13), _O: (1, 0.7, 97.08, 0.32)},
        "CC (108)": {_D: (4, 831, 92.62, 4.89), _O: (2, 1.9, 96.87, 0.48)},
        "CC (126)": {_D: (4, 813, 89.52, 7.78), _O: (2, 10.8, 96.25, 1.01)},
        "OSWorld (128)": {_D: (5, 666, 89.79, 4.00), _O: (1, 19.4, 93.79, 0.21)},
        "OSWorld (144)": {_D: (4, 730, 92.01, 1.85), _O: (1, 18.0, 93.79, 0.19)},
        "OSWorld (160)": {_D: (4, 748, 90.67, 3.24), _O: (1, 17.7, 93.84, 0.17)},
    },
)

_TABLE_2 = _figures(
    "Table 2",
    (_M.QUEUE_WAIT, _M.IMBALANCE),
    {
        "CC (90)": {_D: (11.4, 2.29), _O: (1.5, 1.79)},
        "CC (108)": {_D: (11.0, 2.38), _O: (2.2, 1.75)},
        "CC (126)": {_D: (11.2, 2.61), _O: (4.3, 1.85)},
    },
)

# The last two columns are §5.2's: P95 TTFT of two rows; where the planner settles: of CC 3P6D to 4P5D, of OSWorld 8P1D.
_TABLE_3 = _figures(
    "Table 3",
    (_M.THROUGHPUT, _M.E2E_MEAN, _M.PAUSE, _M.TTFT_P95, _M.PREFILL_NODES),
    {
        "Putnam (224)": {_D: (7.72, 19.1, 10.1, None, None), _O: (8.81, 15.5, 10.0, None, None)},
        "Putnam (256)": {_D: (8.37, 20.4, 10.1, None, None), _O: (9.20, 17.8, 10.0, None, None)},
        "Putnam (288)": {_D: (9.12, 21.7, 10.0, None, None), _O: (10.15, 18.6, 9.9, None, None)},
        "CC (90)": {_D: (2.48, 32.2, 15.4, 142, None), _O: (5.40, 7.9, 12.9, 10.2, 3)},
        "CC (108)": {_D: (2.48, 37.7, 17.1, None, None), _O: (5.78, 9.9, 13.5, None, None)},
        "CC (126)": {_D: (2.14, 54.4, 18.6, 228, None), _O: (5.85, 13.2, 14.1, 21.4, 4)},
        "OSWorld (128)": {_D: (1.93, 57.4, 1.0, None, None), _O: (4.30, 24.5, 1.4, None, 8)},
        "OSWorld (144)": {_D: (1.98, 66.3, 1.4, None, None), _O: (4.33, 28.1, 1.4, None, 8)},
        "OSWorld (160)": {_D: (1.68, 84.4, 1.2, None, None), _O: (4.38, 31.4, 1.3, None, 8)},
    },
)

# Latencies of the whole run: §5.4.
_TABLE_4 = _figures(
    "Table 4",
    (_M.THROUGHPUT, _M.E2E_MEAN, _M.TTFT_P95),
    {
        "Putnam (288)": {_D: (1.57, None, None), _B: (3.02, None, None), _O: (4.05, None, None)},
        "Mixed (144 + 72)": {_D: (2.21, None, None), _B: (3.64, None, None), _O: (3.99, None, None)},
        "OSWorld (144)": {_D: (2.05, None, None), _B: (3.10, None, None), _O: (4.43, None, None)},
        "Whole run": {_D: (1.94, 83.1, 130), _B: (3.25, 51.5, 68.4), _O: (4.16, 38.7, 36.3)},
    },
)

_TABLE_5 = _figures(
    "Table 5",
    (_M.PREFILL_NODES, _M.THROUGHPUT, _M.TTFT_MEAN, _M.TTFT_P95, _M.E2E_MEAN, _M.E2E_P95),
    {
        "Putnam (224)": {_B: (2, 9.00, 1.0, 2.5, 14.6, 74.0), _O: (2, 9.20, 0.6, 1.2, 14.0, 72.6)},
        "CC (90)": {_B: (4, 4.97, 4.8, 19.5, 9.2, 30.7), _O: (3, 5.44, 3.5, 9.7, 7.8, 22.2)},
        "OSWorld (128)": {_B: (6, 3.12, 35.3, 50.8, 35.8, 51.3), _O: (8, 4.33, 21.6, 35.6, 24.2, 39.2)},
    },
)

_TABLE_6 = _figures(
    "Table 6",
    (_M.TTFT_P50, _M.TTFT_P95, _M.E2E_P50),
    {
        "0.5 agents/min": {_O: (0.7, 6.8, 2.5), _B: (0.7, 10.8, 2.7), _D: (1.0, 22.0, 3.4)},
        "0.75 agents/min": {_O: (1.3, 17.8, 4.4), _B: (3.8, 57.0, 7.3), _D: (21.0, 234.5, 25.7)},
        "1.0 agents/min": {_O: (1.2, 12.3, 4.6), _B: (6.6, 139.0, 11.3), _D: (11.9, 122.1, 17.4)},
        "1.25 agents/min": {_O: (16.8, 55.0, 21.8), _B: (18.5, 1142.7, 21.1), _D: (16.2, 186.9, 21.0)},
        "1.5 agents/min": {_O: (68.4, 151.9, 74.7), _B: (637.8, 1377.1, 639.9), _D: (19.6, 251.1, 24.4)},
    },
)

# Table D.4 is the same.
_TABLE_8 = _figures(
    "Table 8",
    (
        _M.THROUGHPUT,
        _M.TTFT_MEAN,
        _M.TTFT_P95,
        _M.E2E_MEAN,
        _M.E2E_P95,
        _M.TPOT_MEAN,
        _M.HIT_RATE,
        _M.IDEAL_HIT_RATE,
        _M.LOST_REUSE,
        _M.UNCACHED_TOKENS,
    ),
    {
        "CC (126), 4P5D": {
            _B: (4.66, 15.3, 60.3, 19.7, 66.7, 4.6, 94.9, 97.2, 2.4, 7660),
            _O: (6.27, 4.5, 14.0, 11.2, 32.6, 7.9, 96.6, 97.3, 0.7, 5268),
        },
    },
)

# §2: throughput, and by how much Dynamo and Arrow are below the best fixed split's 4.9 requests/s; final splits.
_SECTION_2 = _figures(
    "§2.1, §2.2",
    (_M.THROUGHPUT, _M.LOST_REUSE, _M.SWITCHES, _M.SWITCH_TIME, _M.PREFILL_NODES),
    {
        "CC (90)": {
            _D: (4.9 * (1 - 0.49), 5.1, None, 681, 2),
            _A: (4.9 * (1 - 0.65), 55.5, 34, None, 8),
            _O: (None, 0.3, None, 0.7, None),
            _B: (4.9, None, None, None, 4),
        },
    },
)

_SECTION_2_3 = _figures(
    "§2.3",
    (_M.TTFT_P95, _M.E2E_MEAN),
    {
        "CC (90), routing": {
            _B: (27, 13),
            Side.STICKY: (34, 16),
            Side.LOAD_AWARE: (65, 34),
            Side.POOL_AT_START: (95, 38),
        },
    },
)

_SECTION_5_3 = _figures(
    "§5.3",
    (_M.THROUGHPUT,),
    {"CC (126), from 4P5D": {_B: (4.57,), Side.OURS_STATIC: (6.27,), _O: (6.25,)}},
)

_TABLE_D_5 = _figures(
    "Table D.5",
    (_M.THROUGHPUT, _M.IDLE, _M.TTFT_MEAN, _M.TTFT_P95, _M.E2E_MEAN, _M.E2E_P95),
    {
        "CC (126), 4P5D": {
            _B: (4.62, 23.6, 15.7, 56.4, 20.2, 64.5),
            Side.ASYNC_FETCH: (5.18, 14.4, 12.1, 42.8, 16.5, 50.7),
        },
    },
)

_SECTION_5_5 = _figures(
    "§5.5",
    (_M.SPREAD, _M.PREFILL_NODES, _M.FINAL_SPLITS),
    {
        "mean E2E from four splits": {_O: (1.8, None, 1)},
        "CC (126), from 3P6D": {_O: (None, 4, None)},
        "CC (126), from 4P5D": {_O: (None, 4, None)},
        "CC (126), from 5P4D": {_O: (None, 4, None)},
        "CC (126), from 6P3D": {_O: (None, 4, None)},
        "3,072 GPUs in 8 partitions": {_O: (42.4, None, None)},
    },
)

# The text calls the side with 142 s a fixed split; 142 s is Dynamo's figure of §5.2. A mean 16 % above Table 3's 7.9 s.
_SCALE = _figures(
    "§5.5",
    (_M.TTFT_P95, _M.E2E_MEAN),
    {
        "36 GPUs": {_D: (142, None), _O: (10.2, 7.9)},
        "256 GPUs": {_D: (418, None), _O: (13.7, 7.9 * 1.16)},
    },
)

_PARTITIONS = Figure("§5.5", "3,072 GPUs in 8 partitions", _O, _M.THROUGHPUT, 1.42, under=_B)

FIGURES: tuple[Figure, ...] = (
    *_SECTION_2,
    *_SECTION_2_3,
    *_TABLE_1,
    *_TABLE_2,
    *_TABLE_3,
    *_TABLE_4,
    *_TABLE_5,
    *_TABLE_6,
    *_TABLE_8,
    *_SECTION_5_3,
    *_TABLE_D_5,
    *_SECTION_5_5,
    *_SCALE,
    _PARTITIONS,
)
