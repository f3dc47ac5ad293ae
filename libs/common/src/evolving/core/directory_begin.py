"""Begin: what a request's context is, what that makes of its branch's context, and where its blocks are."""

from __future__ import annotations

from dataclasses import dataclass, replace

from evolving.core import directory_turns
from evolving.core.branches import Branch, BranchKey, Request
from evolving.core.directory_log import Began, Heard
from evolving.core.directory_state import DirectoryState
from evolving.core.directory_types import Begin, BeginAnswer, BeginKind, Effect, Loss, Match
from evolving.core.errors import BranchEnded, InvalidArgument, NeedFull, RequestConflict, StaleVersion
from evolving.core.prefix_index import check_names
from evolving.core.runs import Run
from evolving.core.terms import NAME_BYTES

_EXTEND, _REWRITE, _SIDE = BeginKind.EXTEND, BeginKind.REWRITE, BeginKind.SIDE  # an enum is slow to tell its members
_REASONS = {kind: f"begin: {kind}" for kind in BeginKind}
_PATH_RUNS_SLACK = 8  # runs a path may have beyond twice those it had when merged last, before it is merged again


@dataclass(slots=True)
class _Position:
    """Where a request's context leaves the tree: `depth` of its blocks are known, the last in or at the end of `run`;
    `rest` are the names of those that are not."""

    run: Run | None
    depth: int
    rest: bytes
    blocks: int


def begin(state: DirectoryState, now_s: float, event: Begin) -> tuple[BeginAnswer, list[Effect]]:
    """See Directory.begin."""
    new_blocks = _check(event)
    key = (event.tenant, event.branch_id)
    tombstone = state.table.tombstones.get(key)
    if tombstone is not None and not tombstone.expired:
        raise BranchEnded(f"branch {event.branch_id!r} has ended")
    branch = state.table.live.get(key)
    known = None if branch is None else branch.requests.get(event.request_id)
    if known is not None:
        _check_same(known, event, event.base_blocks + new_blocks)
    elif branch is not None and 0 < event.version < branch.version:
        raise StaleVersion(branch.version)
    if branch is not None:
        directory_turns.settle(state, branch)
    base = _base(state, branch, event)
    run, depth = state.index.deepest(base, event.base_blocks, event.new_names)
    rest = event.new_names[(depth - event.base_blocks) * NAME_BYTES :]
    position = _Position(run, depth, rest, event.base_blocks + new_blocks)
    if known is not None:
        assert branch is not None
        return _replay(state, now_s, branch, known, position), directory_turns.flush(state, [])
    entry = None if state.log is None else Began(now_s, _written_out(state, branch, event, base))
    effects = directory_turns.flush(state, [])
    answer = _first_time(state, now_s, key, branch, event, position, effects)
    if entry is not None:
        state.record(entry)
    return answer, effects


def rematch(state: DirectoryState, now_s: float, event: Begin) -> Match:
    """See Directory.rematch."""
    blocks = event.base_blocks + _check(event)
    branch = state.table.live.get((event.tenant, event.branch_id))
    base = _base(state, branch, event)
    run, depth = state.index.deepest(base, event.base_blocks, event.new_names)
    known = None if branch is None else branch.requests.get(event.request_id)
    if branch is not None and known is not None:
        _hear(state, now_s, branch, known)
    state.counters["rematches"] += 1
    return _match_position(state, _Position(run, depth, b"", blocks))


def _check(event: Begin) -> int:
    """Number of new blocks. Raises InvalidArgument."""
    if not event.branch_id:
        raise InvalidArgument("branch_id must not be empty")
    if not event.request_id:
        raise InvalidArgument("request_id must not be empty")
    if event.version < 0:
        raise InvalidArgument(f"version must not be negative, got {event.version}")
    if event.base_blocks < 0 or len(event.base_name) != (NAME_BYTES if event.base_blocks else 0):
        raise InvalidArgument(f"a base of blocks needs a name of {NAME_BYTES} bytes, and an empty one none")
    return check_names(event.new_names)


def _check_same(known: Request, event: Begin, blocks: int) -> None:
    """Raise RequestConflict when a request id comes back with another body."""
    last_name = event.new_names[-NAME_BYTES:] or event.base_name
    same = (
        event.version in (0, known.version)
        and blocks == known.prompt_blocks
        and last_name == known.last_name
        and event.end_after == known.end_after
        and (not event.body_digest or not known.body_digest or event.body_digest == known.body_digest)
    )
    if not same:
        raise RequestConflict(f"request {event.request_id!r} was begun with another body")


def _base(state: DirectoryState, branch: Branch | None, event: Begin) -> Run | None:
    """The run with the last block of the base. Raises NeedFull."""
    if event.base_blocks == 0:
        return None
    run = _base_in_context(state, branch, event)
    if run is not None:
        return run
    run = state.index.on_path(state.index.indexed(event.base_name), event.base_blocks - 1, event.base_name)
    if run is None:
        raise NeedFull(f"the first {event.base_blocks} blocks are not known")
    return run


def _base_in_context(state: DirectoryState, branch: Branch | None, event: Begin) -> Run | None:
    """The run with the last block of the base, when it is in the branch's context or in its parent's."""
    if branch is not None:
        run = state.index.on_path(branch.tip, event.base_blocks - 1, event.base_name)
        if run is not None:
            return run
    parent = state.table.live.get((event.tenant, event.parent_branch_id))
    return None if parent is None else state.index.on_path(parent.tip, event.base_blocks - 1, event.base_name)


def _written_out(state: DirectoryState, branch: Branch | None, event: Begin, base: Run | None) -> Begin:
    """The event as one that needs no copies to be understood: a base no context has is named in full."""
    if base is None or _base_in_context(state, branch, event) is not None:
        return event
    names = b"".join(run.names for run in state.index.path(base))[: event.base_blocks * NAME_BYTES]
    return replace(event, base_blocks=0, base_name=b"", new_names=names + event.new_names)


def _hear(state: DirectoryState, now_s: float, branch: Branch, request: Request) -> None:
    """An event of a request that began before."""
    state.table.hear(now_s, branch, request)
    state.record(Heard(now_s, *branch.key, request.request_id))


def _replay(state: DirectoryState, now_s: float, branch: Branch, known: Request, position: _Position) -> BeginAnswer:
    """The stored answer, with a match of this moment: where the blocks are may have changed since."""
    state.counters["replays"] += 1
    _hear(state, now_s, branch, known)
    match = _match_position(state, position)
    return BeginAnswer(known.version, BeginKind.REPLAY, known.prompt_blocks, match, known.loss)


def _first_time(
    state: DirectoryState,
    now_s: float,
    key: BranchKey,
    branch: Branch | None,
    event: Begin,
    position: _Position,
    effects: list[Effect],
) -> BeginAnswer:
    """A request not seen before."""
    common = 0 if branch is None else _common_blocks(branch, position)
    kind = _kind(branch, event, common)
    tip = None
    if kind is not _SIDE:
        tip = state.index.extend(position.run, position.depth, position.rest)
    version = event.version or (1 if branch is None else branch.version)
    if branch is None:
        branch = _new_branch(state, now_s, key, version, event)
    request = Request(
        event.request_id,
        version,
        position.blocks,
        event.new_names[-NAME_BYTES:] or event.base_name,
        event.end_after,
        event.body_digest,
        side=kind is _SIDE,
        valid_blocks=0,
        last_event_s=now_s,
    )
    state.counters["begins"] += 1
    if kind is _SIDE:
        state.counters["side_requests"] += 1
        match = _match_position(state, position)
    else:
        if kind is _REWRITE and version == branch.version:
            state.counters["unannounced_rewrites"] += 1
            branch.unannounced_rewrites += 1
        branch.version = version
        state.counts.set_context(branch, tip, position.blocks, common, _REASONS[kind], effects)
        request.valid_blocks = branch.prompt_blocks = position.blocks
        request.loss, branch.loss = branch.loss, Loss.NONE
        branch.context_request_id = event.request_id
        match = _match_branch(state, branch)
    branch.last_event_s = now_s
    state.table.start(branch, request)
    return BeginAnswer(version, kind, position.blocks, match, request.loss)


def _kind(branch: Branch | None, event: Begin, common: int) -> BeginKind:
    """What a request not seen before is taken for; `common` leading blocks are those of the branch's context."""
    if branch is None:
        return BeginKind.NEW
    if event.version > branch.version:
        return _REWRITE
    if common >= branch.prompt_blocks:
        return _EXTEND
    if branch.running and any(not r.done and r.version == branch.version for r in branch.requests.values()):
        return _SIDE
    return _REWRITE


def _new_branch(state: DirectoryState, now_s: float, key: BranchKey, version: int, event: Begin) -> Branch:
    """A branch seen for the first time, or revived after its idle limit had ended it."""
    if key in state.table.tombstones:
        state.counters["revived"] += 1
    parent_known = (event.tenant, event.parent_branch_id) in state.table.live
    if event.parent_branch_id and not parent_known:
        state.counters["unknown_parents"] += 1
    branch = state.table.add(now_s, key, version, event.parent_branch_id)
    branch.turn = state.turns.last
    return branch


def _common_blocks(branch: Branch, position: _Position) -> int:
    """Leading blocks that a branch's context and a position share: up to where their paths part."""
    ours, theirs = branch.tip, position.run
    while ours is not theirs:
        if ours is None or theirs is None:
            return 0
        if ours.start >= theirs.start:
            ours = ours.parent
        else:
            theirs = theirs.parent
    return 0 if ours is None else min(ours.start + ours.size, position.depth)


def _match_branch(state: DirectoryState, branch: Branch) -> Match:
    """Match a branch's whole context, merging its path first when it got long."""
    stretches = state.index.stretches(branch.tip, branch.blocks)
    if len(stretches) > 2 * branch.merged_path_runs + _PATH_RUNS_SLACK:
        state.index.merge_up(branch.tip)
        stretches = state.index.stretches(branch.tip, branch.blocks)
        branch.merged_path_runs = len(stretches)
    return state.index.score(stretches, branch.blocks)


def _match_position(state: DirectoryState, position: _Position) -> Match:
    """Match a context that does not become a branch's."""
    return state.index.score(state.index.stretches(position.run, position.depth), position.blocks)
