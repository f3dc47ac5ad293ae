"""Wiring of the directory: `evolving-directory`, or `python -m evolving_directory`."""

from __future__ import annotations

from evolving.core.directory import Directory
from evolving.internal.v1 import directory_pb2_grpc as internal_grpc
from evolving.runtime.service import Service, run_service
from evolving.runtime.settings_loader import load
from evolving.runtime.store import Store
from evolving.v1 import directory_pb2_grpc as public_grpc
from evolving_directory import collector
from evolving_directory.audit import CountsQueries
from evolving_directory.cluster import ClusterWatch
from evolving_directory.host import Host
from evolving_directory.internal_service import InternalDirectoryService
from evolving_directory.metrics import DirectoryMetrics
from evolving_directory.public_service import PublicDirectoryService
from evolving_directory.settings import DirectorySettings
from evolving_directory.term import take_term

# Registered under one name, so that a new directory takes the place of one that died without waiting for its lease.
INSTANCE = "active"


async def run_directory(service: Service[DirectorySettings]) -> None:
    """Take a term, then serve from memory; nodes and gateways bring what there is to know."""
    settings, clock = service.settings, service.clock
    host = Host(Directory(settings.config), clock, DirectoryMetrics(service.metrics))
    queries = CountsQueries()
    service.server.add(
        internal_grpc.add_DirectoryServiceServicer_to_server,
        InternalDirectoryService(host, queries, settings),
        "evolving.internal.v1.DirectoryService",
    )
    service.server.add(
        public_grpc.add_DirectoryServiceServicer_to_server,
        PublicDirectoryService(host, queries, settings.audit_timeout_s),
        "evolving.v1.DirectoryService",
    )
    service.ready.require("term", "nodes", "registered")
    await service.start()

    async def take_office(store: Store) -> None:
        host.term = await take_term(store, settings.keys, clock)
        service.ready.set("term", True)
        watch = ClusterWatch(store, settings.keys, host)
        service.spawn(watch.run(), "cluster_watch")
        await watch.loaded.wait()
        service.ready.set("nodes", True)
        registration = service.announce(store, "directory", INSTANCE)
        await registration.wait_registered()
        service.ready.set("registered", True)
        await host.superseded.wait()
        service.ready.set("term", False, f"a directory of term {host.newer_term} serves this partition")
        await registration.close()

    async with service.open_store() as store:
        service.on_drain(host.close_streams)
        service.spawn(take_office(store), "take_office")
        service.spawn(host.let_time_pass(), "let_time_pass")
        service.spawn(host.show_sizes(), "show_sizes")
        collector.begin(clock)
        await service.serve()


def main() -> None:
    """The command."""
    raise SystemExit(run_service(load(DirectorySettings), run_directory))


if __name__ == "__main__":
    main()
