"""Which queued legs SGLang's walk of its queue may take: no engine."""

from __future__ import annotations

import numpy as np
import pytest

from evolving.core.config import FetchStart
from evolving_node_agent.engines.port import PrefillJob, Sampling
from evolving_node_agent.engines.sglang.host.admission import Admission
from evolving_node_agent.engines.sglang.host.legs import PrefillLeg, prefill_leg
from evolving_node_agent.engines.sglang.translate import prefill_command


def queued(number: int, fetched: bool) -> PrefillLeg:
    """A leg in the queue, whose fetch is over or not."""
    leg = prefill_leg(
        prefill_command(PrefillJob(str(number), number, np.arange(8, dtype=np.uint32), 0, bytes(32), Sampling(1)))
    )
    leg.fetch.over = fetched
    return leg


def walk(admission: Admission, legs: list[PrefillLeg]) -> list[bool]:
    """Which of them the walk may take, where there is room for all."""
    admission.begin_walk()
    let = [admission.lets(leg, lambda: True) for leg in legs]
    admission.end_walk()
    return let


@pytest.mark.parametrize(
    ("fetch_start", "let"),
    [(FetchStart.ENQUEUE, [True, False, True, False]), (FetchStart.ADMISSION, [True, False, False, False])],
)
async def test_a_leg_that_fetches_holds_up_those_behind_it_at_admission_only(
    fetch_start: FetchStart, let: list[bool]
) -> None:
    turns: list[PrefillLeg] = []
    admission = Admission(turns.append, fetch_start)
    legs = [queued(number, fetched=number in (0, 2)) for number in range(4)]
    assert walk(admission, legs) == let
    assert turns == ([legs[1], legs[3]] if fetch_start is FetchStart.ENQUEUE else [legs[1]])
    legs[1].fetch.over = True
    assert walk(admission, legs[1:]) == [True, True, False]
