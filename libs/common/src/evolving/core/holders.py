"""Whose copies a node fetches: which blocks peers can bring, and who brings them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeldRun:
    """Blocks [first_block, first_block + blocks) of a context and the nodes whose host memory holds them."""

    first_block: int
    blocks: int
    node_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HolderHint:
    """Fetch blocks [first_block, first_block + blocks) from this node."""

    node_id: str
    first_block: int
    blocks: int


def holder_hints(
    runs: Sequence[HeldRun], target_node_id: str, own_blocks: int, end_block: int, load_s: Mapping[str, float]
) -> tuple[HolderHint, ...]:
    """Who brings blocks [0, end_block) to the target: as few holders as can be, then the least loaded.

    Take the holder that reaches furthest without a gap (equal reach: the least `load_s`), and go on from where it ends.
    The target holds the first `own_blocks` itself; who else has them is named too, since until it is there the target
    may have let them go, and those another node has go first. After them, fetching stops at a block that nobody else
    holds. `runs` are in order and do not overlap. Only nodes in `load_s` are named: the others are not live.
    """
    hints: list[HolderHint] = []
    at = 0
    while at < end_block:
        reach = _reach(runs, target_node_id, at, end_block)
        reach = {node_id: end for node_id, end in reach.items() if node_id in load_s}
        if not reach:
            if at < own_blocks:
                at = min(own_blocks, *(run.first_block for run in runs if run.first_block > at), end_block)
                continue
            break
        node_id = min(reach, key=lambda name: (-reach[name], load_s[name], name))
        hints.append(HolderHint(node_id, at, reach[node_id] - at))
        at = reach[node_id]
    return tuple(hints)


def fetchable_blocks(runs: Sequence[HeldRun], target_node_id: str, first_block: int) -> int:
    """Blocks from `first_block` on that `holder_hints` can have brought to the target. `runs` name live nodes only."""
    at = first_block
    for run in runs:
        end = run.first_block + run.blocks
        if end <= at:
            continue
        if run.first_block > at or run.node_ids in ((), (target_node_id,)):
            break
        at = end
    return at - first_block


def spare_share(runs: Sequence[HeldRun]) -> float:
    """Share of held blocks that lie on two nodes or more, in [0, 1]; 0 where none is held."""
    held = sum(run.blocks for run in runs if run.node_ids)
    return sum(run.blocks for run in runs if len(run.node_ids) > 1) / held if held else 0.0


def _reach(runs: Sequence[HeldRun], target_node_id: str, at: int, end_block: int) -> dict[str, int]:
    """Per node, the block up to which it holds everything from block `at` on; nodes that lack `at` are left out."""
    reach: dict[str, int] = {}
    for run in runs:
        run_end = min(run.first_block + run.blocks, end_block)
        if run_end <= at:
            continue
        for node_id in run.node_ids:
            starts_here = run.first_block <= at
            continues = reach.get(node_id) == run.first_block
            if node_id != target_node_id and (starts_here or continues):
                reach[node_id] = run_end
    return reach
