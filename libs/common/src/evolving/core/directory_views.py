"""Reads of the directory: blocks, branches, counts and sizes. None changes anything."""

from __future__ import annotations

import heapq
from collections.abc import Generator, Iterable, Iterator

from evolving.core.branches import Branch, BranchKey, Tombstone
from evolving.core.directory_state import DirectoryState
from evolving.core.directory_types import (
    BlockCopy,
    BlockCounts,
    BlockView,
    BranchState,
    BranchView,
    CountUpdate,
    Home,
    NodeStats,
    Stats,
)
from evolving.core.errors import InvalidArgument, UnknownNode
from evolving.core.refcounts import Node, count_at, home_key
from evolving.core.runs import SLICE_RUNS, Run
from evolving.core.terms import NAME_BYTES, Phase

_SLICE_BRANCHES = 100


def block(state: DirectoryState, name: bytes) -> Generator[None, None, BlockView | None]:
    """See Directory.block."""
    if len(name) != NAME_BYTES:
        raise InvalidArgument(f"a name has {NAME_BYTES} bytes, got {len(name)}")
    found = yield from _find(state, name)
    if found is None:
        return None
    run, depth = found
    copies = []
    for node in state.counts.nodes.values():
        if (run.l1 | run.l2) & node.bit:
            homes = run.homes or {}
            copies.append(
                BlockCopy(
                    node.node_id,
                    in_l1=bool(run.l1 & node.bit),
                    in_l2=bool(run.l2 & node.bit),
                    prefill_count=homes.get(home_key(node.number, Phase.PREFILL), 0),
                    decode_count=homes.get(home_key(node.number, Phase.DECODE), 0),
                )
            )
    branches = yield from _branches_with(state, name, depth)
    if not copies and not branches:
        return None
    return BlockView(name, depth, tuple(copies), branches)


def _find(state: DirectoryState, name: bytes) -> Generator[None, None, tuple[Run, int] | None]:
    """The run and depth of a block: by the index, else by looking through all runs."""
    indexed = state.index.indexed(name)
    if indexed is not None:
        return _within(indexed, name)
    with state.index.visit() as visit:
        while not visit.over:
            for run in visit.take(SLICE_RUNS):
                found = _within(run, name)
                if found is not None:
                    return found
            yield
    return None


def _within(run: Run, name: bytes) -> tuple[Run, int] | None:
    at = run.names.find(name)
    while at >= 0 and at % NAME_BYTES:
        at = run.names.find(name, at + 1)
    return (run, run.start + at // NAME_BYTES) if at >= 0 else None


def _branches_with(state: DirectoryState, name: bytes, depth: int) -> Generator[None, None, tuple[BranchKey, ...]]:
    """Live branches with a block in their context, at most the configured number of them."""
    found: list[BranchKey] = []
    for count, branch in enumerate(list(state.table.live.values()), 1):
        if state.index.on_path(branch.tip, depth, name) is not None:
            found.append(branch.key)
            if len(found) == state.config.block_view_branches_max:
                break
        if count % _SLICE_BRANCHES == 0:
            yield
    return tuple(found)


def branch(state: DirectoryState, now_s: float, key: BranchKey) -> BranchView | None:
    """See Directory.branch."""
    live = state.table.live.get(key)
    if live is not None:
        return _live_view(state, now_s, live)
    tombstone = state.table.tombstones.get(key)
    return None if tombstone is None else _ended_view(now_s, key, tombstone)


def _live_view(state: DirectoryState, now_s: float, branch: Branch) -> BranchView:
    homes = [
        Home(phase, state.counts.by_number[number].node_id, first, end - first)
        for phase, home_map in branch.homes.items()
        for first, end, number in home_map
        if state.counts.by_number[number].bit  # else it is gone
    ]
    children = state.table.lineage.children(branch.key)
    return BranchView(
        *branch.key,
        version=branch.version,
        parent_branch_id=branch.parent_branch_id,
        state=BranchState.LIVE,
        prompt_blocks=branch.prompt_blocks,
        output_blocks=branch.blocks - branch.prompt_blocks,
        idle_s=max(0.0, now_s - branch.last_event_s),
        running_requests=branch.running,
        homes=tuple(homes),
        counts=_counts(state, state.index.path(branch.tip)),
        unannounced_rewrites=branch.unannounced_rewrites,
        child_branch_ids=tuple(child[1] for child in children if child in state.table.live),
    )


def _ended_view(now_s: float, key: BranchKey, tombstone: Tombstone) -> BranchView:
    return BranchView(
        *key,
        version=tombstone.version,
        parent_branch_id=tombstone.parent_branch_id,
        state=BranchState.EXPIRED if tombstone.expired else BranchState.ENDED,
        idle_s=max(0.0, now_s - tombstone.ended_s),
    )


def branches(
    state: DirectoryState,
    now_s: float,
    after: BranchKey | None,
    limit: int,
    tenant: str | None,
    include_ended: bool,
) -> list[BranchView]:
    """See Directory.branches."""
    keys = [
        key
        for table in (state.table.live, state.table.tombstones if include_ended else {})
        for key in table
        if (after is None or key > after) and (tenant is None or key[0] == tenant)
    ]
    views = [branch(state, now_s, key) for key in heapq.nsmallest(limit, keys)]
    return [view for view in views if view is not None]


def context_counts(state: DirectoryState, key: BranchKey) -> BlockCounts:
    """See Directory.context_counts."""
    live = state.table.live.get(key)
    return BlockCounts() if live is None else _counts(state, state.index.path(live.tip))


def pool_counts(state: DirectoryState) -> BlockCounts:
    """See Directory.pool_counts."""
    return _counts(state, state.index.runs())


def _counts(state: DirectoryState, runs: Iterable[Run]) -> BlockCounts:
    held = shared = zero = 0
    for run in runs:
        copies = (run.l1 | run.l2) & state.index.live
        prefill = total = 0
        if copies and run.homes is not None:
            for node in state.counts.nodes.values():
                if copies & node.bit:
                    total += count_at(run.homes, node.number)
                    prefill += run.homes.get(home_key(node.number, Phase.PREFILL), 0)
        if total:
            held += run.size
        elif copies:
            zero += run.size
        if prefill >= 2:
            shared += run.size
    return BlockCounts(held, shared, zero)


def node_counts(state: DirectoryState, node_id: str) -> list[tuple[bytes, int]]:
    """See Directory.node_counts."""
    node = state.counts.nodes.get(node_id)
    if node is None:
        raise UnknownNode(f"node {node_id!r} is not up")
    return [(run.names, count_at(run.homes, node.number)) for run in _counted_on(node, state.index.runs())]


def node_counts_in_parts(state: DirectoryState, node_id: str) -> Generator[list[CountUpdate], None, None]:
    """See Directory.node_counts_in_parts."""
    node = state.counts.nodes.get(node_id)
    if node is None:
        raise UnknownNode(f"node {node_id!r} is not up")
    with state.index.visit() as visit:
        while not visit.over and node.bit:
            counted = _counted_on(node, visit.take(SLICE_RUNS))
            yield [state.counts.update(node, run, "all counts") for run in counted]


def _counted_on(node: Node, runs: Iterable[Run]) -> Iterator[Run]:
    """Those runs that have a count on a node."""
    for run in runs:
        if run.homes is not None and (run.l1 | run.l2) & node.bit and count_at(run.homes, node.number):
            yield run


def stats(state: DirectoryState) -> Stats:
    """See Directory.stats."""
    nodes = [
        NodeStats(
            node.node_id,
            node.incarnation,
            node.l1_blocks,
            node.l2_blocks,
            node.held_blocks,
            node.last_sequence,
            resyncing=node.resyncing or node.resync_asked,
        )
        for node in state.counts.nodes.values()
    ]
    return Stats(
        live_branches=len(state.table.live),
        tombstones=len(state.table.tombstones),
        blocks=state.index.block_count,
        runs=state.index.run_count,
        nodes=tuple(nodes),
        counters=dict(state.counters),
        ignored_events=dict(state.ignored),
    )
