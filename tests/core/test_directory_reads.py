"""What the directory shows: pages, bounds, audits that find what is wrong, and configuration that is refused."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

import pytest

from evolving.core.blocks import split_names
from evolving.core.config import DirectoryConfig
from evolving.core.directory import Directory
from evolving.core.directory_types import (
    AuditMismatch,
    Begin,
    BlockCounts,
    BranchState,
    Home,
    Landed,
    NeedResync,
    Output,
    RunRef,
    Stored,
)
from evolving.core.errors import InvalidArgument, StaleIncarnation, UnknownNode
from evolving.core.needs import need
from evolving.core.terms import NAME_BYTES, Phase, Tier

NAMES = random.Random(3).randbytes(40 * NAME_BYTES)


def hold(directory: Directory, node_id: str, blocks: int) -> None:
    """A node comes up and holds the first blocks of NAMES in L2."""
    directory.node_up(0.0, node_id, "1")
    directory.node_events(0.0, node_id, "1", 1, [Stored(Tier.L2, RunRef(0, NAMES[: blocks * NAME_BYTES]))])


def land(directory: Directory, branch_id: str, node_id: str, blocks: int) -> None:
    """A branch whose context is the first blocks of NAMES, landed on a node."""
    directory.begin(0.0, Begin("t", branch_id, "r", new_names=NAMES[: blocks * NAME_BYTES]))
    directory.landed(0.0, Landed("t", branch_id, "r", 1, Phase.PREFILL, node_id, blocks))


@pytest.fixture
def directory() -> Directory:
    return Directory(DirectoryConfig(block_view_branches_max=2, audit_mismatches_max=3))


def test_pages_of_branches_have_each_branch_once_in_order(directory: Directory) -> None:
    keys = [(tenant, f"b{number:02}") for tenant in ("t1", "t2") for number in range(7)]
    for tenant, branch_id in reversed(keys):
        directory.begin(0.0, Begin(tenant, branch_id, "r"))
    directory.end(1.0, "t1", ["b03"])
    seen: list[tuple[str, str]] = []
    while page := directory.branches(1.0, after=seen[-1] if seen else None, limit=4):
        seen += [(view.tenant, view.branch_id) for view in page]
    assert seen == [key for key in keys if key != ("t1", "b03")]
    everyone = directory.branches(1.0, tenant="t1", include_ended=True)
    assert [view.state is BranchState.ENDED for view in everyone] == [number == 3 for number in range(7)]


def test_a_branch_shows_its_homes_by_phase_in_context_order(directory: Directory) -> None:
    for node_id in ("p", "q", "d"):
        hold(directory, node_id, 30)
    land(directory, "b", "p", 30)
    directory.landed(0.0, Landed("t", "b", "r", 1, Phase.PREFILL, "q", 5, first_block=20))
    directory.output(0.0, Output("t", "b", "r", 1, "d", 30, NAMES[30 * NAME_BYTES : 32 * NAME_BYTES]))
    view = directory.branch(7.0, "t", "b")
    assert view is not None
    assert view.homes == (
        Home(Phase.PREFILL, "p", 0, 20),
        Home(Phase.PREFILL, "q", 20, 5),
        Home(Phase.PREFILL, "p", 25, 5),
        Home(Phase.DECODE, "d", 30, 2),
    )
    assert (view.prompt_blocks, view.output_blocks, view.idle_s, view.running_requests) == (30, 2, 7.0, 1)
    assert view.counts == BlockCounts(held_blocks=30, shared_blocks=0, zero_blocks=0)  # d doesn't hold the output yet


def test_a_block_is_found_at_any_depth_and_names_a_bounded_number_of_branches(directory: Directory) -> None:
    hold(directory, "p", 40)
    for branch_id in ("a", "b", "c"):
        land(directory, branch_id, "p", 30)
    for depth, name in enumerate(split_names(NAMES)):
        view = directory.block(name)
        assert view is not None
        assert view.depth == depth
        assert [copy.prefill_count for copy in view.copies] == [3 if depth < 30 else 0]
        assert view.branches == ((("t", "a"), ("t", "b")) if depth < 30 else ())
    assert directory.block(bytes(NAME_BYTES)) is None
    with pytest.raises(InvalidArgument):
        directory.block(NAMES[:15])


def test_an_audit_finds_counts_a_node_has_wrong_misses_or_has_too_many(directory: Directory) -> None:
    hold(directory, "p", 20)
    land(directory, "b", "p", 10)
    names = split_names(NAMES)
    right = dict.fromkeys(names[:10], need(1, elsewhere=False))
    assert directory.audit({"p": right}).mismatch_count == 0
    assert directory.audit({"p": right}).compared == 10
    wrong = {names[0]: need(2, elsewhere=False), names[15]: need(1, elsewhere=False)}
    report = directory.audit({"p": right | wrong})
    assert report.mismatches == (
        AuditMismatch("p", names[0], incremental=1, recounted=1, node=2, elsewhere=False, node_elsewhere=False),
        AuditMismatch("p", names[15], incremental=0, recounted=0, node=1, elsewhere=None, node_elsewhere=False),
    )
    assert report.nonzero_after_end == 1
    report = directory.audit({"p": {}})
    assert (report.mismatch_count, len(report.mismatches)) == (10, 3)
    assert {(each.node, each.node_elsewhere) for each in report.mismatches} == {(0, None)}
    assert directory.audit().mismatch_count == 0


def test_an_audit_finds_counts_kept_wrong(directory: Directory) -> None:
    hold(directory, "p", 20)
    land(directory, "b", "p", 10)
    run = directory._state.table.live["t", "b"].tip
    assert run is not None
    assert run.homes is not None
    run.homes = {key: count + 1 for key, count in run.homes.items()}
    assert directory.audit().mismatch_count == 10
    with pytest.raises(AssertionError):
        directory.check_invariants()


def test_a_node_that_comes_back_is_asked_for_what_was_missed(directory: Directory) -> None:
    hold(directory, "p", 20)
    assert directory.node_up(0.0, "p", "1", next_sequence=2) == []
    (effect,) = directory.node_up(0.0, "p", "1", next_sequence=5)
    assert isinstance(effect, NeedResync)
    (effect,) = directory.node_up(0.0, "p", "1", next_sequence=2)  # nothing is missing, but the resync never came
    assert isinstance(effect, NeedResync)
    assert directory.stats().nodes[0].resyncing
    with pytest.raises(StaleIncarnation):
        directory.resync_begin(0.0, "p", "2")
    with pytest.raises(UnknownNode):
        directory.resync_begin(0.0, "q", "1")


@pytest.mark.parametrize("name", [entry.name for entry in fields(DirectoryConfig) if entry.name != "decode_to_prefill"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_configuration_out_of_range_is_refused(name: str, value: int) -> None:
    settings: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=name):
        DirectoryConfig(**settings)
