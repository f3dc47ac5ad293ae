"""`evolvectl plan`: what the planner measured, what it would do with it, and whether it may."""

from __future__ import annotations

from collections.abc import Sequence

from evolving.v1 import planner_pb2
from evolving_client.ctl import output, split
from evolving_client.ctl.cluster import Cluster
from evolving_client.ctl.evaluation import (
    gain_text,
    moves_text,
    print_evaluation,
    print_gate,
    print_missing,
    print_nothing,
    print_slices,
    shape_text,
)
from evolving_client.ctl.failure import usage
from evolving_client.ctl.plain import Plain, plain

_LOOKED_AT = 100
"""Newest decisions among which the last one by measurement is sought."""


async def read_plan(cluster: Cluster) -> tuple[planner_pb2.GetSplitResponse, planner_pb2.Decision | None]:
    """The split with its mode, and the newest decision that says what it was made from."""
    answer = await split.read_split(cluster)
    decisions = await split.read_decisions(cluster, _LOOKED_AT, with_evaluations=True, stop=_has_evaluation)
    return answer, next((decision for decision in decisions if _has_evaluation(decision)), None)


def _has_evaluation(decision: planner_pb2.Decision) -> bool:
    return decision.HasField("evaluation")


def plan_json(answer: planner_pb2.GetSplitResponse, decision: planner_pb2.Decision | None) -> Plain:
    """The documented form."""
    return {**plain(answer), "decision": plain(decision) if decision is not None else None}


def print_plan(answer: planner_pb2.GetSplitResponse, decision: planner_pb2.Decision | None) -> None:
    """Who decides, then what was decided last by measurement."""
    split.print_split_line(answer.split)
    split.print_mode(answer)
    if decision is None:
        output.print_line("nothing was decided by measurement lately: evolvectl plan what-if shows what there is")
        return
    output.print_line(f"last decision: {decision.kind} at {output.moment(decision.decided_at_s)}: {decision.reason}")
    print_evaluation(decision.evaluation)


async def evaluate(cluster: Cluster, shape: str) -> planner_pb2.EvaluateSplitResponse:
    """What every split would serve, and `shape`, such as "5P4D", in particular; "": none. Raises Failure."""
    request = planner_pb2.EvaluateSplitRequest()
    if shape:
        parsed = split.parse_shape(shape)
        if parsed is None:
            raise usage(f"{shape!r} is no shape: give prefill and decode nodes, such as 5P4D")
        request.shape.CopyFrom(parsed)
    return await cluster.call("planner", "EvaluateSplit", request, planner_pb2.EvaluateSplitResponse)


def print_what_if(answer: planner_pb2.EvaluateSplitResponse, shape: str) -> None:
    """One shape against the present, or all of them."""
    evaluation = answer.evaluation
    if not shape:
        print_evaluation(evaluation)
        return
    if not answer.HasField("candidate"):
        print_nothing(shape.upper(), evaluation)
        print_slices(evaluation)
        print_missing(evaluation.missing)
        return
    asked = answer.candidate
    present = next((candidate for candidate in evaluation.candidates if not candidate.moves), None)
    served = f"{shape_text(asked.shape)} would serve {output.rate(asked.throughput_per_s)} requests/s"
    rates = f"prefill {output.rate(asked.prefill_per_s)}, decode {output.rate(asked.decode_per_s)}"
    if not asked.moves:
        output.print_line(f"{served} ({rates}): it is the present split")
    else:
        output.print_line(f"{served} ({rates})")
        if present is not None:
            now = f"{shape_text(present.shape)}, the present split, {output.rate(present.throughput_per_s)} requests/s"
            output.print_line(f"{now}: gain {gain_text(asked)}; it {_judged(asked)}")
        output.print_line(f"moves: {moves_text(asked.moves)}")
    if evaluation.problem:
        output.print_line(f"nothing may move: {evaluation.problem}")
    print_slices(evaluation)
    print_missing(evaluation.missing)
    print_gate(evaluation.gate)


def _judged(candidate: planner_pb2.Candidate) -> str:
    return "passes the gate" if candidate.passes else "does not pass the gate"


async def read_models(cluster: Cluster) -> planner_pb2.GetModelResponse:
    """The time models in use."""
    return await cluster.call("planner", "GetModel", planner_pb2.GetModelRequest(), planner_pb2.GetModelResponse)


async def refit(cluster: Cluster, node_ids: Sequence[str]) -> planner_pb2.RefitModelResponse:
    """Fit nodes anew, all of them where none is named; the models of all as they are then."""
    request = planner_pb2.RefitModelRequest(node_ids=node_ids)
    return await cluster.call("planner", "RefitModel", request, planner_pb2.RefitModelResponse)


async def hold(cluster: Cluster, for_s: float, reason: str) -> planner_pb2.Split:
    """Let the planner leave the split as it is. for_s: seconds; 0: until released."""
    request = planner_pb2.ProposeSplitRequest(keep=planner_pb2.KeepRoles(), hold_s=for_s, reason=reason)
    return await split.propose_split(cluster, request)


async def release(cluster: Cluster, reason: str) -> planner_pb2.Split:
    """End the hold, if there is one."""
    request = planner_pb2.ReleaseSplitRequest(reason=reason)
    answer = await cluster.call("planner", "ReleaseSplit", request, planner_pb2.ReleaseSplitResponse)
    return answer.split


def print_released(after: planner_pb2.Split) -> None:
    """What is in force, and that nothing holds it."""
    split.print_split_line(after)
    output.print_line(split.NOT_HELD)
