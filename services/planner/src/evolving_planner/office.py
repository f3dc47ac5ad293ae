"""What only the leading planner does: make the split follow the nodes and operators' proposals, and write it.

Every write carries two conditions that etcd checks: the leader's key is still the one this planner holds, and the
split is the one it decided from. A planner that lost its office without noticing is refused by the first, one that
decided from an old split by the second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from evolving.core.planner import Decision, Split, SplitShape, effective_roles, follow_membership
from evolving.runtime.clock import Clock
from evolving.runtime.election import Election
from evolving.runtime.errors import NotLeader, NotReady, StoreUnavailable
from evolving.runtime.keys import Keys
from evolving.runtime.log import get_logger
from evolving.runtime.store import Conflict, Fenced, Guard, Store, Versioned
from evolving_planner.metrics import PlannerMetrics
from evolving_planner.records import encode_history, encode_split
from evolving_planner.view import View

AUTHOR = "planner"
_RETRY_S = 0.5

_log = get_logger(__name__)


class Office:
    """Present in every planner; acts only while `election` says that this one leads."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        view: View,
        *,
        initial: SplitShape | None,
        decisions_kept: int,
        clock: Clock,
        metrics: PlannerMetrics,
    ) -> None:
        self._store = store
        self._keys = keys
        self._view = view
        self._initial = initial
        self._decisions_kept = decisions_kept
        self._clock = clock
        self._metrics = metrics
        self._election: Election | None = None
        self.own_address = ""  # what the leader's key holds when this planner leads
        self._lock = asyncio.Lock()  # one decision at a time, from reading the split to having written it
        # The term of office whose start this planner has read split and history in; None: read them anew first.
        self._settled_in: Guard | None = None
        metrics.follow_leadership(self.is_leader)

    def is_leader(self) -> bool:
        """Whether this planner leads at this very moment."""
        return self._election is not None and self._election.is_leader()

    async def run(self, election: Election, own_address: str) -> None:
        """Act on every change of nodes, split and leadership, for ever."""
        self._election = election
        self.own_address = own_address
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_leadership(election))
            while True:
                await self._view.changed.wait()
                self._view.changed.clear()
                self._metrics.saw(self._view.split, effective_roles(self._view.split, self._view.nodes))
                if not await self._follow_nodes():
                    await self._clock.sleep(_RETRY_S)
                    self._view.changed.set()

    async def propose(self, decide: Callable[[Split, frozenset[str], float], Decision]) -> Split:
        """Carry out an operator's proposal; the split then in force.

        `decide(split, live nodes, prefill share aimed at)` may raise CoreError. Raises NotLeader, Conflict (the split
        changed meanwhile), Fenced, NotReady, StoreUnavailable (it may or may not have been written).
        """
        if not self._view.loaded.is_set():
            raise NotReady("the nodes are not known yet", retry_after_s=1.0)
        async with self._lock:
            fence = await self._settle_in()
            decision = decide(self._view.split, frozenset(self._view.nodes), self._view.history.prefill_share)
            await self._write(decision, fence)
            return self._view.split

    async def _watch_leadership(self, election: Election) -> None:
        async for leads in election.leadership_changes():
            _log.info("leadership", leads=leads)
            self._view.changed.set()

    async def _follow_nodes(self) -> bool:
        """False: it has to be tried again."""
        if not self.is_leader() or not self._view.loaded.is_set():
            return True
        async with self._lock:
            try:
                fence = await self._settle_in()
                decision = follow_membership(
                    self._view.split,
                    self._view.nodes,
                    initial=self._initial,
                    prefill_share=self._view.history.prefill_share,
                    author=AUTHOR,
                    now_s=self._clock.wall_s(),
                )
                if decision is not None:
                    await self._write(decision, fence)
            except (Conflict, StoreUnavailable) as error:
                _log.warning("split_not_written", error=str(error))
                return False
            except (NotLeader, Fenced) as error:
                _log.info("office_lost", error=str(error))
        return True

    async def _settle_in(self) -> Guard:
        """Before the first decision of a term of office: read what predecessors wrote. Raises NotLeader."""
        if self._election is None:
            raise NotLeader("this planner is not a candidate yet")
        fence = self._election.fence()
        if self._settled_in != fence:
            await self._view.reload()
            history = self._view.history.completed(self._view.split)
            if history != self._view.history:
                await self._swap(self._keys.decisions, self._view.history_revision, encode_history(history), fence)
            _log.info("took_office", epoch=self._view.split.epoch, decisions=len(history.decisions))
            self._settled_in = fence
        return fence

    async def _write(self, decision: Decision, fence: Guard) -> None:
        """The split, then the decision behind it. Whatever stops this half-way (an error, a caller that went away)
        leaves the office unsettled, so that the next step starts from what etcd really has."""
        self._settled_in = None
        try:
            if decision.changes_split:
                value = encode_split(decision.split())
                await self._swap(self._keys.split, self._view.split_revision, value, fence)
                _log.info(
                    "split_written",
                    epoch=decision.epoch_after,
                    kind=decision.kind.value,
                    reason=decision.reason,
                    moved=decision.moved_nodes,
                )
            remembered = await self._remember(decision, fence)
            self._metrics.decided(decision)
            if remembered:
                self._settled_in = fence
        finally:
            self._view.changed.set()

    async def _remember(self, decision: Decision, fence: Guard) -> bool:
        """Write the decision into the history. Where its split is written already, a failure here must not look like
        one of the proposal: the next step of the office finds the split without its decision and adds it."""
        history = self._view.history.with_decision(decision, self._decisions_kept)
        try:
            await self._swap(self._keys.decisions, self._view.history_revision, encode_history(history), fence)
        except (Conflict, Fenced, StoreUnavailable) as error:
            if not decision.changes_split:
                raise
            _log.warning("decision_not_written", error=str(error), epoch=decision.epoch_after)
            return False
        return True

    async def _swap(self, key: str, revision: int, value: bytes, fence: Guard) -> None:
        try:
            written: Versioned = await self._store.compare_and_swap(key, revision, value, guards=(fence,))
        except Conflict as conflict:
            self._metrics.write_refused()
            if conflict.current is not None:
                self._view.adopt(conflict.current)
            raise
        except Fenced:
            self._metrics.write_refused()
            raise
        self._view.adopt(written)
