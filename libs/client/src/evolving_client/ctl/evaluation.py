"""How evolvectl prints what the planner computes: what splits would serve, from which measurements and models."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from evolving.v1 import common_pb2, planner_pb2
from evolving_client.ctl import output
from evolving_client.ctl.plain import word

_MOVES_SHOWN = 4
_SHORTEST_SILENCE_S = 0.5  # less is how reports travel
_PREFILL_NAMES = ("c0", "c1", "c2", "c3", "c4")
_DECODE_NAMES = ("d0", "d1", "d2", "d3")


def shape_text(shape: planner_pb2.SplitShape) -> str:
    """ "5P4D"."""
    return f"{shape.prefill_nodes}P{shape.decode_nodes}D"


def gain_text(candidate: planner_pb2.Candidate) -> str:
    """ "+5.00%, standard error 1.25%"."""
    return f"{_signed(candidate.mean_gain)}, standard error {_fine(candidate.error)}"


def moves_text(moves: Mapping[str, int], shown: int | None = None) -> str:
    """ "node-c→decode, …"; "-" of none."""
    texts = [f"{node_id}→{word(common_pb2.Role, moves[node_id])}" for node_id in sorted(moves)]
    return _some(texts, len(texts) if shown is None else shown) or "-"


def print_evaluation(evaluation: planner_pb2.Evaluation) -> None:
    """What was compared, then what it was computed from."""
    print_candidates(evaluation)
    print_slices(evaluation)
    print_missing(evaluation.missing)
    print_gate(evaluation.gate)


def print_candidates(evaluation: planner_pb2.Evaluation) -> None:
    """One row a split, and why it has to stay."""
    if evaluation.candidates:
        output.print_table(
            ["split", ">prefill/s", ">decode/s", ">Θ requests/s", ">gain", ">std error", "gate", "moves"],
            [_candidate_row(candidate) for candidate in evaluation.candidates],
        )
        if evaluation.problem:
            output.print_line(f"nothing may move: {evaluation.problem}")
    else:
        print_nothing("any split", evaluation)


def print_nothing(what: str, evaluation: planner_pb2.Evaluation) -> None:
    """Why a split, or all of them, can't be compared."""
    output.print_line(f"nothing can be said of {what} yet: {evaluation.problem or 'too little was measured'}")


def _candidate_row(candidate: planner_pb2.Candidate) -> list[str]:
    rates = [candidate.prefill_per_s, candidate.decode_per_s, candidate.throughput_per_s]
    row = [shape_text(candidate.shape), *map(output.rate, rates)]
    if not candidate.moves:
        return [*row, "-", "-", "present", "-"]
    gain = [_signed(candidate.mean_gain), _fine(candidate.error)]
    return [*row, *gain, "passes" if candidate.passes else "-", moves_text(candidate.moves, _MOVES_SHOWN)]


def print_slices(evaluation: planner_pb2.Evaluation) -> None:
    """One row a slice of the window, oldest first; work is a mean over requests. Earlier ones are in --json."""
    if not evaluation.slices:
        output.print_line("no slice has been measured yet")
        return
    counted = f"{evaluation.counted_slices} of {len(evaluation.slices)} slices count"
    if evaluation.counted_earlier_slices:
        counted += f", and {evaluation.counted_earlier_slices} before them, under the same split"
    elif evaluation.earlier_slices:
        counted += f"; with the {len(evaluation.earlier_slices)} before them no split passes either"
    output.print_line(f"{counted}; ages are at the window's end")
    output.print_table(
        ["from", "to", ">completed", ">no prefill", ">open", ">new tokens", ">cached", ">restored",
         ">query-key pairs", ">iterations", ">context"],
        [_slice_row(each) for each in evaluation.slices],
    )  # fmt: skip


def _slice_row(each: planner_pb2.Slice) -> list[str]:
    row = [output.ago(each.from_age_s), output.ago(each.to_age_s), str(each.completions), str(each.without_prefill)]
    row.append(f"{each.open_requests:.1f}")
    if not each.HasField("work"):
        return [*row, *["-"] * 6]
    work = each.work
    means = [work.uncached_tokens, work.cached_tokens, work.restored_tokens, work.query_key_pairs]
    return [*row, *(f"{mean:.0f}" for mean in means), f"{work.decode_iterations:.1f}", f"{work.context_tokens:.0f}"]


def print_missing(missing: planner_pb2.Missing) -> None:
    """A line about measurements that did not come."""
    parts = [
        (missing.late_samples, f"{missing.late_samples} samples came late"),
        (missing.lost_requests, f"half of {missing.lost_requests} requests never came"),
        (missing.lost_reports, f"{missing.lost_reports} reports were lost"),
        (missing.dropped_samples, f"nodes dropped {missing.dropped_samples} samples"),
        (
            missing.unreported_s >= _SHORTEST_SILENCE_S,
            f"gateways were silent for {output.duration(missing.unreported_s)}",
        ),
    ]
    output.print_line("measurements missing: " + (", ".join(text for amount, text in parts if amount) or "none"))


def print_gate(gate: planner_pb2.Gate) -> None:
    """What a gain has to pass, in a line; nothing where nobody said."""
    if not gate.name:
        return
    several = gate.name == "default" and gate.evidence_windows > 1
    output.print_line(
        f"gate: {gate.name} · window {output.duration(gate.window_s)} in {gate.slices} slices, at least "
        f"{gate.slices_valid_least} of them with {gate.slice_completions_least} completions · gain above "
        f"{_percent(gate.gain_floor)} · cooldown {output.duration(gate.cooldown_s)}"
        + (f" · up to {gate.evidence_windows} windows under one split count together" if several else "")
    )


def print_models(models: Sequence[planner_pb2.NodeModel], now_s: float | None = None) -> None:
    """Two rows a node: what an iteration of each phase takes, and how well that is known.

    now_s: unix time at which they were so; None: now.
    """
    now_s = time.time() if now_s is None else now_s
    rows = []
    for model in models:
        prefill = _coefficients(_PREFILL_NAMES, model.prefill_coefficients_s)
        prefill += f" · {model.new_tokens_per_iteration:.0f} new tokens, {_percent(model.restored_share)} restored"
        decode = _coefficients(_DECODE_NAMES, model.decode_coefficients_s)
        rows.append([model.node_id, "prefill", *_fit_cells(model, model.prefill_fit, now_s), prefill])
        rows.append([model.node_id, "decode", *_fit_cells(model, model.decode_fit, now_s), decode])
    output.print_table(
        ["node", "phase", "source", "age", ">rows", ">error", ">error left out", ">error lately", "not identified",
         "an iteration"],
        rows,
    )  # fmt: skip


def print_not_fitted(models: Sequence[planner_pb2.NodeModel]) -> None:
    """A line about the phases that are as configured; none where all are fitted."""
    phases = [("prefill", model.node_id) for model in models if not model.prefill_fit.rows]
    phases += [("decode", model.node_id) for model in models if not model.decode_fit.rows]
    if phases:
        names = _some([f"{phase} of {node_id}" for phase, node_id in phases], _MOVES_SHOWN)
        output.print_line(f"as configured, since too little was measured: {names}")


def _fit_cells(model: planner_pb2.NodeModel, fit: planner_pb2.PhaseFit, now_s: float) -> list[str]:
    lately = f"{_percent(fit.recent_error)} on {fit.recent_rows}" if fit.recent_rows else "-"
    if not fit.rows:
        return ["config" if model.source else "-", "-", "-", "-", "-", lately, "-"]
    unseen = [name for name in fit.unidentified if name not in fit.dropped]
    unknown = [*unseen, *(f"{name} (did not pay)" for name in fit.dropped)]
    return [
        "fit" if fit.node_id in ("", model.node_id) else f"fit of {fit.node_id}",
        output.duration(max(0.0, now_s - fit.fitted_at_s)),
        str(fit.rows),
        _percent(fit.error_in_sample),
        _percent(fit.error_left_out) if fit.error_left_out else "-",
        lately,
        ", ".join(unknown) or "-",
    ]


def _coefficients(names: Sequence[str], values_s: Sequence[float]) -> str:
    """Those that are not 0, by their names in equations 1 and 2."""
    known = [f"{name} {output.short_time(value_s)}" for name, value_s in zip(names, values_s, strict=False) if value_s]
    return " ".join(known) or "0"


def _some(texts: Sequence[str], shown: int) -> str:
    more = f" and {len(texts) - shown} more" if len(texts) > shown else ""
    return ", ".join(texts[:shown]) + more


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _signed(share: float) -> str:
    return f"{100 * share:+.2f}%"


def _fine(share: float) -> str:
    return f"{100 * share:.2f}%"
