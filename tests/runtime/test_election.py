"""At most one leader at any moment, also when etcd, the clock or a member fails."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from etcd_process import Etcd

from evolving.runtime.clock import ManualClock, SystemClock
from evolving.runtime.election import Election
from evolving.runtime.errors import NotLeader
from evolving.runtime.etcd import EtcdStore
from evolving.runtime.memory_store import MemoryStore
from evolving.runtime.store import Fenced, Store

KEY = "/leaders/planner"
TTL_S = 9.0


@pytest.fixture
async def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def store(clock: ManualClock) -> AsyncIterator[MemoryStore]:
    store = MemoryStore(clock)
    yield store
    await store.close()


async def test_a_sole_candidate_leads_and_resigns_on_close(store: MemoryStore, clock: ManualClock) -> None:
    async with Election(store, KEY, b"a:1", TTL_S, clock) as election:
        await clock.settle()
        assert election.is_leader()
        assert await election.leader() == b"a:1"
    assert not election.is_leader()
    assert await store.get(KEY) is None


async def test_one_of_several_leads_and_the_next_follows_a_resignation(store: MemoryStore, clock: ManualClock) -> None:
    async with contextlib.AsyncExitStack() as stack:
        elections = [await stack.enter_async_context(Election(store, KEY, b"%d" % n, TTL_S, clock)) for n in range(5)]
        await clock.settle()
        while len(elections) > 1:
            (leader,) = [one for one in elections if one.is_leader()]
            await leader.close()
            elections.remove(leader)
            await clock.settle()
        assert [one.is_leader() for one in elections] == [True]


async def test_leadership_outlasts_the_lease_by_renewal(store: MemoryStore, clock: ManualClock) -> None:
    async with Election(store, KEY, b"a", TTL_S, clock) as election:
        await clock.settle()
        fence = election.fence()
        for _ in range(50):
            await clock.advance(TTL_S / 2)
            assert election.is_leader()
        assert election.fence() == fence


async def test_a_leader_cut_off_steps_down_before_its_lease_can_pass_on(store: MemoryStore, clock: ManualClock) -> None:
    async with Election(store, KEY, b"a", TTL_S, clock) as first, Election(store, KEY, b"b", TTL_S, clock) as second:
        await clock.settle()
        leader, other = (first, second) if first.is_leader() else (second, first)
        guard = leader.fence()
        store.set_available(False)
        await clock.advance(TTL_S - 0.1)  # the store would not give the key away yet
        assert not leader.is_leader()
        with pytest.raises(NotLeader):
            leader.fence()
        store.set_available(True)
        assert not other.is_leader()
        await clock.advance(2 * TTL_S)
        assert first.is_leader() != second.is_leader()
        with pytest.raises(Fenced):
            await store.compare_and_swap("/split", 0, b"late", guards=(guard,))


async def test_a_loop_that_stalled_past_the_deadline_knows_at_once(store: MemoryStore, clock: ManualClock) -> None:
    async with Election(store, KEY, b"a", TTL_S, clock) as election:
        await clock.settle()
        assert election.is_leader()
        clock.jump(TTL_S)  # no task ran meanwhile
        assert not election.is_leader()
        with pytest.raises(NotLeader):
            election.fence()


async def test_a_renewal_counts_from_when_it_was_sent(clock: ManualClock) -> None:
    store = SlowStore(clock)
    async with Election(store, KEY, b"a", TTL_S, clock) as election:
        await clock.settle()
        store.answer_after_s = 3.0
        await clock.advance(TTL_S / 3)  # a renewal is sent now
        await clock.advance(3.0)  # and answered now
        store.set_available(False)
        await clock.advance(TTL_S - 3.0 - 0.1)
        assert not election.is_leader()  # the lease began when the store took the request, not when the answer came
    store.set_available(True)
    await store.close()


async def test_a_leader_whose_key_was_taken_away_steps_down(store: MemoryStore, clock: ManualClock) -> None:
    async with Election(store, KEY, b"a", TTL_S, clock) as election:
        await clock.settle()
        fence = election.fence()
        await store.delete(KEY)
        await clock.advance(TTL_S)
        assert election.is_leader()  # again, in a new term
        assert election.fence().create_revision > fence.create_revision


async def test_changes_are_told_and_a_new_term_counts_as_one(store: MemoryStore, clock: ManualClock) -> None:
    election = Election(store, KEY, b"a", TTL_S, clock)
    changes = election.leadership_changes()
    assert await anext(changes) is False
    async with election:
        assert await anext(changes) is True
        await store.delete(KEY)
        following = asyncio.ensure_future(anext(changes))
        await clock.advance(TTL_S)
        seen = await following
        assert seen is True or await anext(changes) is True
    assert await anext(changes) is False
    await changes.aclose()  # type: ignore[attr-defined]


async def test_a_bug_in_the_campaign_reaches_whoever_follows_it(clock: ManualClock) -> None:
    class Broken(MemoryStore):
        async def grant_lease(self, ttl_s: float) -> int:
            raise ZeroDivisionError

    store = Broken(clock)
    election = Election(store, KEY, b"a", TTL_S, clock)
    changes = election.leadership_changes()
    assert await anext(changes) is False
    with pytest.raises(ZeroDivisionError):
        async with election:
            await anext(changes)
    await store.close()


async def test_a_fenced_write_of_the_present_leader_goes_through(store: MemoryStore, clock: ManualClock) -> None:
    async with Election(store, KEY, b"a", TTL_S, clock) as election:
        await clock.settle()
        written = await store.compare_and_swap("/split", 0, b"1", guards=(election.fence(),))
        assert (await store.get("/split")) == written


@pytest.mark.slow
async def test_leaders_through_kills_of_etcd_members(etcd_cluster: Etcd) -> None:
    """kill -9 of etcd's own leader, twice: never two leaders at once, and in the end one."""
    clock = SystemClock()
    async with contextlib.AsyncExitStack() as stack:
        elections = []
        for name in (b"a", b"b"):
            store = await stack.enter_async_context(EtcdStore(etcd_cluster.endpoints, clock=clock, timeout_s=2))
            elections.append(await stack.enter_async_context(Election(store, KEY, name, 4, clock)))
        watcher = asyncio.create_task(never_two(elections))
        try:
            for _ in range(2):
                await until(lambda: one_leads(elections), 60)
                member = await etcd_cluster.leader()
                member.kill()
                await until(lambda: write_passes(elections), 60)
                await etcd_cluster.restart(member)
            assert not watcher.done()
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)


async def test_etcd_gone_for_good_ends_leadership(etcd: Etcd) -> None:
    clock = SystemClock()
    async with (
        EtcdStore(etcd.endpoints, clock=clock, timeout_s=1) as store,
        Election(store, KEY, b"a", 2, clock) as election,
    ):
        async with asyncio.timeout(30):
            async for leads in election.leadership_changes():
                if leads:
                    break
            fence = election.fence()
            etcd.kill()
            async for leads in election.leadership_changes():
                if not leads:
                    break
        assert not election.is_leader()
        await etcd.start()
        async with asyncio.timeout(30):
            async for leads in election.leadership_changes():
                if leads:
                    break
        with pytest.raises(Fenced):
            await store.compare_and_swap("/split", 0, b"late", guards=(fence,))


class SlowStore(MemoryStore):
    """Answers renewals late."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.answer_after_s = 0.0
        self._manual = clock

    async def renew_lease(self, lease: int) -> float:
        left_s = await super().renew_lease(lease)
        await self._manual.sleep(self.answer_after_s)
        return left_s


async def one_leads(elections: list[Election]) -> bool:
    return sum(election.is_leader() for election in elections) == 1


async def write_passes(elections: list[Election]) -> bool:
    """Whether the present leader can write, fenced."""
    for election in elections:
        if election.is_leader():
            store: Store = election._store
            with contextlib.suppress(Exception):
                current = await store.get("/split")
                revision = current.mod_revision if current else 0
                await store.compare_and_swap("/split", revision, b"x", guards=(election.fence(),))
                return True
    return False


async def never_two(elections: list[Election]) -> None:
    while True:
        assert sum(election.is_leader() for election in elections) <= 1
        await asyncio.sleep(0.01)


async def until(condition: Callable[[], Awaitable[bool]], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not await condition():
            await asyncio.sleep(0.05)
