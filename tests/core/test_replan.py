"""Deciding the split by measured throughput: equation 6, the gate, cooldown and modes (paper, section 4.3)."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from core.planning import NINE, a_slice, mean_work, node_model, planner_inputs
from hypothesis import given
from hypothesis import strategies as st

from evolving.core.config import Gate, PlannerConfig
from evolving.core.modes import Hold, Mode
from evolving.core.placement import fewest_moves
from evolving.core.planner import Decision, DecisionKind, Split, SplitShape, effective_roles
from evolving.core.replan import (
    Evaluation,
    cooldown_ends_s,
    decide_by_throughput,
    evaluate,
    says_something,
    worth_repeating_at_s,
)
from evolving.core.slices import Slice
from evolving.core.terms import Role
from evolving.core.throughput import Kinds, NodeModel, throughput
from evolving.core.timemodel import DecodeCoefficients

P, D, M, X = Role.PREFILL, Role.DECODE, Role.MIXED, Role.DRAINING
CONFIG = PlannerConfig()
NOW_S = 10_000.0
# The mix, of which 4P5D serves most: prompts of 3,000 new tokens after 60,000 cached ones, 400 decode iterations.
WORK, OPEN = mean_work(iterations=400), 60.0


def split_of(shape: str, epoch: int = 5, written_at_s: float = 0.0) -> Split:
    prefills = SplitShape.parse(shape).prefill
    roles = {node: P if i < prefills else D for i, node in enumerate(NINE)}
    return Split(epoch, roles, written_at_s=written_at_s)


def noisy(sd: float = 0.05, seed: int = 1, valid: int = 10, uncached: float = 3000) -> tuple[Slice, ...]:
    """Ten slices of the mix, `valid` of which say something; work and load vary by `sd`."""
    draw = random.Random(seed)

    def about(value: float) -> float:
        return value * max(0.1, draw.gauss(1.0, sd))

    works = [mean_work(about(uncached), about(60_000), about(400)) for _ in range(10)]
    return tuple(a_slice(work, about(OPEN), 100 if i < valid else 4) for i, work in enumerate(works))


def evaluated(
    split: Split,
    slices: Sequence[Slice],
    models: Mapping[str, NodeModel] | None = None,
    config: PlannerConfig = CONFIG,
    live: Sequence[str] = NINE,
    earlier: Sequence[Slice] = (),
) -> Evaluation:
    models = dict.fromkeys(NINE, node_model()) if models is None else models
    return evaluate(slices, effective_roles(split, live), models, config, earlier)


def decide(
    split: Split,
    evaluation: Evaluation,
    *,
    live: Sequence[str] = NINE,
    mode: Mode = Mode.AUTO,
    hold: Hold | None = None,
    now_s: float = NOW_S,
) -> Decision:
    return decide_by_throughput(
        split, live, evaluation, mode=mode, hold=hold, prefill_share=0.3, author="planner", now_s=now_s
    )


def stays(decision: Decision, split: Split, reason: str) -> bool:
    """The decision changes nothing, and says why."""
    assert decision.kind is DecisionKind.STAY
    assert reason in decision.reason
    assert decision.prefill_share == 0.3
    assert decision.evaluation is not None
    return not decision.changes_split and decision.roles_after == split.roles


def shape_of(decision: Decision) -> str:
    roles = list(decision.roles_after.values())
    return f"{roles.count(P)}P{roles.count(D)}D"


@pytest.mark.parametrize("start", ["1P8D", "3P6D", "5P4D", "6P3D", "8P1D"])
def test_every_start_leads_to_the_split_that_serves_most_in_one_switch(start: str) -> None:
    """§5.5: from 3P6D to 6P3D all runs converge to 4P5D."""
    models = dict.fromkeys(NINE, node_model())
    exhaustive = {x: throughput(models, split_of(f"{x}P{9 - x}D").roles, WORK, OPEN).total for x in range(1, 9)}
    assert max(exhaustive, key=exhaustive.__getitem__) == 4
    split = split_of(start)
    decision = decide(split, evaluated(split, noisy()))
    assert decision.kind is DecisionKind.SWITCH
    assert shape_of(decision) == "4P5D"
    assert decision.epoch_after == 6
    assert decision.prefill_share == pytest.approx(4 / 9)
    assert len(decision.moved_nodes) == abs(SplitShape.parse(start).prefill - 4)
    after = decision.split()
    assert stays(decide(after, evaluated(after, noisy(seed=2)), now_s=NOW_S + 600), after, "no other split")


def test_equation_6_gains_are_relative_paired_by_slice_and_averaged() -> None:
    split, slices = split_of("6P3D"), noisy()
    models = {node: node_model(1 + 0.1 * (i % 2)) for i, node in enumerate(NINE)}
    for config in (PlannerConfig(gate=Gate.PAPER), CONFIG):
        for candidate in evaluated(split, slices, models, config).candidates:
            roles = dict(split.roles) | dict(candidate.moves)
            gains, rates = [], []
            for s in slices:
                assert s.work is not None
                rates.append(throughput(models, roles, s.work, s.open_requests))
                gains.append(rates[-1].total / throughput(models, split.roles, s.work, s.open_requests).total - 1)
            assert candidate.mean_gain == pytest.approx(statistics.mean(gains), abs=1e-9)
            assert candidate.throughput == pytest.approx(statistics.mean(rate.total for rate in rates))
            assert candidate.prefill == pytest.approx(statistics.mean(rate.prefill for rate in rates))
            assert candidate.decode == pytest.approx(statistics.mean(rate.decode for rate in rates))
            error = statistics.stdev(gains) / 10**0.5
            assert candidate.error >= error * (1 - 1e-6) - 1e-12
            if config.gate is Gate.PAPER:
                assert candidate.error == pytest.approx(error, abs=1e-9)


def test_theta_of_a_window_is_the_mean_of_each_slice_s_smaller_sum() -> None:
    """Not the smaller of the mean sums: prefill limits half of these slices, decode the others."""
    split = split_of("4P5D")
    slices = [a_slice(mean_work(iterations=each), OPEN) for each in (20, 4000) * 5]
    present = next(each for each in evaluated(split, slices).candidates if not each.moves)
    rates = [throughput(dict.fromkeys(NINE, node_model()), split.roles, s.work, OPEN) for s in slices if s.work]
    assert {rate.prefill < rate.decode for rate in rates} == {True, False}
    assert present.throughput == pytest.approx(statistics.mean(rate.total for rate in rates))
    assert present.throughput < 0.9 * min(present.prefill, present.decode)


@pytest.mark.parametrize("iterations", [(50, 2000), (2000, 50)])
def test_unlike_nodes_are_placed_by_the_means_of_the_slices_that_count(iterations: tuple[int, int]) -> None:
    draw = random.Random(5)
    decodes = [
        DecodeCoefficients(draw.uniform(0, 0.05), 0.0, draw.uniform(0, 3e-3), 5e-8 * draw.random()) for _ in NINE
    ]
    models = {node: replace(node_model(), decode=decode) for node, decode in zip(NINE, decodes, strict=True)}
    split = split_of("6P3D")
    contexts = (10_000.0, 90_000.0)
    works = [replace(mean_work(iterations=i), context_tokens=c) for i, c in zip(iterations, contexts, strict=True)]
    slices = [a_slice(work, level) for work, level in zip(works * 5, (20.0, 80.0) * 5, strict=True)]
    mean = replace(
        mean_work(iterations=statistics.mean(iterations)),
        context_tokens=sum(i * c for i, c in zip(iterations, contexts, strict=True)) / sum(iterations),
    )
    placed = fewest_moves(Kinds(models.values()), split.roles, models, mean, open_requests=50.0)
    more = [a_slice(mean_work(iterations=1), 1000.0, completions=4)]
    found = evaluated(split, [*slices, *more], models).candidates
    assert [dict(each.moves) for each in found] == [dict(each.moves) for each in placed]


def test_of_the_candidates_that_pass_the_one_that_gains_most_is_taken() -> None:
    evaluation = evaluated(split_of("8P1D"), noisy())
    passing = [candidate for candidate in evaluation.candidates if candidate.passes]
    assert len(passing) > 1
    assert evaluation.best is not None
    assert evaluation.best.mean_gain == max(candidate.mean_gain for candidate in passing)


def test_of_equal_gains_the_one_that_moves_fewest_nodes_is_taken() -> None:
    evaluation = evaluated(split_of("8P1D"), noisy())
    tied = tuple(replace(candidate, mean_gain=0.2 - 1e-12 * i) for i, candidate in enumerate(evaluation.candidates))
    best = replace(evaluation, candidates=tied).best
    assert best is not None
    assert len(best.moves) == min(len(candidate.moves) for candidate in tied if candidate.passes)


def test_a_burst_changes_the_queue_and_not_the_split() -> None:
    """§4.3: sub-agents that start together inflate the requests open for a moment, the work per request stays."""
    split = split_of("4P5D")
    for burst in range(10):
        slices = [replace(s, open_requests=s.open_requests + 20 * (i == burst)) for i, s in enumerate(noisy())]
        assert stays(decide(split, evaluated(split, slices)), split, "no other split")


@pytest.mark.parametrize(("valid", "says"), [(8, ""), (7, "insufficient: 7 of 10"), (0, "insufficient: 0 of 10")])
def test_with_too_few_slices_the_split_stays(valid: int, says: str) -> None:
    split = split_of("8P1D")
    evaluation = evaluated(split, noisy(valid=valid))
    assert evaluation.counted == valid
    decision = decide(split, evaluation)
    if says:
        assert stays(decision, split, says)
    else:
        assert decision.kind is DecisionKind.SWITCH


def test_a_few_slices_still_answer_what_if_but_pass_nothing() -> None:
    evaluation = evaluated(split_of("8P1D"), noisy(valid=3))
    asked = evaluation.candidate(SplitShape.parse("4P5D"))
    assert asked is not None
    assert asked.mean_gain > 0.1
    assert not any(candidate.passes for candidate in evaluation.candidates)
    assert evaluated(split_of("8P1D"), noisy(valid=1)).candidate(SplitShape.parse("4P5D")) is None


def test_a_slice_counts_when_enough_completed_and_both_phases_had_work() -> None:
    assert says_something(a_slice(WORK, 1.0, 5), CONFIG)
    assert says_something(replace(a_slice(WORK, 1.0, 9), without_prefill=4), CONFIG)
    assert not says_something(replace(a_slice(WORK, 1.0, 9), without_prefill=5), CONFIG)
    assert not says_something(a_slice(WORK, 1.0, 4), CONFIG)
    assert not says_something(a_slice(WORK, 0.0, 5), CONFIG)
    assert not says_something(a_slice(None, 1.0, 5), CONFIG)
    assert not says_something(a_slice(mean_work(iterations=0), 1.0, 5), CONFIG)


def test_without_a_node_of_each_phase_or_a_model_of_each_nothing_is_compared() -> None:
    all_prefill = Split(3, dict.fromkeys(NINE, P))
    assert stays(decide(all_prefill, evaluated(all_prefill, noisy())), all_prefill, "none only decodes")
    split = split_of("8P1D")
    models = dict.fromkeys(NINE[1:], node_model())
    assert stays(decide(split, evaluated(split, noisy(), models)), split, "no time model of n0")


def test_two_nodes_have_no_other_split() -> None:
    split = Split(3, {"n0": P, "n1": D})
    evaluation = evaluated(split, noisy(), live=["n0", "n1"])
    assert [str(candidate.shape) for candidate in evaluation.candidates] == ["1P1D"]
    assert stays(decide(split, evaluation, live=["n0", "n1"]), split, "there is no other split")


def test_mixed_and_draining_nodes_keep_their_roles_and_count_in_no_phase() -> None:
    split = split_of("8P1D")
    more = replace(split, roles={**split.roles, "x": X, "m": M})
    live = [*NINE, "x", "m", "unlisted"]
    evaluation = evaluated(more, noisy(), live=live)
    assert evaluation.candidates == evaluated(split, noisy()).candidates
    decision = decide(more, evaluation, live=live)
    assert decision.kind is DecisionKind.SWITCH
    assert (decision.roles_after["x"], decision.roles_after["m"]) == (X, M)
    assert "unlisted" not in decision.roles_after


@given(since_s=st.floats(-50, 400), start=st.sampled_from(["1P8D", "8P1D"]), seed=st.integers(0, 20))
def test_no_switch_in_cooldown(since_s: float, start: str, seed: int) -> None:
    """§4.3: for 120 seconds after a transition there is no other."""
    split = split_of(start, written_at_s=NOW_S - since_s)
    decision = decide(split, evaluated(split, noisy(seed=seed)))
    assert decision.changes_split == (since_s >= 120)
    assert cooldown_ends_s(split, CONFIG) == pytest.approx(NOW_S - since_s + 120)
    if since_s < 119.99:
        assert stays(decision, split, "cools down")


def test_what_the_cooldown_alone_stopped_is_worth_deciding_again_when_it_ends() -> None:
    split = split_of("8P1D", written_at_s=NOW_S - 50)
    evaluation = evaluated(split, noisy())
    assert worth_repeating_at_s(split, decide(split, evaluation)) == NOW_S + 70
    ends_s = NOW_S + 70
    for not_again in (
        decide(split, evaluation, now_s=ends_s),  # it switched
        decide(split, evaluation, mode=Mode.SHADOW),
        decide(split, evaluation, mode=Mode.MANUAL),
        decide(split, evaluation, hold=Hold("ops")),
        decide(split, evaluated(split, noisy(valid=7))),  # not surely better
        replace(decide(split, evaluation), evaluation=None),
    ):
        assert worth_repeating_at_s(split, not_again) is None


def test_in_shadow_it_is_decided_and_recorded_and_nothing_changes() -> None:
    split = split_of("8P1D")
    decision = decide(split, evaluated(split, noisy()), mode=Mode.SHADOW)
    assert stays(decision, split, "in shadow nothing is changed")
    assert decision.reason.startswith("4P5D gains +")
    assert decision.evaluation is not None
    assert decision.evaluation.best is not None


def test_an_operator_s_hold_lasts_until_its_time_is_over() -> None:
    split = split_of("8P1D")
    evaluation = evaluated(split, noisy())
    timed, lasting = Hold("ops", until_s=NOW_S + 1), Hold("ops")
    for mode, hold in itertools.product(Mode, (timed, lasting)):
        decision = decide(split, evaluation, mode=mode, hold=hold)
        assert stays(decision, split, f"ops holds the split {'for 1 s more' if hold is timed else 'until released'}")
        assert decision.hold == hold
    over = decide(split, evaluation, hold=timed, now_s=NOW_S + 1)
    assert over.kind is DecisionKind.SWITCH
    assert over.hold is None
    assert stays(decide(split, evaluation, hold=lasting, now_s=NOW_S * 1e6), split, "until released")


def test_in_manual_mode_operators_alone_change_the_split() -> None:
    split = split_of("8P1D")
    assert stays(decide(split, evaluated(split, noisy()), mode=Mode.MANUAL), split, "operators alone")


def test_an_evaluation_of_other_nodes_or_roles_switches_nothing() -> None:
    evaluation = evaluated(split_of("8P1D"), noisy())
    other = split_of("7P2D")
    assert stays(decide(other, evaluation), other, "changed meanwhile")
    split = split_of("8P1D")
    assert stays(decide(split, evaluation, live=NINE[1:]), split, "changed meanwhile")


@given(inputs=planner_inputs(), windows=st.integers(0, 2))
def test_what_an_evaluation_keeps_is_all_it_used(
    inputs: tuple[Split, dict[str, NodeModel], list[Slice], PlannerConfig], windows: int
) -> None:
    split, models, slices, config = inputs
    kept = evaluated(split, slices, models, config, list(models), earlier=slices[::-1] * windows)
    assert evaluate(kept.slices, kept.roles, kept.models, kept.config, kept.earlier) == kept


# -- several windows


def test_a_small_gain_is_found_sooner_by_several_windows_under_one_split_than_by_one() -> None:
    """5P4D serves a few percent more than 4P5D, which work that varies by a fifth from slice to slice hides from most
    windows."""
    split, lives = split_of("4P5D"), 40

    def found_by(windows: Sequence[tuple[Slice, ...]], several: bool) -> str:
        for number, window in enumerate(windows):
            earlier = tuple(itertools.chain.from_iterable(windows[:number])) if several else ()
            best = evaluated(split, window, earlier=earlier).best
            if best is not None:
                return str(best.shape)
        return ""

    hours = [[noisy(0.2, seed=6 * life + number, uncached=3600) for number in range(6)] for life in range(lives)]
    by_one = [found_by(windows, several=False) for windows in hours]
    by_several = [found_by(windows, several=True) for windows in hours]
    print(f"of {lives} hours {by_several.count('5P4D')} found it, {by_one.count('5P4D')} by one window at a time")
    assert by_several.count("5P4D") > by_one.count("5P4D")
    assert set(by_several) <= {"5P4D", "", *by_one}, "earlier windows lead nowhere else"


def test_a_window_that_is_sure_decides_alone_whatever_was_before() -> None:
    split, window = split_of("8P1D"), noisy()
    assert evaluated(split, window).best is not None
    assert evaluated(split, window, earlier=noisy(uncached=9000, seed=2) * 5) == evaluated(split, window)


def test_what_several_windows_say_is_told_with_how_many_slices_say_it() -> None:
    split, window, earlier = split_of("4P5D"), noisy(0.2, seed=7, uncached=3600), noisy(0.02, seed=2, uncached=3600)
    assert stays(decide(split, evaluated(split, window)), split, "no other split is surely better")
    silent = tuple(replace(each, completions=1) for each in noisy(seed=3))
    evaluation = evaluated(split, window, earlier=(*silent, *earlier * 4))
    assert (evaluation.counted, evaluation.counted_earlier) == (10, 40)
    decision = decide(split, evaluation)
    assert decision.kind is DecisionKind.SWITCH
    assert decision.reason.startswith("5P4D gains +")
    assert decision.reason.endswith("over 50 slices")


@pytest.mark.parametrize("uncached", [3000, 3400])
def test_windows_before_the_work_changed_move_nothing(uncached: float) -> None:
    """They say 5P4D gains much. By the last window it loses, or gains nothing to speak of."""
    split, earlier = split_of("4P5D"), noisy(0.02, seed=2, uncached=4000) * 5
    before = evaluated(split, earlier[:10]).best
    assert before is not None
    assert before.mean_gain > 0.1
    for seed in range(20):
        evaluation = evaluated(split, noisy(0.02, seed=seed, uncached=uncached), earlier=earlier)
        assert evaluation.best is None
        assert evaluation.counted_earlier == 0


def test_two_splits_do_not_take_turns_where_each_seems_better_from_the_other() -> None:
    """Slices that ask for prefill and for decode in turns: of three nodes, 1P2D serves one kind faster, 2P1D the other.
    Means of ratios are above 1 both ways, and over six windows surely so."""
    nodes, models = ["a", "b", "c"], dict.fromkeys("abc", node_model())
    works = [mean_work(uncached=2000, iterations=300), mean_work(uncached=300, iterations=400)]
    window = tuple(a_slice(works[at % 2], 90.0) for at in range(10))
    gains = []
    for prefills in ((P, D, D), (P, P, D)):
        split = Split(3, dict(zip(nodes, prefills, strict=True)))
        evaluation = evaluated(split, window, models, live=nodes, earlier=window * 5)
        assert evaluation.best is None
        gains += [candidate.mean_gain for candidate in evaluation.candidates if candidate.moves]
    assert min(gains) > 0.05


def test_the_paper_s_gate_looks_at_one_window() -> None:
    """§4.3."""
    split, config = split_of("4P5D"), PlannerConfig(gate=Gate.PAPER)
    window, earlier = noisy(0.2, seed=7, uncached=3600), noisy(0.02, seed=2, uncached=3600) * 4
    assert evaluated(split, window, earlier=earlier).best is not None
    assert evaluated(split, window, config=config, earlier=earlier) == evaluated(split, window, config=config)


def test_too_few_slices_are_not_made_up_for_by_earlier_ones() -> None:
    split = split_of("8P1D")
    evaluation = evaluated(split, noisy(valid=7), earlier=noisy(seed=2) * 5)
    assert stays(decide(split, evaluation), split, "insufficient: 7 of 10")


@given(inputs=planner_inputs())
def test_a_switch_is_one_to_a_candidate_that_passes_and_leaves_each_phase_a_node(
    inputs: tuple[Split, dict[str, NodeModel], list[Slice], PlannerConfig],
) -> None:
    split, models, slices, config = inputs
    nodes = list(models)
    decision = decide(split, evaluated(split, slices, models, config, nodes), live=nodes)
    assert decision.reason
    if decision.kind is DecisionKind.SWITCH:
        assert decision.evaluation is not None
        best = decision.evaluation.best
        assert best is not None
        assert best.passes
        assert decision.moved_nodes == tuple(sorted(best.moves))
        assert {P, D} <= set(decision.roles_after.values())
    else:
        assert not decision.changes_split


def test_at_the_best_split_noise_hardly_ever_switches() -> None:
    """Every other split is truly worse here, and all share the present one's noise: far fewer false switches than with
    eight independent candidates of no gain (test_gate.py)."""
    split = split_of("4P5D")
    for gate in Gate:
        config = PlannerConfig(gate=gate)
        windows = [evaluated(split, noisy(sd=0.3, seed=seed), config=config) for seed in range(300)]
        rate = sum(window.best is not None for window in windows) / len(windows)
        print(f"{gate} gate: {rate:.1%} of windows at the best split switch")
        assert rate < 0.038


@pytest.mark.parametrize(
    "wrong",
    [
        {"window_s": 0.0},
        {"slices_valid_least": 1},
        {"slices_valid_least": 11},
        {"slice_completions_least": 0},
        {"evidence_windows": 0},
        {"gain_floor": -0.1},
        {"cooldown_s": float("inf")},
    ],
)
def test_configurations_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(CONFIG, **wrong)  # type: ignore[arg-type]
