"""The leader's rounds: what was measured is evaluated and a decision made of it, at each window's end.

A window counts from taking office, for measurements do too. An evaluation is worth repeating out of turn when the
cooldown ends that alone had stopped a switch.
"""

from __future__ import annotations

import asyncio
import math

from evolving.core.config import PlannerConfig
from evolving.core.modes import Mode
from evolving.core.planner import Decision, effective_roles
from evolving.core.replan import Evaluation, decide_by_throughput, evaluate, worth_repeating_at_s
from evolving.runtime.clock import Clock
from evolving.runtime.errors import NotLeader, StoreUnavailable
from evolving.runtime.log import get_logger
from evolving.runtime.store import Conflict, Fenced
from evolving.runtime.tasks import in_thread
from evolving_planner.history import AUTHOR
from evolving_planner.learning import Learning
from evolving_planner.measures import Measures
from evolving_planner.metrics import PlannerMetrics
from evolving_planner.office import Office, Situation, Term
from evolving_planner.view import View

_TICK_S_LEAST, _TICK_S_MAX = 0.02, 1.0
_RETRY_S = 0.5
# Nodes and gateways report every second or so: a slice is read when what ended in it had the time to come.
_REPORTS_LAG_S = 2.0

_log = get_logger(__name__)


class Replanner:
    """Present in every planner; decides only in a term of office."""

    def __init__(
        self,
        view: View,
        office: Office,
        measures: Measures,
        learning: Learning,
        *,
        config: PlannerConfig,
        mode: Mode,
        clock: Clock,
        metrics: PlannerMetrics,
    ) -> None:
        self._view = view
        self._office = office
        self._measures = measures
        self._learning = learning
        self._config = config
        self._mode = mode
        self._clock = clock
        self._metrics = metrics
        self._lock = asyncio.Lock()  # one evaluation at a time, however many operators ask
        self._tick_s = min(_TICK_S_MAX, max(_TICK_S_LEAST, config.slice_s / 4))
        self._lag_s = min(_REPORTS_LAG_S, config.slice_s / 2)
        office.on_term(measures.clear)

    async def run(self) -> None:
        """Decide at each window's end of each term of office, for ever."""
        term: Term | None = None
        window_end_s = repeat_s = math.inf
        while True:
            await self._clock.sleep(self._tick_s)
            now_s = self._clock.now_s()
            if self._office.term != term:
                term = self._office.term
                window_end_s = term.began_s + self._config.window_s if term is not None else math.inf
                repeat_s = math.inf
            if term is None:
                continue
            if now_s >= window_end_s + self._lag_s:
                missed = math.floor((now_s - self._lag_s - window_end_s) / self._config.window_s)
                end_s = window_end_s + missed * self._config.window_s  # older ones say less, and are half forgotten
                window_end_s = end_s + self._config.window_s
            elif now_s >= repeat_s:
                end_s = now_s - self._lag_s
            else:
                continue
            repeat_s = await self._decide(term, end_s)

    async def what_if(self) -> Evaluation:
        """What every split would serve, by what was measured up to now. Changes nothing."""
        return await self._evaluate(self._clock.now_s() - self._lag_s, None)

    async def _evaluate(self, end_s: float, term: Term | None) -> Evaluation:
        """By the window up to then, for a decision in a term of office or (None) to look at. Raises NotLeader."""
        async with self._lock:
            if term is not None and self._office.term != term:
                raise NotLeader("the term of office is over")
            measured = self._measures.read(end_s, self._view.split_since_s, peek=term is None)
            roles = effective_roles(self._view.split, self._view.nodes)
            models = self._learning.models.in_force(self._view.nodes)
            # Many unlike nodes take a second and more; proposals and reports are served meanwhile.
            return await in_thread(lambda: evaluate(measured.slices, roles, models, self._config, measured.earlier))

    async def _decide(self, term: Term, end_s: float) -> float:
        """One round; the monotonic time at which it is worth repeating before the next window's end."""
        try:
            evaluation = await self._evaluate(end_s, term)
        except NotLeader as error:
            _log.info("office_lost", error=str(error))
            return math.inf
        missing = self._measures.missing()
        self._metrics.evaluated(evaluation, missing)

        def decide(now: Situation) -> Decision | None:
            if now.latest is not None and now.latest.evaluation == evaluation:
                return None  # written by a try that seemed to fail
            return decide_by_throughput(
                now.split,
                now.live,
                evaluation,
                mode=self._mode,
                hold=now.hold,
                prefill_share=now.prefill_share,
                author=AUTHOR,
                now_s=now.now_s,
            )

        while self._office.term == term:
            try:
                split = await self._office.decide(decide, missing)
            except (NotLeader, Fenced) as error:
                _log.info("office_lost", error=str(error))
                break
            except (Conflict, StoreUnavailable) as error:
                _log.warning("decision_delayed", error=str(error))
                await self._clock.sleep(_RETRY_S)
                continue
            latest = self._view.history.newest
            repeat_at_s = worth_repeating_at_s(split, latest) if latest is not None else None
            if repeat_at_s is None:
                break
            return self._clock.now_s() + repeat_at_s - self._clock.wall_s()
        return math.inf
