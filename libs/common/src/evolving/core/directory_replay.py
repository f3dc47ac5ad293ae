"""A directory's log told again: entry by entry, the same branches, homes, tombstones and nodes."""

from __future__ import annotations

from dataclasses import replace

from evolving.core import directory_begin, directory_nodes, directory_requests, directory_turns
from evolving.core.directory_log import (
    Began,
    BranchesEnded,
    Heard,
    KvLanded,
    LogEntry,
    NodeCame,
    NodeLost,
    OutputMade,
    RequestDone,
    TimePassed,
    Turned,
)
from evolving.core.directory_state import DirectoryState
from evolving.core.directory_types import Begin
from evolving.core.errors import BrokenChain, NeedFull


def replay(state: DirectoryState, entry: LogEntry) -> None:
    """See Directory.replay."""
    now_s = state.advance(entry.now_s)
    try:
        if isinstance(entry, NodeCame | NodeLost | Turned):
            _replay_node(state, entry)
        else:
            _replay_branch(state, now_s, entry)
    except BrokenChain:  # homes are missing then; see _begin
        state.counters["not_replayed"] += 1


def _replay_branch(
    state: DirectoryState,
    now_s: float,
    entry: Began | Heard | KvLanded | OutputMade | RequestDone | BranchesEnded | TimePassed,
) -> None:
    match entry:
        case Began(_, event):
            _begin(state, now_s, event)
        case Heard(_, tenant, branch_id, request_id):
            branch = state.table.live[tenant, branch_id]
            state.table.hear(now_s, branch, branch.requests[request_id])
        case KvLanded(_, landed):
            directory_requests.landed(state, now_s, landed)
        case OutputMade(_, output):
            directory_requests.output(state, now_s, output)
        case RequestDone(_, tenant, branch_id, request_id):
            directory_requests.request_done(state, now_s, tenant, branch_id, request_id)
        case BranchesEnded(_, tenant, branch_ids, subtree):
            directory_requests.end(state, now_s, tenant, branch_ids, subtree)
        case TimePassed():
            directory_requests.apply_limits(state, entry)


def _replay_node(state: DirectoryState, entry: NodeCame | NodeLost | Turned) -> None:
    match entry:
        case NodeCame(_, node_id, incarnation):
            directory_nodes.node_up(state, node_id, incarnation, 0)
            state.counts.nodes[node_id].resync_asked = True  # what it holds it has yet to say
        case NodeLost(_, node_id):
            directory_nodes.node_gone(state, node_id)
        case Turned():
            directory_turns.take_logged(state, entry)


def _begin(state: DirectoryState, now_s: float, event: Begin) -> None:
    """As it was; but names that are no chained digests may clash in another place than they did when the nodes' copies
    were there. Such a context is left out: its next request is asked for all of it, as after any loss."""
    try:
        directory_begin.begin(state, now_s, event)
    except (BrokenChain, NeedFull):
        state.counters["not_replayed"] += 1
        directory_begin.begin(state, now_s, replace(event, base_blocks=0, base_name=b"", new_names=b""))
