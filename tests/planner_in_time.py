"""A planner of four nodes in virtual time, over a store that tests meddle with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from planner_harness import KEYS, PREFILL_HEAVY, Load, join
from waiting import eventually

from evolving.core.config import PlannerConfig
from evolving.core.modes import Mode
from evolving.core.planner import Decision, SplitShape, propose_shape
from evolving.core.slices import DecodeDone, PrefillDone
from evolving.core.terms import Role
from evolving.core.timemodel import PrefillSums
from evolving.core.work import query_key_pairs
from evolving.runtime.clock import ManualClock
from evolving.runtime.election import Election
from evolving.runtime.errors import StoreUnavailable
from evolving.runtime.memory_store import MemoryStore
from evolving.runtime.metrics import Metrics
from evolving.runtime.store import Guard, Listing, Versioned
from evolving.runtime.tasks import end_tasks
from evolving_planner.learning import Learning
from evolving_planner.measures import Measures, OpenLevel, WorkSample
from evolving_planner.metrics import PlannerMetrics
from evolving_planner.models import ModelBook
from evolving_planner.office import FirstSplit, Office, Situation, Term
from evolving_planner.replanner import Replanner
from evolving_planner.view import LEADER_ROLE, View

FOUR = ("a", "b", "c", "d")
CONFIG = PlannerConfig(window_s=60.0, cooldown_s=12.0)
REPORT_S = CONFIG.window_s / 100
SWAPPED = {"a": Role.DECODE, "b": Role.DECODE, "c": Role.PREFILL, "d": Role.PREFILL}


class MeddledStore(MemoryStore):
    """A store whose next write to the split or to a decision meets with something."""

    before: Callable[[str], Awaitable[None]] | None = None
    lose_answer_of: str = ""
    lists = 0
    may_list: asyncio.Event | None = None

    async def list(self, prefix: str) -> Listing:
        self.lists += 1
        if self.may_list is not None:
            await self.may_list.wait()
        return await super().list(prefix)

    async def compare_and_swap(
        self,
        key: str,
        expected_mod_revision: int,
        value: bytes,
        *,
        guards: Sequence[Guard] = (),
        lease: int | None = None,
    ) -> Versioned:
        if self.before is not None and key == KEYS.split:
            before, self.before = self.before, None
            await before(key)
        written = await super().compare_and_swap(key, expected_mod_revision, value, guards=guards, lease=lease)
        if self.lose_answer_of and key.startswith(self.lose_answer_of):
            self.lose_answer_of = ""
            raise StoreUnavailable("the answer got lost")
        return written


@dataclass
class Cluster:
    """A planner of four nodes, and time in the test's hands."""

    clock: ManualClock
    store: MeddledStore
    view: View
    office: Office
    measures: Measures
    learning: Learning
    replanner: Replanner
    began_s: float = 0.0
    reports: int = 0
    said_s: float = 0.0  # until when it is known how many requests were open

    async def pass_time(self, windows: float, load: Load = PREFILL_HEAVY) -> None:
        """Until so many windows after the term began, with a hundred requests and reports in each."""
        while (left_s := self.began_s + windows * CONFIG.window_s - self.clock.now_s()) > REPORT_S / 2:
            await self.clock.advance(min(REPORT_S, left_s))
            await asyncio.sleep(0.002)  # an evaluation's thread is not of virtual time
            now_s = self.clock.now_s()
            done_s = now_s - REPORT_S / 2
            self.reports += 1
            prefill = PrefillSums(load.uncached_tokens, query_key_pairs(load.uncached_tokens, 0))
            request_id = f"r{self.reports}"
            samples = [
                WorkSample(done_s, PrefillDone(request_id, prefill)),
                WorkSample(done_s, DecodeDone(request_id, load.iterations)),
            ]
            self.measures.keep_only(FOUR)
            self.measures.report_work("a", "a-1", self.reports, samples, 0, now_s)
            self.measures.report_open("g", [OpenLevel(self.said_s or self.began_s, now_s, load.open_requests)], now_s)
            self.said_s = now_s

    def measured(self) -> list[Decision]:
        """The decisions by measurement, oldest first."""
        decisions = [kept.decision for kept in reversed(self.view.history.before(None))]
        return [decision for decision in decisions if decision.evaluation is not None]

    async def decided(self, count: int) -> Decision:
        """The `count`-th decision by measurement, once it is recorded."""

        async def recorded() -> bool:
            await self.clock.advance(0.25)
            return len(self.measured()) >= count

        await eventually(recorded)
        return self.measured()[count - 1]


@asynccontextmanager
async def cluster(mode: Mode = Mode.AUTO, ttl_s: float = 60.0) -> AsyncIterator[Cluster]:
    """Two of the four nodes prefill, and the term has just begun."""
    clock, metrics = ManualClock(), PlannerMetrics(Metrics())
    store = MeddledStore(clock)
    view = View(store, KEYS, clock)
    first = FirstSplit(SplitShape(2, 2))
    office = Office(store, KEYS, view, first=first, decisions_kept=200, clock=clock, metrics=metrics)
    measures = Measures(CONFIG)
    learning = Learning(view, office, ModelBook(), clock, metrics)
    replanner = Replanner(view, office, measures, learning, config=CONFIG, mode=mode, clock=clock, metrics=metrics)
    await join(store, *FOUR)
    async with Election(store, KEYS.leader(LEADER_ROLE), b"here", ttl_s, clock) as election:
        loops = [asyncio.create_task(loop) for loop in (view.run(), office.run(election, "here"), replanner.run())]
        try:
            await eventually(lambda: view.split.epoch == 1)
            assert office.term is not None
            yield Cluster(clock, store, view, office, measures, learning, replanner, office.term.began_s)
            assert not any(loop.done() for loop in loops), "the loops live on"
        finally:
            await end_tasks(*loops)
            await store.close()


def to_shape(shape: SplitShape) -> Callable[[Situation], Decision]:
    return lambda now: propose_shape(
        now.split, now.live, shape, expected_epoch=0, reason="", author="operator:x", now_s=now.now_s
    )


async def lose_office(planned: Cluster) -> None:
    planned.store.set_available(False)  # until the lease is over
    await planned.clock.advance(100.0)
    await eventually(lambda: planned.office.term is None)
    planned.store.set_available(True)


async def leads_again(planned: Cluster) -> Term:
    async def leads() -> bool:
        await planned.clock.advance(0.25)
        return planned.office.term is not None

    await eventually(leads)
    assert planned.office.term is not None
    return planned.office.term
