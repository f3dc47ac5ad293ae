"""The branch table: branches and their requests, who descends from whom, who is idle, and which ids are buried."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from evolving.core.directory_types import Loss
from evolving.core.homes import HomeMap
from evolving.core.runs import Run
from evolving.core.terms import Phase

BranchKey = tuple[str, str]
"""(tenant, branch id)."""


@dataclass(slots=True)
class Request:
    """A request of a branch, kept for a while after it is done."""

    request_id: str
    version: int
    prompt_blocks: int
    last_name: bytes  # of the prompt's last block: with chained names, the whole prompt's full blocks
    end_after: bool
    body_digest: bytes
    side: bool  # its context is not the branch's
    valid_blocks: int  # leading blocks of its context (prompt, output) that still are the branch's
    last_event_s: float
    done: bool = False
    loss: Loss = Loss.NONE  # as its Begin was answered


@dataclass(slots=True)
class Branch:
    """A live branch: ctx(β), its homes and its requests."""

    key: BranchKey
    version: int
    parent_branch_id: str  # as told; the lineage holds it only when it was known
    last_event_s: float
    tip: Run | None = None  # the run that ends the context; None: no full block
    blocks: int = 0  # of the context: prompt, then provisional output
    prompt_blocks: int = 0
    homes: dict[Phase, HomeMap] = field(default_factory=lambda: {phase: HomeMap() for phase in Phase})
    requests: dict[str, Request] = field(default_factory=dict)  # oldest first
    running: int = 0
    context_request_id: str = ""  # the request that set the context
    unannounced_rewrites: int = 0
    merged_path_runs: int = 0  # runs on the path when it was last merged up
    turn: int = 0  # the latest turn it took (`directory_turns`)
    loss: Loss = Loss.NONE  # why homes of it went since its context was last set


class Tombstone(NamedTuple):
    """What is remembered of an ended branch."""

    version: int
    parent_branch_id: str
    ended_s: float
    expired: bool  # by its idle limit: the id may come back


@dataclass(slots=True)
class _Kin:
    """A branch's place in the lineage: itself live, or with live descendants."""

    parent: BranchKey | None
    children: dict[BranchKey, None] = field(default_factory=dict)


class Lineage:
    """Parents and children. An ended branch stays while it has live descendants, so that a whole subtree can be ended
    and ancestors know that they are needed."""

    def __init__(self) -> None:
        self._kin: dict[BranchKey, _Kin] = {}

    def add(self, key: BranchKey, parent: BranchKey | None, live: dict[BranchKey, Branch]) -> BranchKey | None:
        """A branch is live, as a child of a live parent or as a root. A parent that descends from it makes no circle:
        the branch becomes a root. An ended branch that comes back keeps its descendants. Returns as `end`."""
        kin = self._kin.get(key)
        if kin is None:
            kin = self._kin[key] = _Kin(None)
        if parent is not None and any(above == key for above in self._ancestors(parent)):
            parent = None
        before = kin.parent
        kin.parent = parent
        if parent is not None:
            self._kin[parent].children[key] = None
        if before is None or before == parent:
            return None
        del self._kin[before].children[key]
        return self.end(before, live)

    def _ancestors(self, key: BranchKey) -> Iterator[BranchKey]:
        """The key and everything above it."""
        at: BranchKey | None = key
        while at is not None:
            yield at
            at = self._kin[at].parent

    def end(self, key: BranchKey, live: dict[BranchKey, Branch]) -> BranchKey | None:
        """A branch is no longer in `live` (or lost a child): forget it and its ancestors as far as they neither live
        nor have descendants. Returns the live ancestor that has no descendant any more, if any."""
        at = key
        while at not in live and not self._kin[at].children:
            parent = self._kin.pop(at).parent
            if parent is None:
                return None
            del self._kin[parent].children[at]
            at = parent
        return at if at in live and not self._kin[at].children else None

    def has_descendants(self, key: BranchKey) -> bool:
        """Whether live branches descend from it."""
        kin = self._kin.get(key)
        return kin is not None and bool(kin.children)

    def children(self, key: BranchKey) -> tuple[BranchKey, ...]:
        """Children that live or have live descendants, oldest first."""
        kin = self._kin.get(key)
        return tuple(kin.children) if kin is not None else ()

    def subtree(self, key: BranchKey) -> list[BranchKey]:
        """The key and everything below it, parents first."""
        found = [key]
        for at in found:
            found.extend(self.children(at))
        return found

    def families(self) -> Iterator[tuple[BranchKey, tuple[BranchKey, ...]]]:
        """Each key that has children, with them."""
        return ((key, tuple(kin.children)) for key, kin in self._kin.items() if kin.children)

    def restore(self, live: Iterable[BranchKey], families: Iterable[tuple[BranchKey, Iterable[BranchKey]]]) -> None:
        """What `families` said, over the branches that are live."""
        for key in live:
            self._kin[key] = _Kin(None)
        for parent, children in families:
            self._kin.setdefault(parent, _Kin(None)).children.update(dict.fromkeys(children))
            for child in children:
                self._kin.setdefault(child, _Kin(None)).parent = parent

    def check_invariants(self, live: dict[BranchKey, Branch]) -> None:
        """Assert that links agree both ways and that every leaf is live."""
        assert live.keys() <= self._kin.keys()
        for key, kin in self._kin.items():
            assert kin.children or key in live, key
            assert kin.parent is None or key in self._kin[kin.parent].children, key
            assert all(self._kin[child].parent == key for child in kin.children), key
            assert len(set(self._ancestors(key))) == len(list(self._ancestors(key))), key


class BranchTable:
    """All branches, and the three queues that time works on, each oldest first: idle branches, running requests,
    tombstones. A branch is idle while it has no running request and no live descendant."""

    def __init__(self, remembered_requests: int) -> None:
        self.live: dict[BranchKey, Branch] = {}
        self.tombstones: dict[BranchKey, Tombstone] = {}
        self.lineage = Lineage()
        self._remembered_requests = remembered_requests
        self._idle: dict[BranchKey, None] = {}
        self._running: dict[tuple[BranchKey, str], None] = {}

    def add(self, now_s: float, key: BranchKey, version: int, parent_branch_id: str) -> Branch:
        """A new live branch; an unknown parent makes it a root."""
        self.tombstones.pop(key, None)
        parent = (key[0], parent_branch_id)
        branch = Branch(key, version, parent_branch_id, now_s)
        self.live[key] = branch
        freed = self.lineage.add(key, parent if parent in self.live and parent != key else None, self.live)
        if freed is not None:
            self.touch(now_s, self.live[freed])
        if self.lineage.has_descendants(parent):
            self._idle.pop(parent, None)
        return branch

    def bury(self, now_s: float, branch: Branch, expired: bool) -> None:
        """A branch ended; leaves a tombstone. The end of a last descendant is an event of the ancestor it frees."""
        key = branch.key
        del self.live[key]
        self._idle.pop(key, None)
        if branch.running:
            for request_id in branch.requests:
                self._running.pop((key, request_id), None)
        self.tombstones.pop(key, None)
        self.tombstones[key] = Tombstone(branch.version, branch.parent_branch_id, now_s, expired)
        freed = self.lineage.end(key, self.live)
        if freed is not None:
            self.touch(now_s, self.live[freed])

    def touch(self, now_s: float, branch: Branch) -> None:
        """An event of a branch: its idle time starts anew."""
        branch.last_event_s = now_s
        self._idle.pop(branch.key, None)
        if branch.running == 0 and not self.lineage.has_descendants(branch.key):
            self._idle[branch.key] = None

    def start(self, branch: Branch, request: Request) -> None:
        """A request runs. The oldest finished ones are forgotten when there are too many."""
        branch.requests[request.request_id] = request
        branch.running += 1
        self._running[branch.key, request.request_id] = None
        self._idle.pop(branch.key, None)
        surplus = len(branch.requests) - branch.running - self._remembered_requests
        if surplus > 0:
            finished = (known for known, entry in branch.requests.items() if entry.done)
            for request_id in list(islice(finished, surplus)):
                del branch.requests[request_id]

    def hear(self, now_s: float, branch: Branch, request: Request) -> None:
        """An event of a request, which is an event of its branch."""
        request.last_event_s = now_s
        if not request.done:
            at = (branch.key, request.request_id)
            del self._running[at]
            self._running[at] = None
        self.touch(now_s, branch)

    def finish(self, now_s: float, branch: Branch, request: Request) -> None:
        """A running request is over."""
        assert not request.done
        request.done = True
        branch.running -= 1
        del self._running[branch.key, request.request_id]
        self.touch(now_s, branch)

    def oldest_idle(self) -> Branch | None:
        """The branch idle for longest."""
        key = next(iter(self._idle), None)
        return None if key is None else self.live[key]

    def most_silent(self) -> tuple[Branch, Request] | None:
        """The running request not heard of for longest."""
        at = next(iter(self._running), None)
        if at is None:
            return None
        branch = self.live[at[0]]
        return branch, branch.requests[at[1]]

    def oldest_tombstone(self) -> tuple[BranchKey, Tombstone] | None:
        """The branch that ended first."""
        return next(iter(self.tombstones.items()), None)

    def restore(self, families: Iterable[tuple[BranchKey, list[BranchKey]]]) -> None:
        """Complete a table whose `live` and `tombstones` were filled from a snapshot."""
        self.lineage.restore(self.live, families)
        idle = [each for each in self.live.values() if not each.running and not self.lineage.has_descendants(each.key)]
        self._idle = {branch.key: None for branch in sorted(idle, key=lambda branch: branch.last_event_s)}
        running = [
            (request.last_event_s, (key, request.request_id))
            for key, branch in self.live.items()
            for request in branch.requests.values()
            if not request.done
        ]
        self._running = {at: None for _, at in sorted(running, key=lambda each: each[0])}

    def check_invariants(self) -> None:
        """Assert that queues, counters and lineage agree with the branches."""
        self.lineage.check_invariants(self.live)
        assert not self.live.keys() & self.tombstones.keys()
        running = 0
        for key, branch in self.live.items():
            assert key == branch.key
            active = [request for request in branch.requests.values() if not request.done]
            assert branch.running == len(active), key
            assert all((key, request.request_id) in self._running for request in active), key
            running += len(active)
            idle = not active and not self.lineage.has_descendants(key)
            assert idle == (key in self._idle), key
            assert 0 <= branch.prompt_blocks <= branch.blocks, key
            assert (branch.tip is None) == (branch.blocks == 0), key
            if branch.tip is not None:
                assert branch.tip.size, key
                assert branch.tip.start + branch.tip.size == branch.blocks, key
            for request in branch.requests.values():
                assert 0 <= request.valid_blocks <= branch.blocks, (key, request)
            for homes in branch.homes.values():
                homes.check_invariants(branch.blocks)
        assert running == len(self._running)
        assert self._idle.keys() <= self.live.keys()
        for times in (
            [self.live[key].last_event_s for key in self._idle],
            [self.live[key].requests[request_id].last_event_s for key, request_id in self._running],
            [tombstone.ended_s for tombstone in self.tombstones.values()],
        ):
            assert times == sorted(times)
