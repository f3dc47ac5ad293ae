"""What requests report after Begin, how they and their branches end, and what time does to them."""

from __future__ import annotations

from collections.abc import Sequence

from evolving.core import directory_turns
from evolving.core.branches import Branch, Request
from evolving.core.directory_log import BranchesEnded, KvLanded, OutputMade, RequestDone, TimePassed
from evolving.core.directory_state import DirectoryState
from evolving.core.directory_types import Effect, EndedBranch, Landed, Output
from evolving.core.errors import InvalidArgument
from evolving.core.prefix_index import check_names
from evolving.core.refcounts import Node
from evolving.core.terms import NAME_BYTES, Phase


class _Refused(Exception):
    """A report that must be ignored: kind and reason."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


def landed(state: DirectoryState, now_s: float, event: Landed) -> list[Effect]:
    """See Directory.landed."""
    if event.first_block < 0 or event.blocks < 0:
        raise InvalidArgument("first_block and blocks must not be negative")
    try:
        branch, request, node = _live(state, event)
    except _Refused as refused:
        return state.ignore(refused.kind, refused.reason)
    end = min(event.first_block + event.blocks, request.valid_blocks)
    directory_turns.settle(state, branch)  # before what landed, in the log as here
    state.table.hear(now_s, branch, request)
    state.record(KvLanded(now_s, event))
    if event.blocks == 0:
        return []
    if event.first_block >= end:
        return state.ignore("not_in_context", "no block of the run is in the branch's context any more")
    effects = directory_turns.flush(state, [])
    reason = f"landed: {event.phase.name.lower()}"
    state.counts.move(branch, event.phase, event.first_block, end, node, reason, effects)
    return effects


def output(state: DirectoryState, now_s: float, event: Output) -> list[Effect]:
    """See Directory.output."""
    blocks = check_names(event.names)
    if event.first_block < 0 or blocks == 0:
        raise InvalidArgument("output needs blocks and a depth that is not negative")
    end = event.first_block + blocks
    try:
        branch, request, node = _live(state, event)
        if branch.context_request_id != request.request_id:
            raise _Refused("superseded", "a later request set the context")
        known = _known_output(state, branch, event, end)
    except _Refused as refused:
        return state.ignore(refused.kind, refused.reason)
    directory_turns.settle(state, branch)
    effects = directory_turns.flush(state, [])
    fresh = event.names[known * NAME_BYTES :]
    if fresh:
        run, depth = state.index.deepest(branch.tip, branch.blocks, fresh)
        rest = fresh[(depth - branch.blocks) * NAME_BYTES :]
        tip = state.index.extend(run, depth, rest)
        state.counts.set_context(branch, tip, end, branch.blocks, "output", effects)
        request.valid_blocks = end
    state.table.hear(now_s, branch, request)
    state.record(OutputMade(now_s, event))
    state.counts.move(branch, Phase.DECODE, event.first_block, end, node, "output", effects)
    return effects


def _known_output(state: DirectoryState, branch: Branch, event: Output, end: int) -> int:
    """How many of the output's blocks the context already has. Refuses a gap and other blocks at the same depth."""
    if event.first_block > branch.blocks:
        raise _Refused("gap", f"output from block {event.first_block} on, the context ends at {branch.blocks}")
    known = min(end, branch.blocks) - event.first_block
    if known > 0:
        name = event.names[(known - 1) * NAME_BYTES : known * NAME_BYTES]
        if state.index.on_path(branch.tip, event.first_block + known - 1, name) is None:
            raise _Refused("disagrees", "the context has other blocks there")
    return known


def _live(state: DirectoryState, event: Landed | Output) -> tuple[Branch, Request, Node]:
    """The branch, request and node of a report, unless it must be ignored."""
    branch = state.table.live.get((event.tenant, event.branch_id))
    if branch is None:
        raise _Refused("unknown_branch", "the branch is not live")
    request = branch.requests.get(event.request_id)
    if request is None:
        raise _Refused("unknown_request", "the branch has no such request")
    if not event.version == request.version == branch.version:
        raise _Refused("old_version", f"the branch is at version {branch.version}")
    if request.side:
        raise _Refused("side_request", "the request's context is not the branch's")
    node = state.counts.nodes.get(event.node_id)
    if node is None:
        raise _Refused("unknown_node", "the node is not up")
    return branch, request, node


def request_done(state: DirectoryState, now_s: float, tenant: str, branch_id: str, request_id: str) -> list[Effect]:
    """See Directory.request_done."""
    branch = state.table.live.get((tenant, branch_id))
    request = None if branch is None else branch.requests.get(request_id)
    if branch is None or request is None:
        return state.ignore("unknown_request", "no live branch has such a request")
    if request.done:
        return state.ignore("done_before", "the request is over already")
    state.record(RequestDone(now_s, tenant, branch_id, request_id))
    return _finish(state, now_s, branch, request, "request done")


def _finish(state: DirectoryState, now_s: float, branch: Branch, request: Request, reason: str) -> list[Effect]:
    effects: list[Effect] = []
    state.table.finish(now_s, branch, request)
    if request.end_after:
        _end_branch(state, now_s, branch, False, f"{reason}, and its Begin said end_after", effects)
    return effects


def end(state: DirectoryState, now_s: float, tenant: str, branch_ids: Sequence[str], subtree: bool) -> list[Effect]:
    """See Directory.end."""
    effects: list[Effect] = []
    for branch_id in branch_ids:
        key = (tenant, branch_id)
        for member in state.table.lineage.subtree(key) if subtree else [key]:
            branch = state.table.live.get(member)
            if branch is not None:
                reason = "ended" if member == key else f"subtree of {branch_id} ended"
                _end_branch(state, now_s, branch, False, reason, effects)
    if effects:
        state.record(BranchesEnded(now_s, tenant, tuple(branch_ids), subtree))
    return effects


def _end_branch(
    state: DirectoryState, now_s: float, branch: Branch, expired: bool, reason: str, effects: list[Effect]
) -> None:
    """The branch counts nothing any more, and leaves a tombstone."""
    state.counts.set_context(branch, None, 0, 0, reason, effects)
    state.table.bury(now_s, branch, expired)
    state.counters["expired" if expired else "ended"] += 1
    effects.append(EndedBranch(*branch.key, expired=expired, reason=reason))


def tick(state: DirectoryState, now_s: float) -> list[Effect]:
    """See Directory.tick."""
    config = state.config
    due_s = _next_limit_s(state)
    effects: list[Effect] = []
    if due_s is not None and due_s <= now_s:
        limits = TimePassed(now_s, config.request_ttl_s, config.idle_ttl_s, config.tombstone_s)
        effects = apply_limits(state, limits)
        state.record(limits)
    if state.turns.due:
        effects += directory_turns.advance(state)
    else:
        state.counts.copies_swept(state.index.sweep(config.sweep_runs_per_tick), effects)
    return effects


def apply_limits(state: DirectoryState, limits: TimePassed) -> list[Effect]:
    """End what these limits end by now."""
    now_s = limits.now_s
    effects: list[Effect] = []
    while (silent := state.table.most_silent()) and silent[1].last_event_s + limits.request_ttl_s <= now_s:
        state.counters["silent_requests"] += 1
        effects += _finish(state, now_s, *silent, "request silent for too long")
    while (idle := state.table.oldest_idle()) and idle.last_event_s + limits.idle_ttl_s <= now_s:
        _end_branch(state, now_s, idle, True, f"idle for {limits.idle_ttl_s:g} s", effects)
    while (buried := state.table.oldest_tombstone()) and buried[1].ended_s + limits.tombstone_s <= now_s:
        del state.table.tombstones[buried[0]]
    return effects


def next_wakeup_s(state: DirectoryState) -> float | None:
    """See Directory.next_wakeup_s."""
    return state.now_s if state.index.retired or state.turns.due else _next_limit_s(state)


def _next_limit_s(state: DirectoryState) -> float | None:
    """When a configured limit next ends something."""
    due: list[float] = []
    if silent := state.table.most_silent():
        due.append(silent[1].last_event_s + state.config.request_ttl_s)
    if idle := state.table.oldest_idle():
        due.append(idle.last_event_s + state.config.idle_ttl_s)
    if buried := state.table.oldest_tombstone():
        due.append(buried[1].ended_s + state.config.tombstone_s)
    return min(due, default=None)
