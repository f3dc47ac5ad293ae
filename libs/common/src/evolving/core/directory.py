"""The directory: where every KV block is, and how many branches need it there (§4.1 of arXiv 2611.12304).

A deterministic state machine. It sees block names, never tokens. Three things are kept:

- ctx(β): version and blocks of each live branch β: its last prompt, then output that joined provisionally;
- home(β, φ): for runs of ctx(β), the node whose copy β counts in phase φ. φ tags the run, never the node's role;
- copies: which blocks each node holds, by tier.

Counts are derived: count(n, b) is the number of pairs (β, φ) with b in ctx(β) and home(β, φ)(b) = n, provided that n
holds b. They are kept incrementally, run by run, and pushed to the nodes as `CountUpdate` effects.

Every method takes `now_s`, changes state and returns effects for the shell to carry out. Expected failures are raised
(`evolving.core.errors`) and change nothing.

Copies are the nodes' to tell. All else survives a restart: `keep_log` says each change as an entry, `replay` takes
entries back, `snapshot` and `restore` stand for all entries so far.

The rules, where the paper leaves them open:
- A Begin of a version higher than the current rewrites the context. Of the same version: it *extends* when the last
  prompt (not the output: harnesses strip thinking) is a prefix of the new one. Otherwise it is a *side request* while
  any request of that version runs: it is served, the context stays, and what it lands or outputs is ignored. With
  nothing running it is a rewrite, counted as unannounced.
- When a context changes, blocks that stay keep their homes; dropped ones lose them; new ones have none until KV lands.
- Landed and Output are taken while the branch is live, the version current and the request known (also after it is
  done), for as much of the request's own context as still is ctx(β); Output only from the request that last set the
  context.
- A branch is idle while it has no running request and no live descendant. Idle for idle_ttl_s, it ends, and a later
  Begin revives its id as a new branch. An explicit end leaves a tombstone for tombstone_s.
- A new incarnation of a node starts with no copies; homes stay and count again as copies are announced. A node that
  is gone loses its homes too.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar, cast

from evolving.core import (
    directory_audit,
    directory_begin,
    directory_nodes,
    directory_replay,
    directory_requests,
    directory_snapshot,
    directory_turns,
    directory_views,
)
from evolving.core.config import DirectoryConfig
from evolving.core.directory_log import Log, LogEntry
from evolving.core.directory_snapshot import SnapshotPart
from evolving.core.directory_state import DirectoryState
from evolving.core.directory_types import (
    AuditReport,
    Begin,
    BeginAnswer,
    BlockCounts,
    BlockView,
    BranchView,
    CountUpdate,
    Effect,
    Landed,
    Match,
    NodeEvent,
    Output,
    Stats,
)
from evolving.core.runs import Visit
from evolving.core.terms import Role

Answer = TypeVar("Answer")


def finished(parts: Generator[None, None, Answer]) -> Answer:
    """What a read in parts answers, all parts taken in one go."""
    try:
        while True:
            next(parts)
    except StopIteration as done:
        return cast("Answer", done.value)


class Directory:
    """The state machine. One per partition; not thread-safe; no I/O."""

    def __init__(self, config: DirectoryConfig | None = None) -> None:
        self._state = DirectoryState.new(config or DirectoryConfig())

    def _in_order(self, effects: list[Effect]) -> list[Effect]:
        """What turns left to be told comes first: an event that was refused, or ignored, told nobody of it."""
        return directory_turns.flush(self._state, effects)

    # ------------------------------------------------------------------------------------------------------- requests

    def begin(self, now_s: float, event: Begin) -> tuple[BeginAnswer, list[Effect]]:
        """Record the context of a branch's new request and match it against the pool.

        Cost grows with the new blocks and with the runs on the context's path, not with its blocks.
        Raises BranchEnded, StaleVersion, NeedFull, RequestConflict, InvalidArgument; then nothing changed.
        """
        return directory_begin.begin(self._state, self._state.advance(now_s), event)

    def rematch(self, now_s: float, event: Begin) -> Match:
        """Where the blocks of a running request are now, its output so far among them, for a request that lost its
        node. Contexts don't change, and an ended branch is no hindrance: an end never stops a running request.
        Raises NeedFull, InvalidArgument."""
        return directory_begin.rematch(self._state, self._state.advance(now_s), event)

    def match(self, now_s: float, names: bytes) -> Match:
        """Where the blocks of a context are, for a request without a branch. Raises InvalidArgument."""
        self._state.advance(now_s)
        return self._state.index.match(names)

    def landed(self, now_s: float, event: Landed) -> list[Effect]:
        """Set the home of a run in a phase. Raises InvalidArgument; an unknown node, branch, request or an old version
        is ignored."""
        return self._in_order(directory_requests.landed(self._state, self._state.advance(now_s), event))

    def output(self, now_s: float, event: Output) -> list[Effect]:
        """Append completed output blocks to the context, provisionally. Ignored like Landed; also when it leaves a gap
        or disagrees with blocks already there. Raises InvalidArgument."""
        return self._in_order(directory_requests.output(self._state, self._state.advance(now_s), event))

    def request_done(self, now_s: float, tenant: str, branch_id: str, request_id: str) -> list[Effect]:
        """A request is over, whatever its outcome; ends the branch when its Begin said end_after. Repeats and unknown
        requests are ignored."""
        now_s = self._state.advance(now_s)
        return self._in_order(directory_requests.request_done(self._state, now_s, tenant, branch_id, request_id))

    def end(self, now_s: float, tenant: str, branch_ids: Sequence[str], subtree: bool = False) -> list[Effect]:
        """End branches, with `subtree` all their live descendants too. Unknown and ended ones are no-ops. Running
        requests are not cancelled; what they report later is ignored."""
        return self._in_order(
            directory_requests.end(self._state, self._state.advance(now_s), tenant, branch_ids, subtree)
        )

    # ---------------------------------------------------------------------------------------------------------- nodes

    def node_up(self, now_s: float, node_id: str, incarnation: str, next_sequence: int = 0) -> list[Effect]:
        """A node is there. Under a new incarnation it holds nothing and its event sequence starts at 1; under the one
        already known nothing changes. `next_sequence`: the next batch it will send, where it says so; when batches
        before it are missing here, or a resync was under way, yields NeedResync. Raises InvalidArgument."""
        self._state.advance(now_s)
        return self._in_order(directory_nodes.node_up(self._state, node_id, incarnation, next_sequence))

    def node_gone(self, now_s: float, node_id: str) -> list[Effect]:
        """A node is gone for good: its homes and copies vanish. Unknown: no-op."""
        self._state.advance(now_s)
        return self._in_order(directory_nodes.node_gone(self._state, node_id))

    def node_events(
        self, now_s: float, node_id: str, incarnation: str, sequence: int, events: Sequence[NodeEvent]
    ) -> list[Effect]:
        """Changes of what a node holds. `sequence` grows by one a batch, from 1 in each incarnation.

        A batch seen before is ignored; a gap, or a run whose parent is unknown, yields NeedResync, and batches are
        ignored until the resync. Raises UnknownNode, StaleIncarnation, InvalidArgument.
        """
        self._state.advance(now_s)
        return self._in_order(directory_nodes.node_events(self._state, node_id, incarnation, sequence, events))

    def clear_in_parts(
        self, now_s: float, node_id: str, incarnation: str, sequence: int, events: Sequence[NodeEvent]
    ) -> Generator[list[Effect], None, None]:
        """What a batch is going to clear, cleared part by part before it is taken, so that no other event waits for all
        of it. Nothing, unless the batch is the node's next one. Raises UnknownNode, StaleIncarnation."""
        self._state.advance(now_s)
        parts = directory_nodes.clear_in_parts(self._state, node_id, incarnation, sequence, events)
        return (self._in_order(effects) for effects in parts)

    def resync_begin(self, now_s: float, node_id: str, incarnation: str) -> list[Effect]:
        """A snapshot follows: the node holds nothing until told. Raises UnknownNode, StaleIncarnation."""
        self._state.advance(now_s)
        return self._in_order(directory_nodes.resync_begin(self._state, node_id, incarnation))

    def resync_events(self, now_s: float, node_id: str, incarnation: str, events: Sequence[NodeEvent]) -> list[Effect]:
        """Part of a snapshot, parents before children. An unknown parent is InvalidArgument. Raises as node_events."""
        self._state.advance(now_s)
        return self._in_order(directory_nodes.resync_events(self._state, node_id, incarnation, events))

    def resync_end(self, now_s: float, node_id: str, incarnation: str, sequence: int) -> list[Effect]:
        """The snapshot is complete and covers everything up to batch `sequence`; the next batch is sequence + 1."""
        self._state.advance(now_s)
        return self._in_order(directory_nodes.resync_end(self._state, node_id, incarnation, sequence))

    def role_switch(self, now_s: float, node_id: str, old: Role, new: Role) -> list[Effect]:
        """A node's role changed. Only DECODE→PREFILL does anything (§4.1; DirectoryConfig.decode_to_prefill):

        KEEP: in every branch, blocks without a PREFILL home that the node holds in L2 get it as PREFILL home; then the
        node's DECODE homes go. RESET: all homes and copies of the node go. Raises UnknownNode.
        """
        self._state.advance(now_s)
        return self._in_order(directory_nodes.role_switch(self._state, node_id, old, new))

    # ----------------------------------------------------------------------------------------------------------- time

    def tick(self, now_s: float) -> list[Effect]:
        """Let time pass: end idle branches, give up silent requests, forget tombstones, sweep copies of lost nodes."""
        earlier = self._in_order([])
        return earlier + directory_requests.tick(self._state, self._state.advance(now_s))

    def next_wakeup_s(self) -> float | None:
        """When `tick` has something to do next; None: never, as things stand."""
        return directory_requests.next_wakeup_s(self._state)

    # --------------------------------------------------------------------------------------------- surviving a restart

    def keep_log(self, log: Log) -> None:
        """Tell `log` of every change of branches and homes from now on, as soon as it happened. Counters of `stats`
        start at 0 here."""
        self._state.counters.clear()
        self._state.ignored.clear()
        self._state.log = log

    def replay(self, entry: LogEntry) -> None:
        """Take the next entry of the log of a directory that this one is to become. Nodes in it hold nothing until
        they send a snapshot."""
        directory_replay.replay(self._state, entry)

    def snapshot(self) -> Iterator[SnapshotPart]:
        """What all entries of the log so far amount to. The directory must not change meanwhile. Walks all contexts."""
        return directory_snapshot.dump(self._state)

    @classmethod
    def restore(cls, config: DirectoryConfig, parts: Iterable[SnapshotPart]) -> Directory:
        """A directory as another one's `snapshot` told of it, nodes as after `replay`."""
        directory = cls(config)
        directory_snapshot.restore(directory._state, parts)
        return directory

    def awaits_resync(self, node_id: str) -> bool:
        """Whether a node is known whose copies are not, until its resync ends."""
        node = self._state.counts.nodes.get(node_id)
        return node is not None and (node.resync_asked or node.resyncing)

    def turning(self, node_id: str) -> bool:
        """Whether branches have yet to take what a switch of the node's role does to them."""
        return any(turn.node.node_id == node_id for turn in self._state.turns.open)

    @property
    def now_s(self) -> float:
        """The latest time this directory was told."""
        return self._state.now_s

    # ---------------------------------------------------------------------------------------------------------- reads

    def block(self, name: bytes) -> BlockView | None:
        """One block; None: no copy and no branch. Raises InvalidArgument.

        The first block of a run, and each whose depth is a multiple of 16, is found at once; any other is searched for
        in all runs. Then its branches are, among all of them.
        """
        return finished(self.block_in_parts(name))

    def block_in_parts(self, name: bytes) -> Generator[None, None, BlockView | None]:
        """The same, yielding every few milliseconds."""
        return directory_views.block(self._state, name)

    def branch(self, now_s: float, tenant: str, branch_id: str) -> BranchView | None:
        """One branch, also an ended one while its tombstone lasts."""
        return directory_views.branch(self._state, now_s, (tenant, branch_id))

    def branches(
        self,
        now_s: float,
        after: tuple[str, str] | None = None,
        limit: int = 100,
        tenant: str | None = None,
        include_ended: bool = False,
    ) -> list[BranchView]:
        """Branches ordered by (tenant, id), those after `after`, at most `limit`."""
        return directory_views.branches(self._state, now_s, after, limit, tenant, include_ended)

    def context_counts(self, tenant: str, branch_id: str) -> BlockCounts:
        """Counts of the blocks of a live branch's context; zeros for an unknown one."""
        return directory_views.context_counts(self._state, (tenant, branch_id))

    def pool_counts(self) -> BlockCounts:
        """The same over every block anyone holds. Walks all runs."""
        return directory_views.pool_counts(self._state)

    def node_counts(self, node_id: str) -> list[tuple[bytes, int]]:
        """Nonzero counts on a node as (names, count) by run. Walks all runs. Raises UnknownNode."""
        return directory_views.node_counts(self._state, node_id)

    def node_counts_in_parts(self, node_id: str) -> Generator[list[CountUpdate], None, None]:
        """The same, part by part while other things happen: with the `CountUpdate`s in between, in order, they amount
        to the counts at the end. Stops when the node is gone. Raises UnknownNode."""
        return directory_views.node_counts_in_parts(self._state, node_id)

    def stats(self) -> Stats:
        """Sizes and counters."""
        return directory_views.stats(self._state)

    def audit(self, node_needs: Mapping[str, Mapping[bytes, int]] | None = None) -> AuditReport:
        """Compare incremental counts, a recount from the branch table and, where given by node id, what nodes evict by:
        nonzero needs by name (evolving.core.needs). Walks everything."""
        with self.visit() as visit:
            return finished(self.audit_in_parts(visit, node_needs or {}))

    def visit(self) -> Visit:
        """Begin to watch what changes, for an audit. Has to be closed."""
        return self._state.index.visit(self._state.index.live)

    def audit_in_parts(
        self, visit: Visit, node_needs: Mapping[str, Mapping[bytes, int]]
    ) -> Generator[None, None, AuditReport]:
        """The same, yielding every few milliseconds. What changed since the visit began is left out, so that begin has
        to come before the nodes are asked."""
        return directory_audit.audit(self._state, visit, node_needs)

    def check_invariants(self) -> None:
        """Assert everything that must hold between events. Walks everything; for tests."""
        directory_audit.check_invariants(self._state)
