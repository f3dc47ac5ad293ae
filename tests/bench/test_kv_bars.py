"""The bars of bench-kv say what was measured."""

from __future__ import annotations

from typing import Any

import pytest
from bench.kv_bars import bars
from bench.kv_watch import growth

RUN = {"audit": {"mismatches": 0, "nonzero_after_end": 0, "clean": True}, "failed": 0,
       "memory": {"node-a": {"steady": True, "last_quarter_growth_bytes": 5}}}  # fmt: skip


def arm(share: float, policy: str, lost: float, oracle_lost: float = 0.0, **more: Any) -> dict[str, Any]:
    return {"pool_share": share, "policy": policy, "lost_reuse": lost, "oracle": {"agent": oracle_lost}, **RUN, **more}


def fetch(mode: str, p95_s: float, hidden: float | None = 1.0) -> dict[str, Any]:
    return {"mode": mode, "ttft_p95_s": p95_s, "hidden_share": hidden, **RUN}


def missed(arms: list[dict[str, Any]], fetches: list[dict[str, Any]] | None = None) -> list[str]:
    return [bar.name for bar in bars({"arms": arms, "fetch": fetches or []}) if not bar.met]


def test_figures_that_keep_every_bar() -> None:
    arms = [arm(1.0, "agent", 0.001), arm(1.0, "lru", 0.01), arm(0.5, "agent", 0.05, 0.04), arm(0.5, "lru", 0.05)]
    assert missed(arms, [fetch("async", 1.0), fetch("at_start", 1.1), fetch("recompute", 2.0)]) == []


@pytest.mark.parametrize(
    ("arms", "name"),
    [
        ([arm(0.86, "agent", 0.0031, 0.0031), arm(0.86, "lru", 0.9)], "pool 0.86: agent lost"),
        ([arm(1.0, "agent", 0.0021, 0.002), arm(1.0, "lru", 0.01)], "pool 1.0: agent lost, of LRU's fifth"),
        ([arm(0.5, "agent", 0.051, 0.05), arm(0.5, "lru", 0.05)], "pool 0.5: agent lost, of LRU's"),
        ([arm(0.5, "agent", 0.031, 0.02), arm(0.5, "lru", 0.05)], "pool 0.5: agent lost, of its oracle's"),
        ([arm(1.2, "agent", 0.0011, 0.0), arm(1.2, "lru", 0.05)], "pool 1.2: agent lost, of its oracle's"),
        ([arm(1.2, "agent", 0.0, failed=1), arm(1.2, "lru", 0.05)], "pool 1.2 agent: failed requests"),
    ],
)
def test_a_bar_that_is_missed_is_named(arms: list[dict[str, Any]], name: str) -> None:
    assert missed(arms) == [name]


@pytest.mark.parametrize(
    ("fetches", "name"),
    [
        ([fetch("async", 1.1), fetch("at_start", 1.1)], "P95 TTFT, async before at_start"),
        ([fetch("at_start", 2.1), fetch("recompute", 2.0)], "P95 TTFT, at_start before recompute"),
        ([fetch("async", 1.1, 0.94)], "fetch time hidden, async"),
        ([fetch("async", 1.1, None)], "fetch time hidden, async"),
    ],
)
def test_a_fetch_bar_that_is_missed_is_named(fetches: list[dict[str, Any]], name: str) -> None:
    assert missed([], fetches) == [name]


def test_memory_is_steady_when_its_last_quarter_adds_little() -> None:
    mebibyte = 1 << 20
    rising = [(float(at), 100 * mebibyte + at * mebibyte) for at in range(100)]
    late = [*((float(at), 100 * mebibyte) for at in range(100)), (100.0, 120 * mebibyte)]
    early = [(float(at), min(at, 50) * 10 * mebibyte) for at in range(100)]
    sawtooth = [(float(at), (100 + at % 10 * 5) * mebibyte) for at in range(100)]
    assert growth(rising)["last_quarter_growth_bytes"] == 25 * mebibyte
    assert [growth(each)["steady"] for each in (rising, late, early, sawtooth)] == [False, False, True, True]
