"""`evolvectl split` and `evolvectl decisions`: what the planner decided, and an operator's will."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence

from evolving.v1 import common_pb2, planner_pb2
from evolving_client.ctl import output
from evolving_client.ctl.cluster import Cluster
from evolving_client.ctl.evaluation import print_evaluation, print_models
from evolving_client.ctl.failure import usage
from evolving_client.ctl.plain import word

_ROLES = {
    "prefill": common_pb2.ROLE_PREFILL,
    "decode": common_pb2.ROLE_DECODE,
    "mixed": common_pb2.ROLE_MIXED,
    "draining": common_pb2.ROLE_DRAINING,
}
_HOW_TO_RELEASE = "evolvectl plan release ends it"
# The mode says whether the planner moves nodes; an operator's word does not change it.
NOT_HELD = "not held: in mode auto the planner may change it from the next window on"
_PAGE, _PAGE_WITH_EVALUATIONS = 1000, 20


def parse_shape(text: str) -> planner_pb2.SplitShape | None:
    """The shape that `5P4D` names; None for anything else."""
    shape = re.fullmatch(r"(\d{1,6})P(\d{1,6})D", text, flags=re.IGNORECASE | re.ASCII)
    return planner_pb2.SplitShape(prefill_nodes=int(shape[1]), decode_nodes=int(shape[2])) if shape else None


def parse_proposal(words: Sequence[str]) -> planner_pb2.ProposeSplitRequest:
    """`2P1D`, or `node=role` pairs. Raises Failure for anything else."""
    request = planner_pb2.ProposeSplitRequest()
    shape = parse_shape(words[0])
    if shape is not None:
        if len(words) > 1:
            raise usage("give one shape such as 2P1D, or node=role pairs")
        request.shape.CopyFrom(shape)
        return request
    for pair in words:
        node_id, equals, name = pair.partition("=")
        role = _ROLES.get(name.lower())
        if not node_id or not equals or role is None:
            raise usage(f"{pair!r} is neither a shape such as 2P1D nor node=role with a role of {', '.join(_ROLES)}")
        if node_id in request.changes.roles:
            raise usage(f"{node_id} is given two roles")
        request.changes.roles[node_id] = role
    return request


async def read_split(cluster: Cluster) -> planner_pb2.GetSplitResponse:
    """The split in force."""
    return await cluster.call("planner", "GetSplit", planner_pb2.GetSplitRequest(), planner_pb2.GetSplitResponse)


async def propose_split(cluster: Cluster, request: planner_pb2.ProposeSplitRequest) -> planner_pb2.Split:
    """Set the split. Returns what is in force then."""
    answer = await cluster.call("planner", "ProposeSplit", request, planner_pb2.ProposeSplitResponse)
    return answer.split


async def read_decisions(
    cluster: Cluster,
    limit: int,
    *,
    with_evaluations: bool = False,
    stop: Callable[[planner_pb2.Decision], bool] = lambda _: False,
) -> list[planner_pb2.Decision]:
    """The newest decisions, at most `limit`, newest first; no more pages than up to one that `stop` is true of."""
    decisions: list[planner_pb2.Decision] = []
    page = _PAGE_WITH_EVALUATIONS if with_evaluations else _PAGE
    token = ""
    while len(decisions) < limit:
        request = planner_pb2.ListDecisionsRequest(
            page_size=min(page, limit - len(decisions)), page_token=token, with_evaluations=with_evaluations
        )
        answer = await cluster.call("planner", "ListDecisions", request, planner_pb2.ListDecisionsResponse)
        decisions.extend(answer.decisions)
        token = answer.next_page_token
        if not token or any(map(stop, answer.decisions)):
            break
    return decisions[:limit]


def print_split(answer: planner_pb2.GetSplitResponse) -> None:
    """The split's line, then each node: live ones with their effective role, then assigned ones that are gone."""
    print_split_line(answer.split)
    print_mode(answer)
    live = {node.node_id for node in answer.nodes}
    rows = [[node.node_id, word(common_pb2.Role, node.role), "live", node.address] for node in answer.nodes]
    gone = sorted(set(answer.split.roles) - live)
    rows += [[node_id, word(common_pb2.Role, answer.split.roles[node_id]), "gone", "-"] for node_id in gone]
    output.print_table(["node", "role", "state", "address"], rows)


def print_split_line(split: planner_pb2.Split) -> None:
    """The split in a line."""
    shape = output.shape_of(_words(split.roles).values())
    written = output.moment(split.written_at_s)
    because = f" · {split.reason}" if split.reason else ""
    output.print_line(f"split {shape} · epoch {split.epoch} · by {split.author or '-'} at {written}{because}")


def print_mode(answer: planner_pb2.GetSplitResponse) -> None:
    """Who leads, what becomes of its decisions, and who holds the split."""
    output.print_line(f"leader: {answer.leader_address or 'none'} · mode {answer.mode or 'unknown'}")
    output.print_line(hold_line(answer.hold if answer.HasField("hold") else None))


def hold_line(hold: planner_pb2.Hold | None) -> str:
    """Who holds the split until when, and how to end that; "not held"."""
    if hold is None:
        return "not held"
    left = f"for another {output.duration(max(0.0, hold.until_s - time.time()))}, until {output.moment(hold.until_s)}"
    because = f" · {hold.reason}" if hold.reason else ""
    return f"held by {hold.author or '-'} {left if hold.until_s else 'until released'}{because} · {_HOW_TO_RELEASE}"


def print_set(after: planner_pb2.Split, *, hold_s: float, no_hold: bool) -> None:
    """What is in force after an operator's word, and for how long."""
    print_split_line(after)
    if no_hold:
        output.print_line(NOT_HELD)
    else:
        length = f"for {output.duration(hold_s)}" if hold_s else "until released"
        output.print_line(f"held {length} · {_HOW_TO_RELEASE}")


def print_evaluations(decisions: Sequence[planner_pb2.Decision]) -> None:
    """Each decision with what it was made from."""
    for decision in decisions:
        print_decisions([decision])
        if decision.HasField("evaluation"):
            print_evaluation(decision.evaluation)
            if decision.evaluation.models:
                print_models(decision.evaluation.models, decision.decided_at_s)
        output.print_line("")


def print_decisions(decisions: Sequence[planner_pb2.Decision]) -> None:
    """One row a decision."""
    output.print_table(
        ["when", "kind", "by", "epoch", "changes", "held until", "reason"],
        [
            [
                output.moment(decision.decided_at_s),
                decision.kind,
                decision.author or "-",
                f"{decision.epoch_before}→{decision.epoch_after}"
                if decision.epoch_after != decision.epoch_before
                else str(decision.epoch_before),
                _changes(_words(decision.roles_before), _words(decision.roles_after)) or "-",
                _held_until(decision),
                decision.reason,
            ]
            for decision in decisions
        ],
    )


def _held_until(decision: planner_pb2.Decision) -> str:
    """By the hold in force from then on; "-" of none."""
    if not decision.HasField("hold"):
        return "-"
    return output.moment(decision.hold.until_s) if decision.hold.until_s else "released"


def _words(roles: Mapping[str, int]) -> dict[str, str]:
    return {node_id: word(common_pb2.Role, role) for node_id, role in roles.items()}


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    return ", ".join(
        f"{node_id} {before.get(node_id, '-')}→{after.get(node_id, '-')}"
        for node_id in sorted({*before, *after})
        if before.get(node_id) != after.get(node_id)
    )
