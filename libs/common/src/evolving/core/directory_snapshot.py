"""All that a directory's log ever said, in short: its branches, homes, tombstones and nodes as rows.

Contexts share most of their blocks, so the runs of the tree are written once and a branch names the one that ends its
context. Copies are not kept: nodes announce them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from evolving.core import directory_turns
from evolving.core.branches import Branch, BranchKey, Request, Tombstone
from evolving.core.directory_state import DirectoryState
from evolving.core.directory_types import Loss
from evolving.core.errors import BrokenChain
from evolving.core.refcounts import Node
from evolving.core.runs import Run
from evolving.core.terms import NAME_BYTES, Phase

_ROWS_MAX = 1000
_NONE = -1
_Row = TypeVar("_Row")


class RequestRow(NamedTuple):
    """A request of a branch; fields as in `branches.Request`."""

    request_id: str
    version: int
    prompt_blocks: int
    last_name: bytes
    end_after: bool
    body_digest: bytes
    side: bool
    valid_blocks: int
    last_event_s: float
    done: bool
    loss: Loss


class BranchRow(NamedTuple):
    """A live branch. run: index of the run that ends its context, -1: no block. Homes as (first block, end, index of
    the node)."""

    tenant: str
    branch_id: str
    version: int
    parent_branch_id: str
    last_event_s: float
    run: int
    prompt_blocks: int
    prefill_homes: list[tuple[int, int, int]]
    decode_homes: list[tuple[int, int, int]]
    context_request_id: str
    unannounced_rewrites: int
    loss: Loss
    requests: list[RequestRow]


class TombstoneRow(NamedTuple):
    """An ended branch; fields as in `branches.Tombstone`."""

    tenant: str
    branch_id: str
    version: int
    parent_branch_id: str
    ended_s: float
    expired: bool


class KnownNodes(NamedTuple):
    """The time of the snapshot, and (id, incarnation) of each node. Comes first."""

    now_s: float
    nodes: list[tuple[str, str]]


class Runs(NamedTuple):
    """Runs as (index of the run above or -1, names), numbered from 0 on through all of these parts."""

    rows: list[tuple[int, bytes]]


class Branches(NamedTuple):
    """Live branches."""

    rows: list[BranchRow]


class Tombstones(NamedTuple):
    """Ended branches, the one that ended first before the others."""

    rows: list[TombstoneRow]


class Families(NamedTuple):
    """Who descends from whom, as (tenant, branch, its children)."""

    rows: list[tuple[str, str, list[str]]]


SnapshotPart = KnownNodes | Runs | Branches | Tombstones | Families


def dump(state: DirectoryState) -> Iterator[SnapshotPart]:
    """See Directory.snapshot."""
    numbers = {node.number: index for index, node in enumerate(state.counts.nodes.values())}
    yield KnownNodes(state.now_s, [(node.node_id, node.incarnation) for node in state.counts.nodes.values()])
    indices: dict[int, int] = {}  # by id of a run
    live = state.table.live.values()
    for branch in live:
        directory_turns.settle(state, branch)  # a row has no place for turns not taken yet
    for runs in _parts(_run_rows(live, indices)):
        yield Runs(runs)
    for branches in _parts(_branch_row(branch, indices, numbers) for branch in live):
        yield Branches(branches)
    graves = state.table.tombstones.items()
    for tombstones in _parts(
        TombstoneRow(*key, grave.version, grave.parent_branch_id, grave.ended_s, grave.expired) for key, grave in graves
    ):
        yield Tombstones(tombstones)
    for families in _parts(
        (key[0], key[1], [child[1] for child in children]) for key, children in state.table.lineage.families()
    ):
        yield Families(families)


def _parts(rows: Iterable[_Row]) -> Iterator[list[_Row]]:
    rows = iter(rows)
    while part := list(islice(rows, _ROWS_MAX)):
        yield part


def _run_rows(branches: Iterable[Branch], indices: dict[int, int]) -> Iterator[tuple[int, bytes]]:
    """Every run of a context, once, parents first; notes the index of each."""
    for branch in branches:
        path: list[Run] = []
        run = branch.tip
        while run is not None and id(run) not in indices:
            path.append(run)
            run = run.parent
        for run in reversed(path):
            indices[id(run)] = len(indices)
            yield _NONE if run.parent is None else indices[id(run.parent)], run.names


def _branch_row(branch: Branch, indices: dict[int, int], numbers: dict[int, int]) -> BranchRow:
    homes = {
        phase: [(first, end, numbers[number]) for first, end, number in home_map]
        for phase, home_map in branch.homes.items()
    }
    return BranchRow(
        *branch.key,
        branch.version,
        branch.parent_branch_id,
        branch.last_event_s,
        _NONE if branch.tip is None else indices[id(branch.tip)],
        branch.prompt_blocks,
        homes[Phase.PREFILL],
        homes[Phase.DECODE],
        branch.context_request_id,
        branch.unannounced_rewrites,
        branch.loss,
        [_request_row(request) for request in branch.requests.values()],
    )


def _request_row(request: Request) -> RequestRow:
    return RequestRow(*(getattr(request, name) for name in RequestRow._fields))


def restore(state: DirectoryState, parts: Iterable[SnapshotPart]) -> None:
    """See Directory.restore. `state` is new."""
    nodes: list[Node] = []
    runs: list[tuple[int, bytes]] = []
    families: list[tuple[BranchKey, list[BranchKey]]] = []
    for part in parts:
        match part:
            case KnownNodes(now_s, known):
                state.advance(now_s)
                nodes += [state.counts.add_node(*node) for node in known]
            case Runs(rows):
                runs += rows
            case Branches(branches):
                for row in branches:
                    _restore_branch(state, row, _names(runs, row.run), nodes)
            case Tombstones(tombstones):
                for grave in tombstones:
                    state.table.tombstones[grave[:2]] = Tombstone(*grave[2:])
            case Families(rows_):
                families += [((tenant, parent), [(tenant, child) for child in row]) for tenant, parent, row in rows_]
    for node in nodes:
        node.resync_asked = True  # what it holds it has yet to say
    state.table.restore(families)


def _names(runs: list[tuple[int, bytes]], index: int) -> bytes:
    """All names of the context that ends with a run."""
    names: list[Any] = []
    while index != _NONE:
        index, last = runs[index]
        names.append(last)
    names.reverse()
    return b"".join(names)


def _restore_branch(state: DirectoryState, row: BranchRow, names: bytes, nodes: list[Node]) -> None:
    branch = Branch(
        (row.tenant, row.branch_id),
        row.version,
        row.parent_branch_id,
        row.last_event_s,
        context_request_id=row.context_request_id,
        unannounced_rewrites=row.unannounced_rewrites,
        loss=row.loss,
        requests={request.request_id: Request(*request) for request in row.requests},
        running=sum(not request.done for request in row.requests),
    )
    state.table.live[branch.key] = branch
    try:
        run, depth = state.index.deepest(None, 0, names)
        tip = state.index.extend(run, depth, names[depth * NAME_BYTES :])
        state.counts.set_context(branch, tip, len(names) // NAME_BYTES, 0, "restored", [])
        branch.prompt_blocks = row.prompt_blocks
        for request in row.requests:
            branch.requests[request.request_id].valid_blocks = request.valid_blocks
        for phase, homes in ((Phase.PREFILL, row.prefill_homes), (Phase.DECODE, row.decode_homes)):
            for first, end, node in homes:
                state.counts.move(branch, phase, first, end, nodes[node], "restored", [])
    except BrokenChain:  # names that are no chained digests; see directory_replay
        state.counters["not_replayed"] += 1
        state.counts.set_context(branch, None, 0, 0, "not restored", [])
        branch.prompt_blocks = 0
