"""Plays scenario files and keeps what came of it, as data that goes between processes and into JSON."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from evolving_sim.arms.arm import Switch
from evolving_sim.driver import Run
from evolving_sim.pairing import Answers
from evolving_sim.planner_loop import shape_of
from evolving_sim.results import Summary
from evolving_sim.scenario_files.build import scenario_of
from evolving_sim.scenario_files.model import ScenarioFile
from evolving_sim.scenario_files.reading import ScenarioError
from evolving_sim.sim_cluster import TooLong
from evolving_sim.trace_files import TraceError

FORMAT = 1
"""Of the JSON; grows when a field changes its meaning or goes."""

_LOOK_S = 0.2  # of wall time between looks at whether to stop


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is."""

    now_s: float  # of `end_s` simulated seconds
    end_s: float
    requests: int  # answered so far


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of a run."""

    from_s: float
    to_s: float
    shape: str  # of the split in force when it began
    summary: Summary


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run. Everything in it follows from the scenario alone, but for where it was stopped."""

    scenario: dict[str, Any]
    complete: bool
    until_s: float
    final_shape: str
    summary: Summary  # after the warm-up
    kinds: dict[str, Summary]
    windows: tuple[Window, ...]
    switches: tuple[Switch, ...]
    answers: Answers | None = None  # after the warm-up, where they were to be kept; not part of the JSON

    def as_json(self) -> dict[str, Any]:
        """The documented form (libs/sim/README.md). nan is null."""
        windows = [
            {"from_s": each.from_s, "to_s": each.to_s, "shape": each.shape, "summary": each.summary.as_json()}
            for each in self.windows
        ]
        return {
            "format": FORMAT,
            "simulated": True,
            "complete": self.complete,
            "until_s": self.until_s,
            "final_shape": self.final_shape,
            "summary": self.summary.as_json(),
            "kinds": {kind: summary.as_json() for kind, summary in self.kinds.items()},
            "windows": windows,
            "switches": [_without_nan(asdict(switch)) for switch in self.switches],
            "scenario": self.scenario,
        }


def play(
    file: ScenarioFile,
    told: Callable[[Progress], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
    *,
    keep_answers: bool = False,
) -> Outcome:
    """Play a scenario to its end, or until `stop` says so, which is asked a few times a second.

    Raises ScenarioError where a trace can't be read, or values of the scenario don't go together.
    """
    run = _begun(file)
    run.results.keep_ids = keep_answers
    step_s = file.seconds / 1000
    while not stop() and run.events.now_s < file.seconds:
        begun_s = time.perf_counter()
        try:
            run.until(min(file.seconds, run.events.now_s + step_s))
        except TooLong as error:
            raise ScenarioError(str(error)) from error
        told(Progress(run.events.now_s, file.seconds, len(run.results)))
        step_s *= min(4.0, max(0.25, _LOOK_S / max(1e-9, time.perf_counter() - begun_s)))
    return _outcome(file, run)


def _begun(file: ScenarioFile) -> Run:
    try:
        return Run(scenario_of(file))
    except TraceError as error:
        raise ScenarioError(f"not a trace: {error}") from error
    except OSError as error:
        raise ScenarioError(f"{error.filename} can't be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ScenarioError(str(error)) from error


def _outcome(file: ScenarioFile, run: Run) -> Outcome:
    until_s = run.events.now_s
    from_s = min(file.warm_up_s, until_s)
    switches = tuple(run.controller.switches) if run.controller else ()
    edges = [file.window_s * number for number in range(math.ceil(until_s / file.window_s))] + [until_s]
    return Outcome(
        scenario=file.as_json(),
        complete=until_s >= file.seconds,
        until_s=until_s,
        final_shape=str(shape_of(run.cluster)),
        summary=run.results.between(from_s, until_s),
        kinds={kind: run.results.between(from_s, until_s, kind) for kind in run.results.kinds()},
        windows=tuple(
            Window(begin_s, end_s, _shape_at(begin_s, file, switches), run.results.between(begin_s, end_s))
            for begin_s, end_s in itertools.pairwise(edges)
        ),
        switches=switches,
        answers=Answers.of(run.results, from_s) if run.results.keep_ids else None,
    )


def _shape_at(at_s: float, file: ScenarioFile, switches: tuple[Switch, ...]) -> str:
    shapes = [switch.shape for switch in switches if switch.at_s <= at_s]
    return shapes[-1] if shapes else str(file.shape)


def _without_nan(values: dict[str, Any]) -> dict[str, Any]:
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values.items()}
