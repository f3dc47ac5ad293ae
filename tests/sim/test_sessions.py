"""What agents ask: drawn from their kind alone."""

from __future__ import annotations

import random
import statistics

import pytest
from sim.small import HELPER, WORKER

from evolving_sim.mixes import CODING, COMPUTER_USE, MATH, MATH_LONG
from evolving_sim.sessions import AgentKind, Spread, Turn, play

KINDS = [WORKER, HELPER, CODING, COMPUTER_USE, MATH, MATH_LONG]


def turns_of(kind: AgentKind, seed: str) -> list[Turn]:
    return list(play(kind, random.Random(seed)))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_prompt_extends_the_last_context_or_keeps_some_of_it(kind: AgentKind) -> None:
    for seed in range(20):
        context = 0
        for number, turn in enumerate(turns_of(kind, str(seed))):
            assert turn.kept_tokens <= min(context, turn.prompt_tokens)
            assert number == 0 or turn.kept_tokens >= min(kind.system_tokens, context)
            assert turn.output_tokens >= 1
            assert number == 0 or turn.prompt_tokens <= max(
                kind.context_tokens_max, kind.system_tokens + kind.compacted_tokens
            )
            context = turn.prompt_tokens + turn.output_tokens
    assert turns_of(kind, "1") == turns_of(kind, "1") != turns_of(kind, "2")


def test_a_spread_has_its_median_and_mean() -> None:
    spread, draw = Spread(100, 150), random.Random(1)
    values = [spread.draw(draw) for _ in range(20_000)]
    assert statistics.median(values) == pytest.approx(100, rel=0.05)
    assert statistics.mean(values) == pytest.approx(150, rel=0.05)
    with pytest.raises(ValueError, match="not a spread"):
        Spread(2, 1)


def test_the_mixes_ask_what_the_papers_tables_say() -> None:
    """Table 8: 5,268 new tokens in prompts of 155,000. Table 1: of prompts, 6.2 % are new in computer use, 1.5 % in
    mathematics."""
    new, prompt = per_request(CODING)
    assert new == pytest.approx(5268, rel=0.15)
    assert prompt == pytest.approx(155_000, rel=0.15)
    for kind, share in ((COMPUTER_USE, 0.062), (MATH, 0.015)):
        new, prompt = per_request(kind)
        assert new / prompt == pytest.approx(share, abs=0.005)


def per_request(kind: AgentKind) -> tuple[float, float]:
    """New tokens and prompt tokens, means."""
    turns = [(i, turn) for seed in range(150) for i, turn in enumerate(turns_of(kind, str(seed)))]
    new = sum(turn.prompt_tokens - (turn.kept_tokens if i else kind.system_tokens) for i, turn in turns)
    return new / len(turns), sum(turn.prompt_tokens for _, turn in turns) / len(turns)
