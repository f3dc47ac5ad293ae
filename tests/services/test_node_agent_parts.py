"""The pure rooms of the node agent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any, Literal

import grpc
import grpc.aio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import WAIT_S

from evolving.core.blocks import chain_names, hash_tokens
from evolving.core.contexts import Contexts
from evolving.core.terms import NAME_BYTES, Phase, Role
from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients
from evolving.core.work import query_key_pairs
from evolving.internal.v1 import node_agent_pb2, planner_pb2, planner_pb2_grpc
from evolving.runtime.clock import SystemClock
from evolving.runtime.following import FollowingChannel
from evolving.runtime.keys import Keys, Split, encode
from evolving.runtime.metrics import Metrics
from evolving.runtime.store import Versioned, WatchBatch
from evolving.runtime.tasks import end_tasks, first_of
from evolving_node_agent import reports
from evolving_node_agent.blocks import ContextBlocks
from evolving_node_agent.engines.port import CachedTokens, EngineInfo, EngineStatus
from evolving_node_agent.needs import NeedsMirror
from evolving_node_agent.outbox import Entry, Outbox
from evolving_node_agent.restart import RestartConfig, RestartPolicy
from evolving_node_agent.roles import RoleWatch
from evolving_node_agent.samples import decode_sample, prefill_sample
from evolving_node_agent.translate import prefill_job
from evolving_node_agent.waits import LegSize, RestoredShare, new_tokens_per_iteration, wait_s
from evolving_node_agent.work import WorkReporter

# -- names of output


@given(st.integers(0, 70), st.lists(st.integers(1, 9), max_size=12), st.integers(1, 8))
def test_output_blocks_are_complete_when_their_kv_is(prompt: int, pieces: list[int], block: int) -> None:
    """However the ids arrive, the names are those of the whole context without its last sampled token."""
    root = bytes(32)
    tokens = np.arange(prompt + sum(pieces), dtype=np.uint32)
    blocks = ContextBlocks(root, tokens[:prompt], block)
    told = blocks.names
    at = prompt
    for piece in pieces:
        first, names = blocks.sampled(tokens[at : at + piece])
        assert first * NAME_BYTES == len(told)
        told += names
        at += piece
        with_kv = tokens[: at - 1].astype("<u4").tobytes()
        assert told == chain_names(root, with_kv, block)[: len(told)]
        assert len(told) // NAME_BYTES == max(prompt // block, (at - 1) // block)


@given(st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.integers(0, 60), st.integers(1, 30)), max_size=8))
def test_a_leg_knows_its_own_blocks_whatever_its_branch_sent_before(legs: list[tuple[str, int, int]]) -> None:
    """A prompt goes on from what its branch sent before, leaves it midway, or belongs to no branch."""
    info = EngineInfo("1", "m", "m/f32", 4, 1000, 1024, 2048, 4096, 2048, 8192, 8, 128, 64, "n:1", "n:2", 1)
    contexts = Contexts(2_000)  # of few legs
    last: dict[str, list[int]] = {}
    for branch_id, kept, added in legs:
        ids = [*last.get(branch_id, [])[:kept], *range(added)]
        last[branch_id] = ids
        data, root = np.array(ids, dtype="<u4").tobytes(), bytes(32)
        request = node_agent_pb2.PrefillRequest(
            leg_id="l", request_id="r", branch_id=branch_id, token_ids=data, root=root
        )
        job = prefill_job(request, info, contexts, 1.0, 1.0)
        assert job.blocks == hash_tokens(root, data, 4)


# -- needs


def test_needs_not_heard_of_are_zero_only_when_all_were_sent() -> None:
    needs = NeedsMirror()
    assert needs.take({b"a": 2, b"b": 1}) == {b"a": 2, b"b": 1}
    needs.start_over()
    needs.take({b"b": 3})
    assert needs.in_force() == {b"a": 2, b"b": 3}, "unknown is not zero"
    assert needs.complete() == {b"a": 0}
    assert needs.in_force() == {b"b": 3}
    assert needs.take({b"b": 0}) == {b"b": 0}
    assert needs.in_force() == {}


# -- reports on their way


def entry(request: str, needs: bytes = b"", since_s: float = 0.0) -> Entry:
    """A report of a request."""
    ref = reports.RequestRef("t", "b", 1, request)
    return Entry(ref.key, reports.landed(ref, Phase.PREFILL, 1), needs, since_s)


def test_a_report_waits_for_its_block_and_holds_its_request_back() -> None:
    outbox = Outbox(10, patience_s=2.0)
    first, second, other = entry("r", needs=b"x"), entry("r"), entry("s")
    for each in (first, second, other):
        outbox.put(each)
    assert outbox.take(lambda _: False, 0.0) == [other]
    assert outbox.next_wakeup_s() == 2.0
    assert outbox.take(lambda needed: needed == b"x", 0.5) == [first, second]
    assert outbox.next_wakeup_s() is None


def test_a_report_does_not_wait_for_ever() -> None:
    outbox = Outbox(10, patience_s=2.0)
    late = entry("r", needs=b"evicted again")
    outbox.put(late)
    assert outbox.take(lambda _: False, 1.9) == []
    assert outbox.take(lambda _: False, 2.0) == [late]


def test_what_was_not_acknowledged_is_sent_again_in_order() -> None:
    outbox = Outbox(10)
    first, second, third = entry("1"), entry("2"), entry("3")
    outbox.put(first)
    outbox.take(lambda _: True, 0.0)
    outbox.put(second)
    outbox.take(lambda _: True, 0.0)
    outbox.acknowledged(1)
    outbox.put(third)
    outbox.reconnected(1.0)
    assert outbox.take(lambda _: True, 1.0) == [second, third]
    outbox.acknowledged(1)  # counted anew on each stream
    outbox.reconnected(2.0)
    assert outbox.take(lambda _: True, 2.0) == [third]


def test_reports_forgotten_for_room_still_count() -> None:
    outbox = Outbox(2)
    entries = [entry(str(number)) for number in range(4)]
    for each in entries:
        outbox.put(each)
        outbox.take(lambda _: True, 0.0)
    outbox.acknowledged(3)
    outbox.reconnected(1.0)
    assert outbox.take(lambda _: True, 1.0) == entries[3:]


def test_old_reports_are_not_repeated() -> None:
    outbox = Outbox(10, remember_s=60.0)
    outbox.put(entry("1"))
    outbox.take(lambda _: True, 0.0)
    outbox.reconnected(60.0)
    assert outbox.take(lambda _: True, 60.0) == []


def test_a_report_that_waited_long_is_repeated_if_it_was_sent_lately() -> None:
    """A directory that was away for minutes and breaks off again must not cost what waited for it."""
    outbox = Outbox(10, remember_s=60.0)
    waited = entry("1", since_s=0.0)
    outbox.put(waited)
    assert outbox.take(lambda _: True, 300.0) == [waited]
    outbox.reconnected(301.0)
    assert outbox.take(lambda _: True, 301.0) == [waited]


def test_the_oldest_reports_go_when_too_many_wait() -> None:
    outbox = Outbox(2)
    entries = [entry(str(number)) for number in range(3)]
    for each in entries:
        outbox.put(each)
    assert outbox.dropped == 1
    assert outbox.take(lambda _: True, 0.0) == entries[1:]


# -- restarts


def test_waits_double_and_attempts_end() -> None:
    policy = RestartPolicy(RestartConfig(first_s=1.0, max_s=3.0, attempts=5, window_s=100.0))
    assert [policy.failed(now) for now in (0.0, 1.0, 2.0, 3.0, 4.0)] == [1.0, 2.0, 3.0, 3.0, None]


def test_failures_are_forgotten() -> None:
    policy = RestartPolicy(RestartConfig(first_s=1.0, max_s=30.0, attempts=2, window_s=100.0))
    assert [policy.failed(now) for now in (0.0, 100.0, 201.0)] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("bad", [{"first_s": 0}, {"first_s": 5, "max_s": 1}, {"attempts": 0}, {"window_s": 0}])
def test_impossible_restart_settings(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="restarts need"):
        RestartConfig(**bad)  # type: ignore[arg-type]


# -- roles


class ScriptedStore:
    """A store whose watch says what it is given."""

    def __init__(self, *values: bytes) -> None:
        self._values = values

    async def watch(self, prefix: str) -> AsyncIterator[WatchBatch]:
        """One batch a value."""
        for revision, value in enumerate(self._values, 1):
            yield WatchBatch(False, revision, (Versioned(prefix, value, revision, 1, revision),))


async def roles_after(*values: bytes) -> tuple[Role, int]:
    """The role and epoch of node n after these values of the split."""
    roles = RoleWatch("n", lambda: None)
    await roles.watch(ScriptedStore(*values), Keys())  # type: ignore[arg-type]
    return roles.role, roles.epoch


def split(epoch: int, **roles: Literal["prefill", "decode", "mixed", "draining"]) -> bytes:
    """A split as etcd has it."""
    return encode(Split(epoch=epoch, roles=dict(roles), reason="", author="", written_at_s=0.0))


async def test_a_node_takes_its_role_from_the_newest_split() -> None:
    assert await roles_after() == (Role.MIXED, 0)
    assert await roles_after(split(1, n="decode")) == (Role.DECODE, 1)
    assert await roles_after(split(3, n="decode"), split(2, n="prefill")) == (Role.DECODE, 3), "epochs only grow"
    assert await roles_after(split(3, n="decode"), b"no split") == (Role.DECODE, 3)
    assert await roles_after(split(3, n="decode"), split(4, other="decode")) == (Role.MIXED, 4)


# -- W_n (equation 7 of the paper, its first terms)

PREFILL = PrefillCoefficients(0.01, 1e-3, 1e-6)
DECODE = DecodeCoefficients(0.02, 0.0, 0.001, 0.0)


def test_nothing_waits_on_an_idle_node() -> None:
    assert wait_s(EngineStatus(decoding=3), {}, {}, PREFILL, DECODE, 100) == 0.0


def test_wait_is_what_runs_and_what_queues() -> None:
    status = EngineStatus(queued={"q": 50}, prefilling={"r": 100})
    waiting, running = {"q": LegSize(80, 0)}, {"r": LegSize(300, 0)}
    left = 0.01 + 1e-3 * 100 + 1e-6 * query_key_pairs(100, 200)
    queued = 0.01 + 1e-3 * 50 + 1e-6 * query_key_pairs(50, 30)
    assert wait_s(status, waiting, running, PREFILL, DECODE, 100) == pytest.approx(left + queued)


def test_a_leg_the_engine_has_not_seen_counts_as_expected() -> None:
    on_its_way = wait_s(EngineStatus(), {"q": LegSize(80, 30)}, {}, PREFILL, DECODE, 100)
    seen = wait_s(EngineStatus(queued={"q": 50}), {"q": LegSize(80, 0)}, {}, PREFILL, DECODE, 100)
    assert on_its_way == pytest.approx(seen)


@pytest.mark.parametrize(("backlog", "computed"), [(0, 80), (30, 50), (60, 20), (500, 20)])
def test_what_peers_are_still_to_bring_is_not_computed(backlog: int, computed: int) -> None:
    """The engine counts 80 tokens as not cached; the gateway expected 60 of them from peers."""
    fetching = EngineStatus(queued={"q": 80}, fetch_backlog_tokens=backlog)
    reckoned = wait_s(fetching, {"q": LegSize(80, 60)}, {}, PREFILL, DECODE, 100)
    known = wait_s(EngineStatus(queued={"q": computed}), {"q": LegSize(80, 0)}, {}, PREFILL, DECODE, 100)
    assert reckoned == pytest.approx(known)


def test_an_engine_that_has_more_than_expected_is_believed() -> None:
    has = EngineStatus(queued={"q": 5}, fetch_backlog_tokens=100)
    reckoned = wait_s(has, {"q": LegSize(80, 60)}, {}, PREFILL, DECODE, 100)
    assert reckoned == pytest.approx(wait_s(has, {"q": LegSize(80, 75)}, {}, PREFILL, DECODE, 100))


def test_a_decoding_batch_slows_each_prefill_iteration() -> None:
    idle = EngineStatus(queued={"q": 300})
    busy = EngineStatus(queued={"q": 300}, decoding=4)
    waiting = {"q": LegSize(300, 0)}
    difference = wait_s(busy, waiting, {}, PREFILL, DECODE, 100) - wait_s(idle, waiting, {}, PREFILL, DECODE, 100)
    assert difference == pytest.approx(3 * DECODE.decode_iteration_s(4))


def test_what_a_queued_leg_reuses_is_restored_in_part() -> None:
    """c3·t_rst with t_rst = ρ·t_c; a running leg restored its part before its first token was computed."""
    restoring = PrefillCoefficients(0.01, 1e-3, 1e-6, c3_s=1e-4)
    share = RestoredShare()
    assert share.value == 0.0
    share.add(CachedTokens(l1=60, l2=10, peer=30))
    share.add(CachedTokens(l1=100))
    waiting, running = {"q": LegSize(80, 0)}, {"r": LegSize(300, 0)}
    status = EngineStatus(queued={"q": 50}, prefilling={"r": 100})
    plain = wait_s(status, waiting, running, PREFILL, DECODE, 100)
    assert wait_s(status, waiting, running, restoring, DECODE, 100, share.value) == pytest.approx(plain + 1e-4 * 6)


def test_waits_grow_with_the_queue() -> None:
    queues = [{str(leg): LegSize(100, 0) for leg in range(length)} for length in range(5)]
    sizes = [wait_s(EngineStatus(), queue, {}, PREFILL, DECODE, 64) for queue in queues]
    assert all(shorter < longer for shorter, longer in pairwise(sizes))


def test_mean_new_tokens() -> None:
    assert new_tokens_per_iteration(EngineStatus()) == 0.0
    assert new_tokens_per_iteration(EngineStatus(prefill_iterations=4, prefill_tokens=100)) == 25.0


# -- work (section 4.2)


def test_work_of_a_prefill_leg() -> None:
    sample = prefill_sample("t", "r", 100, CachedTokens(l1=10, l2=20, peer=30))
    assert (sample.uncached_tokens, sample.cached_tokens, sample.restored_tokens) == (40, 60, 50)
    assert sample.query_key_pairs == query_key_pairs(40, 60)


async def test_a_report_sent_again_keeps_its_number_and_incarnation() -> None:
    """Its engine may have died meanwhile; under another incarnation the planner would count it twice."""
    taken: list[tuple[str, int, int]] = []

    class Planner(planner_pb2_grpc.PlannerServiceServicer):
        """Takes every report and answers the first only when it is too late."""

        async def ReportWork(self, request: Any, context: Any) -> planner_pb2.ReportWorkResponse:
            taken.append((request.incarnation, request.sequence, len(request.samples)))
            if len(taken) == 1:
                reporter.begin_life("second")
                reporter.add(decode_sample("t", "r2", 1, 1, 5.0))
                await context.abort(grpc.StatusCode.UNAVAILABLE, "taken, and nobody hears of it")
            if len(taken) == 3:
                all_there.set()
            return planner_pb2.ReportWorkResponse()

        ReportOpen = None  # type: ignore[assignment]  # no node calls it

    all_there = asyncio.Event()
    server = grpc.aio.server()
    planner_pb2_grpc.add_PlannerServiceServicer_to_server(Planner(), server)
    planner = FollowingChannel()
    planner.go_to(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    reporter = WorkReporter(
        "p0",
        "n",
        limit=10,
        period_s=0.01,
        window_s=1.0,
        planner=planner,
        answered=lambda _: None,
        clock=SystemClock(),
        metrics=Metrics(),
    )
    reporter.begin_life("first")
    reporter.add(decode_sample("t", "r1", 1, 1, 5.0))
    running = asyncio.create_task(reporter.run())
    try:
        async with asyncio.timeout(WAIT_S):
            await first_of(all_there.wait(), asyncio.wait({running}))
    finally:
        await end_tasks(running)
        await planner.close()
        await server.stop(None)
    assert taken == [("first", 1, 1), ("first", 1, 1), ("second", 2, 1)]


def test_work_of_a_decode_leg() -> None:
    sample = decode_sample("t", "r", 12, 11, 106.0)
    assert (sample.output_tokens, sample.iterations, sample.context_tokens) == (12, 11, 106.0)
