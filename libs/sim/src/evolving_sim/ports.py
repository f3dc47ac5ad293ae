"""What a workload and the cluster that serves it ask of each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from evolving_sim.events import EventHeap
from evolving_sim.legs import Request


class Served(Protocol):
    """What a workload needs of a cluster."""

    @property
    def block_tokens(self) -> int:
        """Tokens in a block of KV."""

    def submit(self, request: Request) -> None:
        """A request comes. Its `on_done` is called when it is answered."""

    def end_branch(self, branch_id: str) -> None:
        """A branch that made a request or more ended: nobody asks for its context again."""

    def recall(self, names: Sequence[bytes], blocks: int) -> None:
        """The first `blocks` of these were computed before the run began: some node has them in L2."""


class Workload(Protocol):
    """Whatever makes requests. What it asks depends on itself, not on when it is answered."""

    def begin(self, events: EventHeap, cluster: Served) -> None:
        """Put the first arrivals into the events. Called once."""

    def check_invariants(self) -> None:
        """Assert what must hold between any two events."""
