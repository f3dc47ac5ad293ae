"""What §4.1 of arXiv 2611.12304 leaves open about branches, requests and nodes, and how it is settled."""

from __future__ import annotations

import pytest
from core.pair import chain, run_ref
from core.served import TENANT, Cluster

from evolving.core.config import DirectoryConfig
from evolving.core.directory_types import (
    Begin,
    BeginKind,
    CountsComplete,
    CountUpdate,
    Effect,
    EndedBranch,
    NeedResync,
    Stored,
)
from evolving.core.errors import BranchEnded, NeedFull, RequestConflict, StaleVersion
from evolving.core.terms import Phase, Tier

HOUR_S = 3600.0


@pytest.fixture
def cluster() -> Cluster:
    return Cluster("p1", "p2", "d1", "d2")


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


def test_a_request_that_lost_its_node_is_matched_anew_with_its_output(cluster: Cluster) -> None:
    """Also on a branch that ended: an end never stops a running request."""
    cluster.serve("agent", "r1", "sys", output="out")
    names = chain([], "sysout")
    lost = Begin(TENANT, "agent", "r1", base_blocks=3, base_name=names[2], new_names=b"".join(names[3:]))
    assert cluster.directory.rematch(0.0, lost).any_blocks == 6
    cluster.end("agent")
    in_full = Begin(TENANT, "agent", "r1", new_names=b"".join(names))
    assert cluster.directory.rematch(0.0, in_full).any_blocks == 6
    assert cluster.all_zero()
    unknown = Begin(TENANT, "agent", "r1", base_blocks=3, base_name=bytes(16))
    with pytest.raises(NeedFull):
        cluster.directory.rematch(0.0, unknown)


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
    told = [effect for effect in heard if isinstance(effect, CountUpdate) and effect.node_id == "p1"]
    assert [(effect.names, effect.count) for effect in told] == [(run.names, 1)]
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


def test_a_node_hears_whether_the_pool_has_its_counted_blocks_without_it(cluster: Cluster) -> None:
    """With its count, and again when the only other copy in L2 comes or goes, however it goes."""

    def heard(effects: list[Effect]) -> dict[str, bool]:
        updates = [effect for effect in effects if isinstance(effect, CountUpdate)]
        assert len({update.node_id for update in updates}) == len(updates), "each hears it once"
        return {update.node_id: update.elsewhere for update in updates}

    cluster.begin("agent", "r1", "sys")
    cluster.store("p1", "sys")
    assert heard(cluster.land("agent", "r1", "p1", Phase.PREFILL, 3)) == {"p1": False}
    assert heard(cluster.store("d1", "sys")) == {"p1": True}
    assert heard(cluster.land("agent", "r1", "d1", Phase.DECODE, 3)) == {"d1": True}
    assert heard(cluster.store("p2", "sys")) == {}, "no news to those who know of another"
    assert heard(cluster.evict("p2", "sys")) == {}

    assert heard(cluster.evict("d1", "sys", tiers=[Tier.L2])) == {"p1": False}, "copies in L1 can't be read"
    assert heard(cluster.evict("p1", "sys", tiers=[Tier.L2])) == {"d1": False}
    assert heard(cluster.store("p1", "sys", tiers=[Tier.L2])) == {"d1": True}
    assert heard(cluster.store("d1", "sys", tiers=[Tier.L2])) == {"p1": True}

    cluster.directory.node_gone(0.0, "d1")
    told: dict[str, bool] = {}
    while (wakeup_s := cluster.directory.next_wakeup_s()) is not None and wakeup_s <= cluster.now_s:
        told |= heard(cluster.directory.tick(cluster.now_s))
    assert told == {"p1": False}
