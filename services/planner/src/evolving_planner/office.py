"""What only the leading planner does: make decisions, one at a time, and write them.

Every write carries two conditions that etcd checks: the leader's key is still the one this planner holds, and what is
written is as it was read. A planner that lost its office without noticing is refused by the first, one that decided
from an old split by the second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from evolving.core.membership import follow_membership
from evolving.core.modes import Hold
from evolving.core.planner import Decision, Split, SplitShape, effective_roles
from evolving.runtime.clock import Clock
from evolving.runtime.election import Election
from evolving.runtime.errors import NotLeader, NotReady, StoreUnavailable
from evolving.runtime.keys import Keys
from evolving.runtime.log import get_logger
from evolving.runtime.store import Conflict, Fenced, Guard, Store, Versioned
from evolving_planner.history import AUTHOR
from evolving_planner.measures import Missing
from evolving_planner.metrics import PlannerMetrics
from evolving_planner.records import encode_decision, encode_split
from evolving_planner.view import View

_RETRY_S = 0.5
_ATTEMPTS = 3  # of a decision that others' writes overtake
_DELETES_PER_WRITE = 20  # of decisions no longer kept

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FirstSplit:
    """When and how the partition gets its first split."""

    shape: SplitShape | None = None  # None: half of the nodes prefill
    warm_up_s: float = 0.0  # how long the nodes it needs serve both phases first


@dataclass(frozen=True, slots=True)
class Term:
    """One term of office of this planner."""

    fence: Guard
    began_s: float  # when it had read what its predecessors left, by the monotonic clock


@dataclass(frozen=True, slots=True)
class Situation:
    """What a decision is made from, besides what asks for it."""

    split: Split
    live: frozenset[str]
    prefill_share: float  # of the nodes, aimed at so far
    hold: Hold | None  # the last one given, perhaps over
    latest: Decision | None
    now_s: float  # unix time


Decide = Callable[[Situation], Decision | None]
"""Makes a decision, or none. May raise CoreError, and may be asked again when another write came first."""


@dataclass(frozen=True, slots=True)
class _Unwritten:
    decision: Decision
    missing: Missing | None


class Office:
    """Present in every planner; acts only while `election` says that this one leads."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        view: View,
        *,
        first: FirstSplit,
        decisions_kept: int,
        clock: Clock,
        metrics: PlannerMetrics,
    ) -> None:
        self._store = store
        self._keys = keys
        self._view = view
        self._first = first
        self._decisions_kept = decisions_kept
        self._clock = clock
        self._metrics = metrics
        self._election: Election | None = None
        self.own_address = ""  # what the leader's key holds when this planner leads
        self._lock = asyncio.Lock()  # one decision at a time, from reading the split to having written it
        # The term of office whose start this planner has read etcd in; None: read it anew first.
        self._settled_in: Guard | None = None
        self._term: Term | None = None  # the last one begun
        self._unwritten: _Unwritten | None = None  # what may be written in part
        self._on_term: list[Callable[[], None]] = []
        metrics.follow(self.is_leader, lambda: view.hold)

    def is_leader(self) -> bool:
        """Whether this planner leads at this very moment."""
        return self._election is not None and self._election.is_leader()

    @property
    def term(self) -> Term | None:
        """The term of office that lasts, with all of the predecessors' read; None: there is none."""
        if self._term is None or self._election is None:
            return None
        try:
            return self._term if self._election.fence() == self._term.fence else None
        except NotLeader:
            return None

    def on_term(self, begin: Callable[[], None]) -> None:
        """Call `begin` at the start of each term, once etcd was read and before the first decision."""
        self._on_term.append(begin)

    async def run(self, election: Election, own_address: str) -> None:
        """Act on every change of nodes, split and leadership, for ever."""
        self._election = election
        self.own_address = own_address
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_leadership(election))
            if self._first.warm_up_s > 0:
                tasks.create_task(self._watch_warm_up())
            while True:
                await self._view.changed.wait()
                self._view.changed.clear()
                self._metrics.saw(self._view.split, effective_roles(self._view.split, self._view.nodes))
                if not await self._follow_nodes():
                    await self._clock.sleep(_RETRY_S)
                    self._view.changed.set()

    async def decide(self, decide: Decide, missing: Missing | None = None) -> Split:
        """Make a decision and write it; the split then in force. `missing`: what the measurements behind it lack.

        Raises what `decide` raises, NotLeader, Fenced, NotReady, Conflict (others wrote again and again),
        StoreUnavailable (it may or may not have been written).
        """
        if not self._view.loaded.is_set():
            raise NotReady("the nodes are not known yet", retry_after_s=1.0)
        async with self._lock:
            for left in reversed(range(_ATTEMPTS)):
                try:
                    fence = await self._settle_in()
                    decision = decide(self._situation())
                    if decision is not None:
                        await self._write(decision, missing, fence)
                    break
                except Conflict as conflict:  # what came first was taken into the view: decide anew from that
                    if left == 0:
                        raise
                    _log.info("overtaken", key=conflict.key)
            return self._view.split

    async def store_model(self, record: Callable[[], bytes]) -> int:
        """Write the fitted models; the revision they then have. `record` is asked for them once those of predecessors
        were taken. Raises NotLeader, Fenced, Conflict (somebody else's are in the view now), StoreUnavailable."""
        async with self._lock:
            fence = await self._settle_in()
            return (await self._swap(self._keys.model, self._view.model_revision, record(), fence)).mod_revision

    def _situation(self) -> Situation:
        history = self._view.history
        return Situation(
            split=self._view.split,
            live=frozenset(self._view.nodes),
            prefill_share=history.prefill_share,
            hold=history.hold,
            latest=history.newest,
            now_s=self._clock.wall_s(),
        )

    async def _watch_leadership(self, election: Election) -> None:
        async for leads in election.leadership_changes():
            _log.info("leadership", leads=leads)
            self._view.changed.set()

    async def _watch_warm_up(self) -> None:
        """Time alone makes a first split possible."""
        while True:
            await self._clock.sleep(_RETRY_S)
            if self._view.split.epoch == 0:
                self._view.changed.set()

    async def _follow_nodes(self) -> bool:
        """False: it has to be tried again."""
        if not self.is_leader() or not self._view.loaded.is_set():
            return True
        try:
            await self.decide(self._by_membership)
        except (Conflict, StoreUnavailable) as error:
            _log.warning("split_not_written", error=str(error))
            return False
        except (NotLeader, Fenced) as error:
            _log.info("office_lost", error=str(error))
        return True

    def _by_membership(self, now: Situation) -> Decision | None:
        return follow_membership(
            now.split,
            now.live,
            initial=self._first.shape,
            prefill_share=now.prefill_share,
            author=AUTHOR,
            now_s=now.now_s,
            hold=now.hold,
            warm=self._view.nodes_there_for(self._first.warm_up_s),
        )

    async def _settle_in(self) -> Guard:
        """Before the first decision of a term of office: read what predecessors wrote. Raises NotLeader."""
        if self._election is None:
            raise NotLeader("this planner is not a candidate yet")
        fence = self._election.fence()
        if self._settled_in == fence:
            return fence
        await self._view.reload()
        history, unwritten = self._view.history, self._unwritten
        found = history.decision_behind(self._view.split, unwritten.decision if unwritten is not None else None)
        if found is not None:
            known = unwritten is not None and found is unwritten.decision
            await self._append(found, unwritten.missing if unwritten is not None and known else None, fence)
        self._unwritten = None
        if self._term is None or self._term.fence != fence:
            self._term = Term(fence, self._clock.now_s())
            for begin in self._on_term:
                begin()
            _log.info("took_office", epoch=self._view.split.epoch, decisions=len(history.numbers()))
        self._settled_in = fence
        return fence

    async def _write(self, decision: Decision, missing: Missing | None, fence: Guard) -> None:
        """The split, then the decision behind it. Whatever stops this half-way (an error, a caller that went away)
        leaves the office unsettled, so that the next step starts from what etcd really has."""
        self._settled_in = None
        self._unwritten = _Unwritten(decision, missing)
        try:
            if decision.changes_split:
                await self._swap(self._keys.split, self._view.split_revision, encode_split(decision.split()), fence)
                _log.info(
                    "split_written",
                    epoch=decision.epoch_after,
                    kind=decision.kind.value,
                    reason=decision.reason,
                    moved=decision.moved_nodes,
                )
            try:
                await self._append(decision, missing, fence)
            except (Conflict, Fenced, StoreUnavailable) as error:
                # Where the split is written, this must not look like a failure of the proposal: the next step of the
                # office finds the split without its decision and adds it.
                if not decision.changes_split:
                    raise
                _log.warning("decision_not_written", error=str(error), epoch=decision.epoch_after)
            else:
                self._unwritten, self._settled_in = None, fence
        finally:
            self._view.changed.set()

    async def _append(self, decision: Decision, missing: Missing | None, fence: Guard) -> None:
        """Write a decision under the next number, and delete those no longer kept."""
        key = self._keys.decision(self._view.history.next_number)
        await self._swap(key, 0, encode_decision(decision, missing), fence)
        self._metrics.decided(decision)
        for number in self._view.history.surplus(self._decisions_kept)[:_DELETES_PER_WRITE]:
            try:
                await self._store.delete(self._keys.decision(number))  # no later leader misses it either
            except StoreUnavailable as error:
                _log.info("decision_not_deleted", number=number, error=str(error))
                break

    async def _swap(self, key: str, revision: int, value: bytes, fence: Guard) -> Versioned:
        try:
            written = await self._store.compare_and_swap(key, revision, value, guards=(fence,))
        except Conflict as conflict:
            self._metrics.write_refused()
            if conflict.current is not None:
                self._view.adopt(conflict.current)
            self._settled_in = None
            raise
        except Fenced:
            self._metrics.write_refused()
            raise
        self._view.adopt(written)
        return written
