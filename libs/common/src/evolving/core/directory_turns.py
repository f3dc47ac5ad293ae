"""Homes that go all at once: those on a node that is gone, or that turned from decode to prefill (§4.1).

A partition has thousands of branches, so such a *turn* is taken branch by branch: by `tick`, in parts, and at once for
a branch that something happens to. A branch takes its turns in order, and to whatever happens to it later it is as if
it had taken them when they came. Counts agree with homes all along; only what a switched node claims is decided by what
it holds when the branch's turn comes.
"""

from __future__ import annotations

from evolving.core.branches import Branch
from evolving.core.directory_log import Turned
from evolving.core.directory_state import DirectoryState, Turn, TurnKind
from evolving.core.directory_types import Effect, Loss
from evolving.core.refcounts import Node
from evolving.core.terms import Phase

_BRANCH_RUNS = 3  # what looking at a branch costs, in runs
_SWEPT_RUNS = 20  # how many are swept in the time one takes to change hands


def start(state: DirectoryState, kind: TurnKind, node: Node, reason: str) -> None:
    """A turn comes for all branches that live now."""
    turns = state.turns
    turns.last += 1
    turns.open.append(Turn(turns.last, kind, node, reason, list(state.table.live.values())))


def settle(state: DirectoryState, branch: Branch) -> None:
    """A branch takes all its turns now. Effects are left for `flush`."""
    if branch.turn == state.turns.last:
        return
    for turn in state.turns.open:
        if turn.number > branch.turn:
            _take(state, turn, branch)
    branch.turn = state.turns.last


def flush(state: DirectoryState, effects: list[Effect]) -> list[Effect]:
    """The effects of turns, and then these."""
    if not state.turns.unsent:
        return effects
    earlier, state.turns.unsent = state.turns.unsent, []
    return earlier + effects


def advance(state: DirectoryState) -> list[Effect]:
    """Let branches take their turns for about as long as a tick's sweep takes."""
    turns = state.turns
    left = state.config.sweep_runs_per_tick // _SWEPT_RUNS
    while turns.open and left >= 0:
        turn = turns.open[0]
        visited = state.counts.visited_runs
        if turn.left:
            branch = turn.left.pop()
            if state.table.live.get(branch.key) is branch:
                settle(state, branch)
            left -= _BRANCH_RUNS + state.counts.visited_runs - visited
        else:
            turns.open.popleft()
            if turn.kind is TurnKind.GONE:
                state.counts.forget_node(turn.node)
    return flush(state, [])


def take_logged(state: DirectoryState, entry: Turned) -> None:
    """What a branch's turn was in another directory's log."""
    branch = state.table.live[entry.tenant, entry.branch_id]
    settle(state, branch)
    if entry.all_homes:
        branch.loss = Loss.SWITCH
    node, effects = state.counts.nodes.get(entry.node_id), state.turns.unsent
    if node is None:
        return  # gone since its switch: a turn of its own, which the branch has taken now
    for first, end in entry.claims:
        state.counts.move(branch, Phase.PREFILL, first, min(end, branch.blocks), node, "claimed", effects)
    _leave(state, branch, node, tuple(Phase) if entry.all_homes else (Phase.DECODE,), "turned", effects)


def _take(state: DirectoryState, turn: Turn, branch: Branch) -> None:
    counts, node, effects = state.counts, turn.node, state.turns.unsent
    if turn.kind is TurnKind.KEEP:
        claims = counts.claim(branch, Phase.PREFILL, node, turn.reason, effects)
        if counts.leave_node(branch, Phase.DECODE, node, turn.reason, effects) or claims:
            state.record(Turned(state.now_s, *branch.key, node.node_id, tuple(claims), all_homes=False))
        return
    if _leave(state, branch, node, tuple(Phase), turn.reason, effects):
        branch.loss = Loss.NODE if turn.kind is TurnKind.GONE else Loss.SWITCH
        if turn.kind is TurnKind.RESET:
            state.record(Turned(state.now_s, *branch.key, node.node_id, (), all_homes=True))


def _leave(
    state: DirectoryState, branch: Branch, node: Node, phases: tuple[Phase, ...], reason: str, effects: list[Effect]
) -> bool:
    """Whether the branch had homes there."""
    left = [state.counts.leave_node(branch, phase, node, reason, effects) for phase in phases]
    return any(left)
