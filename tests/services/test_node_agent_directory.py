"""What a node tells its directory, in which order, and what it does with what it hears."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
from etcd_process import Etcd
from node_agent_harness import (
    BLOCK,
    Agent,
    ScriptedDirectory,
    agent,
    ids,
    names_of,
    prefill_request,
    scripted_directory,
)
from waiting import eventually

from evolving.core import directory_types as core
from evolving.core.blocks import split_names
from evolving.core.directory import Directory
from evolving.core.needs import need
from evolving.core.terms import Phase
from evolving.internal.v1 import directory_pb2
from evolving.runtime.clock import ManualClock
from evolving.runtime.metrics import Metrics
from evolving.runtime.tasks import end_tasks
from evolving.v1 import common_pb2, gateway_pb2
from evolving.wire.directory import node_events_from_proto
from evolving_node_agent import reports
from evolving_node_agent.engines.mock import MockConfig, MockEngine
from evolving_node_agent.engines.port import Tier
from evolving_node_agent.reporter import DirectoryReporter

BRANCH = {"branch_id": "b", "version": 3}


def learned(directory: ScriptedDirectory, hello: directory_pb2.NodeHello) -> Directory:
    """The real directory's core, after all that was said about copies since the last hello."""
    real = Directory()
    node = (hello.node_id, hello.incarnation)
    real.node_up(0.0, *node, hello.next_sequence)
    batches = directory.said("kv")
    start = next((at for at, batch in enumerate(batches) if batch.snapshot), None)
    if start is not None:
        real.resync_begin(0.0, *node)
    for batch in batches[start or 0 :]:
        events = node_events_from_proto(batch.changes)
        if batch.snapshot:
            real.resync_events(0.0, *node, events)
        else:
            effects = real.node_events(0.0, *node, batch.sequence, events)
            assert not any(isinstance(effect, core.NeedResync) for effect in effects), effects
        if batch.snapshot_end:
            real.resync_end(0.0, *node, batch.sequence)
    return real


async def held(node: Agent, tier: Tier) -> int:
    """Blocks that have bytes in a tier."""
    tokens = node.engine.status().l1_used_tokens if tier is Tier.L1 else node.engine.status().l2_used_tokens
    return tokens // BLOCK


async def test_hello_then_copies_then_landings_in_order(etcd: Etcd) -> None:
    async with scripted_directory(etcd) as directory, agent(etcd) as node:
        registration = await node.ready()
        await directory.until(lambda: bool(directory.hellos))
        (hello,) = directory.hellos
        assert (hello.partition_id, hello.node_id, hello.incarnation) == ("p0", "n0", registration.incarnation)
        assert hello.next_sequence == 1
        tokens = ids(1, 100)
        sampling = gateway_pb2.Sampling(max_tokens=50, ignore_eos=True)
        request = prefill_request(tokens, sampling=sampling, **BRANCH)
        *_, output = await node.serve(request)
        await directory.until(lambda: bool(directory.said("done")))

        assert [batch.sequence for batch in directory.said("kv")] == list(range(1, len(directory.said("kv")) + 1))
        landed = directory.said("landed")
        assert [(each.phase, each.blocks) for each in landed] == [(Phase.PREFILL, 6), (Phase.DECODE, 6)]
        about = {
            (each.tenant, each.branch_id, each.version, each.request_id)
            for each in (*landed, *directory.said("output"))
        }
        assert about == {("default", "b", 3, request.request_id)}
        # 149 tokens have KV: nine full blocks, six of them prompt.
        whole = names_of(tokens + output[:-4])
        assert len(whole) == 9
        told = b"".join(each.names for each in directory.said("output"))
        assert told == b"".join(whole[6:])
        assert [each.first_block for each in directory.said("output")] == [6, 7, 8]
        done = directory.said("done")[0]
        assert (done.tenant, done.branch_id, done.request_id) == ("default", "b", request.request_id)

        order = [event.WhichOneof("event") for event in directory.events]
        assert order[-1] == "done"
        stored: set[bytes] = set()
        for event in directory.events:
            if event.HasField("kv"):
                stored.update(_names(event.kv))
            elif event.HasField("landed"):
                assert whole[event.landed.blocks - 1] in stored, "the copy is announced before the landing"
            elif event.HasField("output"):
                assert event.output.names in stored

        real = learned(directory, hello)
        for tier, name in ((Tier.L1, "in_l1"), (Tier.L2, "in_l2")):
            blocks = [view for each in whole if (view := real.block(each)) is not None]
            assert all(getattr(view.copies[0], name) for view in blocks)
            assert len(blocks) == 9 == await held(node, tier)


def _names(batch: directory_pb2.KvBatch) -> set[bytes]:
    stored = [change for change in batch.changes if change.kind == directory_pb2.KvChange.KIND_STORED]
    return {change.names[at : at + 16] for change in stored for at in range(0, len(change.names), 16)}


async def test_a_request_of_no_branch_is_not_told(etcd: Etcd) -> None:
    async with scripted_directory(etcd) as directory, agent(etcd) as node:
        await node.ready()
        await node.serve(prefill_request(ids(1, 100)))
        await node.serve(prefill_request(ids(2, 100), **BRANCH))
        await directory.until(lambda: bool(directory.said("done")))
        assert len(directory.said("done")) == 1
        assert {each.branch_id for each in directory.said("landed")} == {"b"}


async def test_a_resume_reports_the_output_it_brought_along(etcd: Etcd) -> None:
    async with scripted_directory(etcd) as directory, agent(etcd) as node:
        await node.ready()
        tokens = ids(1, 40)
        sampling = gateway_pb2.Sampling(max_tokens=40, ignore_eos=True)
        *_, whole = await node.serve(prefill_request(tokens, sampling=sampling))
        request = prefill_request(tokens + whole[:120], generated_tokens=30, sampling=sampling, **BRANCH)
        await node.serve(request)
        await directory.until(lambda: bool(directory.said("done")))
        assert [each.blocks for each in directory.said("landed")] == [2, 2], "blocks of the prompt alone"
        told = [(each.first_block, each.names) for each in directory.said("output")]
        names = names_of(tokens + whole[:-4])
        assert told == [(2, names[2] + names[3])]


async def test_a_request_that_failed_is_not_done(etcd: Etcd) -> None:
    async with scripted_directory(etcd) as directory, agent(etcd, keep_s=0.05) as node:
        await node.ready()
        failing = node.stub.Prefill(prefill_request(ids(1, 100), **BRANCH))
        with pytest.raises(Exception, match="no decode leg came"):
            async for _ in failing:
                pass
        await node.serve(prefill_request(ids(2, 100), branch_id="other", version=1))
        await directory.until(lambda: bool(directory.said("done")))
        assert {each.branch_id for each in directory.said("done")} == {"other"}


async def test_a_snapshot_says_all_there_is(etcd: Etcd) -> None:
    async with scripted_directory(etcd) as directory, agent(etcd) as node:
        await node.ready()
        contexts = [ids(seed, 20 * BLOCK + 1) for seed in range(5)]
        for tokens in contexts:
            await node.serve(prefill_request(tokens))
        await directory.until(lambda: bool(directory.hellos))
        directory.events.clear()
        directory.say(resync=directory_pb2.Resync(reason="test"))
        await directory.until(lambda: any(batch.snapshot_end for batch in directory.said("kv")))
        await node.serve(prefill_request(contexts[0] + ids(9, 64), **BRANCH))
        await directory.until(lambda: bool(directory.said("done")))
        real = learned(directory, directory.hellos[0])
        stats = real.stats().nodes[0]
        assert (stats.l1_blocks, stats.l2_blocks) == (await held(node, Tier.L1), await held(node, Tier.L2))
        for tokens in contexts:
            assert real.match(0.0, b"".join(names_of(tokens))).nodes["n0"].l1_blocks == 20


async def test_what_happened_without_a_directory_comes_later(etcd: Etcd) -> None:
    async with agent(etcd) as node:
        await node.ready()
        await node.serve(prefill_request(ids(1, 100), **BRANCH))
        async with scripted_directory(etcd) as directory:
            await directory.until(lambda: len(directory.said("landed")) == 2 and bool(directory.said("done")))
            assert directory.hellos[0].next_sequence > 1, "so that the directory asks for a snapshot"
            assert not directory.said("kv"), "copies come with the snapshot it asks for"


async def test_reports_nobody_acknowledged_are_sent_again(etcd: Etcd) -> None:
    async with scripted_directory(etcd, acknowledges=False) as directory, agent(etcd) as node:
        await node.ready()
        await node.serve(prefill_request(ids(1, 100), **BRANCH))
        await directory.until(lambda: bool(directory.said("done")))
        before = [event for event in directory.events if not event.HasField("kv")]
        directory.events.clear()
        directory.hang_up()
        await directory.until(lambda: bool(directory.said("done")))
        assert len(directory.hellos) == 2
        assert [event for event in directory.events if not event.HasField("kv")] == before


async def test_reports_that_were_acknowledged_are_not_repeated(etcd: Etcd) -> None:
    """Also those after the last change of what the node holds."""
    async with scripted_directory(etcd) as directory, agent(etcd) as node:
        await node.ready()
        await node.serve(prefill_request(ids(1, 100), **BRANCH))
        await directory.until(lambda: bool(directory.said("done")))
        directory.say(counts=_counts({names_of(ids(1, 100))[0]: 1}))  # comes after the acknowledgements
        await eventually(lambda: _counts_are(node, {names_of(ids(1, 100))[0]: 1}))
        directory.events.clear()
        directory.hang_up()
        await directory.until(lambda: len(directory.hellos) == 2)
        await node.serve(prefill_request(ids(2, 100), branch_id="other", version=1))
        await directory.until(lambda: bool(directory.said("done")))
        assert {each.branch_id for each in (*directory.said("landed"), *directory.said("done"))} == {"other"}


async def test_another_directory_is_found(etcd: Etcd) -> None:
    async with agent(etcd) as node, AsyncExitStack() as first:
        old = await first.enter_async_context(scripted_directory(etcd, term=1))
        await old.until(lambda: bool(old.hellos))
        old.say(counts=directory_pb2.Counts(sequence=1, complete=True))
        await first.aclose()
        async with scripted_directory(etcd, term=2) as new:
            await new.until(lambda: bool(new.hellos))
            assert new.hellos[0].known_term in (0, 1)
        await node.serve(prefill_request(ids(1, 100)))


async def test_a_directory_of_a_lower_term_is_not_obeyed(etcd: Etcd) -> None:
    async with scripted_directory(etcd, term=5, hangs_up=False) as directory, agent(etcd) as node:
        await node.ready()
        await directory.until(lambda: bool(directory.hellos))
        await node.serve(prefill_request(ids(1, 40)))
        first = names_of(ids(1, 40))[0]
        directory.say(counts=_counts({first: 1}))
        await eventually(lambda: _counts_are(node, {first: 1}))
        directory.say(term=4, counts=_counts({first: 9}))
        await directory.until(lambda: len(directory.hellos) == 2)  # though the old one never ends the stream
        assert directory.hellos[1].known_term == 5
        assert await _counts_are(node, {first: 1})


def _counts(counts: dict[bytes, int], complete: bool = False) -> directory_pb2.Counts:
    each = [directory_pb2.CountedBlocks(names=name, count=count) for name, count in counts.items()]
    return directory_pb2.Counts(counts=each, complete=complete)


async def test_a_block_that_another_node_has_is_needed_less(etcd: Etcd) -> None:
    async with scripted_directory(etcd) as directory, agent(etcd) as node:
        await node.ready()
        await directory.until(lambda: bool(directory.hellos))
        await node.serve(prefill_request(ids(1, 100)))
        spare, last = names_of(ids(1, 100))[:2]
        counts = [
            directory_pb2.CountedBlocks(names=spare, count=3, elsewhere=True),
            directory_pb2.CountedBlocks(names=last, count=1),
        ]
        directory.say(counts=directory_pb2.Counts(counts=counts))
        directory.say(counts_query=directory_pb2.CountsQuery(query_id=1))
        await directory.until(lambda: bool(directory.said("counts_reply")))
        assert await node.engine.needs() == {spare: need(3, elsewhere=True), last: need(1, elsewhere=False)}


async def _counts_are(node: Agent, counts: dict[bytes, int]) -> bool:
    return bool(await node.engine.needs() == {name: need(count, elsewhere=False) for name, count in counts.items()})


async def test_counts_hold_until_a_complete_set_of_the_next_directory(etcd: Etcd) -> None:
    async with agent(etcd) as node:
        await node.ready()
        await node.serve(prefill_request(ids(1, 100)))
        one, two, three, *_ = names_of(ids(1, 100))
        async with scripted_directory(etcd) as directory:
            await directory.until(lambda: bool(directory.hellos))
            directory.say(counts=_counts({one: 2, two: 1}))
            await eventually(lambda: _counts_are(node, {one: 2, two: 1}))
        assert await _counts_are(node, {one: 2, two: 1}), "unknown is not zero"
        async with scripted_directory(etcd, term=2) as directory:
            await directory.until(lambda: bool(directory.hellos))
            directory.say(counts=_counts({three: 1, two: 4}))
            await eventually(lambda: _counts_are(node, {one: 2, two: 4, three: 1}))
            directory.say(counts=_counts({}, complete=True))
            await eventually(lambda: _counts_are(node, {two: 4, three: 1}))


async def test_a_node_told_to_clear_holds_nothing_and_serves_on(etcd: Etcd) -> None:
    async with scripted_directory(etcd) as directory, agent(etcd) as node:
        await node.ready()
        await node.serve(prefill_request(ids(1, 100)))
        await directory.until(lambda: bool(directory.hellos))
        await node.idle()
        assert await held(node, Tier.L2) > 0
        directory.say(clear=directory_pb2.Clear(reason="test"))

        async def empty() -> bool:
            return await held(node, Tier.L1) == await held(node, Tier.L2) == 0

        await eventually(empty)
        await node.serve(prefill_request(ids(2, 100), **BRANCH))
        await directory.until(lambda: bool(directory.said("done")))


async def test_counts_survive_an_engine_that_crashed(etcd: Etcd) -> None:
    """L2 outlives the mock's crash; what is kept there is still needed, whatever the directory does meanwhile."""
    async with scripted_directory(etcd) as directory, agent(etcd) as node:
        before = await node.ready()
        await node.serve(prefill_request(ids(1, 100)))
        names = names_of(ids(1, 100))
        await directory.until(lambda: bool(directory.hellos))
        directory.say(counts=_counts(dict.fromkeys(names, 1)))
        await eventually(lambda: _counts_are(node, dict.fromkeys(names, 1)))
        node.engine.faults.crash()
        await node.status(lambda s: s.ready and s.incarnation != before.incarnation)
        assert await _counts_are(node, dict.fromkeys(names, 1))
        await directory.until(lambda: len(directory.hellos) == 2)
        assert directory.hellos[1].incarnation != before.incarnation
        cleared = [change for batch in directory.said("kv") for change in batch.changes if change.kind == 3]
        assert {change.tier for change in cleared} == {common_pb2.TIER_L1, common_pb2.TIER_L2}


async def test_what_it_evicts_by_is_told_when_asked(etcd: Etcd) -> None:
    async with scripted_directory(etcd) as directory, agent(etcd) as node:
        await node.ready()
        await directory.until(lambda: bool(directory.hellos))
        directory.say(counts_query=directory_pb2.CountsQuery(query_id=7))
        await directory.until(lambda: bool(directory.said("counts_reply")))
        await node.serve(prefill_request(ids(1, 100)))
        first, *others = names_of(ids(1, 100))
        expected = {first: (2, True)} | dict.fromkeys(others, (2, False))
        directory.say(counts=_counts(dict.fromkeys(others, 2)))
        spare = directory_pb2.CountedBlocks(names=first, count=2, elsewhere=True)
        directory.say(counts=directory_pb2.Counts(counts=[spare]))
        directory.say(counts_query=directory_pb2.CountsQuery(query_id=8))
        await directory.until(lambda: sum(reply.last for reply in directory.said("counts_reply")) == 2)
        empty, *full = directory.said("counts_reply")
        assert (empty.query_id, empty.last, list(empty.counts)) == (7, True, [])
        assert {reply.query_id for reply in full} == {8}
        told = {
            name: (each.count, each.elsewhere)
            for reply in full
            for each in reply.counts
            for name in split_names(each.names)
        }
        assert told == expected


async def test_retier_frees_device_memory(etcd: Etcd) -> None:
    async with scripted_directory(etcd) as directory, agent(etcd) as node:
        await node.ready()
        await node.serve(prefill_request(ids(1, 100)))
        await directory.until(lambda: bool(directory.hellos))
        directory.say(retier=directory_pb2.Retier(reason="test"))

        async def freed() -> bool:
            return await held(node, Tier.L1) == 0

        await eventually(freed)
        assert await held(node, Tier.L2) > 0


async def test_serving_never_waits_for_the_directory(etcd: Etcd) -> None:
    """A directory that takes nothing and says nothing: legs go on, and the backlog stays bounded."""
    async with agent(etcd, unsent_reports=10) as node:
        await node.ready()
        outputs: list[Any] = await asyncio.gather(
            *(node.serve(prefill_request(ids(seed, 50), **BRANCH)) for seed in range(12))
        )
        assert all(len(output) == 32 for *_, output in outputs)
        async with scripted_directory(etcd) as directory:
            await directory.until(lambda: len(directory.events) >= 10)
            assert len(directory.events) == 10


class _CountingClock(ManualClock):
    sleeps = 0

    async def sleep(self, duration_s: float) -> None:
        self.sleeps += 1
        await super().sleep(duration_s)


class _Ending:
    """A stream on which nothing can be sent any more and that the directory hasn't closed yet."""

    writable = False


async def test_a_report_that_is_due_costs_nothing_while_its_stream_ends() -> None:
    clock = _CountingClock()
    reporter = DirectoryReporter("p0", "n0", MockEngine(MockConfig("n0")), clock, None, 10, Metrics())
    reporter._stream = _Ending()  # type: ignore[assignment]
    ref = reports.RequestRef("t", "b", 1, "r")
    reporter.tell(ref, reports.landed(ref, Phase.PREFILL, 1), needs=bytes(16))
    late = asyncio.create_task(reporter.flush_late())
    await clock.advance(10.0)
    await end_tasks(late)
    assert clock.sleeps == 0, "it waits for a stream, not for time"
