"""The core's state machine and those it speaks to: effects go to node streams, time comes from the clock."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from contextlib import closing

from evolving.core.directory import Directory
from evolving.core.directory_types import (
    ClearMemory,
    CountsComplete,
    CountUpdate,
    Effect,
    EndedBranch,
    FreeL1,
    Ignored,
    NeedResync,
)
from evolving.core.terms import Role
from evolving.internal.v1 import directory_pb2
from evolving.runtime.clock import Clock
from evolving.runtime.errors import NotReady
from evolving.runtime.log import get_logger
from evolving.runtime.tasks import first_of
from evolving_directory.errors import JournalFailed, StreamReplaced, Superseded
from evolving_directory.journal import Journal
from evolving_directory.metrics import DirectoryMetrics
from evolving_directory.outbox import Outbox
from evolving_directory.records import RoleTaken

_SHOW_EVERY_S = 1.0
_RECONNECT_S = 15.0  # nodes that could not be connected have so long to come back, registered or not
_log = get_logger(__name__)


class Host:
    """One per process. State changes happen between awaits; whatever a change caused is in the outboxes and in the
    journal before the next one starts. Nobody is told that a change was taken before `journal.settled`."""

    def __init__(
        self,
        directory: Directory,
        clock: Clock,
        metrics: DirectoryMetrics,
        journal: Journal,
        origin_s: float = 0.0,
        roles: Mapping[str, Role] | None = None,
    ) -> None:
        """origin_s: what to add to the clock's `now_s` so that the directory's time goes on where it was before a
        restart. roles: of the nodes it knew then."""
        self.directory = directory
        self.clock = clock
        self.metrics = metrics
        self.journal = journal
        self.term = 0  # 0: not taken yet
        self.newer_term = 0  # of the directory that superseded this one; 0: none
        self.superseded = asyncio.Event()
        self.outboxes: dict[str, Outbox] = {}  # of nodes whose stream has not ended
        self._origin_s = origin_s
        self._known = {node.node_id for node in directory.stats().nodes}  # nodes the core has
        self._expected = set(self._known)  # nodes that may be about to come back: they could not be connected
        self._connectable = asyncio.Event()  # again, after the journal failed
        self._draining = False
        self._registered: set[str] | None = None  # nodes etcd has; None: not told yet
        self._wanted_roles: dict[str, Role] = {}  # as etcd has them
        self._roles: dict[str, Role] = dict(roles or {})  # of known nodes, what follows from changes being under way
        self._journaled_roles = dict(self._roles)  # the same, once it is done
        self._orders: dict[str, FreeL1 | ClearMemory] = {}  # of nodes that were away when their role changed
        self._wake = asyncio.Event()
        self._sleeps_until_s = float("inf")

    def now_s(self) -> float:
        """The directory's time, seconds. It goes on while the process is down, so that branches age."""
        return self._origin_s + self.clock.now_s()

    # ------------------------------------------------------------------------------------------------ standing

    def check_serving(self) -> None:
        """Raises NotReady before the term is taken, Superseded once another directory has a higher one, JournalFailed
        while nothing can be made durable."""
        if self.newer_term:
            raise Superseded(self.term, self.newer_term)
        if self.journal.failed:
            raise JournalFailed(self.journal.failed)
        if not self.term:
            raise NotReady("the directory has no term yet", retry_after_s=1.0)

    def meet_term(self, term: int) -> None:
        """Somebody knows of this term. A higher one than this directory's ends its service for good."""
        if self.term and term > max(self.term, self.newer_term):
            _log.error("superseded", term=self.term, newer_term=term)
            self.newer_term = term
            self.superseded.set()
            for outbox in self.outboxes.values():
                outbox.close(Superseded(self.term, term))

    def journal_changed(self, failed: str) -> None:
        """The journal fails, or works again: "". Nodes send what was not acknowledged once they may connect anew."""
        if failed:
            for outbox in self.outboxes.values():
                outbox.close(JournalFailed(failed))
        else:
            self._expected = self._known - self.connected
            self._connectable.set()

    async def close_streams(self) -> None:
        """Let every node go, for a drain: a stream has no end of its own."""
        self._draining = True
        for outbox in list(self.outboxes.values()):
            outbox.close(NotReady("the directory is stopping", retry_after_s=1.0))

    @property
    def connected(self) -> set[str]:
        """Nodes whose stream works. One that was cut may still hang in the transport of a node that doesn't read."""
        return {node_id for node_id, outbox in self.outboxes.items() if not outbox.closed}

    @property
    def known_nodes(self) -> Collection[str]:
        """Nodes the directory keeps copies of."""
        return self._known

    # --------------------------------------------------------------------------------------------------- nodes

    def connect(self, hello: directory_pb2.NodeHello, outbox: Outbox) -> bool:
        """A node opened its stream; an older stream of it ends. Returns whether it needs all its counts now, and not
        after a resync. Raises Superseded, InvalidArgument."""
        self.meet_term(hello.known_term)
        self.check_serving()
        node_id = hello.node_id
        effects = self.directory.node_up(self.now_s(), node_id, hello.incarnation, hello.next_sequence)
        replaced = self.outboxes.get(node_id)
        if replaced is not None:
            self.metrics.cut_streams.labels("replaced").inc()
            replaced.close(StreamReplaced(f"node {node_id} opened another stream"))
        self._known.add(node_id)
        self._expected.discard(node_id)
        self.outboxes[node_id] = outbox
        resyncs = any(isinstance(effect, NeedResync) for effect in effects)
        _log.info("node_connected", node=node_id, incarnation=hello.incarnation, resyncs=resyncs)
        self.carry_out(effects)
        self._take_roles()
        order = self._orders.pop(node_id, None)
        if order is not None and self._roles.get(node_id) is Role.PREFILL:
            self._tell_node(order)
            self._journal_roles()
        return not resyncs

    async def send_all_counts(self, hello: directory_pb2.NodeHello, outbox: Outbox) -> None:
        """Bring a node whose copies are known here to this directory's counts: what an earlier stream did not deliver
        is lost. Nothing may be taken from the node meanwhile; changes in between are in their place."""
        with closing(self.directory.node_counts_in_parts(hello.node_id)) as parts:
            for part in parts:
                for update in part:
                    outbox.counts(update)
                await asyncio.sleep(0)
                if outbox.closed:
                    return
        outbox.counts_complete()
        outbox.acknowledge(max(0, hello.next_sequence - 1))

    def disconnect(self, node_id: str, outbox: Outbox) -> None:
        """A stream is over. Its copies stay while etcd has the node, but nobody is sent to read them."""
        outbox.close()
        if self.outboxes.get(node_id) is outbox:
            del self.outboxes[node_id]
            _log.info("node_disconnected", node=node_id)
            self._drop_gone()

    def set_nodes(self, registered: Collection[str], roles: Mapping[str, Role]) -> None:
        """The nodes etcd has, and the roles in effect."""
        self._registered = set(registered)
        self._wanted_roles = dict(roles)
        self._drop_gone()
        self._take_roles()

    def _take_roles(self) -> None:
        """Let known nodes have the roles that etcd says. What a switch to prefill claims is decided by what the node
        holds, so it waits until that is known: also one that came while this directory was down."""
        for node_id, role in self._wanted_roles.items():
            old = self._roles.get(node_id, role)
            if node_id not in self._known or (old is not role and self.directory.awaits_resync(node_id)):
                continue
            self._roles[node_id] = role
            if old is not role:
                _log.info("role_switched", node=node_id, old=old.name, new=role.name)
                self.carry_out(self.directory.role_switch(self.now_s(), node_id, old, role))
        self._journal_roles()

    def _journal_roles(self) -> None:
        """Write down roles once what follows from them is done, and nodes were told: a switch cut short by a restart is
        begun again."""
        for node_id, role in self._roles.items():
            under_way = self.directory.turning(node_id) or node_id in self._orders
            if self._journaled_roles.get(node_id) is not role and not under_way:
                self._journaled_roles[node_id] = role
                self.journal.append(RoleTaken(node_id, role))

    def _drop_gone(self) -> None:
        """A node is gone when etcd has it no more and its stream is broken. Either alone may be a moment's trouble; a
        stream that this directory itself ended says nothing."""
        if self._registered is None or self._draining or self.journal.failed:
            return
        for node_id in self._known - self._registered - self.connected - self._expected:
            _log.warning("node_gone", node=node_id)
            self._known.discard(node_id)
            self._roles.pop(node_id, None)
            self._orders.pop(node_id, None)
            self._journaled_roles.pop(node_id, None)
            self.carry_out(self.directory.node_gone(self.now_s(), node_id))

    # ------------------------------------------------------------------------------------------------- effects

    def carry_out(self, effects: Iterable[Effect]) -> list[EndedBranch]:
        """Do what the core asks for; the branches that ended."""
        ended: list[EndedBranch] = []
        for effect in effects:
            if isinstance(effect, CountUpdate):
                if (outbox := self.outboxes.get(effect.node_id)) is not None:
                    outbox.counts(effect)
            elif isinstance(effect, EndedBranch):
                ended.append(effect)
                self.metrics.ended_branches.labels("idle_limit" if effect.expired else "harness").inc()
                _log.debug("branch_ended", branch_id=effect.branch_id, tenant=effect.tenant, reason=effect.reason)
            elif isinstance(effect, Ignored):
                self.metrics.ignored.labels(effect.kind).inc()
            else:
                self._tell_node(effect)
        due_s = self.directory.next_wakeup_s()
        if due_s is not None and due_s < self._sleeps_until_s:
            self._wake.set()
        return ended

    def _tell_node(self, effect: CountsComplete | NeedResync | FreeL1 | ClearMemory) -> None:
        outbox = self.outboxes.get(effect.node_id)
        if isinstance(effect, NeedResync):
            self.metrics.resyncs.inc()
            _log.info("resync_asked", node=effect.node_id, reason=effect.reason)
        if outbox is None or outbox.closed:
            if isinstance(effect, FreeL1 | ClearMemory):
                self._orders[effect.node_id] = effect
            return  # of all else it hears when it connects again
        if isinstance(effect, NeedResync):
            outbox.resync(effect.reason)
        elif isinstance(effect, CountsComplete):
            outbox.counts_complete()
            self._take_roles()
        elif isinstance(effect, FreeL1):
            outbox.retier(effect.reason)
        else:
            outbox.clear(effect.reason)

    # ---------------------------------------------------------------------------------------------------- time

    async def let_time_pass(self) -> None:
        """Tick the core whenever it wants to be woken, for ever."""
        while True:
            self._wake.clear()
            due_s = self.directory.next_wakeup_s()
            now_s = self.now_s()
            if due_s is None or due_s > now_s:
                await self._sleep_until(due_s, now_s)
                continue
            self.carry_out(self.directory.tick(now_s))
            self._journal_roles()
            await asyncio.sleep(0)

    async def give_up_absent(self) -> None:
        """Some time after a restart or a failure of the journal, give up nodes that did not come back and that etcd
        does not have either. For ever."""
        while True:
            await self.clock.sleep(_RECONNECT_S)
            self._expected.clear()
            self._drop_gone()
            await self._connectable.wait()
            self._connectable.clear()

    async def show_sizes(self) -> None:
        """Keep the gauges fresh, for ever."""
        while True:
            self.metrics.saw(self.directory.stats(), self.term, len(self.connected))
            await self.clock.sleep(_SHOW_EVERY_S)

    async def _sleep_until(self, due_s: float | None, now_s: float) -> None:
        """Until the core is due, or an event made it due sooner."""
        self._sleeps_until_s = float("inf") if due_s is None else due_s
        try:
            if due_s is None:
                await self._wake.wait()
            else:
                await first_of(self._wake.wait(), self.clock.sleep(due_s - now_s))
        finally:
            self._sleeps_until_s = float("-inf")
