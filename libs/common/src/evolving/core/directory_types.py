"""What goes into the directory and what comes out of it: events, answers, effects and views.

Block names are 16 bytes; several names travel as one `bytes` of 16 per block, in context order ("names"). Depths and
lengths count blocks. Times are seconds of the caller's clock.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from evolving.core.terms import Phase, Tier

# ---------------------------------------------------------------------------------------------- what comes in: branches


@dataclass(frozen=True, slots=True)
class Begin:
    """A request of a branch starts; its context is the first `base_blocks` blocks of a context known here, then
    `new_names`.

    The base is looked for in the branch's own context (output included), then in the parent's, then in the index.
    Keyed by (tenant, branch_id, request_id).
    """

    tenant: str
    branch_id: str
    request_id: str
    version: int = 0  # 0: the current one, or 1 for a new branch
    parent_branch_id: str = ""  # "": a root. Looked at only when the branch is new
    base_blocks: int = 0
    base_name: bytes = b""  # name of block base_blocks - 1; empty when base_blocks is 0
    new_names: bytes = b""
    end_after: bool = False  # end the branch once this request is done
    body_digest: bytes = b""  # of the whole request, to tell another body under the same id; b"": not compared


@dataclass(frozen=True, slots=True)
class Landed:
    """KV of a branch's context is really on a node now, for a phase (§4.1, "KV movement").

    The run is blocks [first_block, first_block + blocks) of the request's own context: prompt, then its output.
    """

    tenant: str
    branch_id: str
    request_id: str
    version: int
    phase: Phase
    node_id: str
    blocks: int
    first_block: int = 0


@dataclass(frozen=True, slots=True)
class Output:
    """A decode node completed blocks of output: they join the context provisionally and have their DECODE home there.

    `names` are consecutive and the first has depth `first_block`; blocks already known are checked and skipped.
    """

    tenant: str
    branch_id: str
    request_id: str
    version: int
    node_id: str
    first_block: int
    names: bytes


# ------------------------------------------------------------------------------------------------- what comes in: nodes


class RunRef(NamedTuple):
    """Consecutive blocks of one context, named so that they can be found.

    names[0] has depth `first_block`, a multiple of 16. The blocks after the first `skip` are meant; the ones before
    only say where. Unless the run starts a context, skip is at least 1 (the block before the first one meant is
    named), so first_block is the last multiple of 16 before the first block meant.
    """

    first_block: int
    names: bytes
    skip: int = 0


class Stored(NamedTuple):
    """Blocks became present in a tier of the node."""

    tier: Tier
    run: RunRef


class Removed(NamedTuple):
    """Blocks left a tier of the node."""

    tier: Tier
    run: RunRef


@dataclass(frozen=True, slots=True)
class Cleared:
    """A tier of the node is empty."""

    tier: Tier


NodeEvent = Stored | Removed | Cleared


# ------------------------------------------------------------------------------------------------------ what comes out


class BeginKind(enum.StrEnum):
    """What a Begin was taken for."""

    NEW = "new"  # first request of a branch (or of one its idle limit had ended)
    EXTEND = "extend"  # same version, the last prompt is a prefix
    REWRITE = "rewrite"  # a higher version, or the same one with another context while nothing of it runs
    SIDE = "side"  # same version, another context, while a request of it runs: served, context unchanged
    REPLAY = "replay"  # the request is known: nothing changed, the stored version, a fresh match


class Loss(enum.StrEnum):
    """Why copies are gone that a branch counted."""

    NONE = ""  # they aren't, or were evicted
    SWITCH = "switch"  # their node turned from decode to prefill and was emptied
    NODE = "node"  # their node is gone


class NodeDepth(NamedTuple):
    """Leading blocks of a context that a node holds: in L1, in L2, and in either."""

    l1_blocks: int = 0
    l2_blocks: int = 0
    either_blocks: int = 0


class HolderRun(NamedTuple):
    """Blocks [first_block, first_block + blocks) of a context are all held by each of these nodes."""

    first_block: int
    blocks: int
    l1_nodes: tuple[str, ...]
    l2_nodes: tuple[str, ...]  # whom peers can read the run from


Stretch = tuple[int, int, int]
"""(first block, L1 mask, L2 mask): from this block on, these nodes hold a context. Bit i: slot i of the match."""


class Match(NamedTuple):
    """Where the blocks of a context are, right now."""

    blocks: int = 0  # of the whole context asked for
    pool_blocks: int = 0  # longest prefix each block of which some node holds in L2: what a fetch can bring
    any_blocks: int = 0  # longest prefix each block of which some node holds in some tier
    nodes: Mapping[str, NodeDepth] = MappingProxyType({})  # nodes that hold block 0, by node id
    # Unpacked by `holders`, for few ask and a long context has many: stretches, the last of them nobody's; their nodes.
    stretches: Sequence[Stretch] = ()
    slots: tuple[str | None, ...] = ()

    @property
    def holders(self) -> tuple[HolderRun, ...]:
        """Who holds which blocks: gapless runs from block 0 to the last block any node holds; one held by nobody has no
        nodes."""
        runs: list[HolderRun] = []
        nodes: dict[int, tuple[str, ...]] = {}
        end = 0
        for first_block, l1, l2 in reversed(self.stretches):
            for mask in (l1, l2):
                if mask not in nodes:
                    nodes[mask] = self._nodes(mask)
            l1_nodes, l2_nodes = nodes[l1], nodes[l2]
            if runs and runs[-1].l1_nodes == l1_nodes and runs[-1].l2_nodes == l2_nodes:
                end += runs.pop().blocks
            if runs or l1_nodes or l2_nodes:
                runs.append(HolderRun(first_block, end - first_block, l1_nodes, l2_nodes))
            end = first_block
        return tuple(reversed(runs))

    def _nodes(self, mask: int) -> tuple[str, ...]:
        return tuple(node for slot, node in enumerate(self.slots) if node is not None and mask >> slot & 1)


class BeginAnswer(NamedTuple):
    """What a Begin did, and where the request's context is."""

    version: int
    kind: BeginKind
    prompt_blocks: int  # full blocks of the request's prompt
    match: Match
    loss: Loss = Loss.NONE  # since the last request that set the branch's context


class CountUpdate(NamedTuple):
    """The branch count of these blocks on this node is now `count`. 0 also says that the node lost the copy."""

    node_id: str
    names: bytes
    count: int  # type: ignore[assignment]  # instead of tuple.count
    elsewhere: bool  # another node has them in L2, so the pool keeps them whatever this one does
    reason: str


@dataclass(frozen=True, slots=True)
class CountsComplete:
    """After this node's resync, all its counts were sent: one it has and didn't hear of is 0."""

    node_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class NeedResync:
    """The node's events can't be followed any more; ask it for everything it holds. Sent once until the resync ends."""

    node_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class FreeL1:
    """The node became a prefill node: it frees L1 pages no running request needs; L2 stays."""

    node_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class ClearMemory:
    """The node became a prefill node under the paper's plain rule (§4.1): it empties both tiers, and tells what left
    them as it always does."""

    node_id: str
    reason: str


class EndedBranch(NamedTuple):
    """The branch is over and counts nothing. expired: its idle limit ended it, and its id may come back."""

    tenant: str
    branch_id: str
    expired: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Ignored:
    """An event changed nothing: it came twice, too late, or out of place. kind: a stable word, for a metric."""

    kind: str
    reason: str


Effect = CountUpdate | CountsComplete | NeedResync | FreeL1 | ClearMemory | EndedBranch | Ignored


# --------------------------------------------------------------------------------------------------------------- views


class BranchState(enum.StrEnum):
    """Whether a branch can be used."""

    LIVE = "live"
    ENDED = "ended"  # by its harness: refused
    EXPIRED = "expired"  # by its idle limit: the next request revives it


@dataclass(frozen=True, slots=True)
class Home:
    """A stretch of a branch's context and the node whose copy the branch counts in this phase."""

    phase: Phase
    node_id: str
    first_block: int
    blocks: int


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """How needed the blocks of a context are, by their counts summed over nodes."""

    held_blocks: int = 0  # counted by at least one branch, in any phase
    shared_blocks: int = 0  # PREFILL counts sum to 2 or more
    zero_blocks: int = 0  # kept somewhere, count 0: evicted first


@dataclass(frozen=True, slots=True)
class BranchView:
    """One branch. Of an ended one only the identity, version, parent, state and idle time are known."""

    tenant: str
    branch_id: str
    version: int
    parent_branch_id: str
    state: BranchState
    prompt_blocks: int = 0
    output_blocks: int = 0  # provisional
    idle_s: float = 0.0  # since its last event, or since it ended
    running_requests: int = 0
    homes: tuple[Home, ...] = ()  # PREFILL first, each in context order
    counts: BlockCounts = BlockCounts()
    unannounced_rewrites: int = 0  # context rewritten without a new version
    child_branch_ids: tuple[str, ...] = ()  # live ones


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A block's copy on one node, and how many branches count it there."""

    node_id: str
    in_l1: bool
    in_l2: bool
    prefill_count: int
    decode_count: int


@dataclass(frozen=True, slots=True)
class BlockView:
    """One block. branches: (tenant, branch id) of live branches with it in their context, at most the configured
    number of them."""

    name: bytes
    depth: int  # blocks before it in its context
    copies: tuple[BlockCopy, ...]
    branches: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class NodeStats:
    """One node as the directory sees it."""

    node_id: str
    incarnation: str
    l1_blocks: int
    l2_blocks: int
    held_blocks: int  # copies with a count above 0; their sum over nodes is the active working set (§2.3)
    last_event_sequence: int
    resyncing: bool


@dataclass(frozen=True, slots=True)
class Stats:
    """Sizes and counters since start."""

    live_branches: int
    tombstones: int
    blocks: int
    runs: int
    nodes: tuple[NodeStats, ...]
    counters: Mapping[str, int]  # begins, side_requests, unannounced_rewrites, unknown_parents, revived, resyncs, …
    ignored_events: Mapping[str, int]  # by Ignored.kind


@dataclass(frozen=True, slots=True)
class AuditMismatch:
    """A block on a node whose counts differ, or that the node takes for one the pool has elsewhere, or has not, and is
    wrong."""

    node_id: str
    name: bytes
    incremental: int
    recounted: int
    node: int | None  # the count the node evicts by; None: it was not asked
    elsewhere: bool | None  # another node has it in L2; None: that can't be said
    node_elsewhere: bool | None  # so the node believes; None: it counts nothing there, or was not asked


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The counts kept incrementally, those recounted from the branch table and what nodes evict by, compared: their
    counts, and whether they believe that another node has the block in L2."""

    compared: int  # pairs of node and block with a nonzero count in any of the three
    mismatch_count: int
    mismatches: tuple[AuditMismatch, ...]  # at most the configured number of them
    nonzero_after_end: int  # pairs with a nonzero count that no live branch counts
