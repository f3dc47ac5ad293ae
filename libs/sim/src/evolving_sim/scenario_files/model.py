"""What a scenario file says, as pydantic models over the simulator's own configuration.

Tables that are one of its dataclasses (machine, planner, an agent's kind) have that class's fields as keys, with its
defaults and its bounds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PrivateAttr,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from evolving.core.config import PlannerConfig
from evolving.core.errors import CoreError
from evolving.core.planner import SplitShape
from evolving_sim.arms.named import ARMS
from evolving_sim.arms.parameters import RESTART_S, ArrowConfig, DynamoPlannerConfig
from evolving_sim.faults import LostEvents, NodeDeath, PlannerFailover, SlowNode
from evolving_sim.mixes import CLAUDE_CODE, CODING, COMPUTER_USE, MATH, MATH_LONG
from evolving_sim.node_config import NodeConfig
from evolving_sim.population import Spacing
from evolving_sim.scenario_files.machine import Values, whole_machine
from evolving_sim.sessions import AgentKind

KINDS = {kind.name: kind for kind in (CODING, MATH, MATH_LONG, COMPUTER_USE)}
RECORDED = {kind.name: kind for kind in (CLAUDE_CODE,)}


class Section(BaseModel):
    """A table of the file: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


def _shape(value: Any) -> SplitShape:
    if isinstance(value, SplitShape):
        return value
    try:
        return SplitShape.parse(str(value))
    except CoreError as error:
        raise ValueError(str(error)) from error


def _machine(value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
    return handler(whole_machine(value, _folder_of(info.context)) if isinstance(value, dict) else value)


def _folder_of(context: Any) -> Path:
    return context["folder"] if context else Path()


def _like(value: Any) -> Any:
    """A kind may be `like` one of ours, but for the keys it gives itself."""
    if not isinstance(value, dict) or "like" not in value:
        return value
    own: Values = dict(value)
    like = own.pop("like")
    if like not in KINDS:
        raise ValueError(f"like must be one of {', '.join(KINDS)}, got {like!r}")
    return {**asdict(KINDS[like]), **own}


Shape = Annotated[SplitShape, BeforeValidator(_shape), PlainSerializer(str)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Span = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Agents = Mapping[str, Annotated[int, Field(ge=0)]]


class PeriodTable(Section):
    """From some time on, so many agents of each kind run, each replaced when it is done."""

    from_s: Seconds
    agents: Agents


class ArrivalsTable(Section):
    """Agents that come at a rate and are not replaced."""

    kind: str
    per_min: Span
    spacing: Spacing = Spacing.POISSON
    from_s: Seconds = 0.0
    until_s: Annotated[float, Field(ge=0)] = math.inf


class BurstTable(Section):
    """So many agents of a kind that start at once, beside the others."""

    at_s: Seconds
    count: Count
    kind: str


class TraceTable(Section):
    """Agents whose sessions are recorded ones: a kind, as those that are drawn. See `traced.TraceKind`."""

    trace: str  # a file, relative to the scenario's; or one that comes with the package
    compression: Span = 1.0
    think_s_max: Annotated[float, Field(ge=0)] = math.inf
    output_scale: Span = 1.0
    shuffled: bool = True
    repeated: bool = True


class WorkloadTable(Section):
    """What is asked: agents in a closed loop, agents that arrive, requests at recorded times; one or more of them."""

    agents: Agents = Field(default_factory=dict)  # from the start, instead of `periods`
    periods: tuple[PeriodTable, ...] = ()
    arrivals: tuple[ArrivalsTable, ...] = ()
    recorded: tuple[str, ...] = ()  # traces whose requests come when they did
    bursts: tuple[BurstTable, ...] = ()
    begun: bool = True  # agents there are at the start are somewhere in their sessions
    spread_s: Seconds = 60.0  # over which the agents that a period adds start

    @model_validator(mode="after")
    def _asks_something(self) -> Self:
        if self.agents and self.periods:
            raise ValueError("give agents or periods, not both")
        if not (self.agents or self.periods or self.arrivals or self.recorded):
            raise ValueError("nothing is asked: give agents, periods, arrivals or recorded")
        return self

    @property
    def closed_loop(self) -> Sequence[PeriodTable]:
        """`agents` as a period, or the periods."""
        return (PeriodTable(from_s=0.0, agents=self.agents),) if self.agents else self.periods

    @property
    def kind_names(self) -> list[str]:
        """Kinds of agents that are named, but for those of `recorded`."""
        several = [name for period in self.closed_loop for name in period.agents]
        return [*several, *(each.kind for each in self.arrivals), *(each.kind for each in self.bursts)]


class FaultsTable(Section):
    """What goes wrong, each as a list of tables. Nodes are called n000, n001, …"""

    node_death: tuple[NodeDeath, ...] = ()
    slow_node: tuple[SlowNode, ...] = ()
    lost_events: tuple[LostEvents, ...] = ()
    planner_failover: tuple[PlannerFailover, ...] = ()


class DynamoTable(Section):
    """Where the arm is Dynamo's planner."""

    restart_s: Seconds = RESTART_S  # of an engine that changes phase
    planner: DynamoPlannerConfig = DynamoPlannerConfig()


class ScenarioFile(Section):
    """One run: `seconds` simulated seconds of a workload on the nodes of a split."""

    name: str = ""
    seed: int = 1
    seconds: Span
    warm_up_s: Seconds = 0.0  # what is answered before doesn't count
    window_s: Span = 600.0  # results also have each stretch of so long
    shape: Shape
    arm: str = "ours"
    gateway_s: Seconds = 0.0  # from a request's being sent until it is routed
    machine: Annotated[NodeConfig, WrapValidator(_machine)]
    planner: PlannerConfig = PlannerConfig()  # where the arm is ours
    dynamo: DynamoTable = DynamoTable()
    arrow: ArrowConfig = ArrowConfig()  # where the arm is Arrow's scheduler
    kinds: Mapping[str, Annotated[AgentKind, BeforeValidator(_like)]] = Field(default_factory=dict)
    traces: Mapping[str, TraceTable] = Field(default_factory=dict)
    workload: WorkloadTable
    faults: FaultsTable = FaultsTable()
    _folder: Path = PrivateAttr(default=Path())

    def model_post_init(self, context: Any) -> None:
        """Remember where the file is."""
        self._folder = _folder_of(context)

    @property
    def folder(self) -> Path:
        """Paths in the file are relative to it."""
        return self._folder

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        """A kind is called as its table is."""
        kinds = values.get("kinds") if isinstance(values, dict) else None
        if not isinstance(kinds, dict):
            return values
        named = {name: {"name": name, **given} if isinstance(given, dict) else given for name, given in kinds.items()}
        return {**values, "kinds": named}

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.warm_up_s >= self.seconds:
            raise ValueError(f"warm_up_s ({self.warm_up_s:g}) must be less than seconds ({self.seconds:g})")
        if self.arm not in ARMS:
            raise ValueError(f"arm: no arm is called {self.arm!r}; there are {', '.join(ARMS)}")
        known = [*dict.fromkeys((*KINDS, *RECORDED, *self.kinds, *self.traces))]
        for name in self.workload.kind_names:
            if name not in known:
                raise ValueError(f"workload: no kind of agent is called {name!r}; there are {', '.join(known)}")
        for name in self.workload.recorded:
            if name not in self.traces:
                raise ValueError(f"workload.recorded: no trace is called {name!r}: give [traces.{name}]")
        return self

    def as_json(self) -> dict[str, Any]:
        """Every key, those left out too. Infinity, which JSON lacks, as text."""
        document: dict[str, Any] = json.loads(self.model_dump_json())
        return document
