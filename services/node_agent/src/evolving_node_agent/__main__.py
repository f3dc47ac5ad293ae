"""Wiring of the node agent: `evolving-node-agent`, or `python -m evolving_node_agent`."""

from __future__ import annotations

import asyncio
import contextlib

from evolving.internal.v1 import node_agent_pb2_grpc
from evolving.runtime.discovery import follow_leader, follow_service
from evolving.runtime.following import FollowingChannel
from evolving.runtime.service import Service, run_service
from evolving.runtime.settings_loader import load
from evolving_node_agent.address import Address
from evolving_node_agent.engine_factory import coefficients, make_engine
from evolving_node_agent.engines.port import Engine
from evolving_node_agent.lives import EngineLives
from evolving_node_agent.node import Node
from evolving_node_agent.reporter import DirectoryReporter
from evolving_node_agent.restart import RestartConfig, RestartPolicy
from evolving_node_agent.service import NodeAgentService
from evolving_node_agent.settings import NodeAgentSettings
from evolving_node_agent.supervisor import Supervisor
from evolving_node_agent.work import WorkReporter

_FAREWELL_S = 1.0


async def run_node_agent(service: Service[NodeAgentSettings], engine: Engine | None = None) -> None:
    """Keep one engine alive and in the cluster, until told to stop. None: the engine of the settings."""
    settings, clock = service.settings, service.clock
    store = service.open_store()
    keys = settings.keys
    engine = engine or make_engine(settings, clock)
    node = Node(settings.node_id, engine, *coefficients(settings), clock, service.metrics)
    token = service.settings.bearer_token()
    directory = DirectoryReporter(
        settings.partition_id, settings.node_id, engine, clock, token, settings.unsent_reports, service.metrics
    )
    planner = FollowingChannel(token=token)
    work = WorkReporter(
        settings.partition_id,
        settings.node_id,
        limit=settings.unsent_reports,
        period_s=settings.work_period_s,
        window_s=settings.iteration_window_s,
        planner=planner,
        answered=node.adopt_model,
        clock=clock,
        metrics=service.metrics,
    )
    service.ready.require("engine", "registered")
    service.server.add(
        node_agent_pb2_grpc.add_NodeAgentServiceServicer_to_server,
        NodeAgentService(settings, node, directory, work),
        "evolving.internal.v1.NodeAgentService",
    )
    address = await service.start()
    lives = EngineLives(service, store, keys, address, node, directory, work)
    policy = RestartPolicy(
        RestartConfig(
            settings.restart_first_s, settings.restart_max_s, settings.restart_attempts, settings.restart_window_s
        )
    )
    supervisor = Supervisor(engine, policy, clock, lives.up, lives.down)
    service.on_kill(supervisor.kill)
    directory_address = Address()
    service.spawn(node.roles.watch(store, keys), "roles")
    service.spawn(follow_service(store, keys, "directory", directory_address.set), "directory_address")
    service.spawn(follow_leader(store, keys, "planner", planner.go_to), "planner_address")
    service.spawn(directory.run(directory_address), "directory_stream")
    service.spawn(directory.flush_late(), "late_reports")
    service.spawn(work.run(), "work")
    supervising = service.spawn(supervisor.run(), "engine")
    service.on_drain(lives.drain)
    await service.serve()
    # Calls have ended. What they reported goes out, then the engine stops, then everything else.
    supervising.cancel()
    await asyncio.wait({supervising})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(min(_FAREWELL_S, service.remaining_s())):
            await asyncio.gather(directory.farewell(), work.farewell())
    await supervisor.stop(min(_FAREWELL_S, service.remaining_s()))
    await service.close()
    await planner.close()
    await store.close()


def main() -> None:
    """The command."""
    raise SystemExit(run_service(load(NodeAgentSettings), run_node_agent))


if __name__ == "__main__":
    main()
