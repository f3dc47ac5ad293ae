"""What the kinds of agents ask, beside what the paper publishes of them."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from evolving_sim.kinds import Kind
from evolving_sim.mix_figures import Figures, figures
from evolving_sim.mixes import CODING, COMPUTER_USE, MATH, MATH_LONG

PAPER: list[tuple[Kind, dict[str, float]]] = [
    # Table 1: hit / (1 − lost). Table 3: pauses. Outputs: Table 5, as mixes.py says.
    (MATH, {"ideal_hit_rate": 0.9902, "think_s": 10.0, "output_tokens": 1190, "output_tokens_p95": 6300}),
    (MATH_LONG, {"think_s": 10.0, "output_tokens": 3300}),
    (COMPUTER_USE, {"ideal_hit_rate": 0.94, "think_s": 1.4, "output_tokens": 266}),
    # Table 8, as mixes.py says. Table 3's pauses grow with E2E, by waits for sub-agents; without any they are 11.9 s.
    (CODING, {"think_s": 11.9, "output_tokens": 848}),
]


def compare(kind: Kind, paper: dict[str, float], agents: int) -> Figures:
    """A line a figure, with the paper's beside it."""
    told = figures(kind, agents)
    print(f"\n{kind.name}, {agents} agents")
    for name, value in asdict(told).items():
        print(f"  {name:20} {value:12.4f}" + (f"   paper {paper[name]:.4f}" if name in paper else ""))
    return told


@pytest.mark.parametrize(("kind", "paper"), PAPER, ids=lambda value: getattr(value, "name", ""))
def test_the_mixes_ask_what_the_papers_tables_say(kind: Kind, paper: dict[str, float]) -> None:
    told = compare(kind, paper, 60)
    for name, value in paper.items():
        close = pytest.approx(value, abs=0.005) if name == "ideal_hit_rate" else pytest.approx(value, rel=0.15)
        assert getattr(told, name) == close, name


@pytest.mark.deep
@pytest.mark.parametrize(("kind", "paper"), PAPER, ids=lambda value: getattr(value, "name", ""))
def test_so_do_five_hundred_agents(kind: Kind, paper: dict[str, float]) -> None:
    told = compare(kind, paper, 500)
    for name, value in paper.items():
        close = pytest.approx(value, abs=0.002) if name == "ideal_hit_rate" else pytest.approx(value, rel=0.1)
        assert getattr(told, name) == close, name
