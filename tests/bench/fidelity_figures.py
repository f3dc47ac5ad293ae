"""The requests of one run beside those of another: paired one by one, then by their means, percentiles and shares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

PAIRS_LEAST = 2000
MEAN_SHARE, P95_SHARE = 0.10, 0.15
BARS: Mapping[str, float] = {
    "ttft_mean_s": MEAN_SHARE,
    "e2e_mean_s": MEAN_SHARE,
    "hit_rate": MEAN_SHARE,
    "lost_reuse": MEAN_SHARE,
    "ttft_p95_s": P95_SHARE,
    "e2e_p95_s": P95_SHARE,
}
"""How far the simulated figure may be from the live one, as a share of the live one."""
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Row:
    """A request that was answered: the `request`-th of the `agent`-th agent of the `session`-th session, from 0."""

    session: int
    agent: int
    request: int
    sent_s: float  # since the run's start
    ttft_s: float
    e2e_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    ideal_tokens: int  # prompt tokens whose KV some request finished before had produced

    @property
    def place(self) -> tuple[int, int, int]:
        """Which request of the trace it is."""
        return self.session, self.agent, self.request

    @property
    def lost_tokens(self) -> int:
        """Of the ideal, those that were computed again."""
        return max(0, self.ideal_tokens - self.cached_tokens)


def pair(live: Sequence[Row], simulated: Sequence[Row]) -> list[tuple[Row, Row]]:
    """The requests that both runs answered, in the trace's order. ValueError where one request is not the same."""
    others = {row.place: row for row in simulated}
    pairs = [(row, others[row.place]) for row in sorted(live, key=lambda row: row.place) if row.place in others]
    for one, other in pairs:
        if (one.prompt_tokens, one.output_tokens) != (other.prompt_tokens, other.output_tokens):
            raise ValueError(f"not the same request: {one} and {other}")
    return pairs


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """What the bars are about, and what explains it. Shares are of prompt tokens."""
    ttft_s, e2e_s = _column(rows, "ttft_s"), _column(rows, "e2e_s")
    prompt_tokens = sum(row.prompt_tokens for row in rows)
    return {
        "ttft_mean_s": float(ttft_s.mean()),
        "e2e_mean_s": float(e2e_s.mean()),
        "hit_rate": sum(row.cached_tokens for row in rows) / prompt_tokens,
        "lost_reuse": sum(row.lost_tokens for row in rows) / prompt_tokens,
        "ttft_p95_s": float(np.percentile(ttft_s, 95)),
        "e2e_p95_s": float(np.percentile(e2e_s, 95)),
        "ttft_p50_s": float(np.percentile(ttft_s, 50)),
        "e2e_p50_s": float(np.percentile(e2e_s, 50)),
        "ideal_hit_rate": sum(row.ideal_tokens for row in rows) / prompt_tokens,
        "uncached_tokens_mean": float(np.mean([row.prompt_tokens - row.cached_tokens for row in rows])),
        "span_s": float((_column(rows, "sent_s") + e2e_s).max()),
    }


def paired(pairs: Sequence[tuple[Row, Row]]) -> dict[str, float]:
    """How single requests compare: simulated less live, seconds, and whether the same ones were slow."""
    live, simulated = [one for one, _ in pairs], [other for _, other in pairs]
    told: dict[str, float] = {"pairs": len(pairs)}
    for name in ("ttft_s", "e2e_s"):
        one, other = _column(live, name), _column(simulated, name)
        differences = other - one
        told[f"{name[:-2]}_difference_mean_s"] = float(differences.mean())
        # The standard error tells how much of it could be chance, were requests independent of each other.
        told[f"{name[:-2]}_difference_error_s"] = float(differences.std(ddof=1) / np.sqrt(len(pairs)))
        told[f"{name[:-2]}_difference_p50_of_absolute_s"] = float(np.median(np.abs(differences)))
        told[f"{name[:-2]}_rank_correlation"] = _rank_correlation(one, other)
    told["same_cached_share"] = float(np.mean([one.cached_tokens == other.cached_tokens for one, other in pairs]))
    return told


@dataclass(frozen=True, slots=True)
class Bar:
    """One thing to show."""

    name: str
    bar: str
    live: float
    simulated: float
    met: bool

    def as_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def bars(live: Mapping[str, float], simulated: Mapping[str, float], pairs: int, failed: int) -> Iterator[Bar]:
    """Each with both sides' figure. failed: requests of the live run without an answer."""
    yield Bar("pairs", f"≥ {PAIRS_LEAST}", pairs, pairs, pairs >= PAIRS_LEAST)
    yield Bar("failed requests", "0", failed, 0, failed == 0)
    for name, share in BARS.items():
        one, other = live[name], simulated[name]
        yield Bar(name, f"± {100 * share:.0f} %", one, other, abs(other - one) <= share * one)


def _column(rows: Sequence[Row], name: str) -> Floats:
    return np.array([getattr(row, name) for row in rows])


def _rank_correlation(one: Floats, other: Floats) -> float:
    """Spearman's, of values that hardly ever tie."""
    ranks = [values.argsort().argsort() for values in (one, other)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])
