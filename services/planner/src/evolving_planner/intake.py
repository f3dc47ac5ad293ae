"""The gRPC methods by which nodes and gateways tell the leading planner what they measured."""

from __future__ import annotations

from dataclasses import astuple

from evolving.core.slices import PrefillDone
from evolving.core.terms import Phase
from evolving.internal.v1 import planner_pb2
from evolving.internal.v1 import planner_pb2_grpc as internal_grpc
from evolving.runtime.clock import Clock
from evolving.runtime.errors import WrongPartition
from evolving.wire.status import Context
from evolving_planner import reports
from evolving_planner.measures import Measures
from evolving_planner.metrics import PlannerMetrics
from evolving_planner.models import ModelBook
from evolving_planner.office import Office
from evolving_planner.service import not_leader
from evolving_planner.view import View


class IntakeService(internal_grpc.PlannerServiceServicer):
    """evolving.internal.v1.PlannerService. A report is taken whole or, where anything in it can't be, not at all."""

    def __init__(
        self,
        partition_id: str,
        view: View,
        office: Office,
        measures: Measures,
        models: ModelBook,
        clock: Clock,
        metrics: PlannerMetrics,
    ) -> None:
        self._partition_id = partition_id
        self._view = view
        self._office = office
        self._measures = measures
        self._models = models
        self._clock = clock
        self._metrics = metrics

    async def ReportWork(
        self, request: planner_pb2.ReportWorkRequest, context: Context
    ) -> planner_pb2.ReportWorkResponse:
        """Keep what a node did, and answer what it is known to take for it. A report that comes twice is taken once."""
        self._require_office(request.partition_id)
        now_s = self._clock.now_s()
        reports.require_id("node_id", request.node_id)
        reports.require_id("incarnation", request.incarnation)
        samples = reports.work_samples(request.samples, now_s)
        windows = reports.iteration_windows(request.windows, now_s)
        self._measures.keep_only(self._view.nodes)
        outcome = self._measures.report_work(
            request.node_id, request.incarnation, request.sequence, samples, request.dropped, now_s
        )
        self._metrics.work_report(outcome.repeated, outcome.lost_reports)
        if outcome.repeated:
            return self._model_of(request)
        self._models.take(request.node_id, windows)
        for sample in samples:
            self._metrics.work_taken(Phase.PREFILL if isinstance(sample.done, PrefillDone) else Phase.DECODE)
        return self._model_of(request)

    async def ReportOpen(
        self, request: planner_pb2.ReportOpenRequest, context: Context
    ) -> planner_pb2.ReportOpenResponse:
        """Keep how many requests a gateway had open."""
        self._require_office(request.partition_id)
        now_s = self._clock.now_s()
        reports.require_id("gateway_id", request.gateway_id)
        self._measures.report_open(request.gateway_id, reports.open_levels(request.levels, now_s), now_s)
        return planner_pb2.ReportOpenResponse()

    def _model_of(self, request: planner_pb2.ReportWorkRequest) -> planner_pb2.ReportWorkResponse:
        """Nothing for another life than the one registered: its engine may be another."""
        registration = self._view.nodes.get(request.node_id)
        if registration is None or registration.incarnation != request.incarnation:
            return planner_pb2.ReportWorkResponse()
        fits = self._models.fits_of(registration)
        return planner_pb2.ReportWorkResponse(
            prefill_coefficients_s=astuple(fits.prefill) if fits.prefill is not None else (),
            decode_coefficients_s=astuple(fits.decode)[:4] if fits.decode is not None else (),
        )

    def _require_office(self, partition_id: str) -> None:
        if partition_id != self._partition_id:
            raise WrongPartition(partition_id, self._partition_id)
        if not self._office.is_leader():
            self._measures.clear()  # what was kept while leading is no use to the next office
            raise not_leader(self._view, self._office)
