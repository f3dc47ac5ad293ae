"""What evolvectl prints: tables for people, JSON for scripts."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_PIPE_WIDTH = 240  # columns; a pipe has none of its own, and a table cut at 80 can't be searched
_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
_SHORT_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9), ("ps", 1e-12), ("fs", 1e-15))
_STYLES = {
    "ready": "green",
    "serving": "green",
    "live": "green",
    "starting": "yellow",
    "not serving": "yellow",
    "unreachable": "red",
}


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def print_line(text: str) -> None:
    """A line on stdout."""
    _console().print(Text(text), soft_wrap=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "") -> None:
    """A table without frame. A column whose name begins with ">" is aligned right."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, title=title or None, title_justify="left")
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    _console().print(table)


def share(used: int, total: int) -> str:
    """ "1200/4000 30%"."""
    return f"{used}/{total} {percent(used, total)}" if total else "-"


def percent(part: int, whole: int) -> str:
    """ "30%"; "-" of nothing."""
    return f"{100 * part / whole:.0f}%" if whole else "-"


def seconds(value_s: float) -> str:
    """ "0.25s"; longer ones without fractions."""
    return f"{value_s:.2f}s" if value_s < 100 else f"{value_s:.0f}s"


def duration(value_s: float) -> str:
    """ "0.25s", "45s", "12min 30s", "1h 5min", "3d 4h": two units, without the smaller one where it is none."""
    if value_s < 1:
        return f"{value_s:.2g}s"
    left_s = round(value_s)
    parts: list[tuple[int, str]] = []
    for unit, unit_s in _UNITS:
        if left_s >= unit_s or parts:
            parts.append((left_s // unit_s, unit))
            left_s %= unit_s
    return " ".join(f"{count}{unit}" for count, unit in parts[:2] if count)


def ago(value_s: float) -> str:
    """ "5min ago"; "now"."""
    return f"{duration(value_s)} ago" if value_s >= 0.5 else "now"


def short_time(value_s: float) -> str:
    """Three digits with a unit that suits: "12.3ms", "850ns"."""
    if not value_s:
        return "0s"
    unit, scale = next((each for each in _SHORT_UNITS if abs(value_s) >= each[1]), _SHORT_UNITS[-1])
    return f"{value_s / scale:.3g}{unit}"


def rate(value_per_s: float) -> str:
    """Three digits."""
    return f"{value_per_s:.3g}" if value_per_s < 1000 else f"{value_per_s:.0f}"


def moment(wall_s: float) -> str:
    """A unix time in UTC, or "-" for none."""
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(wall_s)) if wall_s else "-"


def shape_of(roles: Iterable[str]) -> str:
    """ "2P1D", with other roles spelled out: "1P1D +1 mixed"."""
    counts: dict[str, int] = {}
    for role in roles:
        counts[role] = counts.get(role, 0) + 1
    text = f"{counts.pop('prefill', 0)}P{counts.pop('decode', 0)}D"
    return " ".join([text, *(f"+{count} {role}" for role, count in sorted(counts.items()))])


def _console() -> Console:
    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(width=_PIPE_WIDTH, highlight=False)
