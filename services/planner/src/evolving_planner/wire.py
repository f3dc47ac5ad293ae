"""The planner's types on the wire."""

from __future__ import annotations

from collections.abc import Mapping

from evolving.core.config import PlannerConfig
from evolving.core.modes import Hold
from evolving.core.planner import Split
from evolving.core.replan import Candidate, Evaluation
from evolving.core.slices import Slice
from evolving.core.terms import Role
from evolving.core.throughput import NodeModel
from evolving.runtime.errors import InvalidRequest
from evolving.v1 import common_pb2, planner_pb2
from evolving_planner.history import Kept
from evolving_planner.measures import Missing


def role_to_proto(role: Role) -> common_pb2.Role.ValueType:
    """The same number."""
    return common_pb2.Role.ValueType(role.value)


def roles_to_proto(roles: Mapping[str, Role]) -> dict[str, common_pb2.Role.ValueType]:
    """Node id to role, as messages hold it."""
    return {node: role_to_proto(role) for node, role in sorted(roles.items())}


def roles_from_proto(roles: Mapping[str, int]) -> dict[str, Role]:
    """Raises InvalidRequest for a role that is none."""
    found = {}
    for node, value in roles.items():
        if value not in set(Role):
            raise InvalidRequest(f"node {node!r}: no role has the number {value}")
        found[node] = Role(value)
    return found


def split_to_proto(split: Split) -> planner_pb2.Split:
    """The split as operators read it."""
    return planner_pb2.Split(
        epoch=split.epoch,
        roles=roles_to_proto(split.roles),
        reason=split.reason,
        author=split.author,
        written_at_s=split.written_at_s,
    )


def hold_to_proto(hold: Hold | None) -> planner_pb2.Hold | None:
    """A hold as operators read it."""
    if hold is None:
        return None
    return planner_pb2.Hold(author=hold.author, reason=hold.reason, until_s=hold.until_s or 0.0)


def decision_to_proto(kept: Kept, *, with_evaluation: bool) -> planner_pb2.Decision:
    """A decision as operators read it."""
    decision = kept.decision
    found = planner_pb2.Decision(
        decided_at_s=decision.decided_at_s,
        kind=decision.kind.value,
        reason=decision.reason,
        epoch_before=decision.epoch_before,
        epoch_after=decision.epoch_after,
        roles_before=roles_to_proto(decision.roles_before),
        roles_after=roles_to_proto(decision.roles_after),
        author=decision.author,
        hold=hold_to_proto(decision.hold),
    )
    if with_evaluation and decision.evaluation is not None:
        found.evaluation.CopyFrom(evaluation_to_proto(decision.evaluation, kept.missing))
    return found


def evaluation_to_proto(evaluation: Evaluation, missing: Missing | None) -> planner_pb2.Evaluation:
    """An evaluation and all it was computed from; `missing` None: not known."""
    end_s = evaluation.slices[-1].ended_s if evaluation.slices else 0.0
    return planner_pb2.Evaluation(
        roles=roles_to_proto(evaluation.roles),
        slices=[_slice_to_proto(measured, end_s) for measured in evaluation.slices],
        counted_slices=evaluation.counted,
        earlier_slices=[_slice_to_proto(measured, end_s) for measured in evaluation.earlier],
        counted_earlier_slices=evaluation.counted_earlier,
        candidates=[candidate_to_proto(candidate) for candidate in evaluation.candidates],
        problem=evaluation.problem,
        models=[_model_to_proto(node, model) for node, model in sorted(evaluation.models.items())],
        missing=_missing_to_proto(missing) if missing is not None else None,
        gate=_gate_to_proto(evaluation.config),
    )


def candidate_to_proto(candidate: Candidate) -> planner_pb2.Candidate:
    """One split the nodes could have."""
    return planner_pb2.Candidate(
        shape=planner_pb2.SplitShape(prefill_nodes=candidate.shape.prefill, decode_nodes=candidate.shape.decode),
        moves=roles_to_proto(candidate.moves),
        prefill_per_s=candidate.prefill,
        decode_per_s=candidate.decode,
        throughput_per_s=candidate.throughput,
        mean_gain=candidate.mean_gain,
        error=candidate.error,
        passes=candidate.passes,
    )


def _slice_to_proto(measured: Slice, end_s: float) -> planner_pb2.Slice:
    work = measured.work
    return planner_pb2.Slice(
        from_age_s=end_s - measured.started_s,
        to_age_s=end_s - measured.ended_s,
        completions=measured.completions,
        without_prefill=measured.without_prefill,
        open_requests=measured.open_requests,
        work=planner_pb2.MeanWork(
            uncached_tokens=work.uncached_tokens,
            query_key_pairs=work.query_key_pairs,
            cached_tokens=work.cached_tokens,
            restored_tokens=work.restored_tokens,
            decode_iterations=work.decode_iterations,
            context_tokens=work.context_tokens,
        )
        if work is not None
        else None,
    )


def _model_to_proto(node_id: str, model: NodeModel) -> planner_pb2.NodeModel:
    """What predictions used of a node; how it came to be known is not kept with a decision."""
    prefill, decode = model.prefill, model.decode
    return planner_pb2.NodeModel(
        node_id=node_id,
        prefill_coefficients_s=[prefill.c0_s, prefill.c1_s, prefill.c2_s, prefill.c3_s, prefill.c4_s],
        decode_coefficients_s=[decode.d0_s, decode.d1_s, decode.d2_s, decode.d3_s],
        new_tokens_per_iteration=model.new_tokens_per_iteration,
    )


def _missing_to_proto(missing: Missing) -> planner_pb2.Missing:
    return planner_pb2.Missing(
        late_samples=missing.late_samples,
        lost_requests=missing.lost_requests,
        lost_reports=missing.lost_reports,
        dropped_samples=missing.dropped_samples,
        unreported_s=missing.unreported_s,
    )


def _gate_to_proto(config: PlannerConfig) -> planner_pb2.Gate:
    return planner_pb2.Gate(
        name=config.gate.value,
        window_s=config.window_s,
        slices=config.slices,
        slices_valid_least=config.slices_valid_least,
        slice_completions_least=config.slice_completions_least,
        gain_floor=config.gain_floor,
        cooldown_s=config.cooldown_s,
        evidence_windows=config.evidence_windows,
    )
