"""Links between nodes, and what shares them.

Each node has one way out and one way in. The transfers on a way share it evenly at every moment, and one goes at the
smaller of its two shares: what one of them leaves of its share at the other end is used by nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from evolving_sim.events import Event, EventHeap, Priority


@dataclass(slots=True, eq=False)
class Transfer:
    """Bytes on their way from a node to another."""

    source: str
    target: str
    arrived: Callable[[], None]
    left_bytes: float
    bytes_per_s: float = 0.0  # since `since_s`
    since_s: float = 0.0
    end: Event | None = None


@dataclass(slots=True, eq=False, repr=False)
class Links:
    """The ways out and in of all nodes, for one kind of transfer."""

    events: EventHeap
    out_bytes_per_s: Mapping[str, float]  # by node
    in_bytes_per_s: Mapping[str, float]
    fixed_s: Mapping[str, float]  # by the node that gets it: what a transfer takes beside its bytes
    _out: dict[str, dict[Transfer, None]] = field(init=False)
    _in: dict[str, dict[Transfer, None]] = field(init=False)

    def __post_init__(self) -> None:
        self._out = {node_id: {} for node_id in self.out_bytes_per_s}
        self._in = {node_id: {} for node_id in self.in_bytes_per_s}

    def send(self, source: str, target: str, size_bytes: float, arrived: Callable[[], None]) -> Transfer:
        """Begin a transfer; `arrived` is called at its end."""
        transfer = Transfer(source, target, arrived, size_bytes, since_s=self.events.now_s)
        self._out[source][transfer] = None
        self._in[target][transfer] = None
        self._share(transfer)
        return transfer

    def cancel(self, transfer: Transfer) -> None:
        """It does not arrive."""
        if transfer.end is not None:
            transfer.end.cancel()
        self._leave(transfer)

    def cut_off(self, node_id: str) -> None:
        """A node is gone: nothing on its ways arrives."""
        for transfer in [*self._out[node_id], *self._in[node_id]]:
            self.cancel(transfer)

    def reading_from(self, node_id: str) -> int:
        """Transfers out of a node now."""
        return len(self._out[node_id])

    def _leave(self, transfer: Transfer) -> None:
        if transfer in self._out[transfer.source]:
            del self._out[transfer.source][transfer]
            del self._in[transfer.target][transfer]
            self._share(transfer)

    def _share(self, changed: Transfer) -> None:
        """A transfer came or left: all that share a way with it go at another rate."""
        now_s = self.events.now_s
        for transfer in self._out[changed.source] | self._in[changed.target]:
            source, target = transfer.source, transfer.target
            out_share = self.out_bytes_per_s[source] / len(self._out[source])
            rate = min(out_share, self.in_bytes_per_s[target] / len(self._in[target]))
            if rate == transfer.bytes_per_s:
                continue
            passed_s = now_s - transfer.since_s
            transfer.left_bytes = max(0.0, transfer.left_bytes - transfer.bytes_per_s * passed_s)
            transfer.bytes_per_s, transfer.since_s = rate, now_s
            if transfer.end is not None:
                transfer.end.cancel()
            transfer.end = self.events.after(
                transfer.left_bytes / rate,
                Priority.ARRIVAL,
                lambda ended=transfer: self._ended(ended),  # type: ignore[misc]
            )

    def _ended(self, transfer: Transfer) -> None:
        self._leave(transfer)
        transfer.end = self.events.after(self.fixed_s[transfer.target], Priority.ARRIVAL, transfer.arrived)

    def check_invariants(self) -> None:
        """Assert that each transfer is on both its ways, at its share."""
        going = [transfer for each in self._out.values() for transfer in each]
        assert sorted(map(id, going)) == sorted(id(transfer) for each in self._in.values() for transfer in each)
        for transfer in going:
            out_share = self.out_bytes_per_s[transfer.source] / len(self._out[transfer.source])
            in_share = self.in_bytes_per_s[transfer.target] / len(self._in[transfer.target])
            assert transfer.bytes_per_s == min(out_share, in_share)
