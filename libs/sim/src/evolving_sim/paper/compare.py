"""The paper's numbers beside ours: rows of `tables.json`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evolving_sim.paper.figures import FIGURES, RATIO_METRICS, RATIO_SIDES, Figure, Metric, Side, ratio_name

Place = tuple[str, str, Side]
"""Where a number stands: table, row, whose."""

Measured = Mapping[Place, Mapping[Metric, float]]
"""What was simulated. A place may be missing, as may a metric; nan: there was nothing to measure."""


@dataclass(frozen=True, slots=True)
class Row:
    """One number beside ours. Ours are simulated, all of them."""

    table: str
    row: str
    metric: str  # with whose it is: `throughput_ours`, `ratio_throughput_ours_dynamo`
    paper: float
    ours: float  # nan: nothing to measure
    fitted: bool  # the nodes' coefficients were fitted to it, or to one side of it

    @property
    def ratio(self) -> float:
        """Ours to the paper's; nan where there is none."""
        return self.ours / self.paper if self.paper else math.nan

    @property
    def is_ratio(self) -> bool:
        """It compares two sides."""
        return self.metric.startswith("ratio_")

    def as_json(self) -> dict[str, Any]:
        """As `tables.json` has it: null for what isn't there."""
        values = {"paper": self.paper, "ours": _or_none(self.ours), "ratio": _or_none(self.ratio)}
        return {"table": self.table, "row": self.row, "metric": self.metric} | values | {"fitted": self.fitted}


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def compare(measured: Measured, figures: Sequence[Figure] = FIGURES) -> list[Row]:
    """A row for each of the figures whose place was simulated, then the ratios between sides, table by table."""
    rows: list[Row] = []
    for table in dict.fromkeys(figure.table for figure in figures):
        of_table = [figure for figure in figures if figure.table == table]
        for row in dict.fromkeys(figure.row for figure in of_table):
            of_row = [figure for figure in of_table if figure.row == row]
            rows += _values(of_row, measured)
            rows += _ratios(of_row, measured)
    return rows


def _values(figures: Sequence[Figure], measured: Measured) -> Iterator[Row]:
    for figure in figures:
        ours = _measured(figure, measured)
        if ours is not None:
            yield Row(figure.table, figure.row, figure.name, figure.value, ours, figure.fitted)


def _measured(figure: Figure, measured: Measured) -> float | None:
    """Ours for one figure; None: it wasn't simulated."""
    value = measured.get((figure.table, figure.row, figure.side), {}).get(figure.metric)
    if value is None or figure.under is None:
        return value
    under = measured.get((figure.table, figure.row, figure.under), {}).get(figure.metric)
    return None if under is None else _divided(value, under)


def _ratios(figures: Sequence[Figure], measured: Measured) -> Iterator[Row]:
    known = {(figure.side, figure.metric): figure for figure in figures if figure.under is None}
    for over_side, under_side in RATIO_SIDES:
        for metric in RATIO_METRICS:
            over, under = known.get((over_side, metric)), known.get((under_side, metric))
            if over is None or under is None:
                continue
            values = [_measured(figure, measured) for figure in (over, under)]
            if values[0] is None or values[1] is None:
                continue
            name = ratio_name(metric, over_side, under_side)
            ratio, fitted = _divided(values[0], values[1]), over.fitted or under.fitted
            yield Row(over.table, over.row, name, over.value / under.value, ratio, fitted)


def _divided(over: float, under: float) -> float:
    return over / under if under else math.nan
