"""Two runs of the same workload, request by request: what one answered sooner than the other.

What an agent asks follows from its number and the seed, whatever the cluster does, so the same id is the same request;
a run that is faster answers requests that the other one didn't get to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from evolving_sim.results import Floats, Results


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """Requests that were answered. Shape of each: (requests,)."""

    request_ids: Sequence[str]
    ttft_s: Floats
    e2e_s: Floats

    @classmethod
    def of(cls, results: Results, from_s: float) -> Answers:
        """Those sent at `from_s` or later. The results must keep ids."""
        assert results.keep_ids
        table = results.table()
        rows = np.flatnonzero(table.sent_s >= from_s)
        return cls([results.request_ids[row] for row in rows], table.ttft_s[rows], table.e2e_s[rows])


@dataclass(frozen=True, slots=True)
class Paired:
    """Requests that both runs answered: how much sooner the second did. Means of nothing are nan."""

    requests: int
    ttft_s_sooner: float  # mean
    e2e_s_sooner: float
    ttft_sooner_share: float  # of the requests
    e2e_sooner_share: float

    def as_json(self) -> dict[str, float | None]:
        """By name; nan is null."""
        return {name: None if math.isnan(value) else value for name, value in asdict(self).items()}


def pair(one: Answers, other: Answers) -> Paired:
    """Compare `other` with `one`."""
    rows = {request_id: row for row, request_id in enumerate(one.request_ids)}
    both = [(rows[each], row) for row, each in enumerate(other.request_ids) if each in rows]
    left, right = np.array(both, np.int64).reshape(-1, 2).T
    ttft_s, e2e_s = one.ttft_s[left] - other.ttft_s[right], one.e2e_s[left] - other.e2e_s[right]
    return Paired(len(both), *(_mean(values) for values in (ttft_s, e2e_s, ttft_s > 0, e2e_s > 0)))


def _mean(values: Floats | np.ndarray[tuple[int], np.dtype[np.bool_]]) -> float:
    return float(values.mean()) if len(values) else math.nan
