"""Which simulated run gives each of the paper's numbers. A run that several numbers come from is played once.

Times are the paper's: 30 minutes of warm-up, then an hour of static load (§5.1), to minute 85 in Tables 5 and 8. Every
system that adapts begins at 6P3D (§5.1). Where 126 coding agents are compared on one split (Tables 8 and D.5, §5.3,
§5.5) numbers are means over some seeds, as they differ by a tenth from one to the next; elsewhere they are one run's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from evolving_sim.paper.compare import Place
from evolving_sim.paper.criteria import CONVERGENCE_SHAPES, EVICTION
from evolving_sim.paper.figures import Metric, Side
from evolving_sim.paper.loads import PARTITION_PERIOD_S
from evolving_sim.paper.plays import BEST, Outcome, Play, Stretch

NODES = 9
WARM_S = 1800.0
HOUR = Stretch("hour", WARM_S, WARM_S + 3600.0)
HALF_HOUR = Stretch("half an hour", WARM_S, WARM_S + 1800.0)
TO_85 = Stretch("to minute 85", WARM_S, 5100.0)
WHOLE = Stretch("with warm-up", 0.0, HOUR.to_s)
STATIC_LOAD = (HOUR, TO_85, WHOLE)
SHIFT = (
    Stretch("Putnam (288)", 0.0, 3600.0),
    Stretch("Mixed (144 + 72)", 3600.0, 7200.0),
    Stretch("OSWorld (144)", 7200.0, 10800.0),
    Stretch("Whole run", 0.0, 10800.0),
)
"""§5.4: three hours, scored from the first minute on."""

SENSITIVITY = Stretch("40 minutes", 1200.0, 3600.0)
PARTITION = Stretch("after warm-up", WARM_S, 3 * PARTITION_PERIOD_S)

FIRST_SHAPE = "6P3D"
BEST_SHIFT_SHAPE = "5P4D"  # Table 4's best static split
BEST_CODING_SHAPE = "4P5D"

OURS, OURS_STATIC, DYNAMO, ARROW = "ours", "ours-static", "dynamo", "arrow"
SGLANG, STICKY, ASYNC_FETCH = "sglang-static", "sglang-sticky", "sglang-async-fetch"
LOAD_AWARE, POOL_AT_START = "dynamo-router-static", "dynamo-router-pool"
"""Names of arms."""

BY_NEED = "sglang-by-need"
"""SGLang's static arm, but nodes evict by branches' need as ours do: what LRU alone does to it (§2.3)."""

ARM_OF_SIDE: Mapping[Side, str] = {
    Side.OURS: OURS,
    Side.OURS_STATIC: OURS_STATIC,
    Side.DYNAMO: DYNAMO,
    Side.ARROW: ARROW,
    Side.BEST_STATIC: SGLANG,
    Side.ASYNC_FETCH: ASYNC_FETCH,
    Side.STICKY: STICKY,
    Side.LOAD_AWARE: LOAD_AWARE,
    Side.POOL_AT_START: POOL_AT_START,
}

STATIC_LOADS = tuple(
    f"{name} ({agents})"
    for name, counts in (("Putnam", (224, 256, 288)), ("CC", (90, 108, 126)), ("OSWorld", (128, 144, 160)))
    for agents in counts
)
SEARCHED_LOADS = ("Putnam (224)", "CC (90)", "OSWorld (128)")
RATES = ("0.5", "0.75", "1.0", "1.25", "1.5")
PARTITIONS = 8
SEEDS = (1, 2, 3)

Combine = Callable[[Sequence[Outcome]], Mapping[Metric, float]]


@dataclass(frozen=True, slots=True)
class Source:
    """The runs that a place's numbers come from, and how."""

    plays: tuple[Play, ...]
    combine: Combine


def of(stretch: Stretch) -> Combine:
    """Of a stretch, the mean over the runs; switches and where it ended are those of the whole run."""

    def combine(outcomes: Sequence[Outcome]) -> dict[Metric, float]:
        each = [{**outcome.stretches[stretch.name], **_split(outcome)} for outcome in outcomes]
        return {metric: statistics.fmean(values[metric] for values in each) for metric in each[0]}

    return combine


def spread_of(stretch: Stretch, metric: Metric) -> Combine:
    """By how many percent the greatest is above the least, of the first splits' means over the seeds; and how many
    splits all those runs ended on."""

    def combine(outcomes: Sequence[Outcome]) -> dict[Metric, float]:
        values = [outcome.stretches[stretch.name][metric] for outcome in outcomes]
        means = [statistics.fmean(values[at : at + len(SEEDS)]) for at in range(0, len(values), len(SEEDS))]
        ends = {outcome.final_shape for outcome in outcomes}
        return {Metric.SPREAD: 100.0 * (max(means) / min(means) - 1.0), Metric.FINAL_SPLITS: float(len(ends))}

    return combine


def sum_of(stretch: Stretch) -> Combine:
    """Of partitions: what they serve together, and by how much the share of nodes that prefill moved in one."""

    def combine(outcomes: Sequence[Outcome]) -> dict[Metric, float]:
        served = sum(outcome.stretches[stretch.name][Metric.THROUGHPUT] for outcome in outcomes)
        return {Metric.THROUGHPUT: served, Metric.SPREAD: max(map(_moved_percent, outcomes))}

    return combine


def _split(outcome: Outcome) -> dict[Metric, float]:
    whole = outcome.stretches.get(WHOLE.name, {})
    switches = {metric: whole[metric] for metric in (Metric.SWITCHES, Metric.SWITCH_TIME) if metric in whole}
    return {**switches, Metric.PREFILL_NODES: float(_prefill(outcome.final_shape))}


def _prefill(shape: str) -> int:
    return int(shape.partition("P")[0])


def _moved_percent(outcome: Outcome) -> float:
    """From the fewest to the most prefill nodes, in percent of all."""
    shapes_seen = [shape for _, shape in outcome.switches] + [outcome.final_shape]
    prefills = [_prefill(shape) for shape in shapes_seen]
    nodes = sum(int(part) for part in outcome.final_shape.removesuffix("D").split("P"))
    return 100.0 * (max(prefills) - min(prefills)) / nodes


def sources() -> dict[Place, Source]:
    """What every place is made from."""
    return {**_profiles(), **_static_load(), **_shift(), **_best_splits(), **_open_loop(), **_parts(), **_scale()}


def _play(load: str, side: Side | str, shape: str = FIRST_SHAPE, stretches: tuple[Stretch, ...] = STATIC_LOAD) -> Play:
    return Play(load, ARM_OF_SIDE[side] if isinstance(side, Side) else side, shape, stretches)


def _one(play: Play, stretch: Stretch) -> Source:
    return Source((play,), of(stretch))


def _seeded(play: Play, stretch: Stretch) -> Source:
    return Source(_with_seeds(play), of(stretch))


def _with_seeds(play: Play) -> tuple[Play, ...]:
    return tuple(replace(play, seed=seed) for seed in SEEDS)


def _profiles() -> dict[Place, Source]:
    """§2: what existing systems do."""
    planners = ("§2.1, §2.2", "CC (90)")
    places: dict[Place, Source] = {
        (*planners, side): _one(_play("CC (90)", side), HOUR) for side in (Side.OURS, Side.DYNAMO, Side.ARROW)
    }
    places[*planners, Side.BEST_STATIC] = _one(_play("CC (90)", SGLANG, BEST), HOUR)
    for side in (Side.BEST_STATIC, Side.STICKY, Side.LOAD_AWARE, Side.POOL_AT_START):
        places["§2.3", "CC (90), routing", side] = _one(_play("CC (90)", side, BEST_CODING_SHAPE), HOUR)
    for side, arm in ((Side.BEST_STATIC, SGLANG), (Side.OURS, BY_NEED)):
        places[*EVICTION, side] = _one(_play("CC (126)", arm, BEST_CODING_SHAPE), HOUR)
    return places


def _static_load() -> dict[Place, Source]:
    """§5.2."""
    places: dict[Place, Source] = {}
    for load in STATIC_LOADS:
        for side in (Side.DYNAMO, Side.OURS):
            source = _one(_play(load, side), HOUR)
            places["Table 1", load, side] = places["Table 3", load, side] = source
            if load.startswith("CC"):
                places["Table 2", load, side] = source
    return places


def _shift() -> dict[Place, Source]:
    """§5.4."""
    plays = {
        Side.DYNAMO: _play("shift", DYNAMO, FIRST_SHAPE, SHIFT),
        Side.BEST_STATIC: _play("shift", SGLANG, BEST_SHIFT_SHAPE, SHIFT),
        Side.OURS: _play("shift", OURS, FIRST_SHAPE, SHIFT),
    }
    return {("Table 4", stretch.name, side): _one(play, stretch) for stretch in SHIFT for side, play in plays.items()}


def _best_splits() -> dict[Place, Source]:
    places: dict[Place, Source] = {}
    for load in SEARCHED_LOADS:
        places["Table 5", load, Side.BEST_STATIC] = _one(_play(load, SGLANG, BEST), TO_85)
        places["Table 5", load, Side.OURS] = _one(_play(load, OURS_STATIC, BEST), TO_85)
    return places


def _open_loop() -> dict[Place, Source]:
    starts = ((Side.OURS, FIRST_SHAPE), (Side.DYNAMO, FIRST_SHAPE), (Side.BEST_STATIC, BEST_CODING_SHAPE))
    return {
        ("Table 6", f"{rate} agents/min", side): _one(_play(f"CC, {rate} agents/min", side, shape), HOUR)
        for rate in RATES
        for side, shape in starts
    }


def _parts() -> dict[Place, Source]:
    """§5.3 and Table 8: 126 coding agents on 4P5D."""
    load, shape = "CC (126)", BEST_CODING_SHAPE
    stays = _play(load, SGLANG, shape)
    ours_stays = _play(load, OURS_STATIC, shape)
    return {
        ("Table 8", "CC (126), 4P5D", Side.BEST_STATIC): _seeded(stays, TO_85),
        ("Table 8", "CC (126), 4P5D", Side.OURS): _seeded(ours_stays, TO_85),
        ("§5.3", "CC (126), from 4P5D", Side.BEST_STATIC): _seeded(stays, HOUR),
        ("§5.3", "CC (126), from 4P5D", Side.OURS_STATIC): _seeded(ours_stays, HOUR),
        ("§5.3", "CC (126), from 4P5D", Side.OURS): _seeded(_play(load, OURS, shape), HOUR),
        ("Table D.5", "CC (126), 4P5D", Side.BEST_STATIC): _seeded(stays, HOUR),
        ("Table D.5", "CC (126), 4P5D", Side.ASYNC_FETCH): _seeded(_play(load, ASYNC_FETCH, shape), HOUR),
    }


def _scale() -> dict[Place, Source]:
    """§5.5."""
    starts = {shape: _play("CC (126)", OURS, shape) for shape in CONVERGENCE_SHAPES}
    places: dict[Place, Source] = {
        ("§5.5", f"CC (126), from {shape}", Side.OURS): _seeded(play, HOUR) for shape, play in starts.items()
    }
    every = tuple(play for first in starts.values() for play in _with_seeds(first))
    spread = Source(every, spread_of(HOUR, Metric.E2E_MEAN))
    places["§5.5", "mean E2E from four splits", Side.OURS] = spread
    for side in (Side.OURS, Side.DYNAMO):
        places["§5.5", "36 GPUs", side] = _one(_play("CC (90)", side), HOUR)
        places["§5.5", "256 GPUs", side] = _one(_play("CC (640)", side, "43P21D", (HALF_HOUR,)), HALF_HOUR)
    for side, arm in ((Side.OURS, OURS), (Side.BEST_STATIC, OURS_STATIC)):
        plays = [_play(f"partition {at}", arm, BEST_SHIFT_SHAPE, (PARTITION,)) for at in range(PARTITIONS)]
        seeded = tuple(replace(play, seed=seed) for seed, play in enumerate(plays, 1))
        places["§5.5", "3,072 GPUs in 8 partitions", side] = Source(seeded, sum_of(PARTITION))
    return places


def sensitivity() -> dict[str, dict[str, Play]]:
    """What the paper leaves open: 126 coding agents from 6P3D, one choice of the planner changed at a time."""
    usual = _play("CC (126)", OURS, FIRST_SHAPE, (SENSITIVITY,))
    return {
        "window": {f"{window_s:g} s": replace(usual, window_s=window_s) for window_s in (150.0, 300.0, 600.0, 1200.0)},
        "slices": {str(slices): replace(usual, slices=slices) for slices in (5, 10, 20)},
        "gate": {
            f"{gate}, {slices} slices": replace(usual, gate=gate, slices=slices)
            for gate in ("default", "paper")
            for slices in (5, 10, 20)
        },
        "bursts": {
            f"{rate} an hour, {gate} gate": replace(usual, gate=gate, bursts_per_hour=float(rate))
            for gate in ("default", "paper")
            for rate in (0, 6, 20, 60)
        },
    }


QUICK: tuple[Place, ...] = (
    ("Table 3", "CC (126)", Side.DYNAMO),
    ("Table 3", "CC (126)", Side.OURS),
    ("Table 8", "CC (126), 4P5D", Side.BEST_STATIC),
    ("Table 8", "CC (126), 4P5D", Side.OURS),
)
"""Places that quick mode plays, and a shorter time."""


def shortened(play: Play, share: float) -> Play:
    """The same over less time: stretches begin and end so much earlier."""
    stretches = tuple(Stretch(each.name, each.from_s * share, each.to_s * share) for each in play.stretches)
    return replace(play, stretches=stretches)


def plays_of(wanted: Mapping[Place, Source]) -> Iterator[Play]:
    """Every run that is needed, once."""
    return iter(dict.fromkeys(play for source in wanted.values() for play in source.plays))
