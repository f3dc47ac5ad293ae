"""The audit: counts kept incrementally, counted anew from the branch table, and those nodes evict by, compared.

The recount uses only the branches' contexts and homes, never the runs' own tallies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from evolving.core.directory_state import DirectoryState
from evolving.core.directory_types import AuditMismatch, AuditReport
from evolving.core.refcounts import Node, count_at, home_key
from evolving.core.runs import Run
from evolving.core.terms import NAME_BYTES


class _Part(NamedTuple):
    """Blocks of a run that all have the same recounted homes."""

    run: Run
    first: int  # depth
    end: int
    homes: dict[int, int]


class _Homes(dict[int, list[tuple[int, int, int]]]):
    """By id of a run: (first, end, home key), one for each branch and phase with a home in the run."""


def _collect(state: DirectoryState) -> _Homes:
    """Every branch's homes, laid over the runs of its context."""
    collected = _Homes()
    for branch in state.table.live.values():
        path = state.index.path(branch.tip)
        for phase, homes in branch.homes.items():
            for first, end, number in homes:
                for run in path:
                    begin, until = max(first, run.start), min(end, run.start + run.size)
                    if begin < until:
                        collected.setdefault(id(run), []).append((begin, until, home_key(number, phase)))
    return collected


def _parts(state: DirectoryState) -> Iterator[_Part]:
    """All runs, cut where recounted homes change."""
    collected = _collect(state)
    for run in state.index.runs():
        laid = collected.pop(id(run), [])
        cuts = sorted({run.start, run.start + run.size, *(cut for first, end, _ in laid for cut in (first, end))})
        for first, end in pairwise(cuts):
            homes: dict[int, int] = {}
            for begin, until, key in laid:
                if begin <= first and end <= until:
                    homes[key] = homes.get(key, 0) + 1
            yield _Part(run, first, end, homes)
    assert not collected, "a context goes through a run that is not in the index"


class _Report:
    """Gathers what an audit finds."""

    def __init__(self, mismatches_max: int) -> None:
        self._mismatches_max = mismatches_max
        self.compared = 0
        self.mismatch_count = 0
        self.nonzero_after_end = 0
        self.mismatches: list[AuditMismatch] = []

    def compare(self, node_id: str, name: bytes, incremental: int, recounted: int, by_node: int | None) -> None:
        """One pair of node and block."""
        if not (incremental or recounted or by_node):
            return
        self.compared += 1
        if recounted == 0:
            self.nonzero_after_end += 1
        if incremental != recounted or by_node not in (None, recounted):
            self.mismatch_count += 1
            if len(self.mismatches) < self._mismatches_max:
                self.mismatches.append(AuditMismatch(node_id, name, incremental, recounted, by_node))


def audit(state: DirectoryState, node_counts: Mapping[str, Mapping[bytes, int]]) -> AuditReport:
    """See Directory.audit."""
    report = _Report(state.config.audit_mismatches_max)
    left = {node_id: dict(counts) for node_id, counts in node_counts.items()}
    for part in _parts(state):
        for node in state.counts.nodes.values():
            if (part.run.l1 | part.run.l2) & node.bit:
                _compare_part(report, part, node, left.get(node.node_id))
    for node_id, counts in left.items():
        for name, count in counts.items():
            report.compare(node_id, name, 0, 0, count)
    return AuditReport(report.compared, report.mismatch_count, tuple(report.mismatches), report.nonzero_after_end)


def _compare_part(report: _Report, part: _Part, node: Node, by_node: dict[bytes, int] | None) -> None:
    """Compare the blocks of a part that a node holds; takes them out of what the node told."""
    incremental = count_at(part.run.homes, node.number)
    recounted = count_at(part.homes, node.number)
    if not (incremental or recounted or by_node):
        return
    names = part.run.names
    for depth in range(part.first, part.end):
        at = (depth - part.run.start) * NAME_BYTES
        name = names[at : at + NAME_BYTES]
        told = None if by_node is None else by_node.pop(name, 0)
        report.compare(node.node_id, name, incremental, recounted, told)


def check_invariants(state: DirectoryState) -> None:
    """See Directory.check_invariants."""
    state.index.check_invariants()
    state.table.check_invariants()
    for part in _parts(state):
        assert (part.run.homes or {}) == part.homes, part
    tips: dict[int, int] = {}
    for branch in state.table.live.values():
        if branch.tip is not None:
            tips[id(branch.tip)] = tips.get(id(branch.tip), 0) + 1
    for run in state.index.runs():
        assert run.tips == tips.get(id(run), 0), run
        assert not (run.l1 | run.l2) & ~(state.index.live | state.index.retired), run
    assert state.index.live & state.index.retired == 0
    for node in state.counts.nodes.values():
        assert state.index.live & node.bit, node
        runs = [run for run in state.index.runs() if (run.l1 | run.l2) & node.bit]
        assert node.l1_blocks == sum(run.size for run in runs if run.l1 & node.bit), node
        assert node.l2_blocks == sum(run.size for run in runs if run.l2 & node.bit), node
        assert node.held_blocks == sum(run.size for run in runs if count_at(run.homes, node.number)), node
