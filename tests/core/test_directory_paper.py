"""The paper's rules for branch counts, row by row (arXiv 2611.12304, §3's table and §4.1), and what it leaves open.

A block is a letter here: "sys" is a context of three blocks, and equal letters after equal contexts are the same block.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from core.pair import chain, run_ref

from evolving.core.config import DecodeToPrefill, DirectoryConfig
from evolving.core.directory import Directory
from evolving.core.directory_types import (
    Begin,
    BeginAnswer,
    BeginKind,
    BranchState,
    ClearMemory,
    CountsComplete,
    CountUpdate,
    Effect,
    EndedBranch,
    FreeL1,
    Landed,
    NeedResync,
    Output,
    Removed,
    Stored,
)
from evolving.core.errors import BranchEnded, NeedFull, RequestConflict, StaleVersion
from evolving.core.terms import Phase, Role, Tier

TENANT = "t"
HOUR_S = 3600.0


class Cluster:
    """A directory with nodes that hold what they are told to, and requests that go as they should."""

    def __init__(self, *nodes: str, config: DirectoryConfig | None = None) -> None:
        self.directory = Directory(config)
        self.now_s = 0.0
        self.sequence = dict.fromkeys(nodes, 0)
        for node_id in nodes:
            self.directory.node_up(self.now_s, node_id, "life-1")

    def tell(self, node_id: str, *events: Stored | Removed) -> list[Effect]:
        """The node's next batch."""
        self.sequence[node_id] += 1
        return self.directory.node_events(self.now_s, node_id, "life-1", self.sequence[node_id], events)

    def store(self, node_id: str, text: str, first: int = 0, tiers: Iterable[Tier] = Tier) -> list[Effect]:
        """The node holds blocks of a context from `first` on."""
        run = run_ref(chain([], text), first, len(text))
        return self.tell(node_id, *(Stored(tier, run) for tier in tiers))

    def evict(self, node_id: str, text: str, first: int = 0, tiers: Iterable[Tier] = Tier) -> list[Effect]:
        """The node lets go of blocks of a context from `first` on."""
        run = run_ref(chain([], text), first, len(text))
        return self.tell(node_id, *(Removed(tier, run) for tier in tiers))

    def begin(self, branch: str, request: str, text: str, version: int = 0, **more: str | bool | bytes) -> BeginAnswer:
        """A request of a branch, its context sent in full."""
        names = b"".join(chain([], text))
        event = Begin(TENANT, branch, request, version=version, new_names=names, **more)  # type: ignore[arg-type]
        return self.directory.begin(self.now_s, event)[0]

    def land(
        self, branch: str, request: str, node_id: str, phase: Phase, blocks: int, version: int = 1
    ) -> list[Effect]:
        """KV of a request's leading blocks is on a node."""
        return self.directory.landed(self.now_s, Landed(TENANT, branch, request, version, phase, node_id, blocks))

    def out(self, branch: str, request: str, node_id: str, text: str, first: int, version: int = 1) -> list[Effect]:
        """Output completed blocks of a context from `first` on."""
        names = b"".join(chain([], text)[first:])
        return self.directory.output(self.now_s, Output(TENANT, branch, request, version, node_id, first, names))

    def done(self, branch: str, request: str) -> list[Effect]:
        """The request is over."""
        return self.directory.request_done(self.now_s, TENANT, branch, request)

    def end(self, *branch_ids: str, subtree: bool = False) -> list[Effect]:
        """Branches end."""
        return self.directory.end(self.now_s, TENANT, branch_ids, subtree)

    def serve(
        self, branch: str, request: str, text: str, p: str = "p1", d: str = "d1", output: str = "", version: int = 0
    ) -> BeginAnswer:
        """A whole request: prefilled on `p`, decoded on `d`, its output written through to `d`'s host memory."""
        answer = self.begin(branch, request, text, version)
        for node_id, phase in ((p, Phase.PREFILL), (d, Phase.DECODE)):
            self.store(node_id, text)
            self.land(branch, request, node_id, phase, len(text), answer.version)
        if output:
            self.store(d, text + output, len(text))
            self.out(branch, request, d, text + output, len(text), answer.version)
        self.done(branch, request)
        return answer

    def counts(self, node_id: str, text: str) -> list[int]:
        """What the node evicts by, block by block of a context."""
        found = {}
        for names, count in self.directory.node_counts(node_id):
            found.update({names[at : at + 16]: count for at in range(0, len(names), 16)})
        self.directory.check_invariants()
        return [found.get(name, 0) for name in chain([], text)]

    def phase_counts(self, text: str) -> list[tuple[int, int]]:
        """(PREFILL, DECODE) counts of each block of a context, summed over nodes."""
        sums = []
        for name in chain([], text):
            view = self.directory.block(name)
            copies = view.copies if view is not None else ()
            sums.append((sum(copy.prefill_count for copy in copies), sum(copy.decode_count for copy in copies)))
        return sums

    def all_zero(self) -> bool:
        """Whether nothing is counted anywhere."""
        return not any(self.directory.node_counts(node_id) for node_id in self.sequence)

    def switch(self, node_id: str, old: Role, new: Role) -> list[Effect]:
        """A node's role changes."""
        return self.directory.role_switch(self.now_s, node_id, old, new)


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
    """§4.1: decode→prefill resets the count to 0 and empties the memory."""
    cluster = Cluster("p1", "d1", config=DirectoryConfig(decode_to_prefill=DecodeToPrefill.RESET))
    cluster.serve("agent", "r1", "sys", output="out")
    effects = cluster.switch("d1", Role.DECODE, Role.PREFILL)
    assert [effect.node_id for effect in effects if isinstance(effect, ClearMemory)] == ["d1"]
    assert cluster.counts("d1", "sysout") == [0] * 6
    assert cluster.phase_counts("sysout") == [(1, 0)] * 3 + [(0, 0)] * 3
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
    assert [(effect.names, effect.count) for effect in effects if isinstance(effect, CountUpdate)] == [(run.names, 1)]
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


# ------------------------------------------------------------------------------------------- what the paper leaves open


def test_output_joins_provisionally_and_a_stripped_one_is_dropped(cluster: Cluster) -> None:
    """Extension is judged against the last prompt: harnesses strip thinking from what they send back."""
    cluster.serve("agent", "r1", "ask", output="thinkanswer")
    view = cluster.directory.branch(0.0, TENANT, "agent")
    assert view is not None
    assert (view.prompt_blocks, view.output_blocks) == (3, 11)
    answer = cluster.serve("agent", "r2", "askanswertool")
    assert (answer.kind, answer.version) == (BeginKind.EXTEND, 1)
    assert cluster.phase_counts("askthinkanswer")[3:] == [(0, 0)] * 11
    assert cluster.phase_counts("askanswertool") == [(1, 1)] * 13


def test_another_request_of_a_running_version_is_a_side_request(cluster: Cluster) -> None:
    cluster.begin("agent", "r1", "sysplan")
    answer = cluster.begin("agent", "title", "systitle")
    assert (answer.kind, answer.prompt_blocks) == (BeginKind.SIDE, 8)
    cluster.store("p1", "systitle")
    cluster.land("agent", "title", "p1", Phase.PREFILL, 8)
    assert cluster.all_zero()
    cluster.store("p1", "sysplan")
    cluster.land("agent", "r1", "p1", Phase.PREFILL, 7)
    assert cluster.counts("p1", "sysplan") == [1] * 7
    assert cluster.directory.stats().counters["side_requests"] == 1


def test_another_context_with_nothing_running_is_an_unannounced_rewrite(cluster: Cluster) -> None:
    cluster.serve("agent", "r1", "syshistory")
    answer = cluster.serve("agent", "r2", "sysshort")
    assert (answer.kind, answer.version) == (BeginKind.REWRITE, 1)
    assert cluster.phase_counts("syshistory")[3:] == [(0, 0)] * 7
    assert cluster.directory.stats().counters["unannounced_rewrites"] == 1


def test_a_lower_version_is_refused_and_no_version_means_the_current(cluster: Cluster) -> None:
    assert cluster.begin("agent", "r1", "sys", version=3).version == 3
    with pytest.raises(StaleVersion) as refused:
        cluster.begin("agent", "r2", "sys", version=2)
    assert refused.value.current == 3
    assert cluster.begin("agent", "r3", "sysa").version == 3


def test_news_of_an_older_version_is_ignored(cluster: Cluster) -> None:
    cluster.begin("agent", "r1", "sys", version=1)
    cluster.begin("agent", "r2", "sum", version=2)
    cluster.store("p1", "sys")
    cluster.land("agent", "r1", "p1", Phase.PREFILL, 3, version=1)
    cluster.out("agent", "r1", "p1", "sysout", 3, version=1)
    assert cluster.all_zero()
    assert cluster.directory.stats().ignored_events


def test_an_unknown_parent_makes_a_root(cluster: Cluster) -> None:
    assert cluster.begin("agent", "r1", "sys", parent_branch_id="nobody").kind is BeginKind.NEW
    assert cluster.directory.stats().counters["unknown_parents"] == 1


def test_a_repeated_request_gets_the_stored_answer(cluster: Cluster) -> None:
    cluster.begin("agent", "r1", "sys")
    cluster.store("p1", "sys")
    again = cluster.begin("agent", "r1", "sys")
    assert (again.kind, again.version, again.prompt_blocks) == (BeginKind.REPLAY, 1, 3)
    assert again.match.any_blocks == 3
    with pytest.raises(RequestConflict):
        cluster.begin("agent", "r1", "other")


def test_an_ended_id_is_refused_while_its_tombstone_lasts(cluster: Cluster) -> None:
    cluster.serve("agent", "r1", "sys")
    cluster.end("agent")
    with pytest.raises(BranchEnded):
        cluster.begin("agent", "r2", "sys")
    cluster.now_s += 25 * HOUR_S
    cluster.directory.tick(cluster.now_s)
    assert cluster.begin("agent", "r2", "sys").kind is BeginKind.NEW


def test_an_idle_branch_ends_and_its_id_may_come_back() -> None:
    cluster = Cluster("p1", "d1", config=DirectoryConfig(idle_ttl_s=HOUR_S))
    cluster.serve("agent", "r1", "sys", version=4)
    wakeup_s = cluster.directory.next_wakeup_s()
    assert wakeup_s == HOUR_S
    effects = cluster.directory.tick(HOUR_S)
    assert [effect.expired for effect in effects if isinstance(effect, EndedBranch)] == [True]
    assert cluster.all_zero()
    cluster.now_s = HOUR_S
    answer = cluster.begin("agent", "r2", "sysagain")
    assert (answer.kind, answer.version) == (BeginKind.NEW, 1)


def test_live_descendants_keep_their_ancestors() -> None:
    cluster = Cluster("p1", "d1", config=DirectoryConfig(idle_ttl_s=HOUR_S))
    cluster.serve("parent", "r1", "sys")
    cluster.begin("child", "r1", "sub", parent_branch_id="parent")
    cluster.now_s = 0.5 * HOUR_S
    cluster.begin("child", "r1", "sub")
    cluster.now_s = 1.2 * HOUR_S
    assert not any(isinstance(effect, EndedBranch) for effect in cluster.directory.tick(cluster.now_s))
    cluster.end("child")
    effects = cluster.directory.tick(cluster.now_s + HOUR_S)
    assert [effect.branch_id for effect in effects if isinstance(effect, EndedBranch)] == ["parent"]


def test_an_end_does_not_cancel_and_what_a_request_reports_later_is_ignored(cluster: Cluster) -> None:
    cluster.begin("agent", "r1", "sys")
    cluster.end("agent")
    cluster.store("p1", "sys")
    cluster.land("agent", "r1", "p1", Phase.PREFILL, 3)
    cluster.done("agent", "r1")
    assert cluster.all_zero()


def test_end_after_is_stored_and_applied_on_any_outcome(cluster: Cluster) -> None:
    cluster.begin("agent", "r1", "sys", end_after=True)
    cluster.store("p1", "sys")
    cluster.land("agent", "r1", "p1", Phase.PREFILL, 3)
    assert any(isinstance(effect, EndedBranch) for effect in cluster.done("agent", "r1"))
    assert cluster.all_zero()
    with pytest.raises(BranchEnded):
        cluster.begin("agent", "r2", "sys")


def test_a_request_nobody_hears_of_counts_as_over() -> None:
    cluster = Cluster("p1", config=DirectoryConfig(request_ttl_s=60.0))
    cluster.begin("agent", "r1", "sys", end_after=True)
    assert not any(isinstance(effect, EndedBranch) for effect in cluster.directory.tick(59.0))
    assert any(isinstance(effect, EndedBranch) for effect in cluster.directory.tick(60.0))


def test_a_base_nobody_knows_is_asked_for_in_full(cluster: Cluster) -> None:
    names = chain([], "sysplan")
    event = Begin(TENANT, "agent", "r1", base_blocks=3, base_name=names[2], new_names=b"".join(names[3:]))
    with pytest.raises(NeedFull):
        cluster.directory.begin(0.0, event)
    assert cluster.directory.branch(0.0, TENANT, "agent") is None
    cluster.serve("parent", "r1", "sys")
    event = Begin(TENANT, "agent", "r1", 0, "parent", 3, names[2], b"".join(names[3:]))
    assert cluster.directory.begin(0.0, event)[0].prompt_blocks == 7


# ----------------------------------------------------------------------------------------------- nodes and their events


def test_a_gap_in_a_nodes_events_asks_for_everything_once(cluster: Cluster) -> None:
    cluster.serve("agent", "r1", "sys")
    cluster.sequence["p1"] += 1
    assert any(isinstance(effect, NeedResync) for effect in cluster.evict("p1", "sys"))
    assert not any(isinstance(effect, NeedResync) for effect in cluster.evict("p1", "sys"))
    assert cluster.counts("p1", "sys") == [1] * 3


def test_a_snapshot_replaces_what_was_known_and_says_when_it_is_complete(cluster: Cluster) -> None:
    """Unknown is not 0: the node keeps its counts until it is told that it heard all of them."""
    cluster.serve("agent", "r1", "sys")
    directory, run = cluster.directory, run_ref(chain([], "sys"), 0, 2)
    assert not any(isinstance(effect, CountUpdate) for effect in directory.resync_begin(0.0, "p1", "life-1"))
    heard = directory.resync_events(0.0, "p1", "life-1", [Stored(Tier.L2, run)])
    assert [(effect.names, effect.count) for effect in heard if isinstance(effect, CountUpdate)] == [(run.names, 1)]
    effects = directory.resync_end(0.0, "p1", "life-1", 9)
    assert any(isinstance(effect, CountsComplete) for effect in effects)
    assert cluster.counts("p1", "sys") == [1, 1, 0]
    cluster.sequence["p1"] = 9
    assert not any(isinstance(effect, NeedResync) for effect in cluster.store("p1", "sys"))
    assert cluster.counts("p1", "sys") == [1, 1, 1]


def test_a_run_below_an_unknown_block_asks_for_everything(cluster: Cluster) -> None:
    effects = cluster.store("p1", "a" * 40, first=20)
    assert any(isinstance(effect, NeedResync) for effect in effects)
    assert not any(isinstance(effect, NeedResync) for effect in cluster.store("p2", "a" * 40, first=16 - 1))
