"""Which nodes prefill and which decode: the rules that turn an operator's wish and the live nodes into a split.

Pure: functions take the current split, the live nodes and `now_s` and return a `Decision`, which says what the split
becomes and why. Following nodes that come and go, in core/membership.py, and deciding by measured throughput (the
paper, section 4.3), in core/replan.py, produce the same `Decision` with other kinds.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from evolving.core.errors import CoreError, InvalidArgument
from evolving.core.modes import Hold, Mode
from evolving.core.terms import Role

if TYPE_CHECKING:
    from evolving.core.replan import Evaluation

_SHAPE = re.compile(r"(\d{1,5})[Pp](\d{1,5})[Dd]")

_PREFILLS = frozenset({Role.PREFILL, Role.MIXED})
_DECODES = frozenset({Role.DECODE, Role.MIXED})


class SplitRefused(InvalidArgument):
    """The proposed split cannot be: an unknown node, or a phase without a node. Nothing changed."""

    code = "SPLIT_REFUSED"


class EpochChanged(CoreError):
    """The split is not the one the proposal was made against. Nothing changed."""

    code = "EPOCH_CHANGED"

    def __init__(self, current: int, expected: int) -> None:
        super().__init__(
            f"the split has epoch {current}, not {expected}",
            {"current_epoch": str(current)},
        )


class DecisionKind(enum.StrEnum):
    """What made the planner decide."""

    SWITCH = "switch"  # measured throughput
    STAY = "stay"
    MEMBERSHIP = "membership"  # a node came or went
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class SplitShape:
    """How many nodes prefill and how many decode, written 4P5D in the paper."""

    prefill: int
    decode: int

    def __post_init__(self) -> None:
        if self.prefill < 1 or self.decode < 1:
            raise SplitRefused(f"{self}: each phase needs a node")

    def __str__(self) -> str:
        return f"{self.prefill}P{self.decode}D"

    @property
    def total(self) -> int:
        """Nodes in all."""
        return self.prefill + self.decode

    @property
    def prefill_share(self) -> float:
        """Share of the nodes that prefill, 0 to 1."""
        return self.prefill / self.total

    @classmethod
    def parse(cls, text: str) -> SplitShape:
        """Read "2P1D". Raises SplitRefused."""
        match = _SHAPE.fullmatch(text.strip())
        if match is None:
            raise SplitRefused(f"{text!r} is not a shape such as 2P1D")
        return cls(int(match[1]), int(match[2]))


@dataclass(frozen=True, slots=True)
class Split:
    """The role of each node. Epoch 0: none was written yet."""

    epoch: int = 0
    roles: Mapping[str, Role] = field(default_factory=dict)
    reason: str = ""
    author: str = ""
    written_at_s: float = 0.0  # unix time


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided, from what, and why. Equal epochs: the split stayed."""

    decided_at_s: float  # unix time
    kind: DecisionKind
    reason: str
    author: str
    epoch_before: int
    epoch_after: int
    roles_before: Mapping[str, Role]
    roles_after: Mapping[str, Role]
    # Share of nodes that should prefill from here on; nodes that join are assigned towards it.
    prefill_share: float
    # The operator's hold in force from here on: no switch by throughput. None: there is none.
    hold: Hold | None = None
    # What was measured, and the mode that says what becomes of it; None: the decision did not ask for them.
    evaluation: Evaluation | None = None
    mode: Mode | None = None

    @property
    def changes_split(self) -> bool:
        """The split must be written."""
        return self.epoch_after != self.epoch_before

    @property
    def moved_nodes(self) -> tuple[str, ...]:
        """Nodes listed before and after with another role, in order."""
        before = self.roles_before
        return tuple(sorted(n for n, role in self.roles_after.items() if n in before and before[n] is not role))

    def split(self) -> Split:
        """The split once this decision is written."""
        return Split(
            self.epoch_after,
            self.roles_after,
            self.reason,
            self.author,
            self.decided_at_s,
        )


def role_text(role: Role) -> str:
    """The role as people and records write it: "prefill"."""
    return role.name.lower()


def parse_role(text: str) -> Role:
    """Read what `role_text` wrote. Raises SplitRefused."""
    try:
        return Role[text.strip().upper()]
    except KeyError:
        known = ", ".join(role_text(role) for role in Role)
        raise SplitRefused(f"{text!r} is no role; roles are {known}") from None


def effective_roles(split: Split, live: Collection[str]) -> dict[str, Role]:
    """Roles in effect: the split's for live nodes; a live node it does not list serves both phases."""
    return {node: split.roles.get(node, Role.MIXED) for node in sorted(live)}


def role_counts(roles: Mapping[str, Role]) -> tuple[int, int]:
    """Nodes that only prefill, nodes that only decode."""
    values = list(roles.values())
    return values.count(Role.PREFILL), values.count(Role.DECODE)


def check_roles(roles: Mapping[str, Role], live: Collection[str]) -> None:
    """Raise SplitRefused for a node that isn't live, or, with two live nodes or more, a phase without a node."""
    unknown = sorted(set(roles) - set(live))
    if unknown:
        raise SplitRefused(f"no such node: {', '.join(unknown)}")
    if len(live) < 2:
        return  # gateways serve both phases on the one there is
    served = {roles.get(node, Role.MIXED) for node in live}
    for phase, able in (("prefill", _PREFILLS), ("decode", _DECODES)):
        if not served & able:
            raise SplitRefused(f"no node would {phase}")


def assign(shape: SplitShape, current: Mapping[str, Role], nodes: Collection[str]) -> dict[str, Role]:
    """Give `shape.total` nodes their roles, moving as few as possible: who already has a wanted role keeps it.

    Ties go by node id, so that any planner picks the same nodes.
    """
    assert shape.total == len(nodes)
    keep_prefill = [n for n in sorted(nodes) if current.get(n) is Role.PREFILL][: shape.prefill]
    keep_decode = [n for n in sorted(nodes) if current.get(n) is Role.DECODE][: shape.decode]
    kept = {*keep_prefill, *keep_decode}
    roles = dict.fromkeys(keep_prefill, Role.PREFILL) | dict.fromkeys(keep_decode, Role.DECODE)
    for node in sorted(set(nodes) - kept):
        lacks_prefill = sum(role is Role.PREFILL for role in roles.values()) < shape.prefill
        roles[node] = Role.PREFILL if lacks_prefill else Role.DECODE
    return roles


def propose_shape(
    split: Split,
    live: Collection[str],
    shape: SplitShape,
    *,
    expected_epoch: int,
    reason: str,
    author: str,
    now_s: float,
    hold: Hold | None = None,
) -> Decision:
    """An operator's wish for counts. Draining nodes stay as they are; the shape must name all the others.

    `expected_epoch` 0: whatever it is now. `hold`: what keeps the planner from moving nodes from here on; None: nothing
    does, whatever did before. Raises SplitRefused, EpochChanged.
    """
    _check_epoch(split, expected_epoch)
    roles = effective_roles(split, live)
    serving = [node for node, role in roles.items() if role is not Role.DRAINING]
    if shape.total != len(serving):
        raise SplitRefused(f"{shape} asks for {shape.total} nodes, {len(serving)} serve")
    wanted = {node: role for node, role in roles.items() if node not in serving}
    wanted |= assign(shape, split.roles, serving)
    text = reason or f"operator asked for {shape}"
    return make_decision(split, wanted, DecisionKind.OPERATOR, text, author, shape.prefill_share, now_s, hold=hold)


def propose_changes(
    split: Split,
    live: Collection[str],
    changes: Mapping[str, Role],
    *,
    expected_epoch: int,
    reason: str,
    author: str,
    prefill_share: float,
    now_s: float,
    hold: Hold | None = None,
) -> Decision:
    """An operator's wish for named nodes; the others keep their roles.

    `prefill_share` is the share aimed at so far, kept when the result has no node of one plain role.
    `expected_epoch` and `hold` as for a shape. Raises SplitRefused, EpochChanged.
    """
    _check_epoch(split, expected_epoch)
    if not changes:
        raise SplitRefused("no node is named")
    wanted = {node: role for node, role in split.roles.items() if node in live} | dict(changes)
    check_roles(wanted, live)
    said = ", ".join(f"{node}={role_text(role)}" for node, role in sorted(changes.items()))
    prefills, decodes = role_counts(wanted)
    share = prefills / (prefills + decodes) if prefills and decodes else prefill_share
    return make_decision(
        split,
        wanted,
        DecisionKind.OPERATOR,
        reason or f"operator asked for {said}",
        author,
        share,
        now_s,
        hold=hold,
    )


def propose_keep(
    split: Split,
    *,
    expected_epoch: int,
    reason: str,
    author: str,
    prefill_share: float,
    now_s: float,
    hold: Hold,
) -> Decision:
    """An operator holds the split as it is. Raises EpochChanged."""
    _check_epoch(split, expected_epoch)
    text = reason or "operator holds the split as it is"
    return make_decision(split, split.roles, DecisionKind.OPERATOR, text, author, prefill_share, now_s, hold=hold)


def release(split: Split, *, reason: str, author: str, prefill_share: float, now_s: float) -> Decision:
    """An operator ends a hold: the split stays as it is until measurements say otherwise."""
    text = reason or "operator released the split"
    return make_decision(split, split.roles, DecisionKind.OPERATOR, text, author, prefill_share, now_s)


def _check_epoch(split: Split, expected_epoch: int) -> None:
    if expected_epoch not in (0, split.epoch):
        raise EpochChanged(split.epoch, expected_epoch)


def make_decision(
    split: Split,
    roles: Mapping[str, Role],
    kind: DecisionKind,
    reason: str,
    author: str,
    prefill_share: float,
    now_s: float,
    *,
    hold: Hold | None = None,
    evaluation: Evaluation | None = None,
    mode: Mode | None = None,
) -> Decision:
    """The decision that gives `split` these roles; its epoch grows only if they are others than before."""
    changed = dict(roles) != dict(split.roles)
    return Decision(
        decided_at_s=now_s,
        kind=kind,
        reason=reason,
        author=author,
        epoch_before=split.epoch,
        epoch_after=split.epoch + 1 if changed else split.epoch,
        roles_before=dict(split.roles),
        roles_after=dict(roles),
        prefill_share=prefill_share,
        hold=hold,
        evaluation=evaluation,
        mode=mode,
    )
