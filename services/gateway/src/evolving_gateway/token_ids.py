"""Token ids on the wire: unsigned 32-bit little-endian integers, one after the other."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from evolving_gateway.errors import BadTokens

TokenIds = npt.NDArray[np.uint32]
_WIRE = np.dtype("<u4")


def from_wire(data: bytes, vocabulary_tokens: int, what: str) -> TokenIds:
    """Ids of shape (n,). Raises BadTokens naming `what` when the length is odd or an id is out of vocabulary."""
    if len(data) % 4:
        raise BadTokens(f"{what}: {len(data)} bytes; each id takes 4")
    ids = np.frombuffer(data, dtype=_WIRE)
    check_vocabulary(ids, vocabulary_tokens, what)
    return ids


def ids_from_node(data: bytes) -> list[int]:
    """Ids that a node generated: in vocabulary, whole."""
    ids: list[int] = np.frombuffer(data, dtype=_WIRE).tolist()
    return ids


def check_vocabulary(ids: TokenIds, vocabulary_tokens: int, what: str) -> None:
    """Raise BadTokens when an id is outside [0, vocabulary_tokens)."""
    if ids.size and int(ids.max()) >= vocabulary_tokens:
        at = int(np.argmax(ids >= vocabulary_tokens))
        raise BadTokens(f"{what}: id {int(ids[at])} at position {at} is outside the vocabulary of {vocabulary_tokens}")


def to_wire(ids: TokenIds | list[int]) -> bytes:
    """The bytes of ids."""
    return np.asarray(ids, dtype=_WIRE).tobytes()
