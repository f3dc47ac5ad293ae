"""Which nodes change roles so that a shape is reached: the fewest, and among unlike nodes those that fit.

Going from 4P5D to 3P6D one of the four prefill nodes moves. Which one matters only where nodes are unlike: taking the
slowest at prefill costs that phase least, taking the fastest at decode gives the other most. Everything here is pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from evolving.core.planner import SplitShape
from evolving.core.terms import Role
from evolving.core.throughput import CountArray, FloatArray, Kinds, MeanWork, NodeModel


@dataclass(frozen=True, slots=True)
class Placement:
    """One split of the nodes: what moves, and how many nodes of each kind are then in each phase."""

    shape: SplitShape
    moves: Mapping[str, Role]  # node to its new role
    prefill: CountArray  # Shape: (kinds,)
    decode: CountArray


def fewest_moves(
    kinds: Kinds, roles: Mapping[str, Role], models: Mapping[str, NodeModel], work: MeanWork, open_requests: float
) -> list[Placement]:
    """One placement per shape xPyD with x, y >= 1, by x. `roles` are PREFILL or DECODE, with nodes in each.

    All moves go one way, which is fewest. Which nodes they take is searched between two orders, cheapest for the phase
    they leave and best for the one they join, for the largest Θ under `work` and `open_requests`. With two kinds of
    nodes that is every way there is, with more a good one. Nodes of one kind go by id, the last first.
    """
    search = _Search(kinds, roles, models, work, open_requests)
    prefills = sum(role is Role.PREFILL for role in roles.values())
    less_prefill = search.moved_to(Role.DECODE)
    more_prefill = search.moved_to(Role.PREFILL)
    moves = [*((moved, Role.DECODE) for moved in reversed(less_prefill)), ((), Role.PREFILL)]
    moves += [(moved, Role.PREFILL) for moved in more_prefill]
    placements = []
    for moved, role in moves:
        change = len(moved) if role is Role.PREFILL else -len(moved)
        shape = SplitShape(prefills + change, len(roles) - prefills - change)
        prefill, decode = search.counts(moved, role)
        placements.append(Placement(shape, dict.fromkeys(sorted(moved), role), prefill, decode))
    return placements


class _Search:
    def __init__(
        self,
        kinds: Kinds,
        roles: Mapping[str, Role],
        models: Mapping[str, NodeModel],
        work: MeanWork,
        open_requests: float,
    ) -> None:
        self._kinds, self._roles, self._models = kinds, roles, models
        self._work, self._open_requests = work, open_requests
        self._have = {
            phase: kinds.count(models[node] for node, role in roles.items() if role is phase)
            for phase in (Role.PREFILL, Role.DECODE)
        }
        single = np.eye(len(kinds.models), dtype=np.int64)
        # What a node of each kind is worth in each phase, on its own with a mean share of the requests.
        self._worth = {
            Role.PREFILL: kinds.prefill_rates(single, work),
            Role.DECODE: kinds.decode_rates(single, work, open_requests / len(roles)),
        }

    def counts(self, moved: Sequence[str], to: Role) -> tuple[CountArray, CountArray]:
        """Nodes per kind that prefill and that decode once `moved` have role `to`."""
        change = self._kinds.count(self._models[node] for node in moved)
        change = change if to is Role.PREFILL else -change
        return self._have[Role.PREFILL] + change, self._have[Role.DECODE] - change

    def moved_to(self, to: Role) -> list[tuple[str, ...]]:
        """The nodes to move to role `to` for one move, two, and so on, leaving one behind."""
        leave = Role.DECODE if to is Role.PREFILL else Role.PREFILL
        nodes = sorted((node for node, role in self._roles.items() if role is leave), reverse=True)
        kind = {node: self._kinds.of(self._models[node]) for node in nodes}
        gain, loss = self._worth[to], self._worth[leave]
        by_gain = sorted(nodes, key=lambda node: (-gain[kind[node]], loss[kind[node]]))
        by_loss = sorted(nodes, key=lambda node: (loss[kind[node]], -gain[kind[node]]))

        def pick(moves: int, by_gain_first: int) -> tuple[str, ...]:
            taken = dict.fromkeys(by_gain[:by_gain_first])
            rest = (node for node in by_loss if node not in taken)
            return (*taken, *(node for node, _ in zip(rest, range(moves - by_gain_first), strict=False)))

        if by_gain == by_loss:
            return [pick(moves, 0) for moves in range(1, len(nodes))]
        # The more are taken by gain, the more the phase they join has and the less the one they leave: Θ, the smaller,
        # is largest where the two cross, on one side or the other. That is found for all counts of moves at once.
        moves = list(range(1, len(nodes)))
        low, high = [0] * len(moves), list(moves)
        while any(a < b for a, b in zip(low, high, strict=True)):
            middle = [(a + b) // 2 for a, b in zip(low, high, strict=True)]
            joined, left = self._rates([pick(*row) for row in zip(moves, middle, strict=True)], to)
            for i, crossed in enumerate(joined >= left):
                if low[i] < high[i]:
                    low[i], high[i] = (low[i], middle[i]) if crossed else (middle[i] + 1, high[i])
        before = [pick(count, max(at - 1, 0)) for count, at in zip(moves, low, strict=True)]
        after = [pick(count, at) for count, at in zip(moves, low, strict=True)]
        better = np.minimum(*self._rates(after, to)) > np.minimum(*self._rates(before, to))
        return [b if is_better else a for a, b, is_better in zip(before, after, better, strict=True)]

    def _rates(self, moved: Sequence[Sequence[str]], to: Role) -> tuple[FloatArray, FloatArray]:
        """Σμ of the phase joined and of the one left, per set of moved nodes."""
        rows = [self.counts(nodes, to) for nodes in moved]
        prefill = self._kinds.prefill_rates(np.array([row[0] for row in rows]), self._work)
        decode = self._kinds.decode_rates(np.array([row[1] for row in rows]), self._work, self._open_requests)
        return (prefill, decode) if to is Role.PREFILL else (decode, prefill)
