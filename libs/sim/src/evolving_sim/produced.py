"""What could be reused if all KV ever produced were kept, and every node had it at once."""

from __future__ import annotations

from collections.abc import Sequence


class ProducedKv:
    """Blocks whose KV finished requests produced, by name: about 100 bytes each."""

    def __init__(self) -> None:
        self._names: set[bytes] = set()

    def known_blocks(self, names: Sequence[bytes], blocks: int) -> int:
        """How many of the first `blocks` blocks were produced. None is known behind one that isn't."""
        known = self._names
        low, high, probe = 0, blocks + 1, blocks
        while high - low > 1:
            if names[probe - 1] in known:
                low = probe
            else:
                high = probe
            probe = (low + high) // 2
        return low

    def add(self, names: Sequence[bytes], blocks: int) -> None:
        """The first `blocks` blocks were produced."""
        self._names.update(names[self.known_blocks(names, blocks) : blocks])
