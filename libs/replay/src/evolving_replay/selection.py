"""Which sessions of a trace are played."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from evolving.v1 import gateway_pb2
from evolving_sim.traces import TraceSession


@dataclass(frozen=True, slots=True)
class Limits:
    """What a session must keep to be played; 0: no limit."""

    sessions: int = 0
    """How many are played: the first of those that keep the other limits."""
    session_hours: float = 0.0
    """Longest recorded duration, hours."""
    prompt_tokens: int = 0
    """Longest prompt of any of its agents."""
    context_tokens: int = 0
    """Longest prompt with its output."""


def limits_of(model: gateway_pb2.Model, asked: Limits) -> Limits:
    """What was asked for, and what the model takes."""
    given = [limit for limit in (asked.prompt_tokens, model.max_prompt_tokens) if limit]
    return Limits(asked.sessions, asked.session_hours, min(given, default=0), model.max_context_tokens)


def select(sessions: Iterable[TraceSession], limits: Limits) -> tuple[list[TraceSession], int]:
    """The sessions to play, in the trace's order, and how many before the last of them were left out."""
    chosen: list[TraceSession] = []
    left_out = 0
    for session in sessions:
        if fits(session, limits):
            chosen.append(session)
            if len(chosen) == limits.sessions:
                break
        else:
            left_out += 1
    return chosen, left_out


def fits(session: TraceSession, limits: Limits) -> bool:
    """Whether a session keeps all limits but the number of sessions."""
    if limits.session_hours and session.duration_s > limits.session_hours * 3600:
        return False
    if limits.prompt_tokens and session.longest_prompt_tokens > limits.prompt_tokens:
        return False
    longest = max(
        request.input_tokens + max(1, request.output_tokens) for agent in session.agents for request in agent.requests
    )
    return not limits.context_tokens or longest <= limits.context_tokens
