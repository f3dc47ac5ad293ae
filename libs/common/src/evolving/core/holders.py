"""Whose copies a node fetches: which blocks peers can bring, and who brings them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

HINTS_MAX = 256
"""More is not worth asking for: each hint may be a holder's connection."""


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
    holds. At most HINTS_MAX, of what the target lacks before what it has. `runs` are in order and do not overlap. Only
    nodes in `load_s` are named: the others are not live.
    """
    others = [
        HeldRun(run.first_block, run.blocks, tuple(n for n in run.node_ids if n != target_node_id and n in load_s))
        for run in runs
        if run.first_block < end_block
    ]
    lacked = list(islice(_hints(others, own_blocks, end_block, load_s, gaps=False), HINTS_MAX))
    own = islice(_hints(others, 0, min(own_blocks, end_block), load_s, gaps=True), HINTS_MAX - len(lacked))
    hints: list[HolderHint] = []
    for hint in (*own, *lacked):
        last = hints[-1] if hints else None
        if last is not None and last.node_id == hint.node_id and last.first_block + last.blocks == hint.first_block:
            hints[-1] = HolderHint(hint.node_id, last.first_block, last.blocks + hint.blocks)
        else:
            hints.append(hint)
    return tuple(hints)


def _hints(
    runs: Sequence[HeldRun], first_block: int, end_block: int, load_s: Mapping[str, float], *, gaps: bool
) -> Iterator[HolderHint]:
    """Hints of blocks [first_block, end_block), without those that nobody holds or, without `gaps`, up to them."""
    at, index = first_block, 0
    while at < end_block:
        while index < len(runs) and runs[index].first_block + runs[index].blocks <= at:
            index += 1
        if index == len(runs) or runs[index].first_block >= end_block or (not gaps and runs[index].first_block > at):
            return
        at = max(at, runs[index].first_block)
        reach = _reach(runs, index, end_block)
        if not reach:
            if not gaps:
                return
            at = runs[index].first_block + runs[index].blocks
            continue
        node_id = min(reach, key=lambda name: (-reach[name], load_s[name], name))
        yield HolderHint(node_id, at, reach[node_id] - at)
        at = reach[node_id]


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


def _reach(runs: Sequence[HeldRun], index: int, end_block: int) -> dict[str, int]:
    """Per holder of the run at `index`, the block up to which it holds everything from there on."""
    ends = min(runs[index].first_block + runs[index].blocks, end_block)
    reach = dict.fromkeys(runs[index].node_ids, ends)
    going_on = set(reach)
    for run in islice(runs, index + 1, None):
        going_on &= set(run.node_ids)
        if not going_on or run.first_block != ends or ends == end_block:
            break
        ends = min(run.first_block + run.blocks, end_block)
        reach |= dict.fromkeys(going_on, ends)
    return reach
