"""`report.md` and `tables.json`: the paper's numbers beside simulated ones, with what was and wasn't borne out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from evolving_sim.paper.compare import Row
from evolving_sim.paper.criteria import WITHIN, Check, predicted, same_winner, within
from evolving_sim.paper.figures import Metric
from evolving_sim.paper.remarks import REMARKS

SIMULATED = (
    "**Every value that is not the paper's is simulated**: a discrete-event simulation in which clock, network and "
    "engines are models, and directory, routing, eviction and planner are the product's own code. Nothing here was "
    "measured on GPUs. The nodes' coefficients were fitted to the values marked *fitted*, and to nothing else."
)

DIFFERENCES = """What is not as in the paper, beside that it is simulated:
- each system was played once with each load, with one seed; in §5.3, §5.5 and Tables 8 and D.5 with three;
- CC is another recording of Claude Code than the paper's, changed to be as heavy (mixes.py); Putnam and OSWorld are
  drawn to what the paper publishes of them, with prompts of assumed lengths;
- KV is kept in blocks of 256 tokens;
- a best split is found in runs of 35 minutes, and then played whole;
- 256 GPUs are played half an hour after the warm-up, not an hour;
- the paper does not tell what its 8 partitions of 96 nodes were asked: here they have nine nodes each and the three
  compositions of §5.4 in turn, half an hour each, every partition at another place of the round; the split that
  stays is 5P4D, of our own engines."""

CAPTIONS: Mapping[str, str] = {
    "§2.1, §2.2": "What two planners do to 90 coding agents, each from 6P3D",
    "§2.3": "Routing of 90 coding agents on a split that stays, 4P5D",
    "Table 1": "Switches and lost reuse, each system from 6P3D",
    "Table 2": "Waits before prefill and their balance",
    "Table 3": "Throughput, latency and pauses, each system from 6P3D",
    "Table 4": "Work that changes: an hour of mathematics, of both, of computer use",
    "Table 5": "Each system on its best split that stays",
    "Table 6": "Coding agents that arrive at a fixed rate",
    "Table 8": "126 coding agents on 4P5D, which stays",
    "§5.3": "What the parts contribute: 126 coding agents from 4P5D",
    "Table D.5": "KV fetched under the queue wait, routing as in SGLang",
    "§5.5": "Convergence and scale",
}


@dataclass(frozen=True, slots=True)
class Charts:
    """Files beside the report, by the table they belong to; "" for the report as a whole."""

    files: Mapping[str, Sequence[tuple[str, str]]]  # file and caption


def write_tables(rows: Sequence[Row], path: Path) -> None:
    """`tables.json`: {"table","row","metric","paper","ours","ratio","fitted"} each."""
    lines = ",\n".join(json.dumps(row.as_json(), ensure_ascii=False) for row in rows)
    path.write_text(f"[\n{lines}\n]\n")


def write_report(
    rows: Sequence[Row], checks: Sequence[Check], charts: Charts, path: Path, *, notes: Sequence[str]
) -> None:
    """`report.md`. `notes`: how the values came about, a paragraph each."""
    path.write_text("\n".join(_report(rows, checks, charts, notes)) + "\n")


def _report(rows: Sequence[Row], checks: Sequence[Check], charts: Charts, notes: Sequence[str]) -> Iterator[str]:
    yield "# The paper's tables beside a simulation"
    for paragraph in (SIMULATED, *notes, DIFFERENCES):
        yield ""
        yield paragraph
    yield from _checks(checks)
    yield from _summary(rows)
    yield from _pictures(charts, "")
    for table in dict.fromkeys(row.table for row in rows):
        yield ""
        yield f"## {table}: {CAPTIONS.get(table, '')}".rstrip(": ")
        yield ""
        of_table = [row for row in rows if row.table == table]
        yield from _table(of_table)
        yield from _remarks(table, of_table)
        yield from _pictures(charts, table)


def _checks(checks: Sequence[Check]) -> Iterator[str]:
    yield from ("", "## What bears out", "", "| | claim | | found (simulated) |", "|---|---|---|---|")
    words = {True: "yes", False: "**no**", None: "not played"}
    for check in checks:
        yield f"| {check.criterion} | {check.claim} | {words[check.met]} | {check.found} |"


def _summary(rows: Sequence[Row]) -> Iterator[str]:
    of_tables = predicted(rows)
    if not of_tables:
        return
    yield from (
        "",
        "Predicted ratios, table by table and metric by metric (those with a fitted side are left out):",
        "",
    )
    yield f"| | ratios | same winner | within ±{WITHIN:.0%} |"
    yield "|---|---|---|---|"
    tables = [(table, [row for row in of_tables if row.table == table]) for table in _of(of_tables, "table")]
    metrics = [(name, [row for row in of_tables if row.metric == name]) for name in _of(of_tables, "metric")]
    for name, some in (*tables, *metrics, ("all", of_tables)):
        yield f"| {name} | {len(some)} | {sum(map(same_winner, some))} | {sum(map(within, some))} |"


def _of(rows: Sequence[Row], field: str) -> list[str]:
    return list(dict.fromkeys(getattr(row, field) for row in rows))


def _table(rows: Sequence[Row]) -> Iterator[str]:
    yield "| row | value | paper | simulated | simulated/paper | |"
    yield "|---|---|---:|---:|---:|---|"
    for row in rows:
        fitted = "*fitted*" if row.fitted else ""
        ratio = "–" if math.isnan(row.ratio) else f"{row.ratio:.2f}"
        yield f"| {row.row} | {_name(row)} | {_number(row.paper)} | {_number(row.ours)} | {ratio} | {fitted} |"


def _name(row: Row) -> str:
    """`throughput_ours` and its unit."""
    if row.is_ratio:
        return f"`{row.metric}`"
    metric = max((each for each in Metric if row.metric.startswith(f"{each}_")), key=len)
    return f"`{row.metric}`, {metric.unit}"


def _number(value: float) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _remarks(table: str, rows: Sequence[Row]) -> Iterator[str]:
    """What people wrote about the table and its rows; else how far the ratios are from the paper's."""
    for row in ("", *_of(rows, "row")):
        remark = REMARKS.get((table, row))
        if remark is not None:
            yield ""
            yield f"{row}: {remark}" if row else remark
    ratios = [abs(row.ratio - 1.0) for row in rows if row.is_ratio and not row.fitted and math.isfinite(row.ratio)]
    if ratios:
        near = sum(off <= WITHIN for off in ratios)
        yield ""
        if near == len(ratios):
            yield f"All {len(ratios)} ratios between systems are within {max(ratios):.0%} of the paper's."
        else:
            yield f"{near} of {len(ratios)} ratios between systems are within {WITHIN:.0%} of the paper's."


def _pictures(charts: Charts, table: str) -> Iterator[str]:
    for file, caption in charts.files.get(table, ()):
        yield ""
        yield f"![{caption}]({file})"
