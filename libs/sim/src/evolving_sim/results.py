"""What a simulated run served, and when: a row for each request, columns of numbers, summaries of stretches of time.

Times and shares are named and reckoned as in the paper's tables:
- TTFT is from sending a request to its first token, E2E to its last; TPOT = (done − first token)/(output tokens − 1).
- Hit rate: prompt tokens reused, of all prompt tokens. Ideal hit rate: those whose KV some earlier request produced.
- Lost reuse: of the tokens that count for the ideal rate, those that were computed again. Table 8 divides by the ideal
  tokens ("the share of these tokens"), as §5.2 does ("taking as 100% the hit rate when all nodes share KV"):
  `lost_reuse_of_ideal`. The replay of traces and the oracle divide by all prompt tokens (DESIGN §4): `lost_reuse`.
- A pause (Table 3) is from a branch's answer to its next request: tools, users, and sub-agents it waits for. With
  those, requests/s · (E2E + pause) is the number of branches alive, about 1.25 of the paper's coding agents each.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from evolving_sim.legs import Request

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Answered(NamedTuple):
    """A request that was answered."""

    request_id: str  # "": they are not kept
    kind: str
    prefill_node: str
    decode_node: str
    sent_s: float
    taken_s: float  # out of the prefill queue
    first_token_s: float
    done_s: float
    pause_s: float  # since the branch's last answer; nan: there was none, or it was sent before that came
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    ideal_tokens: int
    fetched_tokens: int  # from peers, of those cached


_NAMES = ("kind", "prefill_node", "decode_node")
_TIMES = ("sent_s", "taken_s", "first_token_s", "done_s", "pause_s")
_LOAD = ("at_s", "most_wait_s", "mean_wait_s", "idle_share")
_TOKENS = ("prompt_tokens", "output_tokens", "cached_tokens", "ideal_tokens", "fetched_tokens")


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Answered requests in the order they were answered, as columns. Shape of each: (requests,)."""

    kind: Ints  # index into `names`, as the nodes
    prefill_node: Ints
    decode_node: Ints
    sent_s: Floats
    taken_s: Floats
    first_token_s: Floats
    done_s: Floats
    pause_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    cached_tokens: Ints
    ideal_tokens: Ints
    fetched_tokens: Ints
    names: Sequence[str]

    def where(self, rows: npt.NDArray[np.bool_]) -> Table:
        """Those rows alone."""
        columns = {name: getattr(self, name)[rows] for name in (*_NAMES, *_TIMES, *_TOKENS)}
        return Table(**columns, names=self.names)

    @property
    def ttft_s(self) -> Floats:
        """From sending to the first token."""
        return self.first_token_s - self.sent_s

    @property
    def e2e_s(self) -> Floats:
        """From sending to the last token."""
        return self.done_s - self.sent_s

    @property
    def queue_s(self) -> Floats:
        """From sending until the prompt left a prefill queue."""
        return self.taken_s - self.sent_s

    @property
    def tpot_s(self) -> Floats:
        """Seconds a token after the first one; nan where there is none."""
        more = np.where(self.output_tokens > 1, self.output_tokens - 1, np.nan)
        tpot_s: Floats = (self.done_s - self.first_token_s) / more
        return tpot_s


@dataclass(frozen=True, slots=True)
class Summary:
    """The requests answered in a stretch of time, and the switches begun in it that are over. Of nothing: nan."""

    requests: int
    requests_per_s: float
    output_tokens_per_s: float
    ttft_s_mean: float
    ttft_s_p50: float
    ttft_s_p95: float
    e2e_s_mean: float
    e2e_s_p50: float
    e2e_s_p95: float
    tpot_s_mean: float
    queue_s_mean: float
    # Wait of the prefill node with the longest over the mean of those that prefill, both as means over time (Table 2).
    most_loaded_wait_ratio: float
    prefill_idle_share: float  # of the time of nodes that prefill, computing nothing (Table D.5)
    hit_rate: float
    ideal_hit_rate: float
    lost_reuse: float
    lost_reuse_of_ideal: float
    uncached_tokens_mean: float
    pause_s_mean: float
    switches: int
    switch_s_mean: float

    def as_json(self) -> dict[str, float | None]:
        """By name; nan, which JSON lacks, as null."""
        return {name: None if math.isnan(value) else value for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class SwitchTime:
    """A change of the split, and how long until all nodes it moved had finished what they ran and served anew."""

    at_s: float
    took_s: float


@dataclass(slots=True, eq=False, repr=False)
class Results:
    """Grows as requests are answered: some hundred bytes each, ids not counted."""

    keep_ids: bool = False  # of requests, to pair those of two runs
    request_ids: list[str] = field(init=False, default_factory=list)
    switch_times: list[SwitchTime] = field(init=False, default_factory=list)
    _names: dict[str, int] = field(init=False, default_factory=dict)
    _codes: dict[str, array[int]] = field(init=False)
    _times: dict[str, array[float]] = field(init=False)
    _tokens: dict[str, array[int]] = field(init=False)
    _answered_s: dict[str, float] = field(init=False, default_factory=dict)  # by branch
    _load: dict[str, array[float]] = field(init=False)  # samples of the nodes that prefill

    def __post_init__(self) -> None:
        self._codes = {name: array("I") for name in _NAMES}
        self._times = {name: array("d") for name in _TIMES}
        self._tokens = {name: array("I") for name in _TOKENS}
        self._load = {name: array("d") for name in _LOAD}

    def __len__(self) -> int:
        return len(self._times["done_s"])

    def add(self, request: Request) -> None:
        """A request is answered, none before it later."""
        assert not self._times["done_s"] or self._times["done_s"][-1] <= request.done_s
        last_s = self._answered_s.get(request.branch_id, math.inf)
        self._answered_s[request.branch_id] = request.done_s
        if self.keep_ids:
            self.request_ids.append(request.request_id)
        for name, codes in self._codes.items():
            text = getattr(request, name)
            codes.append(self._names.setdefault(text, len(self._names)))
        for name in _TIMES[:-1]:
            self._times[name].append(getattr(request, name))
        self._times["pause_s"].append(request.sent_s - last_s if last_s <= request.sent_s else math.nan)
        for name, tokens in self._tokens.items():
            tokens.append(getattr(request, name))

    def sample_waits(self, at_s: float, waits_s: Sequence[float], idle_nodes: int) -> None:
        """How the nodes that prefill stand, now and then: the wait of each, and how many compute nothing."""
        sample = (at_s, max(waits_s), math.fsum(waits_s) / len(waits_s), idle_nodes / len(waits_s))
        for name, value in zip(_LOAD, sample, strict=True):
            self._load[name].append(value)

    def switched(self, at_s: float, took_s: float) -> None:
        """A switch decided at `at_s` is over."""
        self.switch_times.append(SwitchTime(at_s, took_s))

    def table(self, from_s: float = 0.0, to_s: float = math.inf) -> Table:
        """The rows answered in [from_s, to_s), copied."""
        done_s = self._times["done_s"]
        rows = slice(bisect_left(done_s, from_s), bisect_left(done_s, to_s))
        columns: dict[str, Any] = {
            name: np.array(values[rows], np.int64) for name, values in (self._codes | self._tokens).items()
        }
        columns |= {name: np.array(values[rows], np.float64) for name, values in self._times.items()}
        return Table(**columns, names=tuple(self._names))

    @property
    def served(self) -> list[Answered]:
        """All rows, one by one: for few."""
        names = tuple(self._names)
        ids = self.request_ids if self.keep_ids else [""] * len(self)
        codes = [[names[code] for code in self._codes[name]] for name in _NAMES]
        numbers = [self._times[name] for name in _TIMES], [self._tokens[name] for name in _TOKENS]
        return [Answered(*row) for row in zip(ids, *codes, *numbers[0], *numbers[1], strict=True)]

    def between(self, from_s: float, to_s: float, kind: str | None = None) -> Summary:
        """What was answered in [from_s, to_s), of one kind or all."""
        table = self.table(from_s, to_s)
        if kind is not None:
            table = table.where(table.kind == self._names.get(kind, -1))
        switch_s = [switch.took_s for switch in self.switch_times if from_s <= switch.at_s < to_s]
        return _summary(table, to_s - from_s, self._load_between(from_s, to_s), switch_s)

    def kinds(self) -> list[str]:
        """Kinds of requests that were answered, by name."""
        names = tuple(self._names)
        return sorted(names[code] for code in set(self._codes["kind"]))

    def _load_between(self, from_s: float, to_s: float) -> tuple[float, float]:
        """The most loaded node's wait over the mean one's, and the share of nodes that were idle."""
        at_s = self._load["at_s"]
        samples = slice(bisect_left(at_s, from_s), bisect_left(at_s, to_s))
        most_s, mean_s, idle = (np.array(self._load[name][samples], np.float64) for name in _LOAD[1:])
        return _share(float(most_s.sum()), float(mean_s.sum())), _mean(idle)


def _summary(rows: Table, over_s: float, load: tuple[float, float], switch_s: Sequence[float]) -> Summary:
    requests = len(rows.done_s)
    prompt, cached, ideal = (int(each.sum()) for each in (rows.prompt_tokens, rows.cached_tokens, rows.ideal_tokens))
    lost = int(np.maximum(rows.ideal_tokens - rows.cached_tokens, 0).sum())
    return Summary(
        requests=requests,
        requests_per_s=_share(requests, over_s),
        output_tokens_per_s=_share(int(rows.output_tokens.sum()), over_s),
        ttft_s_mean=_mean(rows.ttft_s),
        ttft_s_p50=_percentile(rows.ttft_s, 50),
        ttft_s_p95=_percentile(rows.ttft_s, 95),
        e2e_s_mean=_mean(rows.e2e_s),
        e2e_s_p50=_percentile(rows.e2e_s, 50),
        e2e_s_p95=_percentile(rows.e2e_s, 95),
        tpot_s_mean=_mean(rows.tpot_s),
        queue_s_mean=_mean(rows.queue_s),
        most_loaded_wait_ratio=load[0],
        prefill_idle_share=load[1],
        hit_rate=_share(cached, prompt),
        ideal_hit_rate=_share(ideal, prompt),
        lost_reuse=_share(lost, prompt),
        lost_reuse_of_ideal=_share(lost, ideal),
        uncached_tokens_mean=_share(prompt - cached, requests),
        pause_s_mean=_mean(rows.pause_s),
        switches=len(switch_s),
        switch_s_mean=_mean(np.array(switch_s)),
    )


def _mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


def _percentile(values: Floats, percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else math.nan


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
