"""What simulated nodes hold, and what the directory knows of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim.small import MACHINE, READER, WORKER, scenario

from evolving.core.config import DirectoryConfig
from evolving.core.directory import Directory
from evolving.core.pool_runs import Use
from evolving.core.terms import Tier
from evolving_sim.arms.named import ARMS
from evolving_sim.contexts import BlockNames
from evolving_sim.driver import Run
from evolving_sim.faults import LostEvents
from evolving_sim.kv import NodeKv
from evolving_sim.produced import ProducedKv
from evolving_sim.sim_cluster import SimCluster

TINY = replace(MACHINE, block_tokens=1, l1_tokens=40, l2_tokens=60, context_tokens_max=10)


def contexts() -> list[BlockNames]:
    """Two branches that share 20 blocks, and one by itself; up to 35 blocks each."""
    first = BlockNames("first", 1)
    first.grow(20)
    second = first.fork("second", 20)
    other = BlockNames("other", 1)
    for each in (first, second, other):
        each.grow(35)
    return [first, second, other]


def agree(directory: Directory, kv: NodeKv) -> None:
    """The directory knows what the node holds."""
    for context in contexts():
        depth = directory.match(0.0, b"".join(context.names)).nodes.get("n")
        for blocks, tier in ((depth.l1_blocks if depth else 0, Tier.L1), (depth.l2_blocks if depth else 0, Tier.L2)):
            assert kv.pool.matched(context.names, 35, tier) == blocks


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["store", "leg", "end", "free", "clear"]), st.integers(0, 2), st.integers(1, 35)),
    max_size=30,
)


@given(ACTIONS)
def test_the_directory_knows_what_a_pool_gained_and_lost_whatever_happened(actions: list[tuple[str, int, int]]) -> None:
    kv, directory = NodeKv(TINY), Directory(DirectoryConfig(run_blocks_max=8))
    directory.node_up(0.0, "n", "1")
    names = [context.names for context in contexts()]
    leg = None
    for sequence, (action, which, blocks) in enumerate(actions, 1):
        if action == "store":
            kv.pool.store(names[which], 0, blocks)
        elif action == "leg" and leg is None:
            leg = kv.leg(names[which], Use.PREFILL)
            if leg.take(blocks, blocks) is not None:
                leg.reach(kv.pool.held(names[which], blocks))
                leg.reach(blocks)
            else:
                leg = None
        elif action == "end" and leg is not None:
            leg.release()
            leg = None
        elif action == "free":
            kv.pool.free_l1()
        elif action == "clear":
            kv.pool.clear()
        kv.check_invariants()
        directory.node_events(0.0, "n", "1", sequence, kv.changes.take())
        directory.check_invariants()
        agree(directory, kv)
    again = Directory(DirectoryConfig(run_blocks_max=8))
    again.node_up(0.0, "n", "1")
    again.node_events(0.0, "n", "1", 1, kv.snapshot())
    agree(again, kv)


def test_host_memory_that_keeps_kv_for_each_gpu_holds_so_many_times_less() -> None:
    """§4.1: one copy per node instead of four."""
    assert NodeKv(TINY, host_copies=4).pool.capacity(Tier.L2) == 15


def test_a_long_context_is_known_as_far_as_it_was_produced() -> None:
    produced, context = ProducedKv(), BlockNames("a", 1)
    context.grow(100)
    for known in (0, 1, 37, 100):
        produced.add(context.names, known)
        for blocks in (0, 1, 36, 37, 38, 100):
            assert produced.known_blocks(context.names, blocks) == min(blocks, known)


def settle(cluster: SimCluster) -> None:
    """Have all that is under way between nodes and directory arrive now."""
    for _ in range(2):
        for node_id, node in cluster.nodes.items():
            if node.alive:
                cluster.directory.catch_up(node_id)


FULL = replace(MACHINE, l1_tokens=40_000, l2_tokens=40_000)
"""A machine whose host memory fills."""


@pytest.mark.parametrize("lost", [False, True])
def test_nodes_evict_by_the_counts_that_the_directory_recounts(lost: bool) -> None:
    """DESIGN §5: the three counts agree; also after batches of events were lost, and the nodes said all they hold."""
    faults = (LostEvents(30.0, "n001"), LostEvents(50.0, "n003", 2)) if lost else ()
    run = Run(replace(scenario("2P2D"), machine=FULL, faults=faults))
    run.until(60.0)
    cluster = run.cluster
    settle(cluster)
    report = cluster.directory.directory.audit(
        {node_id: node.kv.pool.needs() for node_id, node in cluster.nodes.items()}
    )
    assert report.compared > 0
    assert report.mismatches == ()
    assert report.nonzero_after_end == 0
    counters = cluster.directory.directory.stats().counters
    assert (counters.get("resyncs", 0) > 0) == lost
    assert any(not node.kv.pool.free(Tier.L2) for node in cluster.nodes.values())


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("workers", [16, 20])
def test_eviction_by_need_loses_less_than_lru_where_host_memory_is_short(workers: int, seed: int) -> None:
    """§2.3, §4.4: LRU drops what waiting branches need and keeps what no branch does. What 16 need just fits here."""
    lost = {}
    for arm in ("ours-static", "ours-lru"):
        run = Run(replace(scenario("2P2D", {WORKER: workers, READER: 4}), machine=FULL, arm=ARMS[arm], seed=seed))
        run.until(300.0)
        lost[arm] = run.results.between(30.0, 300.0).lost_reuse
    assert lost["ours-static"] < lost["ours-lru"]
