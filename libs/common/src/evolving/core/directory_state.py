"""What the parts of the directory share."""

from __future__ import annotations

import enum
from collections import defaultdict, deque
from dataclasses import dataclass, field

from evolving.core.branches import Branch, BranchTable
from evolving.core.config import DirectoryConfig
from evolving.core.directory_log import Log, LogEntry
from evolving.core.directory_types import Effect, Ignored
from evolving.core.prefix_index import PrefixIndex
from evolving.core.refcounts import Node, RefCounts


class TurnKind(enum.Enum):
    """What becomes of the homes on a node (`directory_turns`)."""

    GONE = enum.auto()  # they vanish with it
    KEEP = enum.auto()  # DECODE ones go, after it was made PREFILL home of what it holds in L2 and has none
    RESET = enum.auto()  # all go


@dataclass(slots=True)
class Turn:
    """What all branches have to take."""

    number: int
    kind: TurnKind
    node: Node
    reason: str
    left: list[Branch]  # who may have yet to take it


@dataclass(slots=True)
class Turns:
    """Turns not yet taken by all branches, oldest first."""

    last: int = 0  # number of the latest one; a branch notes the latest it took
    open: deque[Turn] = field(default_factory=deque)
    unsent: list[Effect] = field(default_factory=list)  # effects nobody was given yet

    @property
    def due(self) -> bool:
        """Whether time alone goes on with them."""
        return bool(self.open or self.unsent)


@dataclass(slots=True)
class DirectoryState:
    """The prefix index, the counts over it, the branch table, and counters for metrics."""

    config: DirectoryConfig
    index: PrefixIndex
    counts: RefCounts
    table: BranchTable
    turns: Turns = field(default_factory=Turns)
    now_s: float = 0.0  # the latest time seen; never runs back
    counters: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    ignored: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    log: Log | None = None  # who is told of every change of branches and homes

    @classmethod
    def new(cls, config: DirectoryConfig) -> DirectoryState:
        """An empty directory."""
        index = PrefixIndex(config.run_blocks_max)
        return cls(config, index, RefCounts(index), BranchTable(config.remembered_requests))

    def advance(self, now_s: float) -> float:
        """The time to reckon with."""
        self.now_s = max(self.now_s, now_s)
        return self.now_s

    def record(self, entry: LogEntry) -> None:
        """Tell the log what happened."""
        if self.log is not None:
            self.log(entry)

    def ignore(self, kind: str, reason: str) -> list[Effect]:
        """The effects of an event that changes nothing."""
        self.ignored[kind] += 1
        return [Ignored(kind, reason)]
