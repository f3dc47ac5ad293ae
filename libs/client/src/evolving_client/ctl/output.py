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
