"""From a scenario file to a scenario of the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from evolving_sim.arms.arm import Arm
from evolving_sim.arms.named import ARMS, arrow, dynamo, ours
from evolving_sim.driver import Scenario
from evolving_sim.faults import Fault
from evolving_sim.kinds import Kind
from evolving_sim.planner_loop import LoopConfig
from evolving_sim.population import Arrivals, Burst, Period, WorkloadConfig
from evolving_sim.scenario_files.model import KINDS, RECORDED, ScenarioFile, TraceTable
from evolving_sim.traced import TraceKind


def scenario_of(file: ScenarioFile) -> Scenario:
    """What a file describes. Raises ValueError where its values don't go together, and what reading a trace does."""
    kinds = _kinds(file)
    return Scenario(
        machine=file.machine,
        shape=file.shape,
        workload=_workload(file, kinds),
        arm=_arm(file),
        seed=file.seed,
        faults=_faults(file),
        gateway_s=file.gateway_s,
    )


def _arm(file: ScenarioFile) -> Arm:
    """One by name, with the file's own parameters where it has some."""
    if file.arm == "ours":
        return ours(LoopConfig(file.planner))
    if file.arm == "dynamo":
        return dynamo(file.dynamo.planner, file.dynamo.restart_s)
    return arrow(file.arrow) if file.arm == "arrow" else ARMS[file.arm]


def _faults(file: ScenarioFile) -> list[Fault]:
    table = file.faults
    return [*table.node_death, *table.slow_node, *table.lost_events, *table.planner_failover]


def _workload(file: ScenarioFile, kinds: Mapping[str, Kind]) -> WorkloadConfig:
    table = file.workload
    return WorkloadConfig(
        periods=[
            Period(each.from_s, {kinds[name]: count for name, count in each.agents.items()})
            for each in table.closed_loop
        ],
        arrivals=[
            Arrivals(kinds[each.kind], each.per_min, each.spacing, each.from_s, each.until_s) for each in table.arrivals
        ],
        recorded=[_trace(file, name, file.traces[name]) for name in table.recorded],
        bursts=[Burst(each.at_s, each.count, kinds[each.kind]) for each in table.bursts],
        begun=table.begun,
        spread_s=table.spread_s,
    )


def _kinds(file: ScenarioFile) -> dict[str, Kind]:
    traces = {name: _trace(file, name, table) for name, table in file.traces.items()}
    return {**KINDS, **RECORDED, **file.kinds, **traces}


def _trace(file: ScenarioFile, name: str, table: TraceTable) -> TraceKind:
    path = file.folder / table.trace
    packaged = not path.exists() and Path(table.trace).name == table.trace
    return TraceKind(
        name=name,
        trace=table.trace if packaged else path,
        compression=table.compression,
        think_s_max=table.think_s_max,
        output_scale=table.output_scale,
        shuffled=table.shuffled,
        repeated=table.repeated,
    )
