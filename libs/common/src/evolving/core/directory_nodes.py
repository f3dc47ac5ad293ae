"""What nodes tell: that they are there, what they hold, and that their role changed."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from evolving.core import directory_turns
from evolving.core.config import DecodeToPrefill
from evolving.core.directory_log import NodeCame, NodeLost
from evolving.core.directory_state import DirectoryState, TurnKind
from evolving.core.directory_types import (
    Cleared,
    ClearMemory,
    CountsComplete,
    Effect,
    FreeL1,
    NeedResync,
    NodeEvent,
    Stored,
)
from evolving.core.errors import BrokenChain, InvalidArgument, StaleIncarnation, UnknownNode
from evolving.core.prefix_index import NO_CHANGE, Change, UnknownParent, check_run
from evolving.core.refcounts import Node
from evolving.core.runs import SLICE_RUNS
from evolving.core.terms import Role, Tier


def node_up(state: DirectoryState, node_id: str, incarnation: str, next_sequence: int) -> list[Effect]:
    """See Directory.node_up."""
    if not node_id or not incarnation:
        raise InvalidArgument("a node needs an id and an incarnation")
    node = state.counts.nodes.get(node_id)
    if node is None:
        node = state.counts.add_node(node_id, incarnation)
        state.record(NodeCame(state.now_s, node_id, incarnation))
    elif node.incarnation != incarnation:
        _start_over(state, node)
        node.incarnation = incarnation
        node.last_sequence = 0
        state.record(NodeCame(state.now_s, node_id, incarnation))
    elif node.resync_asked or node.resyncing:
        return _ask_resync(state, node, "what the node holds is not known")
    if next_sequence not in (0, node.last_sequence + 1):
        return _ask_resync(state, node, f"batches {node.last_sequence + 1} to {next_sequence - 1} are missing")
    return []


def _start_over(state: DirectoryState, node: Node) -> None:
    """The node holds nothing."""
    state.counts.drop_copies(node)
    node.resync_asked = node.resyncing = False


def _ask_resync(state: DirectoryState, node: Node, reason: str) -> list[Effect]:
    state.counters["resyncs"] += 1
    node.resync_asked = True
    node.resyncing = False
    return [NeedResync(node.node_id, reason)]


def node_gone(state: DirectoryState, node_id: str) -> list[Effect]:
    """See Directory.node_gone."""
    node = state.counts.nodes.get(node_id)
    if node is None:
        return state.ignore("unknown_node", "the node is not up")
    state.counts.remove_node(node)
    directory_turns.start(state, TurnKind.GONE, node, "node gone")
    state.record(NodeLost(state.now_s, node_id))
    return directory_turns.advance(state)


def _node(state: DirectoryState, node_id: str, incarnation: str | None) -> Node:
    """The node an event is of. Raises UnknownNode, StaleIncarnation."""
    node = state.counts.nodes.get(node_id)
    if node is None:
        raise UnknownNode(f"node {node_id!r} is not up")
    if incarnation is not None and node.incarnation != incarnation:
        raise StaleIncarnation(f"node {node_id!r} is up as {node.incarnation!r}, not {incarnation!r}")
    return node


def node_events(
    state: DirectoryState, node_id: str, incarnation: str, sequence: int, events: Sequence[NodeEvent]
) -> list[Effect]:
    """See Directory.node_events."""
    node = _node(state, node_id, incarnation)
    _check_events(events)
    if node.resync_asked or node.resyncing:
        return state.ignore("awaiting_resync", f"node {node_id} is being resynced")
    if sequence <= node.last_sequence:
        return state.ignore("batch_repeated", f"batch {sequence} of node {node_id} was taken before")
    if sequence != node.last_sequence + 1:
        return _ask_resync(state, node, f"batches {node.last_sequence + 1} to {sequence - 1} are missing")
    effects: list[Effect] = []
    for event in events:
        try:
            _apply(state, node, event, effects)
        except UnknownParent as error:
            return effects + _ask_resync(state, node, f"batch {sequence}: {error}")
        except BrokenChain as error:
            state.counts.drop_copies(node)  # how many of the event's copies were added is not known
            return effects + _ask_resync(state, node, f"batch {sequence}: {error}")
    node.last_sequence = sequence
    return effects


def _check_events(events: Sequence[NodeEvent]) -> None:
    for event in events:
        if not isinstance(event, Cleared):
            check_run(event.run)


def _apply(state: DirectoryState, node: Node, event: NodeEvent, effects: list[Effect]) -> None:
    """Raises UnknownParent, BrokenChain."""
    if isinstance(event, Stored):
        change = state.index.add_copies(node.bit, event.tier, event.run)
        if event.tier is Tier.L1:
            node.l1_blocks += change.blocks
        else:
            node.l2_blocks += change.blocks
        if change.touched:
            state.counts.copies_gained(node, event.tier, change.touched, "copy arrived", effects)
    else:
        if isinstance(event, Cleared):
            change = state.index.clear_tier(node.bit, event.tier) if _held(node, event.tier) else NO_CHANGE
        else:
            change = state.index.remove_copies(node.bit, event.tier, event.run)
        _left(state, node, event.tier, change, effects)


def _left(state: DirectoryState, node: Node, tier: Tier, change: Change, effects: list[Effect]) -> None:
    """Copies left a tier of the node."""
    if tier is Tier.L1:
        node.l1_blocks -= change.blocks
    else:
        node.l2_blocks -= change.blocks
    if change.touched:
        state.counts.copies_lost(node, tier, change.touched, "copy left", effects)


def clear_in_parts(
    state: DirectoryState, node_id: str, incarnation: str, sequence: int, events: Sequence[NodeEvent]
) -> Generator[list[Effect], None, None]:
    """See Directory.clear_in_parts."""
    node = _node(state, node_id, incarnation)
    for tier in dict.fromkeys(event.tier for event in events if isinstance(event, Cleared)):
        with state.index.visit() as visit:
            while _awaits(node, incarnation, sequence) and not visit.over and _held(node, tier):
                effects: list[Effect] = []
                _left(state, node, tier, state.index.clear(node.bit, tier, visit, SLICE_RUNS), effects)
                yield effects


def _awaits(node: Node, incarnation: str, sequence: int) -> bool:
    """Whether a batch is the next one of a node that is up and in step."""
    in_step = not node.resync_asked and not node.resyncing
    return bool(node.bit) and node.incarnation == incarnation and in_step and sequence == node.last_sequence + 1


def _held(node: Node, tier: Tier) -> int:
    return node.l1_blocks if tier is Tier.L1 else node.l2_blocks


def resync_begin(state: DirectoryState, node_id: str, incarnation: str) -> list[Effect]:
    """See Directory.resync_begin."""
    node = _node(state, node_id, incarnation)
    _start_over(state, node)
    node.resyncing = True
    return []


def resync_events(state: DirectoryState, node_id: str, incarnation: str, events: Sequence[NodeEvent]) -> list[Effect]:
    """See Directory.resync_events."""
    node = _node(state, node_id, incarnation)
    _check_events(events)
    if not node.resyncing:
        return state.ignore("no_resync", f"node {node_id} is not being resynced")
    effects: list[Effect] = []
    for event in events:
        try:
            _apply(state, node, event, effects)
        except UnknownParent as error:
            raise InvalidArgument(f"snapshot of {node_id}: {error}") from error
        except BrokenChain:
            state.counts.drop_copies(node)  # as above; the snapshot is worth nothing
            raise
    return effects


def resync_end(state: DirectoryState, node_id: str, incarnation: str, sequence: int) -> list[Effect]:
    """See Directory.resync_end."""
    node = _node(state, node_id, incarnation)
    if not node.resyncing:
        return state.ignore("no_resync", f"node {node_id} is not being resynced")
    node.resyncing = node.resync_asked = False
    node.last_sequence = sequence
    return [CountsComplete(node_id, "resync ended")]


def role_switch(state: DirectoryState, node_id: str, old: Role, new: Role) -> list[Effect]:
    """See Directory.role_switch."""
    node = _node(state, node_id, None)
    if (old, new) != (Role.DECODE, Role.PREFILL):
        return []
    reason = "switched from decode to prefill"
    first: Effect
    if state.config.decode_to_prefill is DecodeToPrefill.KEEP:
        directory_turns.start(state, TurnKind.KEEP, node, reason)
        first = FreeL1(node_id, reason)
    else:
        directory_turns.start(state, TurnKind.RESET, node, reason)
        first = ClearMemory(node_id, reason)
    return [first, *directory_turns.advance(state)]
