"""An evaluation as it lies in etcd, with all that it was computed from, so that it can be computed again.

Nodes are named once and counted by place elsewhere, models that are equal are written once: a candidate of a large
cluster moves many nodes, and an etcd value has its limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, cast

from pydantic import Field

from evolving.core.config import PlannerConfig
from evolving.core.planner import SplitShape, parse_role, role_text
from evolving.core.replan import Candidate, Evaluation
from evolving.core.slices import Slice
from evolving.core.terms import Role
from evolving.core.throughput import NodeModel
from evolving.runtime import keys

_Place = Annotated[int, Field(ge=0)]
_Count = Annotated[int, Field(ge=1)]
_Number = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class CandidateRecord:
    """See core Candidate."""

    prefill_nodes: _Count
    decode_nodes: _Count
    moves: dict[keys.Role, tuple[_Place, ...]]  # places of nodes by their new role
    prefill: _Number
    decode: _Number
    throughput: _Number
    mean_gain: _Number
    error: _Number
    passes: bool


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """See core Evaluation."""

    nodes: tuple[str, ...]  # a place is an index of this
    roles: dict[str, keys.Role]
    models: tuple[NodeModel, ...]
    model_places: tuple[tuple[_Place, ...], ...]  # of the nodes that have each model
    slices: tuple[Slice, ...]
    config: PlannerConfig
    counted: int
    candidates: tuple[CandidateRecord, ...]
    problem: str
    earlier: tuple[Slice, ...] = ()
    counted_earlier: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for a place that is none."""
        moved = [places for candidate in self.candidates for places in candidate.moves.values()]
        if any(place >= len(self.nodes) for places in (*self.model_places, *moved) for place in places):
            raise ValueError("a place beyond the nodes")
        if len(self.models) != len(self.model_places):
            raise ValueError("each model needs its nodes")


def roles_to_texts(roles: Mapping[str, Role]) -> dict[str, keys.Role]:
    """Roles as records write them."""
    return {node: _text(role) for node, role in sorted(roles.items())}


def roles_from_texts(texts: Mapping[str, keys.Role]) -> dict[str, Role]:
    """What `roles_to_texts` was given."""
    return {node: parse_role(text) for node, text in texts.items()}


def to_record(evaluation: Evaluation) -> EvaluationRecord:
    """The same evaluation, more compactly."""
    nodes = tuple(sorted({*evaluation.roles, *evaluation.models}))
    place = {node: index for index, node in enumerate(nodes)}
    model_places: dict[NodeModel, list[int]] = {}
    for node, model in sorted(evaluation.models.items()):
        model_places.setdefault(model, []).append(place[node])
    return EvaluationRecord(
        nodes=nodes,
        roles=roles_to_texts(evaluation.roles),
        models=tuple(model_places),
        model_places=tuple(tuple(places) for places in model_places.values()),
        slices=evaluation.slices,
        config=evaluation.config,
        counted=evaluation.counted,
        earlier=evaluation.earlier,
        counted_earlier=evaluation.counted_earlier,
        candidates=tuple(_candidate_to_record(candidate, place) for candidate in evaluation.candidates),
        problem=evaluation.problem,
    )


def from_record(record: EvaluationRecord) -> Evaluation:
    """What `to_record` was given."""
    of_models = zip(record.models, record.model_places, strict=True)
    return Evaluation(
        roles=roles_from_texts(record.roles),
        models={record.nodes[place]: model for model, places in of_models for place in places},
        slices=record.slices,
        config=record.config,
        counted=record.counted,
        earlier=record.earlier,
        counted_earlier=record.counted_earlier,
        candidates=tuple(_candidate_from_record(candidate, record.nodes) for candidate in record.candidates),
        problem=record.problem,
    )


def _candidate_to_record(candidate: Candidate, place: Mapping[str, int]) -> CandidateRecord:
    moves: dict[Role, list[int]] = {}
    for node, role in candidate.moves.items():
        moves.setdefault(role, []).append(place[node])
    return CandidateRecord(
        prefill_nodes=candidate.shape.prefill,
        decode_nodes=candidate.shape.decode,
        moves={_text(role): tuple(places) for role, places in moves.items()},
        prefill=candidate.prefill,
        decode=candidate.decode,
        throughput=candidate.throughput,
        mean_gain=candidate.mean_gain,
        error=candidate.error,
        passes=candidate.passes,
    )


def _candidate_from_record(record: CandidateRecord, nodes: tuple[str, ...]) -> Candidate:
    return Candidate(
        shape=SplitShape(record.prefill_nodes, record.decode_nodes),
        moves={nodes[place]: parse_role(role) for role, places in record.moves.items() for place in places},
        prefill=record.prefill,
        decode=record.decode,
        throughput=record.throughput,
        mean_gain=record.mean_gain,
        error=record.error,
        passes=record.passes,
    )


def _text(role: Role) -> keys.Role:
    return cast("keys.Role", role_text(role))
