"""What was decided, as far as etcd keeps it: the newest decisions by number, and what they say of now."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from evolving.core.modes import Hold
from evolving.core.planner import Decision, DecisionKind, Split, make_decision
from evolving.core.terms import Role
from evolving_planner.measures import Missing
from evolving_planner.records import decode_decision

AUTHOR = "planner"  # of what no operator asked for
_LARGEST_HISTORY_BYTES = 8_000_000  # every planner reads all of it at its start, in one message


@dataclass(frozen=True, slots=True)
class Kept:
    """One decision of the history."""

    number: int  # grows by one a decision, from 0, whoever leads
    decision: Decision
    missing: Missing | None  # of the measurements it was made from


@dataclass(slots=True)
class _Entry:
    revision: int  # of the store, when it was written
    size_bytes: int
    kept: Kept | None  # None: not readable


@dataclass(slots=True)
class History:
    """Decisions that cannot be read take a number and nothing else."""

    _entries: dict[int, _Entry] = field(default_factory=dict)

    @property
    def newest(self) -> Decision | None:
        """The last decision that can be read; None: there is none."""
        readable = [entry.kept for entry in self._entries.values() if entry.kept is not None]
        return max(readable, key=lambda kept: kept.number).decision if readable else None

    @property
    def next_number(self) -> int:
        """Of the decision to come."""
        return max(self._entries, default=-1) + 1

    @property
    def prefill_share(self) -> float:
        """Share of the nodes that should prefill, by the last wish; nodes that join are assigned towards it."""
        return self.newest.prefill_share if self.newest is not None else 0.5

    @property
    def hold(self) -> Hold | None:
        """The last one given, whether its time is over or not; None: there was none, or it was released."""
        return self.newest.hold if self.newest is not None else None

    @property
    def epoch(self) -> int:
        """The last one decided."""
        return self.newest.epoch_after if self.newest is not None else 0

    def put(self, number: int, value: bytes, revision: int) -> None:
        """Take what lies under a decision's key. Raises BadRecord, with the number taken all the same."""
        known = self._entries.get(number)
        if known is not None and known.revision >= revision:
            return
        self._entries[number] = entry = _Entry(revision, len(value), None)
        entry.kept = Kept(number, *decode_decision(value))

    def forget(self, number: int, revision: int) -> None:
        """At `revision` of the store the decision was gone."""
        entry = self._entries.get(number)
        if entry is not None and entry.revision <= revision:
            del self._entries[number]

    def numbers(self) -> Collection[int]:
        """Of all there is, readable or not."""
        return self._entries.keys()

    def surplus(self, keep: int) -> list[int]:
        """Numbers of the decisions that are no longer to be kept, oldest first: all but the newest `keep`, or fewer
        where those are too large together. The newest stays."""
        size_bytes, kept = 0, 0
        surplus = []
        for number in sorted(self._entries, reverse=True):
            size_bytes += self._entries[number].size_bytes
            if kept == 0 or (kept < keep and size_bytes <= _LARGEST_HISTORY_BYTES):
                kept += 1
            else:
                surplus.append(number)
        return surplus[::-1]

    def before(self, number: int | None) -> list[Kept]:
        """The decisions numbered below `number` (None: all), newest first."""
        below = (self._entries[n].kept for n in sorted(self._entries, reverse=True) if number is None or n < number)
        return [kept for kept in below if kept is not None]

    def decision_behind(self, split: Split, remembered: Decision | None) -> Decision | None:
        """The decision that `split` comes from and the history lacks, its leader having died between the two writes;
        None: it is there. `remembered`: what this planner itself was about to write."""
        if split.epoch <= self.epoch:
            return None
        if remembered is not None and remembered.changes_split and remembered.split() == split:
            return remembered
        return _reconstructed(self.newest, split)


def _reconstructed(last: Decision | None, split: Split) -> Decision:
    """As much of a decision as its split tells. How long an operator wanted it to last is not known, so it holds."""
    epoch = last.epoch_after if last is not None else 0
    before = Split(epoch, last.roles_after if last is not None else {})
    by_operator = split.author != AUTHOR
    same_nodes = set(before.roles) == set(split.roles)
    kind = DecisionKind.SWITCH if same_nodes else DecisionKind.MEMBERSHIP
    decision = make_decision(
        before,
        split.roles,
        DecisionKind.OPERATOR if by_operator else kind,
        split.reason,
        split.author,
        _share(last, split, keep=not by_operator and not same_nodes),
        split.written_at_s,
        hold=Hold(split.author, split.reason) if by_operator else last.hold if last is not None else None,
    )
    return replace(decision, epoch_after=split.epoch)


def _share(last: Decision | None, split: Split, *, keep: bool) -> float:
    """The share of prefilling nodes aimed at from `split` on; `keep`: it is what it was, where there was one."""
    roles = list(split.roles.values())
    prefills, decodes = roles.count(Role.PREFILL), roles.count(Role.DECODE)
    if (keep and last is not None) or not (prefills and decodes):
        return last.prefill_share if last is not None else 0.5
    return prefills / (prefills + decodes)
