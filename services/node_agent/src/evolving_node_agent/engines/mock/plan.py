"""What the next iteration computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from evolving.core.timemodel import PrefillSums
from evolving.core.work import query_key_pairs
from evolving_node_agent.engines.mock.legs import PrefillLeg


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of one prompt."""

    leg: PrefillLeg
    tokens: int

    @property
    def is_first(self) -> bool:
        """Whether all that comes before it is reused."""
        return self.leg.kv.tokens == self.leg.cached.total


def plan_chunks(running: Iterable[PrefillLeg], chunk_tokens: int) -> list[Chunk]:
    """Fill one chunk from started prompts, in the order they were started; several short ones share it."""
    chunks = []
    room = chunk_tokens
    for leg in running:
        tokens = min(leg.left, room)
        if tokens == 0:
            break
        chunks.append(Chunk(leg, tokens))
        room -= tokens
    return chunks


def sums(chunks: Sequence[Chunk]) -> PrefillSums:
    """What equation 1 of the paper wants to know of an iteration."""
    return PrefillSums(
        uncached_tokens=sum(chunk.tokens for chunk in chunks),
        query_key_pairs=sum(query_key_pairs(chunk.tokens, chunk.leg.kv.tokens) for chunk in chunks),
        restored_tokens=sum(chunk.leg.cached.restored for chunk in chunks if chunk.is_first),
        cached_tokens=sum(chunk.leg.cached.total for chunk in chunks if chunk.is_first),
    )
