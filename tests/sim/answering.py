"""A cluster that answers each request after a while that has nothing to do with it, and notes what was asked of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from evolving_sim.events import EventHeap, Priority
from evolving_sim.legs import Request
from evolving_sim.population import Population, WorkloadConfig


@dataclass
class Answering:
    """See the module."""

    events: EventHeap
    delay_s: Callable[[], float]
    block_tokens: int = 64
    requests: list[Request] = field(default_factory=list)  # as they were sent
    ended: dict[str, float] = field(default_factory=dict)  # branches, when
    recalled: list[Sequence[bytes]] = field(default_factory=list)
    open: set[str] = field(default_factory=set)  # branches with an open request

    def submit(self, request: Request) -> None:
        assert request.branch_id not in self.open, "an agent waits for its answer"
        assert request.branch_id not in self.ended
        assert request.sent_s == self.events.now_s
        self.requests.append(request)
        self.open.add(request.branch_id)
        self.events.after(self.delay_s(), Priority.ITERATION, lambda: self._answer(request))

    def _answer(self, request: Request) -> None:
        self.open.remove(request.branch_id)
        request.done_s = self.events.now_s
        request.on_done()

    def end_branch(self, branch_id: str) -> None:
        assert branch_id not in self.ended
        assert branch_id not in self.open
        self.ended[branch_id] = self.events.now_s

    def recall(self, names: Sequence[bytes], blocks: int) -> None:
        assert blocks <= len(names)
        self.recalled.append(names[:blocks])


def play(
    config: WorkloadConfig, end_s: float, *, seed: int = 1, delays: int | float = 0, block_tokens: int = 64
) -> Answering:
    """What a workload asks up to `end_s`. delays: a whole number seeds them, another one is all of them."""
    draw = random.Random(delays)
    delay_s = (lambda: draw.expovariate(0.5)) if isinstance(delays, int) else (lambda: delays)
    events = EventHeap()
    cluster, population = Answering(events, delay_s, block_tokens), config.workload(seed)
    assert isinstance(population, Population)
    population.begin(events, cluster)
    for step in range(1, 21):
        events.run_until(end_s * step / 20)
        population.check_invariants()
        events.check_invariants()
    return cluster


def content(request: Request, block_tokens: int = 64) -> tuple[object, ...]:
    """What is asked, without when."""
    blocks = (request.prompt_tokens + request.output_tokens - 1) // block_tokens
    return (
        request.request_id,
        request.kind,
        request.agent_id,
        request.branch_id,
        request.parent_branch_id,
        request.version,
        tuple(request.names[:blocks]),
        request.shared_blocks,
        request.prompt_tokens,
        request.output_tokens,
    )
