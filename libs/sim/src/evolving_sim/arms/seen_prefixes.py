"""Which prompts went where: what a router that asks no node believes they hold."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class SeenPrefixes:
    """A prefix tree over the prompts sent, with the nodes each block went to, the first one first.

    A block's name stands for all before it too, so the tree is a dictionary, and how deep it has a prompt is found by
    bisection: a match takes time logarithmic in the prompt, and a prompt sent costs what is new of it.
    """

    _labels: dict[str, int] = field(init=False, default_factory=dict)  # by node; one that comes back gets a new one
    _nodes: dict[int, str] = field(init=False, default_factory=dict)  # by label
    _made: int = field(init=False, default=0)
    _seen: dict[bytes, tuple[int, ...]] = field(init=False, default_factory=dict)  # labels, also of nodes forgotten

    def keep_only(self, node_ids: Sequence[str]) -> None:
        """Forget what went to nodes other than these."""
        if self._labels.keys() == set(node_ids):
            return
        self._labels = {node_id: self._labels[node_id] for node_id in node_ids if node_id in self._labels}
        for node_id in node_ids:
            if node_id not in self._labels:
                self._made += 1
                self._labels[node_id] = self._made
        self._nodes = {label: node_id for node_id, label in self._labels.items()}

    def match(self, names: Sequence[bytes]) -> tuple[str, int]:
        """The node with the longest prefix of `names`, of several the one it went to first, and how many blocks.

        ("", 0) where nothing matches.
        """
        blocks = bisect_left(names, True, key=lambda name: not self._first(name))
        return (self._first(names[blocks - 1]), blocks) if blocks else ("", 0)

    def add(self, names: Sequence[bytes], node_id: str) -> None:
        """A prompt was sent to a node, one of those kept."""
        seen, label = self._seen, self._labels[node_id]
        alone = (label,)
        for name in names[bisect_left(names, True, key=lambda name: label not in seen.get(name, ())) :]:
            before = seen.get(name)
            seen[name] = (*before, label) if before else alone

    def _first(self, name: bytes) -> str:
        """The node a block went to first; "": it went to none that is kept."""
        return next((self._nodes[label] for label in self._seen.get(name, ()) if label in self._nodes), "")
