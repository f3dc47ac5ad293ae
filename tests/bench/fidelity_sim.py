"""The simulated side of bench-fidelity: the same sessions in virtual time, on nodes of the same speed and sizes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bench.fidelity_figures import Row
from bench.fidelity_plan import Plan

from evolving_sim.driver import Run, Scenario
from evolving_sim.population import Period, WorkloadConfig
from evolving_sim.results import Answered
from evolving_sim.traced import TraceKind
from evolving_sim.traces import TraceSession

_STEP_S = 60.0
_LONGEST_S = 24 * 3600.0
_PLACE = re.compile(r".* (\d+)\.(\d+)#(\d+)")


class NotAnswered(Exception):
    """The simulated cluster did not answer all requests."""


def play_simulated(sessions: Sequence[TraceSession], plan: Plan, seed: int = 1) -> list[Row]:
    """Every request of the sessions, as answered. Raises NotAnswered after a day of virtual time."""
    places = min(plan.concurrency, len(sessions))
    kind = TraceKind("replayed", tuple(sessions), compression=plan.compression, shuffled=False, repeated=False)
    workload = WorkloadConfig(
        periods=(Period(0.0, {kind: places}),), begun=False, spread_s=plan.stagger_s / plan.compression
    )
    run = Run(Scenario(plan.machine, plan.shape, workload, seed=seed))
    run.results.keep_ids = True
    requests = sum(session.request_count for session in sessions)
    while len(run.results) < requests:
        if run.events.now_s > _LONGEST_S:
            raise NotAnswered(f"{requests - len(run.results)} of {requests} requests are open after a day")
        run.until(run.events.now_s + _STEP_S)
    return [_row(answered) for answered in run.results.served]


def _row(answered: Answered) -> Row:
    place = _PLACE.fullmatch(answered.request_id)
    assert place is not None, "a request of a trace"
    session, agent, request = map(int, place.groups())
    return Row(
        session,
        agent,
        request,
        answered.sent_s,
        answered.first_token_s - answered.sent_s,
        answered.done_s - answered.sent_s,
        answered.prompt_tokens,
        answered.output_tokens,
        answered.cached_tokens,
        answered.ideal_tokens,
    )
