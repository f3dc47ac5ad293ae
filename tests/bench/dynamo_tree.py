"""NVIDIA Dynamo's radix tree behind the calls the benchmark makes of ours: the binding of `ai-dynamo-runtime`.

Its hashes are 64-bit integers, a list of them for each call, and its events are JSON; ours are 16-byte names in one
`bytes`. Both start from bytes as they come over the wire: 8 or 16 a block.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dynamo._core import RadixTree

from evolving.core.terms import NAME_BYTES

HASH_BYTES = 8


def wire_hashes(names: bytes) -> bytes:
    """The hashes of a context as they travel: the first 8 bytes of each name."""
    return b"".join(names[at : at + HASH_BYTES] for at in range(0, len(names), NAME_BYTES))


class DynamoTree:
    """One tree; nodes are worker ids."""

    def __init__(self) -> None:
        self._tree = RadixTree()
        self._events = 0

    def match(self, wire: bytes) -> Mapping[Any, int]:
        """Blocks each worker holds from the start of a context on."""
        hashes = array("Q")
        hashes.frombytes(wire)
        return self._tree.find_matches(hashes.tolist()).scores

    def stored(self, wire: bytes, batch_blocks: int) -> Iterator[bytes]:
        """The events that tell of a whole context, batch by batch."""
        hashes = _integers(wire)
        for at in range(0, len(hashes), batch_blocks):
            blocks = [{"block_hash": each, "tokens_hash": each} for each in hashes[at : at + batch_blocks]]
            yield self._event({"stored": {"parent_hash": hashes[at - 1] if at else None, "blocks": blocks}})

    def removed(self, wire: bytes, firsts: Sequence[int], blocks: int) -> bytes:
        """The event that tells that so many blocks of a context left, from each of these depths on."""
        hashes = _integers(wire)
        return self._event({"removed": {"block_hashes": [each for at in firsts for each in hashes[at : at + blocks]]}})

    def apply(self, worker: int, event: bytes) -> None:
        """A worker tells of an event."""
        self._tree.apply_event(worker, event)

    def _event(self, data: dict[str, object]) -> bytes:
        self._events += 1
        return json.dumps({"event_id": self._events, "data": data, "dp_rank": 0}).encode()


def _integers(wire: bytes) -> list[int]:
    hashes = array("Q")
    hashes.frombytes(wire)
    return hashes.tolist()
