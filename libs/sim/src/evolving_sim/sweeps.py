"""Many runs at once: the values of some keys, each with each, in as many processes as one has cores for."""

from __future__ import annotations

import itertools
import multiprocessing
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from ctypes import Array, c_byte, c_double
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evolving_sim.outcomes import Outcome, Progress, play
from evolving_sim.scenario_files.model import ScenarioFile
from evolving_sim.scenario_files.reading import Raw, changed, parse

_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Row:
    """One run of a sweep."""

    settings: Mapping[str, Any]
    outcome: Outcome

    def as_json(self) -> dict[str, Any]:
        """The settings, and the outcome's form."""
        return {"settings": dict(self.settings), "outcome": self.outcome.as_json()}


@dataclass(frozen=True, slots=True)
class Watch:
    """Who hears how far all runs are, and says when to stop. Both are called a few times a second."""

    told: Callable[[Sequence[Progress]], None] = lambda _: None
    stop: Callable[[], bool] = lambda: False


def sweep(
    scenario: Raw,
    settings: Mapping[str, Sequence[Any]],
    processes: int,
    folder: Path = Path(),
    watch: Watch = Watch(),
) -> list[Row]:
    """Play a scenario's tables with every combination of the settings' values, by dotted key, the last key fastest.

    Paths in the tables are relative to `folder`. Stopped, it gives the runs that were begun. Raises ScenarioError,
    before the first run begins.
    """
    combinations = [dict(zip(settings, values, strict=True)) for values in itertools.product(*settings.values())]
    files = [parse(changed(scenario, each), folder) for each in combinations]
    outcomes = play_all(files, processes, watch)
    return [Row(each, outcome) for each, outcome in zip(combinations, outcomes, strict=True) if outcome is not None]


def play_all(
    files: Sequence[ScenarioFile], processes: int, watch: Watch, *, keep_answers: bool = False
) -> list[Outcome | None]:
    """What came of each scenario, in their order; None: it was stopped before it began. Raises what `play` does."""
    if min(processes, len(files)) <= 1:
        return _one_by_one(files, watch, keep_answers=keep_answers)
    context = multiprocessing.get_context("spawn")
    # Without locks: one who dies while it holds a lock would stop all others.
    stop, how_far = context.RawValue("b", 0), context.RawArray("d", 2 * len(files))
    with ProcessPoolExecutor(min(processes, len(files)), context, _prepare, (stop, how_far)) as pool:
        # Workers begin with the signals blocked that are blocked here: when to stop is said by this process.
        signals = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            runs = [pool.submit(_play, number, file, keep_answers) for number, file in enumerate(files)]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        left: set[Future[Outcome | None]] = set(runs)
        while left:
            done, left = wait(left, _LOOK_S)
            watch.told(
                [Progress(how_far[2 * n], file.seconds, int(how_far[2 * n + 1])) for n, file in enumerate(files)]
            )
            if watch.stop() or any(run.exception() is not None for run in done):
                stop.value = 1
        return [run.result() for run in runs]


def _one_by_one(files: Sequence[ScenarioFile], watch: Watch, *, keep_answers: bool) -> list[Outcome | None]:
    """In this process."""
    far = [Progress(0.0, file.seconds, 0) for file in files]
    outcomes: list[Outcome | None] = []

    def told(progress: Progress) -> None:
        far[len(outcomes)] = progress
        watch.told(far)

    for file in files:
        outcome = None if watch.stop() else play(file, told, watch.stop, keep_answers=keep_answers)
        outcomes.append(outcome)  # one by one: `told` goes by how many there are
    return outcomes


_shared: tuple[c_byte, Array[c_double]]


def _prepare(stop: c_byte, how_far: Array[c_double]) -> None:
    global _shared  # noqa: PLW0603  # a worker's only way to what it shares with its parent
    _shared = stop, how_far


def _play(number: int, file: ScenarioFile, keep_answers: bool) -> Outcome | None:
    stop, how_far = _shared

    def told(progress: Progress) -> None:
        how_far[2 * number], how_far[2 * number + 1] = progress.now_s, progress.requests

    return None if stop.value else play(file, told, lambda: bool(stop.value), keep_answers=keep_answers)
