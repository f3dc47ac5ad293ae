"""Wiring of the directory: `evolving-directory`, or `python -m evolving_directory`."""

from __future__ import annotations

import asyncio

from evolving.core.directory import Directory
from evolving.internal.v1 import directory_pb2_grpc as internal_grpc
from evolving.runtime.log import get_logger
from evolving.runtime.service import Service, run_service
from evolving.runtime.settings_loader import load
from evolving.runtime.store import Store
from evolving.v1 import directory_pb2_grpc as public_grpc
from evolving_directory import collector
from evolving_directory.audit import CountsQueries
from evolving_directory.cluster import ClusterWatch
from evolving_directory.compaction import Compactor
from evolving_directory.data_dir import DataDir
from evolving_directory.host import Host
from evolving_directory.internal_service import InternalDirectoryService
from evolving_directory.journal import DiskJournal, NoJournal, SegmentFiles
from evolving_directory.metrics import DirectoryMetrics
from evolving_directory.public_service import PublicDirectoryService
from evolving_directory.recovery import recover
from evolving_directory.settings import DirectorySettings
from evolving_directory.term import take_term

# Registered under one name, so that a new directory takes the place of one that died without waiting for its lease.
INSTANCE = "active"
_log = get_logger(__name__)


async def run_directory(service: Service[DirectorySettings]) -> None:
    """Become what the data directory says this directory was, then serve; nodes bring what they hold."""
    if service.settings.data_dir is None:
        _log.warning("memory_only", hint="a restart forgets all branches until their next request; see --data-dir")
        host = Host(Directory(service.settings.config), service.clock, DirectoryMetrics(service.metrics), NoJournal())
        await serve(service, host)
        return
    data = DataDir(service.settings.data_dir)
    data.lock()
    try:
        await serve_from(service, data)
    finally:
        data.unlock()


async def serve_from(service: Service[DirectorySettings], data: DataDir) -> None:
    """Serve with a data directory that this process has locked. Raises DataDirError."""
    settings, clock = service.settings, service.clock
    metrics = DirectoryMetrics(service.metrics)
    started_s = clock.now_s()
    found = await asyncio.to_thread(recover, data, settings.partition_id, settings.config)
    # The directory's time is that of the wall, but never runs back, and ticks evenly while this process lives.
    origin_s = max(clock.wall_s(), found.now_s) - clock.now_s()
    stats = found.directory.stats()
    _log.info(
        "recovered",
        branches=stats.live_branches,
        records=found.records,
        not_replayed=stats.counters.get("not_replayed", 0),
        segment=found.next_segment,
        seconds=clock.now_s() - started_s,
    )

    def changed(failed: str) -> None:
        service.ready.set("journal", not failed, failed)
        host.journal_changed(failed)

    files = SegmentFiles(data, settings.partition_id, found.next_segment, settings.journal_segment_bytes)
    journal = DiskJournal(files, clock, lambda: origin_s + clock.now_s(), metrics, changed)
    host = Host(found.directory, clock, metrics, journal, origin_s, found.roles)
    found.directory.keep_log(journal.append)
    service.ready.require("journal")
    service.spawn(journal.run(), "journal")
    compactor = Compactor(data, settings.partition_id, journal, settings.journal_segment_bytes, clock)
    service.spawn(compactor.run(), "compaction")
    await serve(service, host)
    await journal.close()


async def serve(service: Service[DirectorySettings], host: Host) -> None:
    """Take a term, then serve until told to stop."""
    settings, clock = service.settings, service.clock
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
        service.spawn(host.give_up_absent(), "give_up_absent")
        service.spawn(host.show_sizes(), "show_sizes")
        collections = collector.begin(clock)
        try:
            await service.serve()
        finally:
            collections.end()


def main() -> None:
    """The command."""
    raise SystemExit(run_service(load(DirectorySettings), run_directory))


if __name__ == "__main__":
    main()
