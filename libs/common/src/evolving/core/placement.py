"""Which nodes change roles so that a shape is reached: the fewest, and among unlike nodes those that fit.

Going from 4P5D to 3P6D one of the four prefill nodes moves. Which one matters only where nodes are unlike: taking the
slowest at prefill costs that phase least, taking the fastest at decode gives the other most. Everything here is pure.
"""

from __future__ import annotations

import itertools
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


@dataclass(frozen=True, slots=True)
class _Orders:
    """The nodes that could move, by what they give the phase they would join and by what the one they leave loses."""

    by_gain: Sequence[str]
    by_loss: Sequence[str]

    def pick(self, moves: int, by_gain_first: int) -> tuple[str, ...]:
        """`moves` nodes: so many by gain, the rest by loss."""
        taken = dict.fromkeys(self.by_gain[:by_gain_first])
        rest = (node for node in self.by_loss if node not in taken)
        return (*taken, *itertools.islice(rest, moves - by_gain_first))


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
        self._prefill_worth = kinds.prefill_rates(np.eye(len(kinds.models), dtype=np.int64), work)

    def counts(self, moved: Sequence[str], to: Role) -> tuple[CountArray, CountArray]:
        """Nodes per kind that prefill and that decode once `moved` have role `to`."""
        change = self._kinds.count(self._models[node] for node in moved)
        change = change if to is Role.PREFILL else -change
        return self._have[Role.PREFILL] + change, self._have[Role.DECODE] - change

    def moved_to(self, to: Role) -> list[tuple[str, ...]]:
        """The nodes to move to role `to` for one move, two, and so on, leaving one behind."""
        nodes = sorted((node for node, role in self._roles.items() if role is not to), reverse=True)
        moves = list(range(1, len(nodes)))
        orders = [self._orders(nodes, count, to) for count in moves]
        if not moves or len(self._kinds.models) == 1:
            return [order.pick(count, 0) for order, count in zip(orders, moves, strict=True)]
        # The more are taken by gain, the more the phase they join has and the less the one they leave: Θ, the smaller,
        # is largest where the two cross, on one side or the other. That is found for all counts of moves at once.
        low, high = [0] * len(moves), list(moves)
        while any(a < b for a, b in zip(low, high, strict=True)):
            middle = [(a + b) // 2 for a, b in zip(low, high, strict=True)]
            joined, left = self._rates(self._picked(orders, moves, middle), to)
            for i, crossed in enumerate(joined >= left):
                if low[i] < high[i]:
                    low[i], high[i] = (low[i], middle[i]) if crossed else (middle[i] + 1, high[i])
        before = self._picked(orders, moves, [max(at - 1, 0) for at in low])
        after = self._picked(orders, moves, low)
        better = np.minimum(*self._rates(after, to)) > np.minimum(*self._rates(before, to))
        return [b if is_better else a for a, b, is_better in zip(before, after, better, strict=True)]

    def _orders(self, nodes: Sequence[str], moves: int, to: Role) -> _Orders:
        """For `moves` moves. What a node is worth at decode depends on how many there are to share the requests."""
        kind = {node: self._kinds.of(self._models[node]) for node in nodes}
        decodes = int(self._have[Role.DECODE].sum()) + (moves if to is Role.DECODE else -moves)
        decode_worth = self._kinds.node_decode_rates(self._work, self._open_requests / decodes)
        worths = (self._prefill_worth, decode_worth)
        gain, loss = worths if to is Role.PREFILL else reversed(worths)
        return _Orders(
            by_gain=sorted(nodes, key=lambda node: (-gain[kind[node]], loss[kind[node]])),
            by_loss=sorted(nodes, key=lambda node: (loss[kind[node]], -gain[kind[node]])),
        )

    @staticmethod
    def _picked(orders: Sequence[_Orders], moves: Sequence[int], by_gain: Sequence[int]) -> list[tuple[str, ...]]:
        return [order.pick(*counts) for order, *counts in zip(orders, moves, by_gain, strict=True)]

    def _rates(self, moved: Sequence[Sequence[str]], to: Role) -> tuple[FloatArray, FloatArray]:
        """Σμ of the phase joined and of the one left, per set of moved nodes."""
        rows = [self.counts(nodes, to) for nodes in moved]
        prefill = self._kinds.prefill_rates(np.array([row[0] for row in rows]), self._work)
        decode = self._kinds.decode_rates(np.array([row[1] for row in rows]), self._work, self._open_requests)
        return (prefill, decode) if to is Role.PREFILL else (decode, prefill)
