"""What one pool of KV could save of a trace: the least that a cluster which knows the same can lose.

The pool holds whole blocks, and a block only while it holds those before it, as prefixes need. Requests come as
`interleaving` says; a prompt is looked up and stored when its request begins, what the answer added when it ends. Three
orders of eviction: the longest unused; the least needed by live branches, then the longest unused (arXiv 2611.12304,
§4.4); and the one needed furthest in the future, which no order can beat (Belady).

Works on stretches of a path that share their place in the order, so a request costs a few array operations, not one
step a block.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evolving_sim.workload import Nodes, Step, Workload

_NEVER = np.int64(1) << 40
_COUNT_SHIFT = 40  # bits for the last access below the count


class Policy(enum.StrEnum):
    """What is evicted first."""

    LRU = "lru"  # the longest unused
    AGENT = "agent"  # the least counted by live branches, then the longest unused
    BELADY = "belady"  # what is needed last


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a pool did for a workload that asked for anything at all."""

    prompt_tokens: int
    hit_tokens: int  # found in the pool
    ideal_tokens: int  # found in a pool that keeps everything

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found."""
        return self.hit_tokens / self.prompt_tokens

    @property
    def ideal_hit_rate(self) -> float:
        """Share found were all KV ever produced kept."""
        return self.ideal_tokens / self.prompt_tokens

    @property
    def lost_reuse(self) -> float:
        """Share of prompt tokens whose KV was produced before and is computed again."""
        return (self.ideal_tokens - self.hit_tokens) / self.prompt_tokens


def simulate(workload: Workload, capacity_blocks: int, policy: Policy) -> Outcome:
    """Play a workload against one pool."""
    pool = _Pool(workload, capacity_blocks)
    counts = np.zeros(workload.nodes, np.int64)
    next_uses = _next_uses(workload) if policy is Policy.BELADY else iter(())
    produced = np.zeros(workload.nodes, bool)
    prompt_tokens = hit_tokens = ideal_tokens = 0
    for number, step in enumerate(workload.steps):
        if policy is Policy.AGENT:
            for nodes, change in ((step.dropped, -1), (step.added, 1)):
                counts[nodes] += change
                pool.move(nodes, change << _COUNT_SHIFT)
        if step.is_prompt:
            tokens = workload.block_tokens
            prompt_tokens += step.prompt_tokens
            hit_tokens += min(_leading(pool.resident, step.path), step.reusable_blocks) * tokens
            ideal_tokens += min(_leading(produced, step.path), step.reusable_blocks) * tokens
        produced[step.path] = True
        if policy is Policy.BELADY:
            pool.use(step.path, -next(next_uses))
        else:
            pool.use(step.path, (counts[step.path] << _COUNT_SHIFT) + number)
    return Outcome(prompt_tokens, hit_tokens, ideal_tokens)


class _Pool:
    """Resident nodes and the order in which they go: the smallest rank first, deeper before shallower."""

    def __init__(self, workload: Workload, capacity_blocks: int) -> None:
        self.resident = np.zeros(workload.nodes, bool)
        self._rank = np.zeros(workload.nodes, np.int64)
        self._depth = workload.depth
        self._free = capacity_blocks
        # Stretches of a path by (rank, -depth of the deepest). Those of nodes that have another rank by now are stale.
        self._order: list[tuple[int, int, int, Nodes]] = []
        self._pushed = 0

    def use(self, path: Nodes, rank: npt.NDArray[np.int64]) -> None:
        """Make a path resident, as far as there is room, with these ranks. Ranks never grow along a path."""
        self._free -= len(path) - int(np.count_nonzero(self.resident[path]))
        self.resident[path] = True
        self._rank[path] = rank
        self._note(path)
        while self._free < 0:
            self._evict(-self._free)

    def move(self, nodes: Nodes, change: int) -> None:
        """Change the rank of a stretch of a path."""
        self._rank[nodes] += change
        self._note(nodes[self.resident[nodes]])

    def _note(self, nodes: Nodes) -> None:
        if not len(nodes):
            return
        rank = self._rank[nodes]
        starts = np.flatnonzero(np.diff(rank)) + 1
        for stretch in np.split(nodes, starts) if len(starts) else (nodes,):
            self._push(int(self._rank[stretch[0]]), stretch)

    def _push(self, rank: int, stretch: Nodes) -> None:
        self._pushed += 1
        heapq.heappush(self._order, (rank, -int(self._depth[stretch[-1]]), self._pushed, stretch))

    def _evict(self, most: int) -> None:
        rank, _, _, stretch = heapq.heappop(self._order)
        present = stretch[self.resident[stretch] & (self._rank[stretch] == rank)]
        gone = present[-most:]
        self.resident[gone] = False
        self._free += len(gone)
        if len(present) > len(gone):
            self._push(rank, present[: -len(gone)])


def _leading(there: npt.NDArray[np.bool_], path: Nodes) -> int:
    """Leading nodes of a path that are there."""
    missing = np.flatnonzero(~there[path])
    return int(missing[0]) if len(missing) else len(path)


def _next_uses(workload: Workload) -> Iterator[npt.NDArray[np.int64]]:
    """Per step, the number of the next step that looks its nodes up. Shape of each: (path,)."""
    following = np.full(workload.nodes, _NEVER)
    per_step: list[_Stretches] = []
    for number in range(len(workload.steps) - 1, -1, -1):
        step: Step = workload.steps[number]
        per_step.append(_Stretches.of(following[step.path]))
        if step.is_prompt:
            following[step.path] = number
    return (stretches.array() for stretches in reversed(per_step))


@dataclass(frozen=True, slots=True)
class _Stretches:
    """An array of long equal stretches."""

    values: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]

    @classmethod
    def of(cls, array: npt.NDArray[np.int64]) -> _Stretches:
        starts = np.concatenate(([0], np.flatnonzero(np.diff(array)) + 1)) if len(array) else np.zeros(0, np.int64)
        return cls(array[starts], np.diff(np.append(starts, len(array))))

    def array(self) -> npt.NDArray[np.int64]:
        return np.repeat(self.values, self.lengths)
