"""What stands in for a model: KV bytes made from token ids, and tokens made from KV bytes.

The next token depends on the KV of the whole context, so a wrong or damaged page changes the output as it would in a
real engine, while right KV gives the same tokens wherever and in however many pieces they are computed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from evolving_node_agent.engines.port import FinishReason, Sampling, TokenIds

_CANDIDATES = 8  # tokens that get a logit; all others are out of reach


def block_kv(name: bytes, page_bytes: int) -> bytes:
    """KV of a full block, shape (page_bytes,)."""
    return hashlib.shake_128(b"block" + name).digest(page_bytes)


def partial_kv(before: bytes, tokens: TokenIds, page_bytes: int) -> bytes:
    """KV of the last, incomplete block of a context: `before` is the digest its first token follows."""
    if len(tokens) == 0:
        return bytes(page_bytes)
    return hashlib.shake_128(b"partial" + before + tokens.astype("<u4").tobytes()).digest(page_bytes)


class ContextState:
    """What attention would see: the KV bytes of the full blocks so far, folded."""

    def __init__(self) -> None:
        self._fold = hashlib.sha256()

    def add_block(self, kv: bytes) -> None:
        """Append a full block's KV."""
        self._fold.update(kv)

    def logits_seed(self, partial: bytes) -> bytes:
        """32 bytes the next token's logits come from; `partial`: KV of the incomplete block."""
        fold = self._fold.copy()
        fold.update(partial)
        return fold.digest()


@dataclass(frozen=True, slots=True)
class _Candidate:
    token: int
    logit: float


def next_token(seed: bytes, sampling: Sampling, prompt: TokenIds, output: Sequence[int], vocab_size: int) -> int:
    """Draw a token. `output` holds what was drawn so far, earlier attempts included; penalties see it."""
    if sampling.temperature == 0 and not _penalises(sampling):
        return int.from_bytes(seed[:4], "little") % vocab_size  # what the rest comes to, thousands of times a second
    words = np.frombuffer(seed, dtype="<u4")
    tokens = list(dict.fromkeys(int(word) % vocab_size for word in words))
    candidates = [
        _Candidate(token, _penalised(float(_CANDIDATES - rank), token, sampling, prompt, output))
        for rank, token in enumerate(tokens)
    ]
    candidates.sort(key=lambda candidate: (-candidate.logit, candidate.token))
    if sampling.temperature == 0:
        return candidates[0].token
    return _drawn(candidates, sampling, seed, len(output))


def finish_reason(
    token: int, output_tokens: int, context_tokens: int, sampling: Sampling, eos_token_id: int, max_context_tokens: int
) -> FinishReason | None:
    """Whether the output ends with `token`, the `output_tokens`-th one, in a context of `context_tokens`."""
    if token in sampling.stop_token_ids or (token == eos_token_id and not sampling.ignore_eos):
        return FinishReason.STOP
    if output_tokens >= sampling.max_tokens or context_tokens >= max_context_tokens:
        return FinishReason.LENGTH
    return None


def _penalises(sampling: Sampling) -> bool:
    return sampling.repetition_penalty != 1.0 or sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0


def _penalised(logit: float, token: int, sampling: Sampling, prompt: TokenIds, output: Sequence[int]) -> float:
    if not _penalises(sampling):
        return logit
    drawn = output.count(token)
    if sampling.repetition_penalty != 1.0 and (drawn or bool((prompt == token).any())):
        logit /= sampling.repetition_penalty
    return logit - sampling.frequency_penalty * drawn - sampling.presence_penalty * (drawn > 0)


def _drawn(candidates: Sequence[_Candidate], sampling: Sampling, seed: bytes, index: int) -> int:
    kept = candidates[: sampling.top_k] if sampling.top_k > 0 else candidates
    weights = [math.exp((candidate.logit - kept[0].logit) / sampling.temperature) for candidate in kept]
    total = sum(weights)
    chosen: list[tuple[int, float]] = []
    reached = 0.0
    for candidate, weight in zip(kept, weights, strict=True):
        if chosen and (reached >= sampling.top_p * total or weight < sampling.min_p):
            break
        chosen.append((candidate.token, weight))
        reached += weight
    key = seed + (sampling.seed or 0).to_bytes(8, "little") + index.to_bytes(8, "little")
    point = int.from_bytes(hashlib.sha256(key).digest()[:8], "little") / 2**64 * reached
    for token, weight in chosen:
        point -= weight
        if point < 0:
            return token
    return chosen[-1][0]
