"""The planner's records in etcd ↔ the core's types: the split, and one decision."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from evolving.core.modes import Hold, Mode
from evolving.core.planner import Decision, DecisionKind, Split
from evolving.runtime import keys
from evolving_planner.evaluation_record import (
    EvaluationRecord,
    from_record,
    roles_from_texts,
    roles_to_texts,
    to_record,
)
from evolving_planner.measures import Missing

_LARGEST_BYTES = 1_000_000  # etcd refuses requests beyond 1.5 MiB


@dataclass(frozen=True, slots=True)
class _DecisionRecord:
    decided_at_s: Annotated[float, Field(allow_inf_nan=False)]
    kind: Literal["switch", "stay", "membership", "operator"]
    reason: str
    author: str
    epoch_before: Annotated[int, Field(ge=0)]
    epoch_after: Annotated[int, Field(ge=0)]
    roles_before: dict[str, keys.Role]
    roles_after: dict[str, keys.Role]
    prefill_share: Annotated[float, Field(ge=0, le=1)]
    hold: Hold | None
    mode: Mode | None
    evaluation: EvaluationRecord | None
    missing: Missing | None


_DECISION: TypeAdapter[_DecisionRecord] = TypeAdapter(_DecisionRecord)


def encode_split(split: Split) -> bytes:
    """The record under the split's key."""
    record = keys.Split(split.epoch, roles_to_texts(split.roles), split.reason, split.author, split.written_at_s)
    return keys.encode(record)


def decode_split(value: bytes) -> Split:
    """Raises keys.BadRecord."""
    record = keys.decode(keys.Split, value)
    return Split(record.epoch, roles_from_texts(record.roles), record.reason, record.author, record.written_at_s)


def encode_decision(decision: Decision, missing: Missing | None) -> bytes:
    """The record under a decision's key, JSON. What is larger than etcd takes in a value is left out: earlier slices,
    where that is not enough the evaluation."""
    evaluation = to_record(decision.evaluation) if decision.evaluation is not None else None
    record = _DecisionRecord(
        decided_at_s=decision.decided_at_s,
        kind=decision.kind.value,
        reason=decision.reason,
        author=decision.author,
        epoch_before=decision.epoch_before,
        epoch_after=decision.epoch_after,
        roles_before=roles_to_texts(decision.roles_before),
        roles_after=roles_to_texts(decision.roles_after),
        prefill_share=decision.prefill_share,
        hold=decision.hold,
        mode=decision.mode,
        evaluation=evaluation,
        missing=missing,
    )
    value = _DECISION.dump_json(record)
    if len(value) > _LARGEST_BYTES and evaluation is not None:
        value = _DECISION.dump_json(replace(record, evaluation=replace(evaluation, earlier=())))
    return value if len(value) <= _LARGEST_BYTES else _DECISION.dump_json(replace(record, evaluation=None))


def decode_decision(value: bytes) -> tuple[Decision, Missing | None]:
    """What `encode_decision` was given. Raises keys.BadRecord."""
    try:
        record = _DECISION.validate_json(value)
    except ValidationError as error:
        raise keys.BadRecord(f"not a decision: {error.errors(include_url=False)[0]['msg']}") from error
    decision = Decision(
        decided_at_s=record.decided_at_s,
        kind=DecisionKind(record.kind),
        reason=record.reason,
        author=record.author,
        epoch_before=record.epoch_before,
        epoch_after=record.epoch_after,
        roles_before=roles_from_texts(record.roles_before),
        roles_after=roles_from_texts(record.roles_after),
        prefill_share=record.prefill_share,
        hold=record.hold,
        evaluation=from_record(record.evaluation) if record.evaluation is not None else None,
        mode=record.mode,
    )
    return decision, record.missing
