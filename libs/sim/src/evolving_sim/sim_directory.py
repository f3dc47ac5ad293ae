"""The product's directory in virtual time, and what goes between it and the nodes, a little late.

As on a node's stream: what the pool gained and lost first, then what its legs report, in order; counts come back.
Both wait `delay_s` from the first of them on, and go together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from evolving.core.blocks import split_names
from evolving.core.config import DirectoryConfig
from evolving.core.directory import Directory
from evolving.core.directory_types import (
    Begin,
    ClearMemory,
    CountsComplete,
    CountUpdate,
    Effect,
    FreeL1,
    Ignored,
    Landed,
    Match,
    NeedResync,
    Output,
)
from evolving.core.errors import NeedFull
from evolving.core.needs import need
from evolving.core.terms import Phase, Role
from evolving_sim.events import EventHeap, Priority
from evolving_sim.kv import NodeKv
from evolving_sim.legs import Request

_TENANT = ""
_RUN_BLOCKS_MAX = 4096  # whole contexts: what happens to one is said at once
_TICK_S = 0.05  # between steps of work that the directory does bit by bit
_LIMITS_S = 60.0  # between looks at what time ends


class _Over(NamedTuple):
    """A request has its whole output."""

    branch_id: str
    request_id: str


@dataclass(slots=True, eq=False)
class _Stream:
    """One life of a node's engine, as the directory hears of it."""

    node_id: str
    incarnation: str
    kv: NodeKv
    sequence: int = 0
    reports: list[Landed | Output | _Over] = field(default_factory=list)
    needs: list[tuple[bytes, int]] = field(default_factory=list)  # of consecutive blocks, on their way to the node
    heard: set[bytes] | None = None  # needs of these names, since it is being resynced
    meets: bool = False  # an exchange is under way
    losing: int = 0  # batches that will not arrive


class SimDirectory:
    """Who holds what, and how needed it is."""

    def __init__(self, events: EventHeap, delay_s: float, *, counts: bool) -> None:
        """counts: nodes are told how needed their blocks are; they have no use for it where they evict without."""
        self.directory = Directory(DirectoryConfig(run_blocks_max=_RUN_BLOCKS_MAX))
        self.ignored: dict[str, int] = {}  # events that changed nothing, by kind
        self._events = events
        self._delay_s = delay_s
        self._counts = counts
        self._streams: dict[str, _Stream] = {}
        self._lives = 0
        self._ticking = False
        self._events.after(_LIMITS_S, Priority.REPORT, self._check_limits)

    # -- nodes

    def node_up(self, node_id: str, kv: NodeKv) -> None:
        """An engine's life begins: it holds nothing."""
        self._lives += 1
        stream = self._streams[node_id] = _Stream(node_id, str(self._lives), kv)
        self._carry_out(self.directory.node_up(self._events.now_s, node_id, stream.incarnation))

    def node_gone(self, node_id: str) -> None:
        """A node is lost, with all it had to tell."""
        del self._streams[node_id]
        self._carry_out(self.directory.node_gone(self._events.now_s, node_id))
        self._tick_soon()

    def changed(self, node_id: str) -> None:
        """A node's pool changed."""
        stream = self._streams.get(node_id)
        if stream is not None:
            self._meet(stream)

    def role_switch(self, node_id: str, old: Role, new: Role) -> None:
        """A node's role changed."""
        self.catch_up(node_id)
        self._carry_out(self.directory.role_switch(self._events.now_s, node_id, old, new))
        self._tick_soon()

    def catch_up(self, node_id: str) -> None:
        """Have what a node has to tell arrive now."""
        self._exchange(self._streams[node_id])

    def lose(self, node_id: str, batches: int) -> None:
        """The next batches of changes that a node tells do not arrive."""
        self._streams[node_id].losing += batches

    # -- requests

    def begin(self, request: Request, block_tokens: int) -> Match:
        """A request comes; where its context is."""
        now_s, blocks = self._events.now_s, request.prompt_tokens // block_tokens
        try:
            answer, effects = self.directory.begin(now_s, _begin(request, min(request.shared_blocks, blocks), blocks))
        except NeedFull:
            answer, effects = self.directory.begin(now_s, _begin(request, 0, blocks))
        self._carry_out(effects)
        return answer.match

    def rematch(self, request: Request, block_tokens: int) -> Match:
        """Where the context of a running request is, its output so far among it."""
        blocks = request.context_tokens // block_tokens
        return self.directory.rematch(self._events.now_s, _begin(request, 0, blocks))

    def landed(self, request: Request, phase: Phase, node_id: str, blocks: int) -> None:
        """The prompt's KV is on a node."""
        ids = (_TENANT, request.branch_id, request.request_id, request.version)
        self._tell(node_id, Landed(*ids, phase, node_id, blocks))

    def output(self, request: Request, node_id: str, first_block: int, last_block: int) -> None:
        """A node completed blocks of output."""
        if last_block > first_block:
            ids = (_TENANT, request.branch_id, request.request_id, request.version)
            names = b"".join(request.names[first_block:last_block])
            self._tell(node_id, Output(*ids, node_id, first_block, names))

    def request_done(self, request: Request, node_id: str) -> None:
        """A request has its whole output."""
        self._tell(node_id, _Over(request.branch_id, request.request_id))

    def end(self, branch_id: str) -> None:
        """A branch ends."""
        self._carry_out(self.directory.end(self._events.now_s, _TENANT, [branch_id]))

    # -- exchanges

    def _tell(self, node_id: str, report: Landed | Output | _Over) -> None:
        stream = self._streams[node_id]
        stream.reports.append(report)
        self._meet(stream)

    def _meet(self, stream: _Stream) -> None:
        if not stream.meets:
            stream.meets = True
            self._events.after(self._delay_s, Priority.ARRIVAL, partial(self._exchange, stream))

    def _exchange(self, stream: _Stream) -> None:
        if self._streams.get(stream.node_id) is not stream:
            return  # the node is gone
        stream.meets = False
        if stream.needs:
            needs, stream.needs = stream.needs, []
            stream.kv.pool.set_stretches(needs)
        now_s, directory = self._events.now_s, self.directory
        changes = stream.kv.changes.take()
        if changes:
            stream.sequence += 1
            if stream.losing:
                stream.losing -= 1
            else:
                told = (stream.node_id, stream.incarnation, stream.sequence, changes)
                self._carry_out(directory.node_events(now_s, *told))
        reports, stream.reports = stream.reports, []
        for report in reports:
            if isinstance(report, Landed):
                self._carry_out(directory.landed(now_s, report))
            elif isinstance(report, Output):
                self._carry_out(directory.output(now_s, report))
            else:
                self._carry_out(directory.request_done(now_s, _TENANT, *report))

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, CountUpdate):
                if self._counts:
                    self._count(effect)
            elif isinstance(effect, Ignored):
                self.ignored[effect.kind] = self.ignored.get(effect.kind, 0) + 1
            elif isinstance(effect, NeedResync | CountsComplete | FreeL1 | ClearMemory):
                self._events.after(self._delay_s, Priority.ARRIVAL, partial(self._obey, effect))

    def _count(self, update: CountUpdate) -> None:
        stream = self._streams.get(update.node_id)
        if stream is None:
            return
        stream.needs.append((update.names, need(update.count, update.elsewhere)))
        if stream.heard is not None:
            stream.heard.update(split_names(update.names))
        self._meet(stream)

    def _obey(self, effect: NeedResync | CountsComplete | FreeL1 | ClearMemory) -> None:
        """A node hears what the directory wants of it."""
        stream = self._streams.get(effect.node_id)
        if stream is None:
            return
        if isinstance(effect, NeedResync):
            self._resync(stream)
        elif isinstance(effect, CountsComplete):
            self._complete(stream)
        elif isinstance(effect, FreeL1):
            stream.kv.pool.free_l1()
        else:
            stream.kv.pool.clear()

    def _resync(self, stream: _Stream) -> None:
        """A node says all that it holds; what it had yet to tell is in that."""
        stream.kv.changes.take()
        stream.heard = set()
        now_s, told = self._events.now_s, (stream.node_id, stream.incarnation)
        effects = self.directory.resync_begin(now_s, *told)
        effects += self.directory.resync_events(now_s, *told, stream.kv.snapshot())
        effects += self.directory.resync_end(now_s, *told, stream.sequence)
        self._carry_out(effects)
        self._tick_soon()

    def _complete(self, stream: _Stream) -> None:
        """A node heard all counts there are."""
        self._exchange(stream)
        heard, stream.heard = stream.heard or set(), None
        pool = stream.kv.pool
        pool.set_needs({name: 0 for name in pool.needs() if name not in heard})

    # -- time

    def _check_limits(self) -> None:
        self._tick_soon()
        self._events.after(_LIMITS_S, Priority.REPORT, self._check_limits)

    def _tick_soon(self) -> None:
        if not self._ticking:
            self._ticking = True
            self._events.after(_TICK_S, Priority.REPORT, self._tick)

    def _tick(self) -> None:
        self._ticking = False
        due_s = self.directory.next_wakeup_s()
        if due_s is not None and due_s <= self._events.now_s:
            self._carry_out(self.directory.tick(self._events.now_s))
            self._tick_soon()

    def check_invariants(self) -> None:
        """Assert what the directory asserts of itself. Walks everything."""
        self.directory.check_invariants()


def _begin(request: Request, base_blocks: int, blocks: int) -> Begin:
    """A request's Begin, its first `base_blocks` blocks known from before."""
    return Begin(
        tenant=_TENANT,
        branch_id=request.branch_id,
        request_id=request.request_id,
        version=request.version,
        parent_branch_id=request.parent_branch_id,
        base_blocks=base_blocks,
        base_name=request.names[base_blocks - 1] if base_blocks else b"",
        new_names=b"".join(request.names[base_blocks:blocks]),
    )
