"""The store's conformance: what must hold for etcd and for its fake alike."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from etcd_process import Etcd

from evolving.runtime.clock import SystemClock
from evolving.runtime.errors import NameTaken
from evolving.runtime.etcd import EtcdStore
from evolving.runtime.memory_store import MemoryStore
from evolving.runtime.store import Conflict, Fenced, Guard, LeaseLost, Store, WatchBatch


@pytest.fixture(params=["memory", "etcd"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    if request.param == "memory":
        store: Store = MemoryStore(SystemClock())
        yield store
        await store.close()
        return
    cluster = Etcd(1)
    try:
        await cluster.start()
        store = EtcdStore(cluster.endpoints, clock=SystemClock())
        yield store
        await store.close()
    finally:
        cluster.destroy()


async def test_an_absent_key_is_none(store: Store) -> None:
    assert await store.get("/a") is None
    assert store.ready


async def test_put_get_and_versions(store: Store) -> None:
    first = await store.put("/a", b"1")
    second = await store.put("/a", b"2")
    assert (first.version, second.version) == (1, 2)
    assert first.create_revision == second.create_revision == first.mod_revision < second.mod_revision
    assert await store.get("/a") == second


async def test_deleted_and_put_again_is_created_anew(store: Store) -> None:
    first = await store.put("/a", b"1")
    assert await store.delete("/a")
    assert not await store.delete("/a")
    again = await store.put("/a", b"1")
    assert again.version == 1
    assert again.create_revision > first.create_revision


async def test_list_is_ordered_and_only_below_the_prefix(store: Store) -> None:
    for key in ("/n/b", "/n/a", "/other", "/n0"):
        await store.put(key, key.encode())
    listing = await store.list("/n/")
    assert [item.key for item in listing.items] == ["/n/a", "/n/b"]
    assert listing.revision >= max(item.mod_revision for item in listing.items)


async def test_compare_and_swap_creates_only_what_is_absent(store: Store) -> None:
    created = await store.compare_and_swap("/a", 0, b"1")
    with pytest.raises(Conflict) as conflict:
        await store.compare_and_swap("/a", 0, b"2")
    assert conflict.value.current == created
    assert await store.get("/a") == created


async def test_compare_and_swap_replaces_only_the_revision_read(store: Store) -> None:
    first = await store.put("/a", b"1")
    second = await store.compare_and_swap("/a", first.mod_revision, b"2")
    with pytest.raises(Conflict) as conflict:
        await store.compare_and_swap("/a", first.mod_revision, b"3")
    assert conflict.value.current == second
    await store.delete("/a")
    with pytest.raises(Conflict) as conflict:
        await store.compare_and_swap("/a", second.mod_revision, b"3")
    assert conflict.value.current is None


async def test_of_many_swaps_of_one_revision_one_wins(store: Store) -> None:
    first = await store.put("/a", b"0")
    swaps = (store.compare_and_swap("/a", first.mod_revision, b"%d" % n) for n in range(8))
    results = await asyncio.gather(*swaps, return_exceptions=True)
    won = [result for result in results if not isinstance(result, BaseException)]
    assert len(won) == 1
    assert all(isinstance(result, Conflict) for result in results if result not in won)
    assert await store.get("/a") == won[0]


async def test_a_guard_that_no_longer_holds_fences_the_write(store: Store) -> None:
    leader = await store.put("/leader", b"me")
    guard = Guard("/leader", leader.create_revision)
    written = await store.compare_and_swap("/split", 0, b"1", guards=(guard,))
    await store.put("/leader", b"me, with another value")  # same life of the key: still the same term
    written = await store.compare_and_swap("/split", written.mod_revision, b"2", guards=(guard,))
    await store.delete("/leader")
    with pytest.raises(Fenced) as fenced:
        await store.compare_and_swap("/split", written.mod_revision, b"3", guards=(guard,))
    assert fenced.value.guard == guard
    await store.put("/leader", b"another")
    with pytest.raises(Fenced):
        await store.compare_and_swap("/split", written.mod_revision, b"3", guards=(guard,))
    assert await store.get("/split") == written


async def test_a_revoked_lease_takes_its_keys_along(store: Store) -> None:
    lease = await store.grant_lease(30)
    await store.put("/a", b"1", lease=lease)
    await store.put("/b", b"1")
    await store.revoke_lease(lease)
    await store.revoke_lease(lease)  # gone already: no error
    assert await store.get("/a") is None
    assert await store.get("/b") is not None
    with pytest.raises(LeaseLost):
        await store.renew_lease(lease)
    with pytest.raises(LeaseLost):
        await store.put("/a", b"1", lease=lease)
    with pytest.raises(LeaseLost):
        await store.compare_and_swap("/a", 0, b"1", lease=lease)


async def test_a_renewed_lease_has_its_whole_time_again(store: Store) -> None:
    lease = await store.grant_lease(29.5)
    assert await store.renew_lease(lease) == 30


async def test_a_lease_that_is_not_renewed_expires(store: Store) -> None:
    lease = await store.grant_lease(1)
    await store.put("/a", b"1", lease=lease)
    async with contextlib.aclosing(store.watch("/a")) as batches:
        assert (await anext(batches)).puts
        async with asyncio.timeout(20):
            assert (await anext(batches)).deletes == ("/a",)


async def test_a_key_put_under_another_lease_outlives_the_first(store: Store) -> None:
    first, second = await store.grant_lease(30), await store.grant_lease(30)
    await store.put("/a", b"1", lease=first)
    await store.put("/a", b"2", lease=second)
    await store.revoke_lease(first)
    assert await store.get("/a") is not None


async def test_watch_begins_with_everything_and_goes_on_with_changes(store: Store) -> None:
    await store.put("/n/a", b"1")
    await store.put("/m", b"1")
    async with contextlib.aclosing(store.watch("/n/")) as batches:
        first = await anext(batches)
        assert first.snapshot
        assert [item.key for item in first.puts] == ["/n/a"]
        await store.put("/m", b"2")
        await store.put("/n/b", b"2")
        await store.delete("/n/a")
        view = {item.key: item.value for item in first.puts}
        async with asyncio.timeout(10):
            while view != {"/n/b": b"2"}:
                apply(view, await anext(batches))


async def test_each_watch_sees_all_changes(store: Store) -> None:
    async with contextlib.aclosing(store.watch("/n/")) as one, contextlib.aclosing(store.watch("/n/")) as two:
        views: list[dict[str, bytes]] = [{}, {}]
        for view, batches in zip(views, (one, two), strict=True):
            apply(view, await anext(batches))
        for n in range(20):
            await store.put(f"/n/{n % 7}", b"%d" % n)
        expected = {item.key: item.value for item in (await store.list("/n/")).items}
        async with asyncio.timeout(10):
            for view, batches in zip(views, (one, two), strict=True):
                while view != expected:
                    apply(view, await anext(batches))


async def test_a_registration_is_there_until_closed(store: Store) -> None:
    registration = store.register("/n/a", b"1", ttl_s=10)
    async with asyncio.timeout(10):
        await registration.wait_registered()
    assert registration.registered
    await registration.update(b"2")
    item = await store.get("/n/a")
    assert item is not None
    assert item.value == b"2"
    await registration.close()
    assert await store.get("/n/a") is None


async def test_a_closed_registration_leaves_its_successors_key(store: Store) -> None:
    old = store.register("/n/a", b"old", ttl_s=10)
    await old.wait_registered()
    new = store.register("/n/a", b"new", ttl_s=10)
    await new.wait_registered()
    await old.close()
    item = await store.get("/n/a")
    assert item is not None
    assert item.value == b"new"
    await new.close()


async def test_who_registers_a_key_later_takes_it_over_and_the_earlier_gives_up(store: Store) -> None:
    old = store.register("/n/a", b"old", ttl_s=1)
    await old.wait_registered()
    new = store.register("/n/a", b"new", ttl_s=1)
    async with asyncio.timeout(20):
        with pytest.raises(NameTaken, match="/n/a"):
            await old.wait_closed()
    assert not old.registered
    await old.close()
    item = await store.get("/n/a")
    assert item is not None
    assert item.value == b"new"
    await new.close()


async def test_a_registration_outlives_its_lease_time_by_renewing(store: Store) -> None:
    registration = store.register("/n/a", b"1", ttl_s=1)
    await registration.wait_registered()
    created = await store.get("/n/a")
    witness = await store.grant_lease(2)  # not renewed: its end shows that more than the registration's time has passed
    await store.put("/witness", b"", lease=witness)
    async with contextlib.aclosing(store.watch("/witness")) as batches, asyncio.timeout(20):
        while not (await anext(batches)).deletes:
            pass
    assert await store.get("/n/a") == created
    await registration.close()


async def test_a_registration_whose_key_was_removed_puts_it_again(store: Store) -> None:
    registration = store.register("/n/a", b"1", ttl_s=1)
    await registration.wait_registered()
    async with contextlib.aclosing(store.watch("/n/")) as batches, asyncio.timeout(20):
        await anext(batches)
        await store.delete("/n/a")
        view = {"/n/a": b"1"}
        apply(view, await anext(batches))
        while "/n/a" not in view:
            apply(view, await anext(batches))
    await registration.close()


def apply(view: dict[str, bytes], batch: WatchBatch) -> None:
    """Bring a reader's view of a prefix up to date."""
    if batch.snapshot:
        view.clear()
    for item in batch.puts:
        view[item.key] = item.value
    for key in batch.deletes:
        view.pop(key, None)
