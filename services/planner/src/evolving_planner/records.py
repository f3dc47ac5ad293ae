"""The planner's records in etcd ↔ the core's types: the split, and the history of decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal, cast

from pydantic import Field, TypeAdapter, ValidationError

from evolving.core.planner import Decision, DecisionKind, Split, parse_role, role_text
from evolving.core.terms import Role
from evolving.runtime import keys

_PLANNER = "planner"
_LARGEST_BYTES = 1_000_000  # etcd refuses requests beyond 1.5 MiB


@dataclass(frozen=True, slots=True)
class History:
    """The newest decisions, oldest first, and how many older ones are no longer kept.

    prefill_share: share of the nodes that should prefill, by the last wish; nodes that join are assigned towards it.
    """

    decisions: tuple[Decision, ...] = ()
    dropped: int = 0
    prefill_share: float = 0.5

    def with_decision(self, decision: Decision, keep: int) -> History:
        """This history and one more decision, of which the newest `keep` are kept."""
        decisions = (*self.decisions, decision)
        surplus = max(0, len(decisions) - keep)
        return History(decisions[surplus:], self.dropped + surplus, decision.prefill_share)

    def completed(self, split: Split) -> History:
        """This history with the decision behind `split`, whose leader died between writing the split and this."""
        last = self.decisions[-1] if self.decisions else None
        if (last is None and split.epoch == 0) or (last is not None and last.epoch_after >= split.epoch):
            return self
        found = Decision(
            decided_at_s=split.written_at_s,
            kind=DecisionKind.MEMBERSHIP if split.author == _PLANNER else DecisionKind.OPERATOR,
            reason=split.reason,
            author=split.author,
            epoch_before=last.epoch_after if last else 0,
            epoch_after=split.epoch,
            roles_before=last.roles_after if last else {},
            roles_after=split.roles,
            prefill_share=self.prefill_share,
        )
        return replace(self, decisions=(*self.decisions, found))

    def page(self, size: int, before: int | None) -> tuple[list[Decision], int | None]:
        """The newest `size` decisions numbered below `before` (None: all), newest first, and the number to go on
        from. Numbers count from 0, the first decision ever."""
        end = len(self.decisions) if before is None else min(max(before - self.dropped, 0), len(self.decisions))
        start = max(0, end - size)
        return list(reversed(self.decisions[start:end])), self.dropped + start if start else None


@dataclass(frozen=True, slots=True)
class _DecisionRecord:
    decided_at_s: float
    kind: Literal["switch", "stay", "membership", "operator"]
    reason: str
    author: str
    epoch_before: Annotated[int, Field(ge=0)]
    epoch_after: Annotated[int, Field(ge=0)]
    roles_before: dict[str, keys.Role]
    roles_after: dict[str, keys.Role]
    prefill_share: Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, slots=True)
class _HistoryRecord:
    decisions: tuple[_DecisionRecord, ...]
    dropped: Annotated[int, Field(ge=0)]
    prefill_share: Annotated[float, Field(ge=0, le=1)]


_HISTORY: TypeAdapter[_HistoryRecord] = TypeAdapter(_HistoryRecord)


def encode_split(split: Split) -> bytes:
    """The record under the split's key."""
    record = keys.Split(split.epoch, _texts(split.roles), split.reason, split.author, split.written_at_s)
    return keys.encode(record)


def decode_split(value: bytes) -> Split:
    """Raises keys.BadRecord."""
    record = keys.decode(keys.Split, value)
    return Split(record.epoch, _roles(record.roles), record.reason, record.author, record.written_at_s)


def encode_history(history: History) -> bytes:
    """JSON, UTF-8. The oldest decisions are left out where all would be more than etcd takes in one value."""
    value = _encode_history(history)
    while len(value) > _LARGEST_BYTES and len(history.decisions) > 1:
        surplus = 1 + len(history.decisions) // 10
        history = replace(history, decisions=history.decisions[surplus:], dropped=history.dropped + surplus)
        value = _encode_history(history)
    return value


def _encode_history(history: History) -> bytes:
    decisions = tuple(
        _DecisionRecord(
            decided_at_s=d.decided_at_s,
            kind=d.kind.value,
            reason=d.reason,
            author=d.author,
            epoch_before=d.epoch_before,
            epoch_after=d.epoch_after,
            roles_before=_texts(d.roles_before),
            roles_after=_texts(d.roles_after),
            prefill_share=d.prefill_share,
        )
        for d in history.decisions
    )
    return _HISTORY.dump_json(_HistoryRecord(decisions, history.dropped, history.prefill_share))


def decode_history(value: bytes) -> History:
    """Raises keys.BadRecord."""
    try:
        record = _HISTORY.validate_json(value)
    except ValidationError as error:
        raise keys.BadRecord(f"not a history of decisions: {error.errors(include_url=False)[0]['msg']}") from error
    decisions = tuple(
        Decision(
            decided_at_s=d.decided_at_s,
            kind=DecisionKind(d.kind),
            reason=d.reason,
            author=d.author,
            epoch_before=d.epoch_before,
            epoch_after=d.epoch_after,
            roles_before=_roles(d.roles_before),
            roles_after=_roles(d.roles_after),
            prefill_share=d.prefill_share,
        )
        for d in record.decisions
    )
    return History(decisions, record.dropped, record.prefill_share)


def _texts(roles: Mapping[str, Role]) -> dict[str, keys.Role]:
    return {node: cast("keys.Role", role_text(role)) for node, role in sorted(roles.items())}


def _roles(texts: Mapping[str, keys.Role]) -> dict[str, Role]:
    return {node: parse_role(text) for node, text in texts.items()}
