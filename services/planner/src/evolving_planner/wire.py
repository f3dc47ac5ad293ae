"""The planner's types on the wire."""

from __future__ import annotations

from collections.abc import Mapping

from evolving.core.planner import Decision, Split
from evolving.core.terms import Role
from evolving.runtime.errors import InvalidRequest
from evolving.runtime.keys import NodeRegistration
from evolving.v1 import common_pb2, planner_pb2


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


def decision_to_proto(decision: Decision) -> planner_pb2.Decision:
    """A decision as operators read it."""
    return planner_pb2.Decision(
        decided_at_s=decision.decided_at_s,
        kind=decision.kind.value,
        reason=decision.reason,
        epoch_before=decision.epoch_before,
        epoch_after=decision.epoch_after,
        roles_before=roles_to_proto(decision.roles_before),
        roles_after=roles_to_proto(decision.roles_after),
    )


def model_to_proto(node: NodeRegistration) -> planner_pb2.NodeModel:
    """The time model a node was configured with."""
    return planner_pb2.NodeModel(
        node_id=node.node_id,
        prefill_coefficients_s=node.prefill_coefficients,
        decode_coefficients_s=node.decode_coefficients,
        source="config",
    )
