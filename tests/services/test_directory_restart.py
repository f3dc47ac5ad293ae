"""A directory that stops and starts with the same data directory, on a real etcd: branches, versions, ends, homes."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import threading
import time
from contextlib import AsyncExitStack
from pathlib import Path

import grpc.aio
import pytest
from cluster import ClusterSpec, LocalCluster
from directory_harness import KEYS, Directory, Node, blocks_of, context, directory, split_record
from etcd_process import Etcd
from planner_harness import join, open_store
from waiting import WAIT_S, eventually

from evolving.core.directory_log import Began, BranchesEnded, RequestDone
from evolving.core.directory_types import Begin
from evolving.core.terms import Phase, Role, Tier
from evolving.internal.v1 import directory_pb2, directory_pb2_grpc
from evolving.runtime.channel import open_channel
from evolving.v1 import common_pb2
from evolving.wire.status import parse_error
from evolving_directory import journal as journal_module
from evolving_directory.data_dir import DataDir, DataDirError
from evolving_directory.frames import frame
from evolving_directory.journal import SegmentFiles
from evolving_directory.records import Record, encode


async def refusal(to: Directory, branch: str, names: bytes, **more: object) -> str:
    """Why a Begin is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await to.begin(branch, names, **more)  # type: ignore[arg-type]
    return parse_error(refused.value).reason


async def clean(to: Directory) -> None:
    audit = await to.audit()
    assert audit.mismatch_count == 0, audit.mismatches
    assert (audit.nonzero_after_end, list(audit.unreachable_node_ids)) == (0, [])
    assert audit.compared > 0


async def test_branches_versions_ends_and_homes_outlive_a_restart(etcd: Etcd, tmp_path: Path) -> None:
    prompt, output = context("a", 20), context("out", 3, context("a", 20))
    p, d = Node("p"), Node("d")
    expected = {"p": dict.fromkeys(blocks_of(prompt), 1), "d": dict.fromkeys(blocks_of(output)[-3:], 1)}
    async with open_store(etcd) as store:
        await join(store, "p", "d")
    async with directory(etcd, data_dir=tmp_path) as to, p.connected(to), d.connected(to):
        await to.begin("b", prompt, version=4)
        await p.store(prompt)
        await p.landed("b", 20, Phase.PREFILL, version=4)
        await d.store(output, skip=20)
        await d.output("b", 20, output[20 * 16 :], version=4)
        await d.done("b")
        await to.begin("child", b"", base=prompt, parent_branch_id="b")
        await to.begin("gone", context("g", 2))
        await to.end("gone")
        await p.counts_become(expected["p"])
        await d.counts_become(expected["d"])
        before = await to.branch("b")
    async with directory(etcd, data_dir=tmp_path) as to:
        view = await to.branch("b")
        assert (view.version, view.prompt_blocks, view.output_blocks, view.running_requests) == (4, 20, 3, 0)
        assert list(view.homes) == list(before.homes)
        assert list(view.child_branch_ids) == ["child"]
        assert await refusal(to, "b", prompt, request="r2", version=3) == "STALE_VERSION"
        assert await refusal(to, "gone", prompt) == "BRANCH_ENDED"
        assert (await to.begin("b", prompt, version=4)).kind == directory_pb2.BEGIN_KIND_REPLAY
        assert await refusal(to, "b", prompt[:-16], version=4) == "REQUEST_CONFLICT"
        async with p.connected(to), d.connected(to):
            await p.counts_become(expected["p"])
            await d.counts_become(expected["d"])
            assert len(p.resyncs) == len(d.resyncs) == 1
            await clean(to)
            extended = await to.begin("b", context("next", 1, output)[-16:], request="r2", base=output)
            assert extended.kind == directory_pb2.BEGIN_KIND_EXTEND
            assert sorted(await to.end("b", subtree=True)) == ["b", "child"]
            await p.counts_become({})


async def test_a_node_keeps_its_counts_until_its_snapshot_is_counted(etcd: Etcd, tmp_path: Path) -> None:
    prompt, node = context("a", 4), Node("n", answer_resyncs=False)
    counts = dict.fromkeys(blocks_of(prompt), 1)
    async with open_store(etcd) as store:
        await join(store, "n")
    async with directory(etcd, data_dir=tmp_path) as to, node.connected(to):
        await to.begin("b", prompt)
        await node.store(prompt)
        await node.landed("b", 4, Phase.PREFILL)
        await node.counts_become(counts)
    async with directory(etcd, data_dir=tmp_path) as to, node.connected(to):
        await eventually(lambda: bool(node.resyncs))
        await to.audit()  # its question is behind whatever else was sent
        assert not node.complete
        assert node.counts == counts
        await node.send_snapshot()
        await node.counts_become(counts)
        await clean(to)


async def test_a_switch_to_prefill_while_the_directory_was_down_is_made_up_for(etcd: Etcd, tmp_path: Path) -> None:
    names, node = context("a", 6), Node("n")
    async with open_store(etcd) as store:
        await join(store, "n")
        await store.put(KEYS.split, split_record(1, n=Role.DECODE))
        async with directory(etcd, data_dir=tmp_path) as to, node.connected(to):
            await to.begin("b", names)
            await node.store(names)
            await node.landed("b", 6, Phase.DECODE)
            await node.counts_become(dict.fromkeys(blocks_of(names), 1))
        await store.put(KEYS.split, split_record(2, n=Role.PREFILL))
        async with directory(etcd, data_dir=tmp_path) as to, node.connected(to):
            await eventually(lambda: len(node.retiers) == 1)
            await node.counts_become(dict.fromkeys(blocks_of(names), 1))
            homes = (await to.branch("b")).homes
            assert [(home.phase, home.blocks) for home in homes] == [(common_pb2.PHASE_PREFILL, 6)]
        async with directory(etcd, data_dir=tmp_path) as to, node.connected(to):
            await node.counts_become(dict.fromkeys(blocks_of(names), 1))
            assert len(node.retiers) == 1, "and it is made up for once"


async def test_time_goes_on_while_the_directory_is_down(etcd: Etcd, tmp_path: Path) -> None:
    """Limits of 300 s, and a log that ended a while ago."""
    now_s = time.time()
    log: list[Record] = []
    for branch, age_s in (("old", 400.0), ("young", 200.0), ("buried", 400.0), ("fresh grave", 200.0)):
        log.append(Began(now_s - 500.0, Begin("default", branch, "r1", new_names=context(branch, 1))))
        log.append(RequestDone(now_s - age_s, "default", branch, "r1"))
        if "o" not in branch:
            log.append(BranchesEnded(now_s - age_s, "default", (branch,), False))
    log.sort(key=lambda entry: entry.now_s)  # type: ignore[union-attr]
    files = SegmentFiles(DataDir(tmp_path), "p0", 1, 1 << 20)
    files.write(b"".join(frame(encode(entry)) for entry in log), now_s - 500.0)
    files.close()
    limits = {"idle_ttl_s": 300.0, "tombstone_s": 300.0, "request_ttl_s": 300.0}
    async with directory(etcd, data_dir=tmp_path, **limits) as to:

        async def settled() -> bool:
            stats = await to.stats()
            return (stats.live_branches, stats.tombstones) == (1, 2)

        await eventually(settled)
        view = await to.branch("young")
        assert 200.0 <= view.idle_s <= 200.0 + (time.time() - now_s) + 1.0
        assert await refusal(to, "fresh grave", context("x", 1)) == "BRANCH_ENDED"
        assert (await to.begin("buried", context("x", 1))).kind == directory_pb2.BEGIN_KIND_NEW
        assert (await to.begin("old", context("x", 1))).kind == directory_pb2.BEGIN_KIND_NEW, "it revives"


async def test_the_log_is_compacted_while_it_serves(etcd: Etcd, tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    base = context("shared", 20)
    async with directory(etcd, data_dir=tmp_path, journal_segment_bytes=4096) as to:
        number = 0
        while not data.snapshots():
            await to.begin(f"b{number}", context(str(number), 20, base)[20 * 16 :] if number else base)
            number += 1
        for _ in range(20):
            await to.begin(f"b{number}", context(str(number), 3))
            number += 1
        await eventually(lambda: data.segments()[0] >= data.snapshots()[0])
    async with directory(etcd, data_dir=tmp_path, journal_segment_bytes=4096) as to:
        assert (await to.stats()).live_branches == number
        assert (await to.branch("b0")).prompt_blocks == 20


async def test_a_second_directory_on_the_same_files_does_not_start(etcd: Etcd, tmp_path: Path) -> None:
    async with directory(etcd, data_dir=tmp_path) as to:
        with pytest.raises(DataDirError, match="another directory process uses"):
            async with directory(etcd, data_dir=tmp_path):
                pass
        assert (await to.begin("b", context("a", 1))).kind == directory_pb2.BEGIN_KIND_NEW


async def test_a_disk_that_fails_costs_no_promise(etcd: Etcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, node, sync = context("a", 3), Node("n"), os.fdatasync
    counts = dict.fromkeys(blocks_of(names), 1)
    monkeypatch.setattr(journal_module, "_RETRY_S", 0.02)

    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with directory(etcd, data_dir=tmp_path) as to, AsyncExitStack() as stack:
        await stack.enter_async_context(node.connected(to))
        await to.begin("b", names)
        await node.store(names)
        await node.landed("b", 3, Phase.PREFILL)
        await node.counts_become(counts)
        monkeypatch.setattr(os, "fdatasync", full)
        assert await refusal(to, "c", names) == "JOURNAL_FAILED"
        assert await refusal(to, "d", names) == "JOURNAL_FAILED", "nothing more is taken"
        assert parse_error(await node.stream_ended()).reason == "JOURNAL_FAILED"
        condition = to.service.ready.conditions()["journal"]
        assert not to.service.ready.ready
        assert "No space left" in str(condition["detail"])
        monkeypatch.setattr(os, "fdatasync", sync)
        await eventually(lambda: to.service.ready.ready)
        assert (await to.begin("c", names)).kind == directory_pb2.BEGIN_KIND_REPLAY, "taken, and now promised"
        assert (await to.begin("d", names)).kind == directory_pb2.BEGIN_KIND_NEW
        await node.disconnect()
        await node.connect(to)
        await node.counts_become(counts)
        assert not node.resyncs
        await clean(to)
    async with directory(etcd, data_dir=tmp_path) as to:
        assert (await to.stats()).live_branches == 3


async def test_nothing_is_acknowledged_before_it_is_on_the_disk(
    etcd: Etcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, free, sync = context("a", 3), threading.Event(), os.fdatasync

    def held(handle: int) -> None:
        assert free.wait(60)
        sync(handle)

    async with directory(etcd, data_dir=tmp_path) as to, Node("n").connected(to) as node:
        await to.begin("b", names)
        await to.begin("e", names)
        await node.store(names, tier=Tier.L1)
        await node.taken()
        monkeypatch.setattr(os, "fdatasync", held)
        try:
            waiting = [asyncio.create_task(call) for call in (to.begin("c", names), to.finish("b"), to.end("e"))]
            await node.landed("b", 3, Phase.PREFILL)
            await node.counts_become(dict.fromkeys(blocks_of(names), 1))  # it was taken
            await node.store(names)
            await node.taken()  # copies are not the journal's
            assert node.reports_acknowledged == 0
            assert not any(task.done() for task in waiting)
        finally:
            free.set()
        await asyncio.gather(*waiting)
        await eventually(lambda: node.reports_acknowledged == 1)


async def test_a_process_whose_files_cannot_grow_serves_on_once_they_can_and_keeps_all_it_promised(
    tmp_path: Path,
) -> None:
    """The kernel itself refuses, in the middle of a write; then the process is killed."""
    local = LocalCluster(ClusterSpec(state_dir=tmp_path, grace_s=5))
    (tmp_path / "logs").mkdir()
    promised: list[str] = []
    try:
        await asyncio.to_thread(local.start_etcd)
        local.start_service("directory", "directory", 0, "--data-dir", str(tmp_path / "directory"))
        await asyncio.to_thread(local.wait_ready, ["directory"])
        process = local.processes["directory"]
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (500_000, hard))
        async with open_channel(process.address) as channel:
            stub = directory_pb2_grpc.DirectoryServiceStub(channel)

            async def begin(number: int) -> None:
                request = directory_pb2.BeginRequest(
                    partition_id="p0",
                    tenant="default",
                    branch=common_pb2.BranchMetadata(branch_id=f"b{number}"),
                    request_id="r",
                    new_names=context(str(number), 2_000),
                )
                await stub.Begin(request, timeout=WAIT_S)
                promised.append(f"b{number}")

            async def begin_many() -> None:
                for number in range(100):
                    await begin(number)

            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await begin_many()
            assert parse_error(refused.value).reason == "JOURNAL_FAILED"
            assert len(promised) > 5
            await eventually(lambda: not local.serving("directory"))
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard, hard))
            await asyncio.to_thread(local.wait_ready, ["directory"])
            await begin(1000)
        local.kill("directory")
        local.restart("directory")
        await asyncio.to_thread(local.wait_ready, ["directory"])
        async with open_channel(process.address) as channel:
            stub = directory_pb2_grpc.DirectoryServiceStub(channel)
            for branch in promised:
                request = directory_pb2.ReadBranchRequest(partition_id="p0", tenant="default", branch_id=branch)
                assert (await stub.ReadBranch(request, timeout=WAIT_S)).branch.prompt_blocks == 2_000
    finally:
        assert await asyncio.to_thread(local.stop) == []
