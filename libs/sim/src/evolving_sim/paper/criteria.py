"""What must come out for the simulator to be believed: each claim with whether our runs bear it out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from evolving_sim.paper.compare import Measured, Row
from evolving_sim.paper.figures import Metric, Side

PREDICTED_TABLES = ("Table 3", "Table 4", "Table 5", "Table 6", "Table 8")
PREDICTED_SIDES = (f"_{Side.OURS}_{Side.DYNAMO}", f"_{Side.OURS}_{Side.BEST_STATIC}")
WITHIN = 0.25
SHARE_WITHIN = 0.8
SPREAD_MOST_PERCENT = 1.8
ADAPTATION_MOST = 0.003

DIAGNOSIS = ("§2.1, §2.2", "CC (90)")
ROUTING = ("§2.3", "CC (90), routing")
ROUTING_ORDER = (Side.BEST_STATIC, Side.STICKY, Side.LOAD_AWARE, Side.POOL_AT_START)
EVICTION = ("§2.3", "CC (126), eviction")
CONVERGENCE_SHAPES = ("3P6D", "4P5D", "5P4D", "6P3D")
CONVERGENCE = "§5.5"
ADAPTATION = ("§5.3", "CC (126), from 4P5D")


@dataclass(frozen=True, slots=True)
class Check:
    """One claim."""

    criterion: int
    claim: str
    met: bool | None  # None: this run didn't play what it takes
    found: str


def predicted(rows: Sequence[Row]) -> list[Row]:
    """Ratios of ours to Dynamo's and to the best static split's that nothing was fitted to."""
    return [
        row
        for row in rows
        if row.table in PREDICTED_TABLES and row.is_ratio and row.metric.endswith(PREDICTED_SIDES) and not row.fitted
    ]


def same_winner(row: Row) -> bool:
    """The side that is ahead in the paper is ahead here; where the paper has a tie, either is."""
    if not math.isfinite(row.ours):
        return False
    return row.paper == 1.0 or (row.paper > 1.0) == (row.ours > 1.0)


def within(row: Row) -> bool:
    """The ratio is the paper's, give or take `WITHIN`."""
    return math.isfinite(row.ratio) and abs(row.ratio - 1.0) <= WITHIN


def evaluate(rows: Sequence[Row], measured: Measured) -> list[Check]:
    """Every claim, in order."""
    return [*_prediction(rows), *_diagnosis(measured), *_stability(measured)]


def _prediction(rows: Sequence[Row]) -> list[Check]:
    of_tables = predicted(rows)
    if not of_tables:
        return [Check(1, "the same winner in every predicted row", None, "no predicted row was played")]
    winners, close = (sum(map(test, of_tables)) for test in (same_winner, within))
    count = len(of_tables)
    return [
        Check(1, "the same winner in every predicted row", winners == count, f"{winners} of {count}"),
        Check(
            1,
            f"within ±{WITHIN:.0%} of the paper's ratio in {SHARE_WITHIN:.0%} of them",
            close >= SHARE_WITHIN * count,
            f"{close} of {count} ({close / count:.0%})",
        ),
    ]


def _diagnosis(measured: Measured) -> list[Check]:
    return [
        _drift(measured, Side.ARROW, "Arrow-like ends with more prefill nodes than the best split has", 1),
        _drift(measured, Side.DYNAMO, "Dynamo-like ends with fewer prefill nodes than the best split has", -1),
        _ranks(measured, Metric.E2E_MEAN),
        _ranks(measured, Metric.TTFT_P95),
        *_eviction(measured),
    ]


def _drift(measured: Measured, side: Side, claim: str, sign: int) -> Check:
    best, last = (measured.get((*DIAGNOSIS, each), {}).get(Metric.PREFILL_NODES) for each in (Side.BEST_STATIC, side))
    if best is None or last is None:
        return Check(2, claim, None, "not played")
    return Check(2, claim, (last - best) * sign > 0, f"{last:g}, best {best:g}")


def _ranks(measured: Measured, metric: Metric) -> Check:
    claim = f"routing ranks as in §2.3 by {metric}: {' < '.join(ROUTING_ORDER)}"
    values = [measured.get((*ROUTING, side), {}).get(metric) for side in ROUTING_ORDER]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return Check(2, claim, None, "not played")
    ordered = all(a < b for a, b in pairwise(known))
    return Check(2, claim, ordered, " ".join(f"{value:.1f}" for value in known) + " s")


def _eviction(measured: Measured) -> list[Check]:
    """SGLang's static arm beside the same that evicts by branches' need."""
    lru, by_need = (measured.get((*EVICTION, side), {}) for side in (Side.BEST_STATIC, Side.OURS))
    claims = (
        (Metric.LOST_REUSE, "LRU loses more reuse than eviction by need: it drops branches that wait"),
        (Metric.KEPT_UNNEEDED, "LRU keeps more of what nobody needs: what was compacted, or ended"),
    )
    checks = []
    for metric, claim in claims:
        if metric not in lru or metric not in by_need:
            checks.append(Check(2, claim, None, "not played"))
        else:
            found = f"{lru[metric]:.2f} %, {by_need[metric]:.2f} %"
            checks.append(Check(2, claim, lru[metric] > by_need[metric], found))
    return checks


def _stability(measured: Measured) -> list[Check]:
    claim = f"mean E2E from four first splits within {SPREAD_MOST_PERCENT} %"
    converged = measured.get((CONVERGENCE, "mean E2E from four splits", Side.OURS), {})
    spread, ends = converged.get(Metric.SPREAD), converged.get(Metric.FINAL_SPLITS)
    one = "four first splits end on one"
    checks = [
        Check(3, claim, None, "not played")
        if spread is None
        else Check(3, claim, spread <= SPREAD_MOST_PERCENT, f"{spread:.1f} %"),
        Check(3, one, None, "not played") if ends is None else Check(3, one, ends == 1, f"{ends:g}, all seeds"),
    ]
    claim = f"adapting costs at most {ADAPTATION_MOST:.1%} of the throughput on the best split"
    adapted, fixed = (
        measured.get((*ADAPTATION, side), {}).get(Metric.THROUGHPUT) for side in (Side.OURS, Side.OURS_STATIC)
    )
    if adapted is None or fixed is None:
        return [*checks, Check(3, claim, None, "not played")]
    cost = round(1.0 - adapted / fixed, 3)  # the paper's own 6.25 and 6.27 requests/s are 0.32 %, which it calls 0.3 %
    return [*checks, Check(3, claim, cost <= ADAPTATION_MOST, f"{cost:.1%}")]
