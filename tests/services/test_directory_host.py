"""What the directory remembers of nodes that are away: whether they may come back, and what they have to be told."""

from __future__ import annotations

import asyncio

import pytest

from evolving.core.directory import Directory
from evolving.core.terms import Role
from evolving.internal.v1 import directory_pb2
from evolving.runtime.clock import ManualClock
from evolving.runtime.metrics import Metrics
from evolving_directory.host import Host
from evolving_directory.journal import NoJournal
from evolving_directory.metrics import DirectoryMetrics
from evolving_directory.outbox import Outbox
from evolving_directory.records import Record, RoleTaken


class Kept(NoJournal):
    """A journal that shows the roles it was given."""

    def __init__(self) -> None:
        self.roles: list[Role] = []

    def append(self, record: Record) -> None:
        if isinstance(record, RoleTaken):
            self.roles.append(record.role)


def connect(host: Host, node_id: str) -> Outbox:
    """A node's stream."""
    outbox = Outbox(host.term, host.clock, 0.0, 1000)
    host.connect(directory_pb2.NodeHello(node_id=node_id, incarnation="1", next_sequence=1), outbox)
    return outbox


@pytest.mark.parametrize("registered", [False, True])
async def test_nodes_that_left_while_the_disk_failed_are_given_up_after_a_while(registered: bool) -> None:
    clock, disk = ManualClock(), NoJournal()
    host = Host(Directory(), clock, DirectoryMetrics(Metrics()), disk)
    host.term = 1
    giving_up = asyncio.create_task(host.give_up_absent())
    host.set_nodes({"back", "away"}, {})
    streams = {node_id: connect(host, node_id) for node_id in ("back", "away")}
    await clock.advance(60.0)
    disk.failed = "full"
    host.journal_changed(disk.failed)
    for node_id, outbox in streams.items():
        host.disconnect(node_id, outbox)
    host.set_nodes({"away"} if registered else set(), {})
    await clock.advance(60.0)
    assert set(host.known_nodes) == {"back", "away"}, "nothing is decided while nobody can connect"
    disk.failed = ""
    host.journal_changed("")
    host.set_nodes({"away"} if registered else set(), {})
    assert set(host.known_nodes) == {"back", "away"}, "they have not had the time to come back"
    connect(host, "back")
    await clock.advance(60.0)
    assert set(host.known_nodes) == ({"back", "away"} if registered else {"back"})
    giving_up.cancel()


@pytest.mark.parametrize("back_as", [Role.PREFILL, Role.DECODE])
async def test_a_switch_is_written_down_once_a_node_that_was_away_was_told(back_as: Role) -> None:
    """A restart before that would forget what the node has yet to be told."""
    journal = Kept()
    host = Host(Directory(), ManualClock(), DirectoryMetrics(Metrics()), journal)
    host.term = 1
    host.set_nodes({"n"}, {"n": Role.DECODE})
    host.disconnect("n", connect(host, "n"))
    host.set_nodes({"n"}, {"n": Role.PREFILL})
    while host.directory.turning("n"):
        host.carry_out(host.directory.tick(0.0))
    host.set_nodes({"n"}, {"n": back_as})
    assert journal.roles == [Role.DECODE]
    connect(host, "n")
    host.set_nodes({"n"}, {"n": back_as})
    assert journal.roles == [Role.DECODE, Role.PREFILL][: 2 if back_as is Role.PREFILL else 1]
