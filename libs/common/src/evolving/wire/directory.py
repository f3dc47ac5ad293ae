"""The directory's events, answers and views: core ↔ protobuf.

`…_from_proto` raise InvalidArgument for what no core type can hold (an unknown tier, a name that is not 16 bytes);
what only the directory's state can tell is left to the core.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from evolving.core import directory_types as core
from evolving.core.errors import InvalidArgument
from evolving.core.terms import NAME_BYTES, Phase, Tier
from evolving.internal.v1 import directory_pb2 as internal_pb2
from evolving.v1 import common_pb2, directory_pb2

LONGEST_ID = 256
"""Characters of a tenant, a branch id or a request id."""

_Change = internal_pb2.KvChange
_BEGIN_KINDS: Mapping[core.BeginKind, internal_pb2.BeginKind.ValueType] = {
    core.BeginKind.NEW: internal_pb2.BEGIN_KIND_NEW,
    core.BeginKind.EXTEND: internal_pb2.BEGIN_KIND_EXTEND,
    core.BeginKind.REWRITE: internal_pb2.BEGIN_KIND_REWRITE,
    core.BeginKind.SIDE: internal_pb2.BEGIN_KIND_SIDE,
    core.BeginKind.REPLAY: internal_pb2.BEGIN_KIND_REPLAY,
}
_BRANCH_STATES: Mapping[core.BranchState, common_pb2.BranchState.ValueType] = {
    core.BranchState.LIVE: common_pb2.BRANCH_STATE_LIVE,
    core.BranchState.ENDED: common_pb2.BRANCH_STATE_ENDED,
    core.BranchState.EXPIRED: common_pb2.BRANCH_STATE_EXPIRED,
}
_LOSSES: Mapping[core.Loss, common_pb2.LossCause.ValueType] = {
    core.Loss.NONE: common_pb2.LOSS_CAUSE_UNSPECIFIED,
    core.Loss.SWITCH: common_pb2.LOSS_CAUSE_SWITCH,
    core.Loss.NODE: common_pb2.LOSS_CAUSE_NODE,
}


# ------------------------------------------------------------------------------------------------------ events, inwards


def begin_from_proto(request: internal_pb2.BeginRequest, tenant: str) -> core.Begin:
    """A Begin of a branch. Raises InvalidArgument."""
    branch = request.branch
    return core.Begin(
        tenant=check_id("tenant", tenant),
        branch_id=check_id("branch_id", branch.branch_id),
        request_id=check_id("request_id", request.request_id),
        version=branch.version,
        parent_branch_id=check_id("parent_branch_id", branch.parent_branch_id, may_be_empty=True),
        base_blocks=request.base_blocks,
        base_name=check_names("base_name", request.base_name),
        new_names=check_names("new_names", request.new_names),
        end_after=branch.end_after,
    )


def landed_from_proto(landed: internal_pb2.Landed, node_id: str) -> core.Landed:
    """What landed on `node_id`. Raises InvalidArgument."""
    return core.Landed(
        tenant=landed.tenant,
        branch_id=landed.branch_id,
        request_id=landed.request_id,
        version=landed.version,
        phase=_phase(landed.phase),
        node_id=node_id,
        blocks=landed.blocks,
    )


def output_from_proto(output: internal_pb2.Output, node_id: str) -> core.Output:
    """Output blocks that `node_id` completed. Raises InvalidArgument."""
    return core.Output(
        tenant=output.tenant,
        branch_id=output.branch_id,
        request_id=output.request_id,
        version=output.version,
        node_id=node_id,
        first_block=output.first_block,
        names=check_names("names", output.names),
    )


def node_events_from_proto(changes: Iterable[internal_pb2.KvChange]) -> list[core.NodeEvent]:
    """Changes of what a node holds, in order. Raises InvalidArgument."""
    return [_node_event(change) for change in changes]


def _node_event(change: internal_pb2.KvChange) -> core.NodeEvent:
    if change.tier not in (common_pb2.TIER_L1, common_pb2.TIER_L2):
        raise InvalidArgument(f"a change names no tier (number {change.tier})")
    tier = Tier(change.tier)
    if change.kind == _Change.KIND_CLEARED:
        return core.Cleared(tier)
    run = core.RunRef(change.first_block, check_names("names", change.names), change.skip)
    if change.kind == _Change.KIND_STORED:
        return core.Stored(tier, run)
    if change.kind == _Change.KIND_REMOVED:
        return core.Removed(tier, run)
    raise InvalidArgument(f"a change has no kind (number {change.kind})")


def check_names(field: str, names: bytes) -> bytes:
    """Names of blocks, 16 bytes each. Raises InvalidArgument."""
    if len(names) % NAME_BYTES:
        raise InvalidArgument(f"{field}: {len(names)} bytes are not names of {NAME_BYTES} bytes each")
    return names


def check_id(field: str, value: str, *, may_be_empty: bool = False) -> str:
    """An id of at most LONGEST_ID characters. Raises InvalidArgument."""
    if not value and not may_be_empty:
        raise InvalidArgument(f"{field} is empty")
    if len(value) > LONGEST_ID:
        raise InvalidArgument(f"{field} is longer than {LONGEST_ID} characters")
    return value


def _phase(value: int) -> Phase:
    if value not in (common_pb2.PHASE_PREFILL, common_pb2.PHASE_DECODE):
        raise InvalidArgument(f"no phase has the number {value}")
    return Phase(value)


# ---------------------------------------------------------------------------------------------------- answers, outwards


def begin_to_proto(answer: core.BeginAnswer, connected: Collection[str]) -> internal_pb2.BeginResponse:
    """The answer to a Begin. `connected`: see `match_to_proto`."""
    return internal_pb2.BeginResponse(
        version=answer.version,
        kind=_BEGIN_KINDS[answer.kind],
        match=match_to_proto(answer.match, connected),
        loss=_LOSSES[answer.loss],
    )


def rematch_to_proto(event: core.Begin, match: core.Match, connected: Collection[str]) -> internal_pb2.BeginResponse:
    """The answer to a Begin that asks for a fresh match only; the version is the caller's own."""
    return internal_pb2.BeginResponse(
        version=event.version, kind=internal_pb2.BEGIN_KIND_REPLAY, match=match_to_proto(match, connected)
    )


def match_to_proto(match: core.Match, connected: Collection[str]) -> internal_pb2.Match:
    """Where leading blocks are. Nodes outside `connected` broke their stream: what they hold is in doubt, so they are
    not named as holders to read from."""
    holders = []
    for run in match.holders:
        node_ids = [node for node in run.l2_nodes if node in connected]
        if node_ids:
            holders.append(internal_pb2.HolderRun(first_block=run.first_block, blocks=run.blocks, node_ids=node_ids))
    return internal_pb2.Match(
        pool_blocks=match.any_blocks,
        nodes=[
            internal_pb2.NodeMatch(
                node_id=node_id,
                l1_blocks=depth.l1_blocks,
                l2_blocks=depth.l2_blocks,
                any_blocks=depth.either_blocks,
            )
            for node_id, depth in match.nodes.items()
        ],
        holders=holders,
    )


# ---------------------------------------------------------------------------------------------------------------- views


def branch_to_proto(view: core.BranchView) -> common_pb2.Branch:
    """A branch as clients and operators read it."""
    return common_pb2.Branch(
        branch_id=view.branch_id,
        tenant=view.tenant,
        version=view.version,
        parent_branch_id=view.parent_branch_id,
        state=_BRANCH_STATES[view.state],
        prompt_blocks=view.prompt_blocks,
        output_blocks=view.output_blocks,
        idle_s=view.idle_s,
        running_requests=view.running_requests,
        homes=[
            common_pb2.Home(
                phase=common_pb2.Phase.ValueType(home.phase),
                node_id=home.node_id,
                first_block=home.first_block,
                blocks=home.blocks,
            )
            for home in view.homes
        ],
        counts=common_pb2.BlockCounts(
            held_blocks=view.counts.held_blocks,
            shared_blocks=view.counts.shared_blocks,
            zero_blocks=view.counts.zero_blocks,
        ),
        unannounced_rewrites=view.unannounced_rewrites,
        child_branch_ids=view.child_branch_ids,
    )


def block_to_proto(view: core.BlockView) -> directory_pb2.GetBlockResponse:
    """A block as operators read it."""
    return directory_pb2.GetBlockResponse(
        copies=[
            directory_pb2.BlockCopy(
                node_id=copy.node_id,
                in_l1=copy.in_l1,
                in_l2=copy.in_l2,
                prefill_count=copy.prefill_count,
                decode_count=copy.decode_count,
            )
            for copy in view.copies
        ],
        branch_ids=[branch_id for _tenant, branch_id in view.branches],
        depth=view.depth,
    )


def stats_to_proto(stats: core.Stats, term: int, connected: Collection[str]) -> directory_pb2.GetStatsResponse:
    """Sizes and counters."""
    counters = stats.counters
    return directory_pb2.GetStatsResponse(
        term=term,
        live_branches=stats.live_branches,
        tombstones=stats.tombstones,
        blocks=stats.blocks,
        runs=stats.runs,
        nodes=[
            directory_pb2.NodeStats(
                node_id=node.node_id,
                incarnation=node.incarnation,
                connected=node.node_id in connected,
                l1_blocks=node.l1_blocks,
                l2_blocks=node.l2_blocks,
                held_blocks=node.held_blocks,
                last_event_sequence=node.last_event_sequence,
            )
            for node in stats.nodes
        ],
        ignored_events=dict(stats.ignored_events),
        begins=counters.get("begins", 0),
        side_requests=counters.get("side_requests", 0),
        unannounced_rewrites=counters.get("unannounced_rewrites", 0),
        unknown_parents=counters.get("unknown_parents", 0),
        resyncs=counters.get("resyncs", 0),
    )


def audit_to_proto(report: core.AuditReport, unreachable: Sequence[str]) -> directory_pb2.AuditResponse:
    """An audit; `unreachable` nodes were not asked or did not answer."""
    return directory_pb2.AuditResponse(
        compared=report.compared,
        mismatch_count=report.mismatch_count,
        mismatches=[
            directory_pb2.AuditMismatch(
                node_id=mismatch.node_id,
                name=mismatch.name,
                incremental=mismatch.incremental,
                recounted=mismatch.recounted,
                node=mismatch.node or 0,
                elsewhere=mismatch.elsewhere,
                node_elsewhere=mismatch.node_elsewhere,
            )
            for mismatch in report.mismatches
        ],
        nonzero_after_end=report.nonzero_after_end,
        unreachable_node_ids=sorted(unreachable),
    )
