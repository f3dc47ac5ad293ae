"""What agents ask: drawn from their kind alone."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest
from sim.small import HELPER, WORKER

from evolving_sim.mixes import CODING, COMPUTER_USE, MATH, MATH_LONG
from evolving_sim.sessions import AgentKind, Mixed, Spread, Turn, play

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


def test_a_mixed_spread_is_now_and_then_another() -> None:
    mixed, draw = Mixed(Spread(10, 10), Spread(1_000, 1_000), rare_share=0.1), random.Random(1)
    values = [mixed.draw_int(draw) for _ in range(20_000)]
    assert values.count(1_000) / len(values) == pytest.approx(0.1, abs=0.01)
    assert statistics.mean(values) == pytest.approx(mixed.mean, rel=0.05)
    with pytest.raises(ValueError, match="rare_share"):
        Mixed(mixed.usual, mixed.rare, 1.1)


def test_an_environment_is_set_up_before_the_first_request() -> None:
    assert turns_of(replace(WORKER, setup_s=100.0), "1")[0].think_s == 100.0
    assert turns_of(WORKER, "1")[0].think_s == 0.0
