"""Wiring of the gateway: `evolving-gateway`, or `python -m evolving_gateway`."""

from __future__ import annotations

import asyncio

from evolving.core.contexts import Contexts
from evolving.runtime.discovery import follow_leader
from evolving.runtime.following import FollowingChannel
from evolving.runtime.log import get_logger
from evolving.runtime.service import Service, run_service
from evolving.runtime.settings import SettingsError
from evolving.runtime.settings_loader import load
from evolving.runtime.store import Store
from evolving.runtime.tasks import end_tasks
from evolving.v1 import gateway_pb2_grpc
from evolving_gateway.beginning import Beginning
from evolving_gateway.directory import DirectoryClient
from evolving_gateway.known import KnownRequests
from evolving_gateway.metrics import GatewayMetrics
from evolving_gateway.nodes import Cluster
from evolving_gateway.open_levels import OpenReporter, OpenRequests
from evolving_gateway.request import Desk
from evolving_gateway.router import Router
from evolving_gateway.service import GatewayService
from evolving_gateway.settings import GatewaySettings
from evolving_gateway.tokens import BadModelDirectory, Tokenizer

_FAREWELL_S = 1.0
_log = get_logger(__name__)


async def serve(service: Service[GatewaySettings]) -> None:
    """Serve until told to stop. Ready once etcd has answered, while a node serves."""
    async with service.open_store() as store:
        await run_gateway(service, store)


async def run_gateway(service: Service[GatewaySettings], store: Store) -> None:
    """The same over a store that the caller closes."""
    settings, clock = service.settings, service.clock
    tokenizer = _tokenizer(settings)
    keys = settings.keys
    token = settings.bearer_token()
    cluster = Cluster(
        store,
        keys,
        clock,
        service.metrics,
        token=token,
        max_message_bytes=settings.max_message_bytes,
        silence_s=settings.node_silence_s,
    )
    directory = DirectoryClient(
        keys,
        clock,
        service.metrics,
        token=token,
        max_message_bytes=settings.max_message_bytes,
        timeout_s=settings.directory_timeout_s,
        finish_retry_s=settings.finish_retry_s,
    )
    planner = FollowingChannel(token=token, max_message_bytes=settings.max_message_bytes)
    open_requests = OpenRequests(clock.now_s())
    metrics = GatewayMetrics(service.metrics)
    desk = Desk(
        settings=settings,
        clock=clock,
        cluster=cluster,
        router=Router(cluster, settings.routing(), metrics),
        beginning=Beginning(directory, Contexts(settings.context_cache_bytes), settings.partition_id),
        tokenizer=tokenizer,
        metrics=metrics,
        open_requests=open_requests,
    )
    known = KnownRequests(settings.known_requests, settings.known_requests_age_s)
    service.server.add(
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server,
        GatewayService(desk, directory, known),
        "evolving.v1.GatewayService",
    )
    service.ready.require("nodes")
    cluster.on_change(lambda: _tell_nodes(service, cluster))
    try:
        await service.start()
        for name, loop in {
            "nodes": cluster.watch_nodes(),
            "split": cluster.watch_split(),
            "stale split": cluster.refresh_split(),
            "newcomers": cluster.tell_newcomers(),
            "directory": directory.follow(store),
            "planner": follow_leader(store, keys, "planner", planner.go_to),
        }.items():
            service.spawn(loop, name)
        service.announce(store, "gateway", service.address)
        reporter = OpenReporter(open_requests, planner, settings.partition_id, service.address, clock, service.metrics)
        reporting = service.spawn(reporter.run(), "open requests")
        await service.serve()
        await end_tasks(reporting)
        await reporter.farewell(min(_FAREWELL_S, service.remaining_s() / 2))
        await _tell_ends(directory, service)
    finally:
        await planner.close()
        await directory.close()
        await cluster.close()
        if tokenizer is not None:
            tokenizer.close()


def _tokenizer(settings: GatewaySettings) -> Tokenizer | None:
    if settings.tokenizer_path is None:
        return None
    try:
        return Tokenizer(settings.tokenizer_path)
    except BadModelDirectory as error:
        raise SettingsError(f"--tokenizer-path: {error}; give the model's directory") from error


def _tell_nodes(service: Service[GatewaySettings], cluster: Cluster) -> None:
    serving = sum(node.ready for node in cluster.nodes.values())
    service.ready.set("nodes", serving > 0, f"{serving} of {len(cluster.nodes)} registered nodes serve")


async def _tell_ends(directory: DirectoryClient, service: Service[GatewaySettings]) -> None:
    """Before leaving, tell the directory which requests are over, as long as the grace period lets us."""
    try:
        async with asyncio.timeout(service.remaining_s() / 2):
            await directory.drain()
    except TimeoutError:
        _log.warning("ends_not_told", reason="the directory did not answer within the grace period")


def main() -> None:
    """The command."""
    raise SystemExit(run_service(load(GatewaySettings), serve))


if __name__ == "__main__":
    main()
