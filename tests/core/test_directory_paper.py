"""The paper's rules for branch counts, row by row (arXiv 2611.12304, §3's table and §4.1)."""

from __future__ import annotations

import pytest
from core.pair import chain, run_ref
from core.served import TENANT, Cluster

from evolving.core.config import DecodeToPrefill, DirectoryConfig
from evolving.core.directory_types import (
    BeginKind,
    BranchState,
    Cleared,
    ClearMemory,
    CountUpdate,
    EndedBranch,
    FreeL1,
    Stored,
)
from evolving.core.terms import Phase, Role, Tier


@pytest.fixture
def cluster() -> Cluster:
    return Cluster("p1", "p2", "d1", "d2")


# ------------------------------------------------------------------------------------ §3's table: one branch's lifetime


def test_a_tool_result_adds_one_on_new_blocks_only(cluster: Cluster) -> None:
    """§3 "Request following a tool execution", §4.1 "Successive requests": reused blocks are not counted twice."""
    cluster.serve("agent", "r1", "sysask", output="code")
    answer = cluster.serve("agent", "r2", "sysaskcodetool")
    assert answer.kind is BeginKind.EXTEND
    assert answer.match.any_blocks == len("sysaskcode")
    assert cluster.phase_counts("sysaskcodetool") == [(1, 1)] * 14


def test_compaction_takes_dropped_blocks_to_zero(cluster: Cluster) -> None:
    """§3 and §4.1 "Compaction": −1 on blocks the new context dropped, +1 on blocks newly included; KV stays."""
    cluster.serve("agent", "r1", "syslonghistory")
    answer = cluster.serve("agent", "r2", "syssummary", version=2)
    assert (answer.kind, answer.version) == (BeginKind.REWRITE, 2)
    assert cluster.phase_counts("syssummary") == [(1, 1)] * 10
    assert cluster.phase_counts("syslonghistory")[3:] == [(0, 0)] * 11
    assert cluster.directory.match(0.0, b"".join(chain([], "syslonghistory"))).any_blocks == 14
    assert cluster.directory.pool_counts().zero_blocks == 11


def test_a_fork_counts_shared_blocks_twice(cluster: Cluster) -> None:
    """§3 "Fork", §4.1: +1 on the blocks the new branch reuses; when one finishes the other still has them."""
    cluster.serve("parent", "r1", "sysplan")
    cluster.serve("child", "r1", "sysplanfork")
    assert [prefill for prefill, _ in cluster.phase_counts("sysplan")] == [2] * 7
    assert cluster.counts("p1", "sysplanfork") == [2] * 7 + [1] * 4
    assert cluster.directory.context_counts(TENANT, "child").shared_blocks == 7
    cluster.end("parent")
    assert cluster.phase_counts("sysplanfork") == [(1, 1)] * 11


def test_a_subagent_leaves_the_parents_blocks_alone(cluster: Cluster) -> None:
    """§3 "Sub-agent": a new context; the parent id adds no blocks, only equal leading blocks are shared."""
    cluster.serve("parent", "r1", "sysplan")
    cluster.begin("sub", "r1", "systask", parent_branch_id="parent")
    cluster.land("sub", "r1", "p1", Phase.PREFILL, 3)
    assert cluster.counts("p1", "sysplan") == [2, 2, 2, 1, 1, 1, 1]
    cluster.store("p1", "systask")
    cluster.land("sub", "r1", "p1", Phase.PREFILL, 7)
    assert cluster.counts("p1", "systask") == [2, 2, 2, 1, 1, 1, 1]
    assert cluster.counts("p1", "sysplan")[3:] == [1] * 4


def test_a_long_wait_changes_nothing(cluster: Cluster) -> None:
    """§3 "Resume after waiting a long time on the sub-agent (359 seconds)"."""
    cluster.serve("agent", "r1", "sysplan")
    cluster.now_s += 359.0
    assert cluster.directory.tick(cluster.now_s) == []
    assert cluster.phase_counts("sysplan") == [(1, 1)] * 7
    assert cluster.serve("agent", "r2", "sysplango").match.any_blocks == 7


# ----------------------------------------------------------------------------------------------------- §4.1: the figure


def test_the_count_of_one_block_over_its_life(cluster: Cluster) -> None:
    """§4.1's figure: 1 on the successive request, 1→2 on the fork, 2→1 on the compaction, 1→0 when others leave."""
    seen = []
    cluster.serve("one", "r1", "X")
    cluster.serve("one", "r2", "XY")
    seen.append(cluster.counts("p1", "X"))
    cluster.serve("two", "r1", "X")
    seen.append(cluster.counts("p1", "X"))
    cluster.serve("one", "r3", "Z", version=2)
    seen.append(cluster.counts("p1", "X"))
    cluster.end("two")
    seen.append(cluster.counts("p1", "X"))
    assert seen == [[1], [2], [1], [0]]


# -------------------------------------------------------------------------------------------------- §4.1: "KV movement"


@pytest.mark.parametrize("phase", Phase)
def test_movement_within_a_phase_moves_this_branchs_unit(cluster: Cluster, phase: Phase) -> None:
    """§4.1: P2P and D2D transfer the count to the destination and −1 on the source; other branches' units stay."""
    for branch in ("one", "two"):
        cluster.begin(branch, "r1", "sys")
    cluster.store("p1", "sys")
    for branch in ("one", "two"):
        cluster.land(branch, "r1", "p1", phase, 3)
    cluster.store("p2", "sys")
    cluster.land("one", "r1", "p2", phase, 3)
    assert cluster.counts("p1", "sys") == [1] * 3
    assert cluster.counts("p2", "sys") == [1] * 3


def test_movement_across_phases_leaves_the_count_on_both_sides(cluster: Cluster) -> None:
    """§4.1: P2D and D2P leave the count on both sides."""
    cluster.begin("one", "r1", "sys")
    cluster.store("p1", "sys")
    cluster.land("one", "r1", "p1", Phase.PREFILL, 3)
    cluster.store("d1", "sys")
    cluster.land("one", "r1", "d1", Phase.DECODE, 3)
    assert cluster.counts("p1", "sys") == cluster.counts("d1", "sys") == [1] * 3
    cluster.store("p2", "sys")  # D→P: the next turn prefills elsewhere, from d1's copy
    cluster.land("one", "r1", "p2", Phase.PREFILL, 3)
    assert cluster.counts("d1", "sys") == cluster.counts("p2", "sys") == [1] * 3
    assert cluster.counts("p1", "sys") == [0] * 3


def test_a_branch_counts_on_one_copy_a_phase_at_most(cluster: Cluster) -> None:
    """§4.1: "each active branch holds a reference count on at most one copy of KV per phase"."""
    cluster.begin("one", "r1", "sys")
    for node_id in ("p1", "p2", "d1", "d2"):
        cluster.store(node_id, "sys")
        for phase in Phase:
            cluster.land("one", "r1", node_id, phase, 3)
    assert cluster.phase_counts("sys") == [(1, 1)] * 3


# --------------------------------------------------------------------------------------------------- §4.1: role changes


def test_a_node_turned_decode_keeps_counts_and_kv(cluster: Cluster) -> None:
    """§4.1: prefill→decode keeps the counts and preserves KV."""
    cluster.serve("agent", "r1", "sysplan")
    assert cluster.switch("p1", Role.PREFILL, Role.DECODE) == []
    assert cluster.phase_counts("sysplan") == [(1, 1)] * 7
    assert cluster.counts("p1", "sysplan") == [1] * 7


def test_a_node_turned_prefill_forgets_everything_under_the_papers_rule() -> None:
    """§4.1: decode→prefill resets the count to 0 and empties the memory: at once of what no request needs, of the rest
    when those end. Until the node says that it let go of a block it has it."""
    cluster = Cluster("p1", "d1", config=DirectoryConfig(decode_to_prefill=DecodeToPrefill.RESET))
    cluster.serve("agent", "r1", "sys", output="out")
    effects = cluster.switch("d1", Role.DECODE, Role.PREFILL)
    assert [effect.node_id for effect in effects if isinstance(effect, ClearMemory)] == ["d1"]
    assert cluster.counts("d1", "sysout") == [0] * 6
    assert cluster.phase_counts("sysout") == [(1, 0)] * 3 + [(0, 0)] * 3
    match = cluster.directory.match(0.0, b"".join(chain([], "sysout")))
    assert match.nodes["d1"].either_blocks == 6
    cluster.evict("d1", "sysout", 5)
    cluster.land("agent", "r1", "d1", Phase.DECODE, 3)  # by a request that was running there
    assert cluster.counts("d1", "sysout") == [1, 1, 1, 0, 0, 0]
    cluster.tell("d1", *(Cleared(tier) for tier in Tier))
    assert cluster.counts("d1", "sysout") == [0] * 6
    assert cluster.counts("p1", "sysout") == [1] * 3 + [0] * 3
    assert cluster.directory.match(0.0, b"".join(chain([], "sysout"))).any_blocks == 3


def test_a_node_turned_prefill_takes_over_what_no_prefill_node_counts() -> None:
    """Ours instead of §4.1's reset: what only the switched node holds of a branch stays counted there, now in the
    PREFILL phase; its DECODE counts go; KV in host memory stays."""
    cluster = Cluster("p1", "d1")
    cluster.serve("agent", "r1", "sys", output="out")
    effects = cluster.switch("d1", Role.DECODE, Role.PREFILL)
    assert [effect.node_id for effect in effects if isinstance(effect, FreeL1)] == ["d1"]
    assert not any(isinstance(effect, ClearMemory) for effect in effects)
    assert cluster.phase_counts("sysout") == [(1, 0)] * 6
    assert cluster.counts("d1", "sysout") == [0] * 3 + [1] * 3
    assert cluster.counts("p1", "sysout") == [1] * 3 + [0] * 3
    assert cluster.directory.match(0.0, b"".join(chain([], "sysout"))).pool_blocks == 6


def test_a_node_turned_prefill_takes_over_host_memory_only() -> None:
    """Device memory of the switched node is freed, so a block it holds only there gets no home."""
    cluster = Cluster("p1", "d1")
    cluster.begin("agent", "r1", "sys")
    cluster.store("d1", "sy")
    cluster.store("d1", "sys", 2, [Tier.L1])
    cluster.land("agent", "r1", "d1", Phase.DECODE, 3)
    cluster.switch("d1", Role.DECODE, Role.PREFILL)
    assert cluster.phase_counts("sys") == [(1, 0), (1, 0), (0, 0)]


# --------------------------------------------------------------------------------------------------- §4.1: ends, deaths


def test_an_end_takes_one_from_all_blocks_of_the_branch_once(cluster: Cluster) -> None:
    """§4.1 "Branch termination"; a second end is a no-op."""
    cluster.serve("one", "r1", "sysone", output="out")
    cluster.serve("two", "r1", "systwo")
    assert any(isinstance(effect, EndedBranch) for effect in cluster.end("one"))
    assert cluster.phase_counts("sysoneout") == [(1, 1)] * 3 + [(0, 0)] * 6
    assert not any(isinstance(effect, EndedBranch | CountUpdate) for effect in cluster.end("one"))
    assert cluster.phase_counts("systwo") == [(1, 1)] * 6
    cluster.end("two")
    assert cluster.all_zero()


def test_an_end_of_a_subtree_takes_all_descendants(cluster: Cluster) -> None:
    """Descendants of a branch that ended before them are still its subtree."""
    cluster.serve("root", "r1", "sys")
    cluster.begin("mid", "r1", "sysa", parent_branch_id="root")
    cluster.begin("leaf", "r1", "sysab", parent_branch_id="mid")
    cluster.begin("other", "r1", "sys")
    cluster.end("mid")
    ended = {effect.branch_id for effect in cluster.end("root", subtree=True) if isinstance(effect, EndedBranch)}
    assert ended == {"root", "leaf"}
    view = cluster.directory.branch(0.0, TENANT, "other")
    assert view is not None
    assert view.state is BranchState.LIVE


def test_a_node_that_is_gone_takes_its_homes_and_copies(cluster: Cluster) -> None:
    cluster.serve("agent", "r1", "sys")
    cluster.directory.node_gone(0.0, "p1")
    assert cluster.phase_counts("sys") == [(0, 1)] * 3
    cluster.directory.node_up(0.0, "p1", "life-2")
    cluster.directory.node_events(0.0, "p1", "life-2", 1, [Stored(Tier.L2, run_ref(chain([], "sys"), 0, 3))])
    assert cluster.counts("p1", "sys") == [0] * 3


def test_a_node_that_restarts_keeps_its_homes_and_counts_again_what_it_announces(cluster: Cluster) -> None:
    cluster.serve("agent", "r1", "sys")
    cluster.directory.node_up(0.0, "p1", "life-2")
    assert cluster.counts("p1", "sys") == [0] * 3
    run = run_ref(chain([], "sys"), 0, 2)
    effects = cluster.directory.node_events(0.0, "p1", "life-2", 1, [Stored(Tier.L2, run)])
    heard = [effect for effect in effects if isinstance(effect, CountUpdate) and effect.node_id == "p1"]
    assert [(effect.names, effect.count) for effect in heard] == [(run.names, 1)]
    assert cluster.counts("p1", "sys") == [1, 1, 0]


def test_what_a_node_evicts_is_not_counted_there_until_it_is_back(cluster: Cluster) -> None:
    """count(n, b) needs n to hold b; counts bias eviction, they never pin."""
    cluster.serve("agent", "r1", "sys")
    cluster.evict("p1", "sys", 1)
    assert cluster.counts("p1", "sys") == [1, 0, 0]
    cluster.evict("d1", "sys", 0, [Tier.L1])
    assert cluster.counts("d1", "sys") == [1, 1, 1]
    cluster.store("p1", "sys")
    assert cluster.counts("p1", "sys") == [1, 1, 1]
