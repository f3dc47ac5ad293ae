"""What the directory follows in etcd: roles are of nodes and split together, and it reads no more than it needs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping
from typing import cast

import pytest
from directory_harness import KEYS, split_record
from planner_harness import join
from waiting import eventually

from evolving.core.terms import Role
from evolving.runtime.clock import ManualClock
from evolving.runtime.memory_store import MemoryStore
from evolving.runtime.store import WatchBatch
from evolving.runtime.tasks import end_tasks
from evolving_directory.cluster import ClusterWatch
from evolving_directory.host import Host


class SlowStore(MemoryStore):
    """One of its watches begins when it may."""

    def __init__(self, slow: str) -> None:
        super().__init__(ManualClock())
        self.slow = slow
        self.may_begin = asyncio.Event()
        self.seen: list[str] = []

    async def watch(self, prefix: str) -> AsyncGenerator[WatchBatch, None]:
        if prefix == self.slow:
            await self.may_begin.wait()
        async for batch in super().watch(prefix):
            self.seen += [found.key for found in batch.puts]
            yield batch


class Told:
    """What a host is told."""

    def __init__(self) -> None:
        self.roles: list[dict[str, Role]] = []
        self.nodes: set[str] = set()
        self.terms: list[int] = []

    def set_nodes(self, registered: Collection[str], roles: Mapping[str, Role]) -> None:
        self.nodes = set(registered)
        self.roles.append(dict(roles))

    def meet_term(self, term: int) -> None:
        self.terms.append(term)


@pytest.mark.parametrize("slow", [KEYS.nodes, KEYS.split, KEYS.term("directory")])
async def test_a_node_never_seems_to_have_lost_its_role(slow: str) -> None:
    store, told = SlowStore(slow), Told()
    await join(store, "a", "b")
    await store.put(KEYS.split, split_record(1, a=Role.PREFILL, b=Role.DECODE))
    await store.put(KEYS.term("directory"), b"7")
    await store.put(KEYS.decision(0), b"of another's concern")
    watch = ClusterWatch(store, KEYS, cast("Host", told))
    running = asyncio.create_task(watch.run())
    try:
        await eventually(lambda: len(store.seen) > 1)
        assert not watch.loaded.is_set()
        store.may_begin.set()
        await watch.loaded.wait()
        await store.delete(KEYS.node("b"))
        await store.put(KEYS.split, split_record(2, a=Role.DECODE, b=Role.DECODE))
        await store.put(KEYS.decision(1), b"of another's concern")
        await store.put(KEYS.term("directory"), b"8")
        await eventually(lambda: told.terms == [7, 8] and told.roles[-1] == {"a": Role.DECODE})
        assert told.nodes == {"a"}
        assert all(Role.MIXED not in roles.values() for roles in told.roles)
        assert not any(key.startswith(KEYS.decisions) for key in store.seen)
    finally:
        await end_tasks(running)
