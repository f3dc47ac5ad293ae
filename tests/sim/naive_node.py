"""A node that plays each iteration by itself, and knows no shortcuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evolving.core.timemodel import PrefillSums
from evolving.core.work import query_key_pairs
from evolving_sim.node_config import BothPhases, NodeConfig


@dataclass
class Prompt:
    """To compute."""

    name: str
    at_s: float
    tokens: int
    done: int = 0


@dataclass
class Answer:
    """To decode."""

    name: str
    at_s: float
    iterations: int
    context_tokens: float
    done: int = 0


def play(config: NodeConfig, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> dict[str, float]:
    """When each is done. Neither is ever short of slots or room, and no prompt is cached."""
    coming: list[Prompt | Answer] = sorted([*prompts, *answers], key=lambda each: each.at_s)
    queue: list[Prompt] = []
    running: list[Prompt] = []
    batch: list[Answer] = []
    done_s: dict[str, float] = {}
    now_s = 0.0
    while coming or queue or running or batch:
        while coming and coming[0].at_s <= now_s:
            each = coming.pop(0)
            if isinstance(each, Prompt):
                queue.append(each)
            else:
                batch.append(each)
        while queue and sum(p.tokens - p.done for p in running) < config.chunk_tokens:
            running.append(queue.pop(0))
        if not running and not batch:
            now_s = coming[0].at_s
            continue
        room, chunks, pairs = config.chunk_tokens, list[tuple[Prompt, int]](), 0.0
        for prompt in running:
            tokens = min(room, prompt.tokens - prompt.done)
            room -= tokens
            if tokens:
                chunks.append((prompt, tokens))
                pairs += query_key_pairs(tokens, prompt.done)
        took_s = 0.0
        if chunks:
            took_s += config.prefill.prefill_iteration_s(PrefillSums(config.chunk_tokens - room, pairs))
        if batch:
            contexts = sum(a.context_tokens + a.done * config.accepted_tokens for a in batch)
            took_s += config.decode.decode_iteration_s(len(batch), contexts, config.tokens_per_request)
        if chunks and batch and config.both_phases is BothPhases.TOGETHER:
            took_s -= config.decode.d0_s
        now_s += took_s
        for prompt, tokens in chunks:
            prompt.done += tokens
        for answer in batch:
            answer.done += 1
        done_s |= {prompt.name: now_s for prompt in running if prompt.done == prompt.tokens}
        done_s |= {answer.name: now_s for answer in batch if answer.done == answer.iterations}
        running = [p for p in running if p.name not in done_s]
        batch = [a for a in batch if a.name not in done_s]
    return done_s
