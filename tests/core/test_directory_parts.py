"""Reads and clears that take their time: other events come between their parts."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from contextlib import closing
from typing import TypeVar, cast

import pytest
from core.model import split_names
from core.pair import chain
from core.served import Cluster
from core.test_directory_turns import KEYS, NODES, Story

from evolving.core import directory_audit, directory_nodes, directory_views
from evolving.core.config import DecodeToPrefill
from evolving.core.directory import finished
from evolving.core.directory_types import AuditMismatch, Cleared, CountUpdate, Effect
from evolving.core.needs import need
from evolving.core.terms import Phase, Tier


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (directory_nodes, directory_views):
        monkeypatch.setattr(module, "SLICE_RUNS", 2)
    monkeypatch.setattr(directory_audit, "_SLICE_RUNS", 2)
    monkeypatch.setattr(directory_audit, "_SLICE_BRANCHES", 1)
    monkeypatch.setattr(directory_views, "_SLICE_BRANCHES", 1)


def steps(story: Story, most: int) -> list[Effect]:
    """Some events, and their effects."""
    effects: list[Effect] = []
    story.pair.listeners.append(effects.extend)
    for _ in range(story.rng.randrange(most)):
        story.step()
    story.pair.listeners.clear()
    return effects


Answer = TypeVar("Answer")


def between(parts: Generator[None, None, Answer], happens: Callable[[], object]) -> Generator[None, None, Answer]:
    """The same parts, with something happening after each."""
    while True:
        try:
            next(parts)
        except StopIteration as done:
            return cast("Answer", done.value)
        happens()
        yield


@pytest.mark.parametrize("seed", range(20))
def test_counts_in_parts_and_the_updates_in_between_amount_to_the_counts_at_the_end(seed: int) -> None:
    story = Story(seed, DecodeToPrefill.KEEP)
    node_id = random.Random(seed).choice(NODES)
    heard: dict[bytes, tuple[int, bool]] = {}
    with closing(story.pair.core.node_counts_in_parts(node_id)) as parts:
        for part in parts:
            for effect in [*part, *steps(story, 3)]:
                if isinstance(effect, CountUpdate) and effect.node_id == node_id:
                    heard.update(dict.fromkeys(split_names(effect.names), (effect.count, effect.elsewhere)))
    kept = {
        name: (count, story.pair.elsewhere[node_id, name])
        for names, count in story.pair.core.node_counts(node_id)
        for name in split_names(names)
    }
    assert {name: told for name, told in heard.items() if told[0]} == kept


@pytest.mark.parametrize("seed", range(20))
def test_an_audit_is_not_misled_by_what_happens_meanwhile(seed: int) -> None:
    story = Story(seed, DecodeToPrefill.RESET)
    core = story.pair.core
    with core.visit() as visit:
        steps(story, 3)  # the question is under way
        told = story.pair.needs()
        parts = core.audit_in_parts(visit, told)
        report = finished(between(parts, lambda: steps(story, 3)))
    assert (report.mismatch_count, report.nonzero_after_end) == (0, 0), report.mismatches


@pytest.mark.parametrize("rule", DecodeToPrefill)
@pytest.mark.parametrize("seed", range(20))
def test_an_audit_is_not_misled_by_nodes_that_go_and_turn(seed: int, rule: DecodeToPrefill) -> None:
    story = Story(seed, rule)
    core, rng = story.pair.core, story.rng
    for _ in range(3):
        story.turn_nodes()
        with core.visit() as visit:
            steps(story, 3)
            told = story.pair.needs()
            parts = core.audit_in_parts(visit, told)
            happens = between(parts, lambda: story.turn_nodes() if rng.random() < 0.05 else steps(story, 2))
            report = finished(happens)
        assert (report.mismatch_count, report.nonzero_after_end) == (0, 0), report.mismatches


def test_an_audit_finds_what_is_wrong_where_nothing_changes() -> None:
    """A count, and what a node believes of others' copies."""
    cluster = Cluster("p1", "d1")
    cluster.serve("one", "r1", "sysone")
    cluster.serve("two", "r1", "els")
    ours, theirs = chain([], "sysone"), chain([], "els")
    stale = chain([], "gone")[3]
    told = {"p1": dict.fromkeys([*ours, *theirs], need(1, elsewhere=True))}
    told["p1"][ours[5]], told["p1"][stale] = need(7, elsewhere=True), need(3, elsewhere=True)
    told["p1"][ours[4]] = told["p1"][theirs[1]] = need(1, elsewhere=False)
    del told["p1"][theirs[2]]
    with cluster.directory.visit() as visit:
        cluster.serve("three", "r1", "elsewhere")  # what it touches is left out
        report = finished(cluster.directory.audit_in_parts(visit, told))
    assert set(report.mismatches) == {
        AuditMismatch("p1", ours[5], 1, 1, 7, elsewhere=True, node_elsewhere=True),
        AuditMismatch("p1", ours[4], 1, 1, 1, elsewhere=True, node_elsewhere=False),
        AuditMismatch("p1", stale, 0, 0, 3, elsewhere=None, node_elsewhere=True),
    }
    assert report.mismatch_count == 3


def test_an_audit_waits_for_the_sweep_before_it_says_that_no_other_node_has_a_block() -> None:
    """Nodes are told by the sweep; one that never was is found after it, as is one that believes a block is here
    alone."""
    cluster = Cluster("p1", "d1", "d2")
    cluster.serve("one", "r1", "sys")
    cluster.serve("two", "r1", "els", d="d2")
    ours, theirs = chain([], "sys"), chain([], "els")
    told = {"p1": dict.fromkeys([*ours, *theirs], need(1, elsewhere=True))}
    cluster.directory.node_gone(0.0, "d1")
    assert cluster.directory.audit(told).mismatch_count == 0
    while cluster.directory.next_wakeup_s() == 0.0:
        cluster.directory.tick(0.0)
    report = cluster.directory.audit(told)
    assert report.mismatch_count == 3
    assert set(report.mismatches) == {AuditMismatch("p1", name, 1, 1, 1, False, True) for name in ours}
    told["p1"].update(dict.fromkeys(ours, need(1, elsewhere=False)))
    assert cluster.directory.audit(told).mismatch_count == 0
    told["p1"].update(dict.fromkeys(theirs, need(1, elsewhere=False)))
    assert set(cluster.directory.audit(told).mismatches) == {
        AuditMismatch("p1", name, 1, 1, 1, True, False) for name in theirs
    }


def test_an_audit_says_nothing_of_a_node_that_began_anew() -> None:
    cluster = Cluster("p1", "d1")
    cluster.serve("one", "r1", "sys")
    told = {"p1": dict.fromkeys(chain([], "sys"), 1)}
    with cluster.directory.visit() as visit:
        cluster.directory.node_up(0.0, "p1", "life-2")
        report = finished(cluster.directory.audit_in_parts(visit, told))
    assert report.mismatch_count == 0


@pytest.mark.parametrize("tier", Tier)
def test_a_tier_is_cleared_in_parts_before_its_batch_is_taken(tier: Tier) -> None:
    cluster = Cluster("p1", "p2", "d1")
    for number in range(6):
        cluster.serve(f"b{number}", "r1", f"sys{number}" + "x" * number, p=f"p{number % 2 + 1}")
    directory, parts = cluster.directory, 0
    batch = ("p1", "life-1", cluster.sequence["p1"] + 1, [Cleared(tier)])
    with closing(directory.clear_in_parts(0.0, *batch)) as clearing:
        for _ in clearing:
            parts += 1
            cluster.serve(f"c{parts}", "r1", f"sys1x{parts}", p="p2")
            directory.check_invariants()
    assert parts > 1
    directory.node_events(0.0, *batch)
    directory.check_invariants()
    stats = next(node for node in directory.stats().nodes if node.node_id == "p1")
    assert (stats.l1_blocks, stats.l2_blocks)[tier is Tier.L2] == 0
    assert (stats.l1_blocks, stats.l2_blocks)[tier is Tier.L1] > 0


def test_a_batch_that_will_not_be_taken_clears_nothing() -> None:
    cluster = Cluster("p1")
    cluster.store("p1", "sys")
    for sequence in (cluster.sequence["p1"], cluster.sequence["p1"] + 2):
        assert not list(cluster.directory.clear_in_parts(0.0, "p1", "life-1", sequence, [Cleared(Tier.L1)]))
    assert cluster.directory.stats().nodes[0].l1_blocks == 3


@pytest.mark.parametrize("seed", range(5))
def test_a_block_is_found_while_other_things_happen(seed: int) -> None:
    story = Story(seed, DecodeToPrefill.KEEP)
    story.pair.end(KEYS[0][0], [KEYS[0][1]], subtree=False)
    for key in KEYS[1:]:
        for depth in (0, 3, 7, 16):
            branch = story.pair.model.live(*key)
            if branch is None or len(branch.context) <= depth:
                continue
            parts = story.pair.core.block_in_parts(branch.context[depth])
            view = finished(between(parts, lambda key=key: story.land(key, Phase.PREFILL)))  # type: ignore[misc]
            assert view is not None
            assert view.depth == depth
            assert key in view.branches
