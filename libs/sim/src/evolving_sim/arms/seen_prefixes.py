"""Which prompts went where: what a router that asks no node believes they hold."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class SeenPrefixes:
    """A prefix tree over the prompts sent, with the nodes each block went to, the first one first.

    A block's name stands for all before it too, so the tree is a dictionary, and how deep a node has a prompt is found
    by bisection. The time of a match is logarithmic in the prompt; a prompt sent costs what is new of it.
    """

    _labels: dict[str, int] = field(init=False, default_factory=dict)  # by node; a node that comes back gets a new one
    _made: int = field(init=False, default=0)
    _seen: dict[bytes, tuple[int, ...]] = field(init=False, default_factory=dict)

    def keep_only(self, node_ids: Sequence[str]) -> None:
        """Forget what went to nodes other than these."""
        if self._labels.keys() == set(node_ids):
            return
        self._labels = {node_id: self._labels[node_id] for node_id in node_ids if node_id in self._labels}
        for node_id in node_ids:
            if node_id not in self._labels:
                self._made += 1
                self._labels[node_id] = self._made

    def match(self, names: Sequence[bytes]) -> tuple[str, int]:
        """The node with the longest prefix of `names`, of several the one it went to first, and how many blocks.

        ("", 0) where nothing matches.
        """
        depths = {node_id: self._depth(names, label) for node_id, label in self._labels.items()}
        deepest = max(depths.values(), default=0)
        if deepest == 0:
            return "", 0
        order = self._seen[names[deepest - 1]]
        tied = [node_id for node_id, depth in depths.items() if depth == deepest]
        return min(tied, key=lambda node_id: order.index(self._labels[node_id])), deepest

    def add(self, names: Sequence[bytes], node_id: str) -> None:
        """A prompt was sent to a node, one of those kept."""
        label = self._labels[node_id]
        for name in names[self._depth(names, label) :]:
            self._seen[name] = (*self._seen.get(name, ()), label)

    def _depth(self, names: Sequence[bytes], label: int) -> int:
        return bisect_left(names, True, key=lambda name: label not in self._seen.get(name, ()))
