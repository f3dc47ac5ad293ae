"""Wiring of the planner: `evolving-planner`, or `python -m evolving_planner`."""

from __future__ import annotations

import asyncio

from evolving.internal.v1 import planner_pb2_grpc as internal_grpc
from evolving.runtime.election import Election
from evolving.runtime.service import Service, run_service
from evolving.runtime.settings_loader import load
from evolving.runtime.store import Store
from evolving.v1 import planner_pb2_grpc
from evolving_planner.intake import IntakeService
from evolving_planner.learning import Learning
from evolving_planner.measures import Measures
from evolving_planner.metrics import PlannerMetrics
from evolving_planner.models import ModelBook
from evolving_planner.office import Office
from evolving_planner.replanner import Replanner
from evolving_planner.service import PlannerService
from evolving_planner.settings import PlannerSettings
from evolving_planner.view import LEADER_ROLE, View


async def run_planner(service: Service[PlannerSettings]) -> None:
    """Serve reads as soon as etcd has answered; stand for election all the while."""
    async with service.open_store() as store:
        await _run(service, store)


async def _run(service: Service[PlannerSettings], store: Store) -> None:
    settings, clock, keys = service.settings, service.clock, service.settings.keys
    metrics = PlannerMetrics(service.metrics)
    view = View(store, keys, clock)
    office = Office(
        store,
        keys,
        view,
        first=settings.first_split,
        decisions_kept=settings.decisions_kept,
        clock=clock,
        metrics=metrics,
    )
    measures = Measures(settings.planner_config)
    models = ModelBook(settings.fit_config, windows_kept=settings.iteration_windows_kept, mix_s=settings.window_s)
    learning = Learning(view, office, models, clock, metrics)
    replanner = Replanner(
        view,
        office,
        measures,
        learning,
        config=settings.planner_config,
        mode=settings.mode,
        clock=clock,
        metrics=metrics,
    )
    public = PlannerService(view, office, replanner, learning, measures, settings.mode, clock)
    intake = IntakeService(settings.partition_id, view, office, measures, models, clock, metrics)
    add = service.server.add
    add(planner_pb2_grpc.add_PlannerServiceServicer_to_server, public, "evolving.v1.PlannerService")
    add(internal_grpc.add_PlannerServiceServicer_to_server, intake, "evolving.internal.v1.PlannerService")
    service.ready.require("view", "registered")
    address = await service.start()
    registration = service.announce(store, "planner")

    async def announce_ready() -> None:
        await asyncio.gather(view.loaded.wait(), registration.wait_registered())
        service.ready.set("view", True)
        service.ready.set("registered", True)

    async with Election(store, keys.leader(LEADER_ROLE), address.encode(), settings.leader_ttl_s, clock) as election:
        service.on_drain(election.close)  # resign first, so that another leads while this one drains
        service.spawn(view.run(), "view")
        service.spawn(office.run(election, address), "office")
        service.spawn(learning.run(), "learning")
        service.spawn(replanner.run(), "replanner")
        service.spawn(announce_ready(), "announce_ready")
        await service.serve()


def main() -> None:
    """The command."""
    raise SystemExit(run_service(load(PlannerSettings), run_planner))


if __name__ == "__main__":
    main()
