"""What the etcd store does when etcd misbehaves; the quiet cases are in test_store."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

import pytest
from etcd_process import Etcd

from evolving.runtime.clock import SystemClock
from evolving.runtime.errors import StoreUnavailable
from evolving.runtime.etcd import EtcdStore
from evolving.runtime.store import WatchBatch

CLOCK = SystemClock()


async def follow_until(batches: object, view: dict[str, bytes], expected: dict[str, bytes]) -> list[WatchBatch]:
    """Apply batches to `view` until it is `expected`; the batches seen."""
    seen: list[WatchBatch] = []
    async with asyncio.timeout(60):
        while view != expected:
            batch: WatchBatch = await anext(batches)  # type: ignore[call-overload]
            seen.append(batch)
            if batch.snapshot:
                view.clear()
            view.update({item.key: item.value for item in batch.puts})
            for key in batch.deletes:
                view.pop(key, None)
    return seen


async def test_a_watch_continues_after_compaction(etcd: Etcd) -> None:
    async with (
        EtcdStore(etcd.endpoints, clock=CLOCK) as store,
        contextlib.aclosing(store.watch("/n/")) as batches,
    ):
        view: dict[str, bytes] = {}
        await store.put("/n/a", b"0")
        await follow_until(batches, view, {"/n/a": b"0"})
        for n in range(1, 10):
            await store.put("/n/a", b"%d" % n)
        await etcd.compact()
        await store.put("/n/a", b"last")
        await follow_until(batches, view, {"/n/a": b"last"})


async def test_a_watch_that_missed_a_compacted_history_gets_a_snapshot(etcd: Etcd) -> None:
    """The connection is lost, meanwhile history is written and compacted away: nothing is skipped silently."""
    async with (
        EtcdStore(etcd.endpoints, clock=CLOCK, timeout_s=1) as watching,
        contextlib.aclosing(watching.watch("/n/")) as batches,
    ):
        view: dict[str, bytes] = {}
        async with EtcdStore(etcd.endpoints, clock=CLOCK) as writing:
            await writing.put("/n/gone", b"0")
            await follow_until(batches, view, {"/n/gone": b"0"})
            etcd.kill()
            await etcd.start()
        async with EtcdStore(etcd.endpoints, clock=CLOCK) as writing:
            await writing.delete("/n/gone")
            await writing.put("/n/new", b"1")
            await etcd.compact()
            seen = await follow_until(batches, view, {"/n/new": b"1"})
        assert any(batch.snapshot for batch in seen)


async def test_a_watch_from_a_compacted_revision_ends_the_stream_not_the_iterator(etcd: Etcd) -> None:
    async with EtcdStore(etcd.endpoints, clock=CLOCK) as store:
        first = await store.put("/n/a", b"1")
        for n in range(5):
            await store.put("/n/a", b"%d" % n)
        await etcd.compact()
        with pytest.raises(Exception, match="compacted"):
            async for _ in store._follow("/n/", first.mod_revision):
                pass


async def test_calls_to_an_absent_etcd_end_in_time(etcd: Etcd) -> None:
    changes: list[bool] = []
    async with EtcdStore(etcd.endpoints, clock=CLOCK, timeout_s=0.5, on_ready=changes.append) as store:
        await store.get("/a")
        etcd.kill()
        async with asyncio.timeout(20):
            for call in (
                store.get("/a"),
                store.list("/"),
                store.put("/a", b""),
                store.delete("/a"),
                store.compare_and_swap("/a", 0, b""),
                store.grant_lease(5),
                store.renew_lease(5),
                store.revoke_lease(5),
            ):
                with pytest.raises(StoreUnavailable):
                    await call
        assert not store.ready
        await etcd.start()
        async with asyncio.timeout(30):
            while not store.ready:
                with contextlib.suppress(StoreUnavailable):
                    await store.get("/a")
    assert changes == [True, False, True]


async def test_a_member_that_hangs_does_not_hang_calls_or_watches(etcd: Etcd) -> None:
    """SIGSTOP: the connection stays up and nothing is ever answered."""
    async with (
        EtcdStore(etcd.endpoints, clock=CLOCK, timeout_s=0.5, watch_idle_s=0.5) as store,
        contextlib.aclosing(store.watch("/n/")) as batches,
    ):
        view: dict[str, bytes] = {}
        await store.put("/n/a", b"0")
        await follow_until(batches, view, {"/n/a": b"0"})
        (member,) = etcd.members
        member.pause()
        following = asyncio.create_task(follow_until(batches, view, {"/n/a": b"1"}))
        try:
            async with asyncio.timeout(20):
                while store.ready:  # nobody calls: only the watch can notice
                    await asyncio.sleep(0.05)
                with pytest.raises(StoreUnavailable):
                    await store.get("/n/a")
        finally:
            member.resume()
        async with EtcdStore(etcd.endpoints, clock=CLOCK) as writing:
            await writing.put("/n/a", b"1")
            seen = await following
        assert any(batch.snapshot for batch in seen)


async def test_a_quiet_watch_stays_open(etcd: Etcd) -> None:
    """No change for several idle periods: etcd's sign of life is enough, no snapshot is fetched anew."""
    async with (
        EtcdStore(etcd.endpoints, clock=CLOCK, watch_idle_s=0.1) as store,
        contextlib.aclosing(store.watch("/n/")) as batches,
    ):
        assert (await anext(batches)).snapshot
        following = asyncio.create_task(anext(batches))
        witness = await store.grant_lease(1)  # its end is what we wait for: a second, ten idle periods
        with contextlib.suppress(Exception):
            async with asyncio.timeout(20):
                while True:
                    await store.put("/witness", b"", lease=witness)
                    await asyncio.sleep(0.1)
        assert not following.done()
        await store.put("/n/a", b"1")
        assert not (await following).snapshot


async def test_a_registration_comes_back_after_etcd_lost_its_lease(etcd: Etcd) -> None:
    async with EtcdStore(etcd.endpoints, clock=CLOCK, timeout_s=1) as store:
        registration = store.register("/n/a", b"1", ttl_s=1)
        await registration.wait_registered()
        first = await store.get("/n/a")
        lease = registration._lease
        assert lease is not None
        await store.revoke_lease(lease)
        async with asyncio.timeout(30), contextlib.aclosing(store.watch("/n/")) as batches:
            await follow_until(batches, {"unknown": b""}, {"/n/a": b"1"})
        again = await store.get("/n/a")
        assert again is not None
        assert first is not None
        assert again.create_revision > first.create_revision
        await registration.close()


async def test_closing_ends_watches_and_waiting_calls(etcd: Etcd) -> None:
    store = EtcdStore(etcd.endpoints, clock=CLOCK, timeout_s=30)
    batches = store.watch("/n/")
    await anext(batches)
    reading = asyncio.ensure_future(anext(batches))
    (member,) = etcd.members
    member.pause()
    calling = asyncio.create_task(store.get("/a"))
    await asyncio.sleep(0)
    await store.close()
    async with asyncio.timeout(20):
        with pytest.raises(StopAsyncIteration):
            await reading
        with pytest.raises(StoreUnavailable):
            await calling
    member.resume()


@pytest.mark.slow
async def test_a_watch_through_rolling_kills_misses_nothing(etcd_cluster: Etcd) -> None:
    """Each member is killed and restarted in turn while keys are written; the watcher's view ends equal to etcd's."""
    async with (
        EtcdStore(etcd_cluster.endpoints, clock=CLOCK, timeout_s=2, watch_idle_s=1) as watching,
        EtcdStore(etcd_cluster.endpoints, clock=CLOCK, timeout_s=2) as writing,
        contextlib.aclosing(watching.watch("/n/")) as batches,
    ):
        stop = asyncio.Event()
        writer = asyncio.create_task(write_until(writing, stop))
        view: dict[str, bytes] = {}
        await follow_until(batches, view, {})
        for member in etcd_cluster.members:
            member.kill()
            await etcd_cluster.wait_serving()
            await etcd_cluster.restart(member)
        stop.set()
        written = await writer
        assert written > 0
        expected = {item.key: item.value for item in (await writing.list("/n/")).items}
        await follow_until(batches, view, expected)


async def write_until(store: EtcdStore, stop: asyncio.Event) -> int:
    """Write until told to stop; how many writes were acknowledged."""
    written = 0
    for n in itertools.count():
        if stop.is_set():
            return written
        with contextlib.suppress(StoreUnavailable):
            await store.put(f"/n/{n % 17}", b"%d" % n)
            written += 1
        await asyncio.sleep(0.01)
    raise AssertionError("unreachable")
