"""Deciding the split by measured throughput: equation 6 of the paper and its gate (section 4.3).

`evaluate` compares every split of the serving nodes with the present one, slice by slice, and keeps all it used, so
that a decision can be read and computed again later. `decide_by_throughput` makes a `Decision` of it. Both are pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from evolving.core.config import Gate, PlannerConfig
from evolving.core.gate import judge
from evolving.core.modes import Hold, Mode, hold_in_force
from evolving.core.placement import Placement, fewest_moves
from evolving.core.planner import Decision, DecisionKind, Split, SplitShape, effective_roles, make_decision
from evolving.core.slices import Slice
from evolving.core.terms import Role
from evolving.core.throughput import Kinds, MeanWork, NodeModel

_GAIN_DIGITS = 9  # gains that differ by less are equal: the rest is rounding


@dataclass(frozen=True, slots=True)
class Candidate:
    """One split the nodes could have. Rates are requests/s, means over the slices that count; gains are relative."""

    shape: SplitShape
    moves: Mapping[str, Role]  # the nodes that would change, with the role each would get; none: the present split
    prefill: float  # Σμ_P
    decode: float  # Σμ_D
    throughput: float  # Θ, the mean of each slice's smaller sum
    mean_gain: float  # over the present split, paired per slice (equation 6)
    error: float  # standard error of that mean, as the gate counts it
    passes: bool  # the gate


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What every split would have served, and from what that was computed."""

    roles: Mapping[str, Role]  # in effect
    models: Mapping[str, NodeModel]
    slices: tuple[Slice, ...]  # the window
    config: PlannerConfig
    counted: int  # slices of the window that say something
    candidates: tuple[Candidate, ...]  # by prefill nodes, the present split among them; empty: nothing could be said
    earlier: tuple[Slice, ...] = ()  # under the same split, looked at because the window alone is not sure
    # Of these, the ones that figures of the present split and of those that gain include; 0: they are the window's.
    counted_earlier: int = 0
    problem: str = ""  # why the split has to stay, whatever the candidates; empty: nothing speaks against a switch

    @property
    def best(self) -> Candidate | None:
        """The candidate to switch to: of those that pass, the one that gains most, then moves fewest nodes."""
        passing = [candidate for candidate in self.candidates if candidate.passes]
        return max(passing, key=_rank, default=None) if not self.problem else None

    def candidate(self, shape: SplitShape) -> Candidate | None:
        """What a shape would do; None: nothing can be said of it."""
        return next((candidate for candidate in self.candidates if candidate.shape == shape), None)


def says_something(measured: Slice, config: PlannerConfig) -> bool:
    """Whether a slice counts: enough completions known whole, open requests, and work for both phases."""
    return (
        measured.completions - measured.without_prefill >= config.slice_completions_least
        and measured.open_requests > 0
        and measured.work is not None
        and measured.work.asks_both_phases
    )


def cooldown_ends_s(split: Split, config: PlannerConfig) -> float:
    """Unix time from which a switch is possible again."""
    return split.written_at_s + config.cooldown_s


def worth_repeating_at_s(split: Split, decision: Decision) -> float | None:
    """Unix time at which a decision of `decide_by_throughput` is worth taking anew; None: with the next window.

    That is when the cooldown ends which alone had stopped it.
    """
    evaluation = decision.evaluation
    if evaluation is None or evaluation.best is None or decision.kind is not DecisionKind.STAY:
        return None
    if decision.mode is not Mode.AUTO or decision.hold is not None:
        return None
    ends_s = cooldown_ends_s(split, evaluation.config)
    return ends_s if ends_s > decision.decided_at_s else None


def evaluate(
    slices: Sequence[Slice],
    roles: Mapping[str, Role],
    models: Mapping[str, NodeModel],
    config: PlannerConfig,
    earlier: Sequence[Slice] = (),
) -> Evaluation:
    """Compare every split of the nodes that prefill or decode with the present one, given by `roles` in effect.

    MIXED and DRAINING nodes keep their roles and count in neither phase. Of the ways to reach a shape, the one with the
    fewest moves counts, and among those the best placed (core/placement.py).

    `earlier` are slices before those of the window, measured under the same split (core/evidence.py). Work varies so
    much from request to request that a window can't tell a gain of a few percent from noise. Where no candidate passes
    by the window alone, the default gate counts them too, for those that gain by it. If one passes then, their figures
    are of both, else all are of the window alone.
    """
    planned = {node: role for node, role in roles.items() if role in (Role.PREFILL, Role.DECODE)}
    used = _used(slices, config)
    problem = _problem(planned, models, len(used), config)
    can_compare = (
        len(used) >= 2 and set(planned.values()) == {Role.PREFILL, Role.DECODE} and set(planned) <= set(models)
    )
    comparison = _Comparison.of(used, planned, models, config) if can_compare else None
    candidates = comparison.candidates() if comparison is not None else ()
    sure = any(candidate.passes for candidate in candidates)
    looks_back = config.gate is Gate.DEFAULT and not problem and not sure
    earlier = tuple(earlier) if looks_back else ()
    used_earlier = _used(earlier, config)
    counted_earlier = 0
    if comparison is not None and used_earlier:
        by_all = comparison.looking_back(candidates, used_earlier)
        if any(candidate.passes for candidate in by_all):
            candidates, counted_earlier = by_all, len(used_earlier)
    return Evaluation(
        roles=dict(roles),
        models=dict(models),
        slices=tuple(slices),
        config=config,
        counted=len(used),
        candidates=candidates,
        earlier=earlier,
        counted_earlier=counted_earlier,
        problem=problem,
    )


def decide_by_throughput(
    split: Split,
    live: Collection[str],
    evaluation: Evaluation,
    *,
    mode: Mode,
    hold: Hold | None,
    prefill_share: float,
    author: str,
    now_s: float,
) -> Decision:
    """Switch to the evaluation's best candidate, or stay and say why. The decision carries the evaluation either way.

    `mode` is the configured one; a hold that is in force makes it manual. `prefill_share` is the share of prefilling
    nodes aimed at so far. The cooldown counts from the last write of the split, whoever's it was.
    """
    held = hold_in_force(hold, now_s)
    best = evaluation.best
    if best is None:
        return make_decision(
            split,
            split.roles,
            DecisionKind.STAY,
            evaluation.problem or _nothing_gains(evaluation),
            author,
            prefill_share,
            now_s,
            hold=held,
            evaluation=evaluation,
            mode=mode,
        )
    finding = f"{best.shape} gains {_gain_text(best)}"
    if evaluation.counted_earlier:
        finding += f" over {evaluation.counted + evaluation.counted_earlier} slices"
    obstacle = _obstacle(split, live, evaluation, mode, held, now_s)
    roles = {node: role for node, role in split.roles.items() if node in live} | dict(best.moves)
    return make_decision(
        split,
        split.roles if obstacle else roles,
        DecisionKind.STAY if obstacle else DecisionKind.SWITCH,
        f"{finding}, but {obstacle}" if obstacle else finding,
        author,
        prefill_share if obstacle else best.shape.prefill_share,
        now_s,
        hold=held,
        evaluation=evaluation,
        mode=mode,
    )


def _used(slices: Sequence[Slice], config: PlannerConfig) -> list[tuple[MeanWork, float]]:
    """Mean work and open requests of the slices that count."""
    return [(s.work, s.open_requests) for s in slices if s.work is not None and says_something(s, config)]


@dataclass(frozen=True, slots=True)
class _Comparison:
    """All splits of some nodes, placed for the work of a window."""

    window: Sequence[tuple[MeanWork, float]]
    kinds: Kinds
    placements: Sequence[Placement]
    config: PlannerConfig

    @classmethod
    def of(
        cls,
        window: Sequence[tuple[MeanWork, float]],
        planned: Mapping[str, Role],
        models: Mapping[str, NodeModel],
        config: PlannerConfig,
    ) -> _Comparison:
        kinds = Kinds(models[node] for node in planned)
        return cls(window, kinds, fewest_moves(kinds, planned, models, *_mean(window)), config)

    def candidates(self) -> tuple[Candidate, ...]:
        """By the window alone."""
        return self._judged(self.placements, ())

    def looking_back(
        self, candidates: Sequence[Candidate], earlier: Sequence[tuple[MeanWork, float]]
    ) -> tuple[Candidate, ...]:
        """By earlier slices too; candidates that the window speaks against stay as they are.

        Each slice's gain is a ratio, and the means of A/B − 1 and of B/A − 1 can both lie above 0: over many slices
        surely so. Two splits would take turns. So the mean Θ has to gain more than the floor as well, which it can't
        both ways.
        """
        with_hope = [not candidate.moves or candidate.mean_gain > 0 for candidate in candidates]
        judged = self._judged(list(itertools.compress(self.placements, with_hope)), earlier)
        present = next(candidate for candidate in judged if not candidate.moves)
        least = (1.0 + self.config.gain_floor) * present.throughput
        looked_at = iter(
            replace(candidate, passes=candidate.passes and candidate.throughput > least) for candidate in judged
        )
        return tuple(next(looked_at) if hope else old for old, hope in zip(candidates, with_hope, strict=True))

    def _judged(
        self, placements: Sequence[Placement], earlier: Sequence[tuple[MeanWork, float]]
    ) -> tuple[Candidate, ...]:
        """Placements, the present split's among them, by earlier slices and the window's."""
        used = [*earlier, *self.window]
        prefill_rows = np.array([placement.prefill for placement in placements])
        decode_rows = np.array([placement.decode for placement in placements])
        # Shapes: (slices, candidates), requests/s.
        prefill = np.array([self.kinds.prefill_rates(prefill_rows, work) for work, _ in used])
        decode = np.array([self.kinds.decode_rates(decode_rows, work, open_requests) for work, open_requests in used])
        total = np.minimum(prefill, decode)
        present = next(i for i, placement in enumerate(placements) if not placement.moves)
        gains = total / total[:, [present]] - 1.0
        enough = len(self.window) >= self.config.slices_valid_least

        def candidate(column: int, placement: Placement) -> Candidate:
            verdict = judge(gains[:, column].tolist(), self.config, earlier_count=len(earlier))
            return Candidate(
                shape=placement.shape,
                moves=placement.moves,
                prefill=float(prefill[:, column].mean()),
                decode=float(decode[:, column].mean()),
                throughput=float(total[:, column].mean()),
                mean_gain=verdict.mean_gain,
                error=verdict.error,
                passes=verdict.passes and enough,
            )

        return tuple(candidate(column, placement) for column, placement in enumerate(placements))


def _mean(used: Sequence[tuple[MeanWork, float]]) -> tuple[MeanWork, float]:
    """Mean work and mean open requests of the slices: what unlike nodes are placed by."""
    works = [work for work, _ in used]
    iterations = sum(work.decode_iterations for work in works)
    mean = MeanWork(
        uncached_tokens=sum(work.uncached_tokens for work in works) / len(works),
        query_key_pairs=sum(work.query_key_pairs for work in works) / len(works),
        cached_tokens=sum(work.cached_tokens for work in works) / len(works),
        restored_tokens=sum(work.restored_tokens for work in works) / len(works),
        decode_iterations=iterations / len(works),
        context_tokens=sum(work.context_tokens * work.decode_iterations for work in works) / iterations,
    )
    return mean, sum(open_requests for _, open_requests in used) / len(used)


def _problem(planned: Mapping[str, Role], models: Mapping[str, NodeModel], counted: int, config: PlannerConfig) -> str:
    if set(planned.values()) != {Role.PREFILL, Role.DECODE}:
        return "no node only prefills, or none only decodes"
    unknown = sorted(set(planned) - set(models))
    if unknown:
        return f"no time model of {', '.join(unknown)}"
    if counted < config.slices_valid_least:
        return f"insufficient: {counted} of {config.slices} slices count, {config.slices_valid_least} are needed"
    return ""


def _obstacle(
    split: Split, live: Collection[str], evaluation: Evaluation, mode: Mode, held: Hold | None, now_s: float
) -> str:
    """What keeps the planner from the switch that the evaluation asks for; empty: nothing."""
    if effective_roles(split, live) != evaluation.roles:
        return "nodes or roles changed meanwhile"
    if held is not None:
        until = "until released" if held.until_s is None else f"for {held.until_s - now_s:.0f} s more"
        return f"{held.author} holds the split {until}"
    if mode is Mode.MANUAL:
        return "the split is changed by operators alone"
    left_s = cooldown_ends_s(split, evaluation.config) - now_s
    if left_s > 0:
        return f"the last change cools down for {left_s:.0f} s more"
    return "in shadow nothing is changed" if mode is Mode.SHADOW else ""


def _nothing_gains(evaluation: Evaluation) -> str:
    others = [candidate for candidate in evaluation.candidates if candidate.moves]
    if not others:
        return "there is no other split"
    best = max(others, key=_rank)
    return f"no other split is surely better; {best.shape} comes nearest with {_gain_text(best)}"


def _rank(candidate: Candidate) -> tuple[float, int, int]:
    return round(candidate.mean_gain, _GAIN_DIGITS), -len(candidate.moves), candidate.shape.prefill


def _gain_text(candidate: Candidate) -> str:
    return f"{candidate.mean_gain:+.2%} ± {2 * candidate.error:.2%}"
