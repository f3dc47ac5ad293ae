"""Token ids for traces that carry none.

A block id stands for the same tokens whenever it comes, and a turn's prompt repeats what was really said: where it goes
on from an earlier prompt of its session, that prompt's tail and the answer the cluster gave come first, and only the
rest is made up. So the KV made while answering can be found again, as with a real harness.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from evolving.core.blocks import TOKEN_BYTES
from evolving_sim.traces import BlockIds, TraceRequest

_FIRST_TAIL = 1 << 32  # block ids are below; a row from here on is what follows one request's last full block
_NO_BLOCK = -1
_ROW_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)


class BlockTokens:
    """The tokens of block ids that mean one thing: those of one session, or of all where the trace shares ids.

    Holds the tokens of every id met, 4 bytes each.
    """

    def __init__(self, seed: str, block_tokens: int, vocabulary_tokens: int) -> None:
        self._seed = np.uint64(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little"))
        self._vocabulary = np.uint64(vocabulary_tokens)
        self.block_tokens = block_tokens
        self.known: dict[int, bytes] = {}

    def make(self, rows: list[int]) -> npt.NDArray[np.uint32]:
        """Made-up tokens, the same for the same row. Shape: (rows, block_tokens)."""
        # splitmix64 of a counter that no two rows share
        first = np.array(rows, dtype=np.uint64) * np.uint64(self.block_tokens)
        mixed = first[:, None] + np.arange(self.block_tokens, dtype=np.uint64)
        mixed *= _ROW_STEP
        mixed += self._seed
        mixed ^= mixed >> np.uint64(30)
        mixed *= _MIX_A
        mixed ^= mixed >> np.uint64(27)
        mixed *= _MIX_B
        mixed >>= np.uint64(32)
        mixed *= self._vocabulary
        mixed >>= np.uint64(32)
        return mixed.astype(np.uint32)


class SessionPrompts:
    """The prompts of one session, as they are sent."""

    def __init__(self, blocks: BlockTokens) -> None:
        self._blocks = blocks
        # By the last full block of an earlier prompt: what came after it, the tail and then the answer.
        self._said_after: dict[int, bytes] = {}

    def prompt(self, request: TraceRequest, number: int) -> bytes:
        """Token ids, u32 little-endian; input_tokens of them.

        number: of the request, no other's among those that share the blocks. The first block id that is new here tells
        where this prompt leaves what was sent before.
        """
        ids: list[int] = request.block_ids.tolist()
        known = self._blocks.known
        old = [*map(known.__contains__, ids), False].index(False)  # blocks before the first new one
        made = self._made(
            [*ids[old:], _FIRST_TAIL + number], _last(ids[:old]), request.input_tokens - old * self._blocks.block_tokens
        )
        block_bytes = self._blocks.block_tokens * TOKEN_BYTES
        for index, block_id in enumerate(ids[old:]):
            # An id in the middle may be known although one before it is not.
            known.setdefault(block_id, made[index * block_bytes : (index + 1) * block_bytes])
        tail = made[(len(ids) - old) * block_bytes :]
        self._said_after[_last(ids)] = tail
        return b"".join([*map(known.__getitem__, ids), tail])

    def answered(self, request: TraceRequest, prompt: bytes, output: bytes) -> None:
        """Remember an answer (u32 little-endian), so that the prompt that goes on from it has it."""
        full_bytes = len(request.block_ids) * self._blocks.block_tokens * TOKEN_BYTES
        self._said_after[_last(request.block_ids)] = prompt[full_bytes:] + output

    def _made(self, rows: list[int], after: int, count: int) -> bytes:
        """`count` tokens that follow block `after`: what was said there, then made-up ones."""
        tokens = self._blocks.make(rows).reshape(-1)[:count].astype("<u4", copy=False).tobytes()
        said = self._said_after.get(after, b"")[: len(tokens)]
        return said + tokens[len(said) :]


def _last(ids: list[int] | BlockIds) -> int:
    return int(ids[-1]) if len(ids) else _NO_BLOCK
