"""The counts of the naive model, all of them, counted anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from core.model import Model, Name

from evolving.core.terms import Phase


@dataclass
class Tally:
    """All counts at one moment."""

    prefill: Counter[tuple[str, Name]]
    decode: Counter[tuple[str, Name]]
    kept: set[Name]  # by any node

    @classmethod
    def of(cls, model: Model) -> Tally:
        """Count anew."""
        kept = set().union(*(node.names() for node in model.nodes.values()))
        return cls(model.counts(Phase.PREFILL), model.counts(Phase.DECODE), kept)

    def on(self, node_id: str) -> dict[Name, int]:
        """Nonzero counts of a node, both phases."""
        total = self.prefill + self.decode
        return {name: count for (node, name), count in total.items() if node == node_id}

    def held_shared_zero(self, names: Iterable[Name]) -> tuple[int, int, int]:
        """Blocks counted by a branch or more; by two or more PREFILL counts; kept by a node and counted by none."""
        prefill: Counter[Name] = Counter()
        total: Counter[Name] = Counter()
        for (_, name), count in self.prefill.items():
            prefill[name] += count
            total[name] += count
        for (_, name), count in self.decode.items():
            total[name] += count
        held = shared = zero = 0
        for name in names:
            held += total[name] >= 1
            shared += prefill[name] >= 2
            zero += total[name] == 0 and name in self.kept
        return held, shared, zero
