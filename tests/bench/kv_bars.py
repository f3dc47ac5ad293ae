"""What the figures must show, and whether they do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

AGENT_LOST_MOST = 0.003
LRU_PART = 0.2
ORACLE_TIMES, ORACLE_POINTS = 1.5, 0.001
HIDDEN_LEAST = 0.95
FETCH_ORDER = ("async", "at_start", "recompute")


@dataclass(frozen=True, slots=True)
class Bar:
    """One thing to show."""

    name: str
    bar: str
    value: str
    met: bool

    def as_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def bars(result: dict[str, Any]) -> Iterator[Bar]:
    """Those of the arms that were run."""
    arms = {(arm["pool_share"], arm["policy"]): arm for arm in result["arms"]}
    for (share, policy), agent in arms.items():
        if policy == "agent":
            yield from _policy_bars(share, agent, arms[share, "lru"])
    yield from _fetch_bars({row["mode"]: row for row in result["fetch"]})
    for run in (*result["arms"], *result["fetch"]):
        yield from _run_bars(
            f"fetch {run['mode']}" if "mode" in run else f"pool {run['pool_share']} {run['policy']}", run
        )


def _policy_bars(share: float, agent: dict[str, Any], lru: dict[str, Any]) -> Iterator[Bar]:
    lost, most = agent["lost_reuse"], agent["oracle"]["agent"]
    pool = f"pool {share}: agent lost"
    if share >= 0.86:
        yield Bar(f"{pool}", f"≤ {_percent(AGENT_LOST_MOST)}", _percent(lost), lost <= AGENT_LOST_MOST)
    if share in (1.0, 0.86):
        most_lost = LRU_PART * lru["lost_reuse"]
        yield Bar(f"{pool}, of LRU's fifth", f"≤ {_percent(most_lost)}", _percent(lost), lost <= most_lost)
    yield Bar(f"{pool}, of LRU's", f"≤ {_percent(lru['lost_reuse'])}", _percent(lost), lost <= lru["lost_reuse"])
    most_lost = max(ORACLE_TIMES * most, most + ORACLE_POINTS)
    yield Bar(f"{pool}, of its oracle's", f"≤ {_percent(most_lost)}", _percent(lost), lost <= most_lost)


def _fetch_bars(fetch: dict[str, dict[str, Any]]) -> Iterator[Bar]:
    for better, worse in itertools.pairwise(FETCH_ORDER):
        if better in fetch and worse in fetch:
            own_s, other_s = fetch[better]["ttft_p95_s"], fetch[worse]["ttft_p95_s"]
            yield Bar(f"P95 TTFT, {better} before {worse}", f"< {other_s:.3f} s", f"{own_s:.3f} s", own_s < other_s)
    if "async" in fetch:
        hidden = fetch["async"]["hidden_share"]
        met = hidden is not None and hidden >= HIDDEN_LEAST
        shown = "nothing was fetched" if hidden is None else _percent(hidden)
        yield Bar("fetch time hidden, async", f"≥ {_percent(HIDDEN_LEAST)}", shown, met)


def _run_bars(name: str, run: dict[str, Any]) -> Iterator[Bar]:
    audit = run["audit"]
    left = f"{audit['mismatches']} mismatches, {audit['nonzero_after_end']} left after the ends"
    yield Bar(f"{name}: audit", "clean", "clean" if audit["clean"] else left, audit["clean"])
    yield Bar(f"{name}: failed requests", "0", str(run["failed"]), run["failed"] == 0)
    growing = [process for process, memory in run["memory"].items() if not memory["steady"]]
    most = max(memory["last_quarter_growth_bytes"] for memory in run["memory"].values())
    shown = f"at most {most / (1 << 20):.1f} MiB" + (f": {', '.join(growing)}" if growing else "")
    yield Bar(f"{name}: memory, last quarter", "< 5 % or 8 MiB", shown, not growing)


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
