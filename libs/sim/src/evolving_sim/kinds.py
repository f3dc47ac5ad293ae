"""Kinds of agents, drawn and recorded, and who makes them."""

from __future__ import annotations

from collections.abc import Mapping

from evolving_sim.drawn import DrawnAgents
from evolving_sim.sessions import AgentKind
from evolving_sim.traced import TracedAgents, TraceKind

Kind = AgentKind | TraceKind
Agents = Mapping[AgentKind, int] | Mapping[TraceKind, int] | Mapping[Kind, int]
"""How many of each."""


def source_of(kind: Kind, seed: int, block_tokens: int) -> DrawnAgents | TracedAgents:
    """Makes the agents of a kind, one after the other."""
    if isinstance(kind, AgentKind):
        return DrawnAgents(kind, seed, block_tokens)
    return TracedAgents(kind, seed, block_tokens)
