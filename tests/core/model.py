"""A naive model of the directory: the rules of §4.1 of arXiv 2611.12304 with nothing but lists, sets and dicts.

Slow and obviously right is the point. A branch's context is a list of names, its home in a phase is a dict from name
to node, a node's copies in a tier are a set of names. Every count is computed anew from these each time it is asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from evolving.core.config import DecodeToPrefill, DirectoryConfig
from evolving.core.directory_types import Begin, BeginKind, BranchState, Landed, Loss, Output
from evolving.core.terms import Phase, Role, Tier

Name = bytes
Key = tuple[str, str]


def split_names(names: bytes) -> list[Name]:
    """The single names of 16 bytes in a row of them."""
    return [names[at : at + 16] for at in range(0, len(names), 16)]


def common_prefix(left: Sequence[Name], right: Sequence[Name]) -> list[Name]:
    """The longest list both start with."""
    shared = []
    for mine, theirs in zip(left, right, strict=False):
        if mine != theirs:
            break
        shared.append(mine)
    return shared


@dataclass
class ModelRequest:
    """A request of a branch: what it was, and what it still has in common with its branch."""

    version: int
    prompt: list[Name]
    side: bool
    end_after: bool
    body_digest: bytes
    heard_s: float
    running: bool = True
    # The part of its own context (prompt, then output) that has been its branch's context ever since it began.
    still: list[Name] = field(default_factory=list)
    losses: set[Loss] = field(default_factory=set)  # of its branch, until it set the context


@dataclass
class ModelBranch:
    """A branch of any state; of one that is over only identity, version and the time of its end matter."""

    key: Key
    version: int
    parent_branch_id: str
    heard_s: float  # last event of a live branch, or when it ended
    state: BranchState = BranchState.LIVE
    context: list[Name] = field(default_factory=list)
    prompt: list[Name] = field(default_factory=list)
    homes: dict[Phase, dict[Name, str]] = field(default_factory=lambda: {phase: {} for phase in Phase})
    requests: dict[str, ModelRequest] = field(default_factory=dict)  # oldest first
    context_request_id: str = ""
    unannounced_rewrites: int = 0
    losses: set[Loss] = field(default_factory=set)  # why homes of it went since its context was last set

    def running(self) -> list[str]:
        """Ids of running requests."""
        return [request_id for request_id, request in self.requests.items() if request.running]


@dataclass
class ModelNode:
    """What a node said it holds, and how far its events were followed."""

    incarnation: str
    held: dict[Tier, set[Name]] = field(default_factory=lambda: {tier: set() for tier in Tier})
    sequence: int = 0
    lost: bool = False  # asked for a resync that has not ended
    in_snapshot: bool = False

    def holds(self, name: Name) -> bool:
        """In any tier."""
        return name in self.held[Tier.L1] or name in self.held[Tier.L2]

    def names(self) -> set[Name]:
        """All it holds."""
        return self.held[Tier.L1] | self.held[Tier.L2]


class Model:
    """The rules, applied literally. Methods mirror `evolving.core.directory.Directory`; what is refused there with a
    typed error is asked first here (`refusal`), so that each method changes state only when the event is taken."""

    def __init__(self, config: DirectoryConfig) -> None:
        self.config = config
        self.branches: dict[Key, ModelBranch] = {}
        self.lineage: dict[Key, Key] = {}  # child -> parent, for branches whose parent was live when they began
        self.nodes: dict[str, ModelNode] = {}
        self.counters: Counter[str] = Counter()

    # ------------------------------------------------------------------------------------------------------- branches

    def live(self, tenant: str, branch_id: str) -> ModelBranch | None:
        """The branch, when it is live."""
        branch = self.branches.get((tenant, branch_id))
        return branch if branch is not None and branch.state is BranchState.LIVE else None

    def live_branches(self) -> list[ModelBranch]:
        """All of them."""
        return [branch for branch in self.branches.values() if branch.state is BranchState.LIVE]

    def ancestors(self, key: Key) -> list[Key]:
        """Parent, grandparent and so on; ended ones are links too."""
        found = []
        at = self.lineage.get(key)
        while at is not None:
            found.append(at)
            at = self.lineage.get(at)
        return found

    def live_descendants(self, key: Key) -> set[Key]:
        """Live branches below a branch."""
        return {branch.key for branch in self.live_branches() if key in self.ancestors(branch.key)}

    def refusal(self, event: Begin, prompt: list[Name]) -> str | None:
        """Code of the error a Begin must meet, or None."""
        branch = self.branches.get((event.tenant, event.branch_id))
        if branch is not None and branch.state is BranchState.ENDED:
            return "BRANCH_ENDED"
        if branch is None or branch.state is BranchState.EXPIRED:
            return None
        known = branch.requests.get(event.request_id)
        if known is not None:
            same_body = (
                known.prompt == prompt
                and event.version in (0, known.version)
                and event.end_after == known.end_after
                and (b"" in (known.body_digest, event.body_digest) or known.body_digest == event.body_digest)
            )
            return None if same_body else "REQUEST_CONFLICT"
        return "STALE_VERSION" if 0 < event.version < branch.version else None

    def begin(self, now_s: float, event: Begin, prompt: list[Name]) -> tuple[int, BeginKind]:
        """Take a Begin that nothing refuses; `prompt` is its whole context."""
        branch = self.live(event.tenant, event.branch_id)
        if branch is None:
            kind, branch = BeginKind.NEW, self._new_branch(now_s, event)
        elif event.request_id in branch.requests:
            request = branch.requests[event.request_id]
            request.heard_s = branch.heard_s = now_s
            return request.version, BeginKind.REPLAY
        elif event.version > branch.version:
            kind, branch.version = BeginKind.REWRITE, event.version
        elif prompt[: len(branch.prompt)] == branch.prompt:
            kind = BeginKind.EXTEND
        elif any(branch.requests[other].version == branch.version for other in branch.running()):
            kind = BeginKind.SIDE
            self.counters["side_requests"] += 1
        else:
            kind = BeginKind.REWRITE
            branch.unannounced_rewrites += 1
            self.counters["unannounced_rewrites"] += 1
        self.counters["begins"] += 1
        side = kind is BeginKind.SIDE
        request = ModelRequest(branch.version, prompt, side, event.end_after, event.body_digest, now_s)
        if not side:
            branch.prompt = list(prompt)
            branch.context_request_id = event.request_id
            self._set_context(branch, prompt)
            request.still = list(prompt)
            request.losses, branch.losses = branch.losses, set()
        branch.requests[event.request_id] = request
        branch.heard_s = now_s
        self._forget_requests(branch)
        return branch.version, kind

    def rematch(self, now_s: float, event: Begin) -> None:
        """A running request lost its node: nothing changes, but that it was heard of."""
        branch = self.live(event.tenant, event.branch_id)
        request = branch.requests.get(event.request_id) if branch is not None else None
        if branch is not None and request is not None:
            request.heard_s = branch.heard_s = now_s

    def _new_branch(self, now_s: float, event: Begin) -> ModelBranch:
        key = (event.tenant, event.branch_id)
        if key in self.branches:
            assert self.branches[key].state is BranchState.EXPIRED
            self.counters["revived"] += 1
        branch = self.branches[key] = ModelBranch(key, max(event.version, 1), event.parent_branch_id, now_s)
        self.lineage.pop(key, None)
        if event.parent_branch_id:
            parent = (event.tenant, event.parent_branch_id)
            if parent == key or self.live(*parent) is None:
                self.counters["unknown_parents"] += 1
            elif key not in self.ancestors(parent):  # nobody descends from himself
                self.lineage[key] = parent
        return branch

    def _set_context(self, branch: ModelBranch, context: Sequence[Name]) -> None:
        """Blocks that stay keep their homes, dropped ones lose them, new ones have none yet."""
        branch.context = list(context)
        for homes in branch.homes.values():
            for name in set(homes) - set(context):
                del homes[name]
        for request in branch.requests.values():
            request.still = common_prefix(request.still, context)

    def _forget_requests(self, branch: ModelBranch) -> None:
        done = [request_id for request_id, request in branch.requests.items() if not request.running]
        for request_id in done[: max(0, len(done) - self.config.remembered_requests)]:
            del branch.requests[request_id]

    def _current(self, tenant: str, branch_id: str, request_id: str, version: int) -> ModelRequest | None:
        """The request whose news still concerns its branch: both known and live, the version the current one."""
        branch = self.live(tenant, branch_id)
        request = branch.requests.get(request_id) if branch is not None else None
        if branch is None or request is None or request.side or not version == request.version == branch.version:
            return None
        return request

    def landed(self, now_s: float, event: Landed) -> bool:
        """Set homes; False: ignored. A running request is heard of all the same."""
        branch = self.live(event.tenant, event.branch_id)
        request = self._current(event.tenant, event.branch_id, event.request_id, event.version)
        if branch is None or request is None or event.node_id not in self.nodes:
            return False
        request.heard_s = branch.heard_s = now_s
        run = request.still[event.first_block : event.first_block + event.blocks]
        for name in run:
            branch.homes[event.phase][name] = event.node_id
        return bool(run) or event.blocks == 0

    def output(self, now_s: float, event: Output) -> bool:
        """Append output; False: ignored."""
        branch = self.live(event.tenant, event.branch_id)
        request = self._current(event.tenant, event.branch_id, event.request_id, event.version)
        if branch is None or request is None or event.node_id not in self.nodes:
            return False
        if event.request_id != branch.context_request_id:
            return False
        names = split_names(event.names)
        known = branch.context[event.first_block : event.first_block + len(names)]
        if event.first_block > len(branch.context) or known != names[: len(known)]:
            return False  # a gap, or another text than the one known
        branch.context += names[len(known) :]
        request.still = list(branch.context)
        for name in names:
            branch.homes[Phase.DECODE][name] = event.node_id
        request.heard_s = branch.heard_s = now_s
        return True

    def request_done(self, now_s: float, tenant: str, branch_id: str, request_id: str) -> bool:
        """A request is over; False: ignored."""
        branch = self.live(tenant, branch_id)
        request = branch.requests.get(request_id) if branch is not None else None
        if branch is None or request is None or not request.running:
            return False
        request.running = False
        branch.heard_s = now_s
        if request.end_after:
            self._bury(now_s, branch, BranchState.ENDED)
        return True

    def end(self, now_s: float, tenant: str, branch_ids: Iterable[str], subtree: bool) -> set[Key]:
        """End branches; returns those that were live."""
        ended = set()
        for branch_id in branch_ids:
            key = (tenant, branch_id)
            below = self.live_descendants(key) if subtree else set()
            for each in {key} | below:
                branch = self.live(*each)
                if branch is not None:
                    ended.add(each)
        for each in ended:
            self._bury(now_s, self.branches[each], BranchState.ENDED)
        return ended

    def _bury(self, now_s: float, branch: ModelBranch, state: BranchState) -> None:
        """End a branch. When that frees the nearest live ancestor of its last descendant, it is an event of it."""
        branch.state = state
        branch.heard_s = now_s
        branch.context, branch.prompt, branch.requests = [], [], {}
        branch.homes = {phase: {} for phase in Phase}
        for key in self.ancestors(branch.key):
            ancestor = self.live(*key)
            if ancestor is not None:
                if not self.live_descendants(key):
                    ancestor.heard_s = now_s
                return

    # ----------------------------------------------------------------------------------------------------------- time

    def is_idle(self, branch: ModelBranch) -> bool:
        """No running request, no live descendant."""
        return not branch.running() and not self.live_descendants(branch.key)

    def due_s(self) -> list[float]:
        """Every moment at which time alone changes something."""
        due = []
        for branch in self.branches.values():
            if branch.state is not BranchState.LIVE:
                due.append(branch.heard_s + self.config.tombstone_s)
                continue
            if self.is_idle(branch):
                due.append(branch.heard_s + self.config.idle_ttl_s)
            due += [branch.requests[each].heard_s + self.config.request_ttl_s for each in branch.running()]
        return due

    def tick(self, now_s: float) -> set[Key]:
        """Give up silent requests, expire idle branches, forget tombstones; returns the branches that ended."""
        ended = set()
        for branch in self.live_branches():
            for request_id in branch.running():
                request = branch.requests.get(request_id)
                if request is not None and request.heard_s + self.config.request_ttl_s <= now_s:
                    self.request_done(now_s, *branch.key, request_id)
            if branch.state is not BranchState.LIVE:
                ended.add(branch.key)
        for branch in self.live_branches():
            if self.is_idle(branch) and branch.heard_s + self.config.idle_ttl_s <= now_s:
                self._bury(now_s, branch, BranchState.EXPIRED)
                ended.add(branch.key)
        for key, branch in list(self.branches.items()):
            if branch.state is not BranchState.LIVE and branch.heard_s + self.config.tombstone_s <= now_s:
                del self.branches[key]
        return ended

    # ---------------------------------------------------------------------------------------------------------- nodes

    def node_up(self, node_id: str, incarnation: str, next_sequence: int = 0) -> None:
        """A node appears or restarts: a new incarnation holds nothing; homes stay. next_sequence: of the next batch it
        will send; 0: it doesn't say."""
        node = self.nodes.get(node_id)
        if node is None or node.incarnation != incarnation:
            node = self.nodes[node_id] = ModelNode(incarnation)
        elif node.in_snapshot:  # its stream broke meanwhile
            node.lost, node.in_snapshot = True, False
        if next_sequence not in (0, node.sequence + 1):
            node.lost = True

    def node_gone(self, node_id: str) -> None:
        """Its copies and homes vanish."""
        self.nodes.pop(node_id, None)
        self._lose(node_id, Loss.NODE)

    def _lose(self, node_id: str, loss: Loss) -> None:
        for branch in self.live_branches():
            if any(node_id in homes.values() for homes in branch.homes.values()):
                branch.losses.add(loss)
        for phase in Phase:
            self._drop_homes(node_id, phase)

    def _drop_homes(self, node_id: str, phase: Phase) -> None:
        for branch in self.live_branches():
            homes = branch.homes[phase]
            branch.homes[phase] = {name: home for name, home in homes.items() if home != node_id}

    def restart(self) -> None:
        """The directory starts again from its log: what nodes hold is to be told anew, all else is as it was."""
        for node_id, node in self.nodes.items():
            self.nodes[node_id] = ModelNode(node.incarnation, lost=True)
        self.counters.clear()

    def role_switch(self, node_id: str, old: Role, new: Role) -> bool:
        """§4.1: only DECODE→PREFILL touches anything; False: nothing happened."""
        if (old, new) != (Role.DECODE, Role.PREFILL):
            return False
        node = self.nodes[node_id]
        if self.config.decode_to_prefill is DecodeToPrefill.RESET:
            self._lose(node_id, Loss.SWITCH)
            return True
        for branch in self.live_branches():
            prefill_homes = branch.homes[Phase.PREFILL]
            for name in branch.context:
                if name not in prefill_homes and name in node.held[Tier.L2]:
                    prefill_homes[name] = node_id
        self._drop_homes(node_id, Phase.DECODE)
        return True

    def known_names(self) -> set[Name]:
        """Blocks that are in a live context or held by a node. Their ancestors are known with them."""
        names: set[Name] = set()
        for branch in self.live_branches():
            names.update(branch.context)
        for node in self.nodes.values():
            for held in node.held.values():
                names |= held
        return names

    # --------------------------------------------------------------------------------------------------------- counts

    def counts(self, phase: Phase) -> Counter[tuple[str, Name]]:
        """Branches that have a block in their context, and its home of a phase on a node that holds it: by node and
        block."""
        found: Counter[tuple[str, Name]] = Counter()
        held = {node_id: node.names() for node_id, node in self.nodes.items()}
        for branch in self.live_branches():
            for name in branch.context:
                home = branch.homes[phase].get(name)
                if home is not None and name in held[home]:
                    found[home, name] += 1
        return found

    def holders(self, name: Name, tier: Tier | None = None) -> frozenset[str]:
        """Nodes that hold a block, in one tier or in any."""
        return frozenset(
            node_id
            for node_id, node in self.nodes.items()
            if (node.holds(name) if tier is None else name in node.held[tier])
        )

    def branches_with(self, name: Name) -> set[Key]:
        """Live branches that have a block in their context."""
        return {branch.key for branch in self.live_branches() if name in branch.context}

    def depth(self, context: Sequence[Name], node_id: str, tier: Tier | None) -> int:
        """Leading blocks of a context a node holds, in one tier or in either."""
        for depth, name in enumerate(context):
            if node_id not in self.holders(name, tier):
                return depth
        return len(context)

    def pool_depth(self, context: Sequence[Name], tier: Tier | None) -> int:
        """Leading blocks of a context that some node holds."""
        for depth, name in enumerate(context):
            if not self.holders(name, tier):
                return depth
        return len(context)
