"""The audit: counts kept incrementally, counted anew from the branch table, and what nodes evict by, compared.

The recount uses only the branches' contexts and homes, never the runs' own tallies. What a node evicts by is a count
and whether another node has the block in L2, which is so when the index has such a copy. Nodes hear that a copy of a
node that went is gone when it is swept, so until then nothing is said of the others' word for it.

An audit takes its time, part by part, and says nothing of runs that change in that time.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from evolving.core.blocks import split_names
from evolving.core.branches import Branch
from evolving.core.directory_state import DirectoryState
from evolving.core.directory_types import AuditMismatch, AuditReport
from evolving.core.needs import count_of, is_last
from evolving.core.refcounts import Node, count_at, home_key
from evolving.core.runs import Run, Visit
from evolving.core.terms import NAME_BYTES

_SLICE_BRANCHES = 20
_SLICE_RUNS = 50


class _Part(NamedTuple):
    """Blocks of a run that all have the same recounted homes."""

    run: Run
    first: int  # depth
    end: int
    homes: dict[int, int]


_Laid = tuple[int, int, int]
"""(first, end, home key) of one branch and phase within a run."""

_Homes = dict[Run, list[_Laid]]


def _lay(state: DirectoryState, branch: Branch, collected: _Homes) -> None:
    """Lay a branch's homes over the runs of its context."""
    path = state.index.path(branch.tip)
    for phase, homes in branch.homes.items():
        for first, end, number in homes:
            for run in path:
                begin, until = max(first, run.start), min(end, run.start + run.size)
                if begin < until:
                    collected.setdefault(run, []).append((begin, until, home_key(number, phase)))


def _parts(run: Run, laid: list[_Laid]) -> Iterator[_Part]:
    """A run, cut where recounted homes change."""
    cuts = sorted({run.start, run.start + run.size, *(cut for first, end, _ in laid for cut in (first, end))})
    for first, end in pairwise(cuts):
        homes: dict[int, int] = {}
        for begin, until, key in laid:
            if begin <= first and end <= until:
                homes[key] = homes.get(key, 0) + 1
        yield _Part(run, first, end, homes)


class _Report:
    """Gathers what an audit finds."""

    def __init__(self, mismatches_max: int) -> None:
        self._mismatches_max = mismatches_max
        self.compared = 0
        self.mismatch_count = 0
        self.nonzero_after_end = 0
        self.mismatches: list[AuditMismatch] = []

    def compare(
        self, node_id: str, name: bytes, incremental: int, recounted: int, told: int | None, elsewhere: bool | None
    ) -> None:
        """One pair of node and block. told: the need the node evicts by. elsewhere: whether another node has the block
        in L2; None: that can't be said."""
        if not (incremental or recounted or told):
            return
        self.compared += 1
        if recounted == 0:
            self.nonzero_after_end += 1
        by_node = None if told is None else count_of(told)
        believed = not is_last(told) if told else None
        misled = None not in (elsewhere, believed) and elsewhere != believed
        if incremental != recounted or by_node not in (None, recounted) or misled:
            self.mismatch_count += 1
            if len(self.mismatches) < self._mismatches_max:
                found = AuditMismatch(node_id, name, incremental, recounted, by_node, elsewhere, believed)
                self.mismatches.append(found)


def audit(
    state: DirectoryState, visit: Visit, node_needs: Mapping[str, Mapping[bytes, int]]
) -> Generator[None, None, AuditReport]:
    """See Directory.audit_in_parts."""
    report = _Report(state.config.audit_mismatches_max)
    left = {node_id: dict(needs) for node_id, needs in node_needs.items()}
    collected: _Homes = {}
    for count, branch in enumerate(list(state.table.live.values()), 1):
        _lay(state, branch, collected)
        if count % _SLICE_BRANCHES == 0:
            yield
    compared: set[Run] = set()
    while not visit.over:
        _forget_restarted(state, visit, left)
        for run in visit.take(_SLICE_RUNS):
            laid = collected.get(run, [])
            if (laid or run.homes is not None) and run not in visit.changed and run not in compared:
                compared.add(run)
                _compare_run(state, report, run, laid, left)
        yield
    _forget_restarted(state, visit, left)
    changed = {name for run in visit.changed for name in split_names(run.names)} if any(left.values()) else set()
    for node_id, needs in left.items():
        for name, told in needs.items():
            if name not in changed:
                report.compare(node_id, name, 0, 0, told, None)
    return AuditReport(report.compared, report.mismatch_count, tuple(report.mismatches), report.nonzero_after_end)


def _forget_restarted(state: DirectoryState, visit: Visit, left: dict[str, dict[bytes, int]]) -> None:
    """What a node told says nothing any more once it is gone or tells anew what it holds."""
    for node_id in list(left):
        node = state.counts.nodes.get(node_id)
        if node is None or not node.bit & visit.nodes:
            del left[node_id]


def _compare_run(
    state: DirectoryState, report: _Report, run: Run, laid: list[_Laid], left: dict[str, dict[bytes, int]]
) -> None:
    """Compare the blocks of a run on each node that holds it."""
    for part in _parts(run, laid):
        for node in state.counts.nodes.values():
            if (run.l1 | run.l2) & node.bit:
                swept = not run.l2 & state.index.retired
                elsewhere = state.counts.elsewhere(node, run) if swept else None
                _compare_part(report, part, node, left.get(node.node_id), elsewhere)


def _compare_part(
    report: _Report, part: _Part, node: Node, needs: dict[bytes, int] | None, elsewhere: bool | None
) -> None:
    """Compare the blocks of a part that a node holds; takes them out of the needs that the node told."""
    incremental = count_at(part.run.homes, node.number)
    recounted = count_at(part.homes, node.number)
    if not (incremental or recounted or needs):
        return
    names = part.run.names
    for depth in range(part.first, part.end):
        at = (depth - part.run.start) * NAME_BYTES
        name = names[at : at + NAME_BYTES]
        told = None if needs is None else needs.pop(name, 0)
        report.compare(node.node_id, name, incremental, recounted, told, elsewhere)


def check_invariants(state: DirectoryState) -> None:
    """See Directory.check_invariants."""
    state.index.check_invariants()
    state.table.check_invariants()
    collected: _Homes = {}
    for branch in state.table.live.values():
        _lay(state, branch, collected)
    for run in state.index.runs():
        for part in _parts(run, collected.pop(run, [])):
            assert (run.homes or {}) == part.homes, part
    assert not collected, "a context goes through a run that is not in the index"
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
