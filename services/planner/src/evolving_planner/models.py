"""What is known of how long iterations take on each node: fitted where there were rows to fit, lent by a node alike
where there were none, else as configured (the paper, section 4.2).

No I/O and no clock. A `ModelBook` may be called from several threads: fits are computed outside its lock.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import astuple, dataclass, field
from typing import Generic

from evolving.core.fit import Coefficients, FitConfig
from evolving.core.iterations import IterationWindow
from evolving.core.sharing import lenders, shared_mixes
from evolving.core.throughput import NodeModel
from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients, decode_takes_time, prefill_takes_time
from evolving.runtime.keys import NodeRegistration
from evolving.v1 import planner_pb2
from evolving_planner.mix_rows import MixRows
from evolving_planner.model_record import (
    Facts,
    NodeFits,
    PhaseFit,
    decode_fits,
    encode_fits,
    facts_of,
)
from evolving_planner.phase_rows import DECODE, PREFILL, Due, PhaseRows, compute

_GONE_MAX = 64  # nodes that left, remembered as lenders and in case they come back


@dataclass(frozen=True, slots=True)
class EndedWindow:
    """A window of a node's iterations, and when it ended by the planner's monotonic clock."""

    ended_s: float
    window: IterationWindow


@dataclass(frozen=True, slots=True)
class Fits:
    """What is in force for a node as far as it was fitted, by its own iterations or those of a node alike. None: as
    configured."""

    prefill: PrefillCoefficients | None = None
    decode: DecodeCoefficients | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a fit that was due."""

    node_id: str
    phase: str
    rows: int  # there were
    fitted: bool  # False: what was known before stays


@dataclass(slots=True)
class _Node:
    facts: Facts | None  # None: it reported before its registration was seen
    prefill: PhaseRows[PrefillCoefficients]
    decode: PhaseRows[DecodeCoefficients]
    mix: MixRows


@dataclass(slots=True)
class _Job(Generic[Coefficients]):
    """A fit to be made."""

    node_id: str
    facts: Facts
    phase: PhaseRows[Coefficients]
    due: Due
    began_at: int
    fit: PhaseFit[Coefficients] | None = field(init=False, default=None)

    def compute(self, config: FitConfig, now_s: float) -> None:
        fitted = compute(self.phase.kind, self.due, self.facts, config)
        self.fit = PhaseFit(fitted, now_s) if fitted is not None else None

    def settle(self) -> Outcome:
        if self.fit is not None:
            self.phase.end(self.fit, self.began_at)
        return Outcome(self.node_id, self.phase.kind.name, len(self.due.rows), self.fit is not None)


@dataclass(frozen=True, slots=True)
class _Phase(Generic[Coefficients]):
    """What is in force for a phase of a node, and how it does."""

    coefficients: Coefficients
    lender: str  # empty: as configured
    fit: PhaseFit[Coefficients] | None
    rows: PhaseRows[Coefficients] | None  # the node's own; None: nothing came of it yet


@dataclass(frozen=True, slots=True)
class _InForce:
    prefill: _Phase[PrefillCoefficients]
    decode: _Phase[DecodeCoefficients]
    new_tokens_per_iteration: float
    restored_share: float


class ModelBook:
    """Bounded: of each node the newest `windows_kept` windows of each phase; of nodes that left, the last to leave."""

    def __init__(
        self,
        fit: FitConfig | None = None,
        *,
        windows_kept: int = 600,
        rows_settled: int = 160,
        rows_recent: int = 40,
        mix_s: float = 600.0,
    ) -> None:
        """`rows_settled`: from so many rows on a fit is frozen. `rows_recent`: of the newest rows, how many tell how it
        does; at least as many as a fit needs. `mix_s`: how far back from the newest window of any node the mix of work
        is measured."""
        self._config = fit or FitConfig()
        self._rows_settled = rows_settled
        self._rows_recent = max(rows_recent, self._config.rows_least, self._config.drift_rows_least)
        self._windows_kept = max(windows_kept, self._rows_recent)
        self._mix_s = mix_s
        self._newest_s = 0.0  # when the last window of all ended
        self._lock = threading.Lock()
        self._nodes: dict[str, _Node] = {}  # those that left are the first, in the order in which they did
        self._fits: dict[str, tuple[Facts, Fits]] = {}  # as of the last `refit`, of nodes with such facts
        self.outcomes: tuple[Outcome, ...] = ()  # of the last `refit`

    def take(self, node_id: str, windows: Iterable[EndedWindow]) -> None:
        """A node's windows, in the order in which they ended. Those of an earlier life of its engine are its own
        too."""
        with self._lock:
            node = self._nodes.get(node_id)
            if node is None:
                node = self._nodes[node_id] = self._new_node(None)
            for ended in windows:
                self._newest_s = max(self._newest_s, ended.ended_s)
                node.mix.take(ended.ended_s, ended.window)
                node.prefill.take(ended.window)
                node.decode.take(ended.window)

    def refit(self, registrations: Mapping[str, NodeRegistration], now_s: float, wanted: Collection[str] = ()) -> bool:
        """Fit what is due: a phase that has rows enough for its first fit, one whose fit tells its newest rows badly,
        and both of each node `wanted`. `now_s`: unix time. True: something changed and is to be stored.

        Where rows do not suffice, what is known stays, and `outcomes` says so.
        """
        registrations = dict(registrations)  # the caller's may change meanwhile
        with self._lock:
            changed = self._follow(registrations)
            jobs = [job for node_id in sorted(registrations) for job in self._due(node_id, node_id in wanted)]
        for job in jobs:
            job.compute(self._config, now_s)
        with self._lock:
            self.outcomes = tuple(job.settle() for job in jobs)
            self._fits = {
                node_id: (facts_of(registrations[node_id]), Fits(_if_fitted(model.prefill), _if_fitted(model.decode)))
                for node_id, model in self._resolve(registrations).items()
            }
        return changed or any(outcome.fitted for outcome in self.outcomes)

    def fits_of(self, registration: NodeRegistration) -> Fits:
        """Those in force for a node since the last `refit`. Cheap."""
        with self._lock:
            facts, fits = self._fits.get(registration.node_id, (None, Fits()))
        return fits if facts == facts_of(registration) else Fits()

    def in_force(self, registrations: Mapping[str, NodeRegistration]) -> dict[str, NodeModel]:
        """What predictions use, by node. A node whose configured coefficients say that work takes no time, and that
        nobody fitted, is left out. Of alike nodes each has as much memory as the one with the least: engines measure
        what is left for KV, and the planner counts equal models together."""
        with self._lock:
            found = self._resolve(registrations)
        facts = {node_id: facts_of(registration) for node_id, registration in registrations.items()}
        decode_tokens: dict[Facts, int] = {}
        for node_id, each in registrations.items():
            tokens = max(1, each.l1_tokens - each.reserve_tokens)
            decode_tokens[facts[node_id]] = min(tokens, decode_tokens.get(facts[node_id], tokens))
        return {
            node_id: NodeModel(
                prefill=model.prefill.coefficients,
                decode=model.decode.coefficients,
                new_tokens_per_iteration=model.new_tokens_per_iteration,
                decode_slots=registrations[node_id].decode_slots,
                decode_tokens=decode_tokens[facts[node_id]],
            )
            for node_id, model in found.items()
            if prefill_takes_time(model.prefill.coefficients) and decode_takes_time(model.decode.coefficients)
        }

    def views(self, registrations: Mapping[str, NodeRegistration]) -> list[planner_pb2.NodeModel]:
        """The same for people, by node id, with how well it is known."""
        with self._lock:
            return [
                planner_pb2.NodeModel(
                    node_id=node_id,
                    prefill_coefficients_s=astuple(model.prefill.coefficients),
                    decode_coefficients_s=astuple(model.decode.coefficients)[:4],
                    source="fit" if model.prefill.fit is not None or model.decode.fit is not None else "config",
                    new_tokens_per_iteration=model.new_tokens_per_iteration,
                    restored_share=model.restored_share,
                    prefill_fit=self._fit_view(model.prefill),
                    decode_fit=self._fit_view(model.decode),
                )
                for node_id, model in sorted(self._resolve(registrations).items())
            ]

    def encode(self) -> bytes:
        """The record of all fits, for etcd."""
        with self._lock:
            return encode_fits(
                NodeFits(node_id, node.facts, node.prefill.fit, node.decode.fit)
                for node_id, node in sorted(self._nodes.items())
                if node.facts is not None and (node.prefill.fit is not None or node.decode.fit is not None)
            )

    def adopt(self, value: bytes) -> None:
        """Take the fits of a record in place of all there are; windows stay. A fit whose node has other facts than it
        was made for is not used. Raises BadRecord, and nothing changed."""
        record = {fits.node_id: fits for fits in decode_fits(value)}
        with self._lock:
            for node_id, fits in record.items():
                node = self._nodes.get(node_id)
                if node is None or node.facts not in (None, fits.facts):
                    node = self._nodes[node_id] = self._new_node(fits.facts)
                node.facts = fits.facts
            self._fits = {}
            for node_id, node in self._nodes.items():
                known = record.get(node_id)
                node.prefill.adopt(known.prefill if known is not None else None)
                node.decode.adopt(known.decode if known is not None else None)

    def _new_node(self, facts: Facts | None) -> _Node:
        return _Node(
            facts,
            PhaseRows(PREFILL, self._windows_kept),
            PhaseRows(DECODE, self._windows_kept),
            MixRows(self._mix_s),
        )

    def _follow(self, registrations: Mapping[str, NodeRegistration]) -> bool:
        """Whether fits went: of nodes that are others than before, and of those that left long ago."""
        fits_gone = False
        for node_id, registration in registrations.items():
            facts = facts_of(registration)
            node = self._nodes.pop(node_id, None)
            if node is None or node.facts not in (None, facts):
                fits_gone |= node is not None and _is_fitted(node)
                node = self._new_node(facts)
            node.facts = facts
            self._nodes[node_id] = node
        gone = [node_id for node_id in self._nodes if node_id not in registrations]
        for node_id in gone[: max(0, len(gone) - _GONE_MAX)]:
            fits_gone |= _is_fitted(self._nodes.pop(node_id))
        return fits_gone

    def _due(self, node_id: str, wanted: bool) -> Iterable[_Job[PrefillCoefficients] | _Job[DecodeCoefficients]]:
        node = self._nodes[node_id]
        assert node.facts is not None, "a registered node has facts"
        jobs = (
            self._job(node_id, node.facts, node.prefill, wanted),
            self._job(node_id, node.facts, node.decode, wanted),
        )
        return (job for job in jobs if job is not None)

    def _job(
        self, node_id: str, facts: Facts, phase: PhaseRows[Coefficients], wanted: bool
    ) -> _Job[Coefficients] | None:
        due = phase.anyway() if wanted else phase.due(self._config, self._rows_settled, self._rows_recent)
        return _Job(node_id, facts, phase, due, phase.begin()) if due is not None else None

    def _resolve(self, registrations: Mapping[str, NodeRegistration]) -> dict[str, _InForce]:
        facts = {node_id: facts_of(registration) for node_id, registration in registrations.items()}
        kinds = {node_id: node.facts for node_id, node in self._nodes.items() if node.facts is not None} | facts
        known = {node_id: node for node_id, node in self._nodes.items() if node.facts in (None, kinds.get(node_id))}
        prefills = {node_id: node.prefill for node_id, node in known.items()}
        decodes = {node_id: node.decode for node_id, node in known.items()}
        prefill_lenders, decode_lenders = lenders(kinds, _fitted_rows(prefills)), lenders(kinds, _fitted_rows(decodes))
        lately = {node_id: node.mix.up_to(self._newest_s) for node_id, node in known.items() if node_id in facts}
        mixes = shared_mixes(facts, lately)

        def in_force(node_id: str, fact: Facts) -> _InForce:
            configured = PrefillCoefficients(*fact.prefill_coefficients)
            experts = (fact.experts_per_token, fact.experts)
            configured_decode = DecodeCoefficients(*fact.decode_coefficients, *experts)
            mix = mixes[node_id]
            return _InForce(
                prefill=_phase(configured, prefill_lenders[node_id], prefills, node_id),
                decode=_phase(configured_decode, decode_lenders[node_id], decodes, node_id),
                new_tokens_per_iteration=max(1.0, mix.new_tokens_per_iteration or fact.chunk_tokens),
                restored_share=mix.restored_share or 0.0,
            )

        return {node_id: in_force(node_id, fact) for node_id, fact in facts.items()}

    def _fit_view(self, phase: _Phase[Coefficients]) -> planner_pb2.PhaseFit:
        view = planner_pb2.PhaseFit()
        if phase.fit is not None:
            fitted = phase.fit.fitted
            view = planner_pb2.PhaseFit(
                node_id=phase.lender,
                fitted_at_s=phase.fit.fitted_at_s,
                rows=fitted.rows,
                error_in_sample=fitted.error_in_sample,
                error_left_out=fitted.error_left_out,
                unidentified=fitted.unidentified,
                dropped=fitted.dropped,
            )
        if phase.rows is not None:
            error = phase.rows.kind.error(phase.coefficients, phase.rows.newest(self._rows_recent))
            view.recent_rows, view.recent_error = error.rows, error.mean_relative
        return view


def _is_fitted(node: _Node) -> bool:
    return node.prefill.fit is not None or node.decode.fit is not None


def _if_fitted(phase: _Phase[Coefficients]) -> Coefficients | None:
    return phase.coefficients if phase.fit is not None else None


def _fitted_rows(phases: Mapping[str, PhaseRows[Coefficients]]) -> dict[str, int]:
    return {node_id: phase.fit.fitted.rows for node_id, phase in phases.items() if phase.fit is not None}


def _phase(
    configured: Coefficients, lender: str | None, phases: Mapping[str, PhaseRows[Coefficients]], node_id: str
) -> _Phase[Coefficients]:
    own = phases.get(node_id)
    fit = phases[lender].fit if lender is not None else None
    if lender is None or fit is None:
        return _Phase(configured, "", None, own)
    return _Phase(fit.fitted.coefficients, lender, fit, own)
