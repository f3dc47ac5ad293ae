"""What the next iteration computes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from evolving_node_agent.engines.mock.legs import PrefillLeg


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of one prompt."""

    leg: PrefillLeg
    tokens: int


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
